// SPDX-License-Identifier: Apache-2.0
#pragma once
// Resolves the options for a number of ranks to operations, types and sizes, or refuses them and names what is
// available.

#include <string>
#include <utility>
#include <vector>

#include "commbench/operation.h"
#include "ds/commbench.h"

namespace ds::commbench {

struct Selection {
  std::vector<const Operation*> operations;
  std::vector<std::string> left_out;  // operations of "all" that cannot run
  DType dtype;
  ReduceOp redop;
  std::string type, reduction;  // their names

  // The requested sizes in bytes that give different, non-empty counts; one for an operation without data.
  std::vector<i64> counts(const Operation& operation, const Options& options, int ranks) const;
};

// The messages of these operations, and of the pairs that are measured.
std::vector<MessageLink> message_links(const Selection& selection, const Options& options, int ranks);

// Throws Errc::Config.
Selection select_operations(const Options& options, int ranks);

}  // namespace ds::commbench
