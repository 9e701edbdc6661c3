// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mean over ranks by signs and scales, with what each step loses added to the next: the all-reduce of Tang et al.,
// "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", section 4. Each rank sends
// the signs of y = x + its error and one scale, the root mean square of y; the rank that owns a chunk averages what
// comes, adds its own error, and sends signs and one scale of that to all.

#include "comm/coded_slice.h"
#include "comm/communicator.h"

namespace ds {

class OneBitAllReduce {
 public:
  // Of n elements, any number. `device` is where the communicator's memory is; both outlive it. Takes all memory: n and
  // n/P fp32 for the errors, 2n/8 bytes on the wire. Collective.
  OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 n);

  // x [n] fp32, in and out: afterwards the compressed mean, equal on all ranks. With every sum in fp32, in rank order:
  //   worker  y = x + e_w; a = rms(y); e_w = y - a sgn(y), sgn(0) = 1; signs of chunk j and a to rank j
  //   server  z = e_s + (sum of a_i sgn(y_i))/P; c = rms(z); e_s = z - c sgn(z); signs and c to all
  // so that over any number of calls the sum of results = the sum of means - mean(e_w) - e_s, but for rounding. Sends
  // 2 (P-1) slices of chunk_elems()/8 + 4 bytes, and up to 3. One rank compresses like many. A bit cannot say 0: what
  // must stay 0 is the caller's to mask. If an element is not finite on any rank, the whole result is NaN on all, and
  // the errors of who met it start again at 0. Done when it returns (over a device: enqueued).
  void run(TensorView x, std::string_view tag);

  // The state between calls, fp32, of the device: [n], and of the elements of our chunk. For checkpoints, at the same
  // number of ranks; or zero it and lose one step's rounding.
  TensorView worker_error() const noexcept;
  TensorView server_error() const noexcept;
  void reset();

  i64 chunk_elems() const noexcept { return slice_.elems; }  // a multiple of 8; the last ones have less, or nothing

 private:
  i64 chunk_size(i64 rank) const noexcept;
  void compress(i64 slice, TensorView part, i64 n);
  void measure(TensorView y);

  Communicator& comm_;
  Device& device_;
  const i64 n_;
  const CodedSlice slice_;
  Buffer worker_error_, server_error_;
  Buffer numbers_;         // int64: the largest |y|, and the two of the sum of squares
  Buffer send_, receive_;  // P slices
};

}  // namespace ds
