// SPDX-License-Identifier: Apache-2.0
#pragma once
// The layout of coded elements: one slice of a collective contains the codes of its elements, padded to four bytes,
// followed by the scales of its blocks, so that one message carries both.

#include "base/check.h"
#include "ds/kernels/ops.h"

namespace ds {

// R rows of N elements, `stride` elements apart.
inline TensorView row_view(void* data, DType dtype, i64 R, i64 N, i64 stride) {
  TensorView v = TensorView::of(data, dtype, {R, N});
  v.stride[0] = stride;
  return v;
}

struct CodedSlice {
  CodeFormat format;
  i64 elems = 0;

  // Size of a slice: bits/8 + 4/block bytes per element, and up to 3 more.
  i64 bytes() const noexcept { return scales_at() + 4 * format.num_blocks(elems); }

  // The codes and scales of `count` slices in `memory`: slice `first` and every `step`-th slice after it.
  TensorView codes(void* memory, i64 first, i64 count, i64 step = 1) const {
    return row_view(static_cast<u8*>(memory) + first * bytes(), DType::U8, count, format.code_bytes(elems),
                    step * bytes());
  }
  TensorView scales(void* memory, i64 first, i64 count, i64 step = 1) const {
    return row_view(static_cast<u8*>(memory) + first * bytes() + scales_at(), DType::F32, count,
                    format.num_blocks(elems), step * bytes() / 4);
  }

 private:
  i64 scales_at() const noexcept { return align_up(format.code_bytes(elems), 4); }
};

}  // namespace ds
