// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mean over ranks by signs and scales, with each step's error added to the next: the all-reduce of Tang et al.,
// "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", section 4. Each rank sends
// the signs of y = x + its error and a scale, the root mean square of y. The owner of a slice averages what it
// receives, adds its own error, and sends the signs and scale of the result to all.

#include <span>
#include <vector>

#include "comm/coded_slice.h"
#include "device/device.h"
#include "ds/communicator.h"

namespace ds {

class OneBitAllReduce {
 public:
  // Elements with a scale of their own: the part of a parameter that one rank averages.
  struct Part {
    i64 slice = 0;  // rank that averages it
    // Parts with equal numbers share one scale when sent by workers, but have one each when sent by their owner.
    i64 scale = 0;
    i64 at = 0;  // position in x
    i64 count = 0;
  };

  // Parts are ordered by slice; no two have both slice and scale in common. `device` is where the communicator's memory
  // is; both must outlive it. Allocates all memory: for the errors, fp32 for each element of all parts and of our own
  // slice; and 2 P slice_bytes(). Collective.
  OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, std::vector<Part> parts);
  // For all n elements of x (any n), with one scale.
  OneBitAllReduce(Communicator& comm, Device& device, MemoryLedger& ledger, Tag tag, i64 n);

  // Replaces the parts of x (fp32) by the compressed mean, equal on all ranks; other elements do not change. With all
  // sums in fp32, in rank order, and one scale for each number:
  //   worker  y = x + e_w; a = rms(y); e_w = y - a sgn(y), sgn(0) = 1; signs of slice j and a to rank j
  //   server  z = e_s + (sum of a_i sgn(y_i))/P; c = rms(z); e_s = z - c sgn(z); signs and c to all
  // so over any number of calls, sum of results = sum of means - mean(e_w) - e_s, except for rounding. Sends 2 (P-1)
  // slices of slice_bytes(). A single rank compresses, too. A sign cannot encode 0, so the caller must mask elements
  // that have to stay 0. If an element is not finite on any rank, all elements with its scale become NaN on all ranks,
  // and the errors of the ranks that met it restart at 0. Done when it returns (on a device: enqueued). `at`: positions
  // of the parts in x, in their order, instead of Part::at.
  void run(TensorView x, std::string_view tag, std::span<const i64> at = {});

  // The state between calls, fp32, in device memory: errors of the parts of all slices, and of our own slice, one after
  // the other. For checkpoints with the same number of ranks; zeroing it loses the rounding error of one step.
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
  Buffer numbers_;         // int64, by scale: the largest |y|, followed by the two numbers of each sum of squares
  Buffer send_, receive_;  // P slices: signs, followed by scales
};

}  // namespace ds
