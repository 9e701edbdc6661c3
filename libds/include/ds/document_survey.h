// SPDX-License-Identifier: Apache-2.0
#pragma once
// Statistics of documents in data, as ds-train --check reports them.

#include <string>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

// Counts the documents in data that separates or packs them, and the samples that hold them.
struct DocumentSurvey {
  i64 documents = 0, tokens = 0;
  double median = 0;  // tokens of a document
  i64 longest = 0;
  i64 cut = 0;  // documents that do not lie in one sample, or that data.split cuts
  i64 samples = 0;
  double full = 1;  // share of the tokens of samples that is no filling
  DS_API std::string text() const;
};

}  // namespace ds
