// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ranks send, so that what arrives can be compared bit for bit: a function of the rank, the index of the element
// and a salt that is new in every round, so that stale data, a shifted slice or a wrong rank shows.
//
// What is only moved has arbitrary bits. What is reduced is a small integer times a power of two that all ranks share
// at an index, so small that each partial sum, in any order, is exact in the type: |integer| * ranks <= 2^significand.
// Above 64 ranks only one of every ranks/64 has a value other than 0 at an index.

#include <span>

#include "comm/communicator.h"

namespace ds::commbench {

struct Pattern {
  int ranks;
  DType dtype;
  bool reduced;  // the values are to be reduced, by `op`
  ReduceOp op;
  u64 salt;

  // Fills out with what `rank` sends: elements [first, first + out.size() / element bytes).
  void send(int rank, i64 first, std::span<std::byte> out) const;
  // The reduction over all ranks of the same elements, in `out_type`: dtype, or F32 for the sums of 16-bit types.
  void reduce(i64 first, DType out_type, std::span<std::byte> out) const;

  double value(int rank, i64 index) const noexcept;  // where `reduced`
};

// For messages: an element as a number, or as bits where it was only moved.
std::string element_text(const void* element, DType dtype, bool reduced);

}  // namespace ds::commbench
