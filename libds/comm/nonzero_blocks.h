// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives for vectors most of which is zero, such as the gradient of an embedding, in which only the rows of the
// tokens of a micro-batch are not. What travels is the numbers of the blocks that are not zero, and their elements: the
// sums are those of reduce_scatter, in rank order in fp32, but for the sign of a zero. The zeros of a vector are looked
// for, so nobody has to say where they are.
//
// Every rank gets the blocks of all: of each rank's n elements in blocks that are not zero (P-1) n elements are sent,
// whatever P is, and by a dense collective (P-1) slices. Ranks tell each other how many blocks they have, and know
// alike what is less.
//
// Over any communicator; `device` is where its memory is. Set-up is collective and takes all memory; a call takes none,
// and stops the host for the numbers. Calls count under their tag what the inner all-gathers send.

#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace ds {

class NonzeroBlocks {
 public:
  static constexpr i64 kBlock = 64;  // elements

  // For P slices of up to max_elems elements, a multiple of kBlock, of up to `width` bytes each. room: blocks that
  // travel at once, of all ranks together. comm and device outlive it.
  NonzeroBlocks(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 max_elems, i64 width,
                i64 room = i64{1} << 14);

  // Blocks of each rank that one exchange has at most, of a vector that sends less so than as slices of slice_bytes
  // each: the `most` of each rank that are not zero, of block_bytes.
  static i64 most_at_once(int ranks, i64 max_elems, i64 slice_bytes, i64 block_bytes, i64 most,
                          i64 room = i64{1} << 14) noexcept;

  // Whether reduce_scatter of this source [P*n], any work dtype, sends less than a dense one; where it does, that is
  // the next call. most: its blocks that are not zero, at most, for who only counts. Never of one rank.
  bool saves(TensorView source, i64 most, std::string_view tag);
  // As a reduce-scatter of one segment: target [n] fp32.
  void reduce_scatter(TensorView source, TensorView target, bool accumulate, std::string_view tag);
  // As an all-gather in place: full [P*n] any work dtype, our slice filled on entry. False: a dense one sends less, and
  // nothing was done. most: of a slice.
  bool all_gather(TensorView full, i64 most, std::string_view tag);

 private:
  bool find(TensorView blocks, i64 first, i64 most, i64 slice_bytes, std::string_view tag);
  template <class F>
  void for_each_exchange(F f);
  template <class Consume>
  void exchange(TensorView table, std::string_view tag, Consume consume);

  Communicator& comm_;
  Device& device_;
  i64 range_ = 0;            // blocks of a range: as many as an exchange has room for, of each rank
  Buffer flags_;             // [blocks] uint8
  Buffer counts_;            // [P][ranges] int32
  Buffer numbers_, values_;  // of an exchange: [P * range_] int32, [P * range_][kBlock]
  std::vector<u8> is_set_;   // as flags_
  std::vector<i32> mine_;    // numbers of this rank's blocks, ascending
  std::vector<i32> sent_;    // those of an exchange
  std::vector<i32> of_all_;  // [P][num_ranges_]: blocks that ranks have
  std::vector<i64> together_;
  i64 num_ranges_ = 0;  // of this call
};

}  // namespace ds
