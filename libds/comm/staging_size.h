// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a communicator comes to hold for itself (Communicator::staging_bytes), predicted from the calls that will go
// through it.

#include <optional>
#include <set>
#include <string_view>

#include "base/check.h"

namespace ds {

struct Operation;

// Sums in fp32, in rank order; all others are combined by every rank for itself.
bool folds(const Operation& op) noexcept;
// An all-reduce folds slices of so many bytes, one on each rank, and hands them around; what is left, less than a slice
// for each or all of it, every rank combines for itself, in blocks of at most kReductionBlock.
inline constexpr i64 kReductionBlock = i64{64} << 10;
i64 folded_slice_bytes(const Operation& op, int size) noexcept;
inline constexpr i64 kRoundedBlock = i64{16} << 10;  // elements that are folded before they are rounded to 16 bits

// Bytes of each slice that mpi receives at a time to fold.
i64 mpi_fold_round(int size) noexcept;

// The largest calls of one communicator.
struct LargestCalls {
  i64 folded_bytes = 0;    // of one slice
  i64 combined_bytes = 0;  // of a block
  i64 rounded_elems = 0;
  std::set<int> sent_to = {};

  // Reductions and sends; nothing is kept for the others. Not reduce, of which training makes none.
  void add(const Operation& op, int size);
  void add(const LargestCalls& other);
};

// Nothing: not known, of a backend whose own parts have it.
std::optional<i64> staging_size(std::string_view backend, int size, const LargestCalls& calls);

}  // namespace ds
