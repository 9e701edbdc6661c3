// SPDX-License-Identifier: Apache-2.0
#pragma once
// The data that ranks send, chosen so that the received data can be compared bit for bit: a function of the rank, the
// index of the element and a salt that is new in every round. So stale data, a shifted slice or a wrong rank is
// detected.
//
// Data that is only moved has arbitrary bits. A value to be reduced is a small integer times a power of two common to
// all ranks at an index, so small that each partial sum, in any order, is exact in the type: |integer| * ranks <=
// 2^significand. With more than 64 ranks only one of every ranks/64 has a value other than 0 at an index.

#include <span>

#include "ds/communicator.h"

namespace ds::commbench {

struct Pattern {
  int ranks;
  DType dtype;
  bool reduced;  // the values are to be reduced, by `op`
  ReduceOp op;
  u64 salt;

  // Fills `out` with the data that `rank` sends: elements [first, first + out.size() / element bytes).
  void send(int rank, i64 first, std::span<std::byte> out) const;
  // Fills `out` with the reduction of the same elements over all ranks, in `out_type`: dtype, or F32 for sums of 16-bit
  // types.
  void reduce(i64 first, DType out_type, std::span<std::byte> out) const;

  double value(int rank, i64 index) const noexcept;  // if `reduced`
};

// For messages: an element as a number, or as bits if it was only moved.
std::string element_text(const void* element, DType dtype, bool reduced);

}  // namespace ds::commbench
