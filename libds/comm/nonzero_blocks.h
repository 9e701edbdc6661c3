// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives for vectors that are mostly zero, such as the gradient of an embedding, in which only the rows of a
// micro-batch's tokens are not. They send the numbers and elements of the nonzero blocks. Sums are those of
// reduce_scatter, in rank order in fp32, except for the sign of a zero. The vector is searched for nonzero blocks, so
// callers need not know them.
//
// Every rank gets the blocks of all ranks: if each rank has n elements in nonzero blocks, each sends (P-1) n elements;
// a dense collective sends (P-1) slices. Ranks exchange their numbers of blocks, so they all choose the cheaper way
// alike.
//
// Works over any communicator; `device` is where its memory is. Set-up is collective and allocates all memory; a call
// allocates none, but blocks the host for the counts. Calls count the inner all-gathers' bytes under their tag.

#include <string_view>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"

namespace ds {

class NonzeroBlocks {
 public:
  static constexpr i64 kBlock = 64;  // elements

  // For P slices of up to max_elems elements (a multiple of kBlock), of up to `width` bytes each. `room`: blocks of all
  // ranks together in one exchange. comm and device must outlive it.
  NonzeroBlocks(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 max_elems, i64 width,
                i64 room = i64{1} << 14);

  // The largest number of a rank's blocks in one exchange, for a vector that is sent this way because it is cheaper
  // than slices of slice_bytes each. `most`: maximum number of nonzero blocks per rank; block_bytes: their size.
  static i64 most_at_once(int ranks, i64 max_elems, i64 slice_bytes, i64 block_bytes, i64 most,
                          i64 room = i64{1} << 14) noexcept;

  // True if reduce_scatter of this source [P*n] (any work dtype) sends less than a dense one; then it must be the next
  // call. `most`: upper bound of the nonzero blocks, for devices that only count. Always false for one rank.
  bool saves(TensorView source, i64 most, std::string_view tag);
  // Like a reduce-scatter of one segment: target [n] fp32.
  void reduce_scatter(TensorView source, TensorView target, bool accumulate, std::string_view tag);
  // Like an in-place all-gather: full [P*n] in any work dtype, with our slice filled on entry. False: a dense one sends
  // less, and nothing was done. `most`: per slice.
  bool all_gather(TensorView full, i64 most, std::string_view tag);

 private:
  bool find(TensorView blocks, i64 first, i64 most, i64 slice_bytes, std::string_view tag);
  template <class F>
  void for_each_exchange(F f);
  template <class Consume>
  void exchange(TensorView table, std::string_view tag, Consume consume);

  Communicator& comm_;
  Device& device_;
  i64 range_ = 0;            // blocks per range: as many as fit into one exchange, per rank
  Buffer flags_;             // [blocks] uint8
  Buffer counts_;            // [P][ranges] int32
  Buffer numbers_, values_;  // of an exchange: [P * range_] int32, [P * range_][kBlock]
  std::vector<u8> is_set_;   // host copy of flags_
  std::vector<i32> mine_;    // numbers of this rank's nonzero blocks, ascending
  std::vector<i32> sent_;    // those of one exchange
  std::vector<i32> of_all_;  // [P][num_ranges_]: number of blocks per rank
  std::vector<i64> together_;
  i64 num_ranges_ = 0;  // of this call
};

}  // namespace ds
