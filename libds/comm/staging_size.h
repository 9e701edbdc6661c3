// SPDX-License-Identifier: Apache-2.0
#pragma once
// Predicts the memory that a communicator will hold for itself (Communicator::staging_bytes) from its calls.

#include <optional>
#include <set>
#include <string_view>

#include "base/check.h"

namespace ds {

struct Operation;

// True for sums in fp32 in rank order; every rank combines the others itself.
bool folds(const Operation& op) noexcept;
inline constexpr i64 kReductionBlock = i64{64} << 10;  // largest block that every rank combines itself
// An all-reduce folds slices of this size, one on each rank, and distributes them. The remainder (less than a slice per
// rank, or all of a small one) is combined by every rank itself.
i64 folded_slice_bytes(const Operation& op, int size) noexcept;
inline constexpr i64 kRoundedBlock = i64{16} << 10;  // elements folded before they are rounded to 16 bits

// Bytes of each slice that mpi receives at a time to fold.
i64 mpi_fold_round(int size) noexcept;

// The largest calls of one communicator.
struct LargestCalls {
  i64 folded_bytes = 0;    // of one slice
  i64 combined_bytes = 0;  // of a block
  i64 rounded_elems = 0;
  std::set<int> sent_to = {};

  // Adds reductions and sends; others need no memory. Not for reduce, which training does not use.
  void add(const Operation& op, int size);
  void add(const LargestCalls& other);
};

// Empty: unknown, for a backend made of others.
std::optional<i64> staging_size(std::string_view backend, int size, const LargestCalls& calls);

}  // namespace ds
