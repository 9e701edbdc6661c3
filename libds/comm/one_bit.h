// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mean over ranks by signs and scales, with what each step loses added to the next: the all-reduce of Tang et al.,
// "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", section 4. Each rank sends
// the signs of y = x + its error and a scale, the root mean square of y; the rank that owns a slice averages what
// comes, adds its own error, and sends signs and a scale of that to all.

#include <span>
#include <vector>

#include "comm/coded_slice.h"
#include "comm/communicator.h"

namespace ds {

class OneBitAllReduce {
 public:
  // Elements that have a scale of their own: a parameter, as far as one rank averages it.
  struct Part {
    i64 slice = 0;  // of the rank that averages it
    i64 scale = 0;  // parts of one number have one scale where they are sent, and one each where they were averaged
    i64 at = 0;     // in x
    i64 count = 0;
  };

  // Parts come in the order of their slices; no two have a slice and a scale in common. `device` is where the
  // communicator's memory is; both outlive it. Takes all memory: fp32 for each
  // element of all parts and once more of our slice's, for the errors, and 2 P slice_bytes(). Collective.
  OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, std::vector<Part> parts);
  // Of all n elements of x, any number, with one scale.
  OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 n);

  // x fp32, in and out: afterwards its parts are the compressed mean, equal on all ranks; what is in no part stays.
  // With every sum in fp32, in rank order, and a scale for each number:
  //   worker  y = x + e_w; a = rms(y); e_w = y - a sgn(y), sgn(0) = 1; signs of slice j and a to rank j
  //   server  z = e_s + (sum of a_i sgn(y_i))/P; c = rms(z); e_s = z - c sgn(z); signs and c to all
  // so that over any number of calls the sum of results = the sum of means - mean(e_w) - e_s, but for rounding. Sends
  // 2 (P-1) slices of slice_bytes(). One rank compresses like many. A bit cannot say 0: what must stay 0 is the
  // caller's to mask. If an element is not finite on any rank, all that has its scale is NaN on all, and the errors of
  // who met it start again at 0. Done when it returns (over a device: enqueued).
  // `at`: where the parts lie in x, in their order, in place of Part::at.
  void run(TensorView x, std::string_view tag, std::span<const i64> at = {});

  // The state between calls, fp32, of the device: of the parts of all slices, and of those of our own, one after the
  // other. For checkpoints, at the same number of ranks; or zero it and lose one step's rounding.
  TensorView worker_error() const noexcept;
  TensorView server_error() const noexcept;
  void reset();

  i64 slice_elems() const noexcept { return slice_elems_; }  // of the largest slice; a multiple of 8
  i64 slice_bytes() const noexcept { return scales_at() + 4 * num_scales_; }

 private:
  struct Place {
    Part part;
    i64 first = 0;  // in its slice, a multiple of 8
  };
  i64 scales_at() const noexcept { return align_up(slice_elems_ / 8, 4); }
  TensorView codes(void* memory, const Place& p, i64 rows) const;
  TensorView scales(void* memory, const Place& p, i64 rows) const;
  void compress(std::span<const Place> places, TensorView y, bool of_numbers);

  Communicator& comm_;
  Device& device_;
  std::vector<Place> places_;  // by slice
  size_t own_begin_ = 0, own_end_ = 0;
  std::vector<i64> elems_of_scale_;
  i64 slice_elems_ = 0, num_scales_ = 1, worker_elems_ = 0, server_elems_ = 0;
  Buffer worker_error_, server_error_;
  Buffer numbers_;         // int64, by scale: the largest |y|; behind them the two of each sum of squares
  Buffer send_, receive_;  // P slices: signs, and behind them scales
};

}  // namespace ds
