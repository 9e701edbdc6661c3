// SPDX-License-Identifier: Apache-2.0
#pragma once
// What options mean with so many ranks: operations, types and sizes, or a refusal that names what is offered.

#include <string>
#include <utility>
#include <vector>

#include "commbench/operation.h"
#include "ds/commbench.h"

namespace ds::commbench {

struct Selection {
  std::vector<const Operation*> operations;
  std::vector<std::string> left_out;  // of "all"
  DType dtype;
  ReduceOp redop;
  std::string type, reduction;  // their names

  // The bytes asked for that leave different, not empty counts; one for an operation without data.
  std::vector<i64> counts(const Operation& operation, const Options& options, int ranks) const;
};

// Throws Errc::Config.
Selection select_operations(const Options& options, int ranks);

}  // namespace ds::commbench
