// SPDX-License-Identifier: Apache-2.0
#pragma once
// Slices of parameters: the part of one that a tensor-parallel rank has. The elements of a slice are numbered in the
// row-major order of the whole parameter ("local"), so local order is global order with holes:
//
//   shape [2, 8], dim 1, ranges [1,3) [5,6)      global  .  1  2  .  .  5  .  .   .  9 10  .  . 13  .  .
//                                                local      0  1        2            3  4        5
//
// A run is a range that is contiguous in both numberings.

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "ds/shard.h"

namespace ds::model {

// Empty if `slice` is valid for a parameter of this shape, else the problem.
std::string slice_problem(const ParamSlice& slice, std::span<const i64> shape);
// The shape of the slice's elements; the slice must be valid.
std::vector<i64> local_shape(const ParamSlice& slice, std::span<const i64> shape);
// In Python's notation: "[:,0:32+64:96]"; empty for the whole.
std::string slice_text(const ParamSlice& slice, std::span<const i64> shape);

// Converts between the two numberings of a slice.
class SliceMap {
 public:
  // Throws Errc::Internal for an invalid slice. The number of elements of the shape must fit an i64.
  SliceMap(const ParamSlice& slice, std::span<const i64> shape);

  i64 numel() const noexcept { return numel_; }  // of the slice

  // Number of the slice's elements before element `global` of the flattened parameter; 0 <= global <= its size.
  i64 num_before(i64 global) const noexcept;
  // Global number of local element 0 <= local < numel().
  i64 global_of(i64 local) const noexcept;

  // The slice's elements among [begin, begin + count) of the flattened parameter: one range, possibly empty.
  struct Range {
    i64 begin, count;
  };
  Range local_range(i64 begin, i64 count) const noexcept {
    const i64 first = num_before(begin);
    return {first, num_before(begin + count) - first};
  }

  // Calls run(local_begin, global_begin, count) for local elements [begin, begin + count) in order, in as few runs as
  // possible; takes time proportional to the number of runs.
  template <class F>
  void for_each_run(i64 begin, i64 count, F&& run) const {
    if (count <= 0) return;
    i64 row = begin / width_, in_row = begin % width_;
    size_t s = span_of(in_row);
    i64 local = begin, global = row * stride_ + spans_[s].global + (in_row - spans_[s].local), length = 0;
    for (i64 left = count; left > 0;) {
      const i64 n = std::min(left, spans_[s].local + spans_[s].count - in_row);
      length += n;
      left -= n;
      in_row += n;
      if (++s == spans_.size()) s = 0, in_row = 0, ++row;
      const i64 next = row * stride_ + spans_[s].global;
      if (left > 0 && next == global + length) continue;  // the end of one row may adjoin the beginning of the next
      run(local, global, length);
      local += length;
      global = next;
      length = 0;
    }
  }

 private:
  // A row: all indices of the slice's dim and of later dims, for fixed indices of the earlier dims.
  struct Span {
    i64 local, global, count;  // in the row
  };
  size_t span_of(i64 in_row) const noexcept;  // the span that contains local element `in_row` of a row

  i64 numel_ = 0;
  i64 width_ = 1, stride_ = 1;  // local and global elements per row
  std::vector<Span> spans_;
};

}  // namespace ds::model
