// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs for copy_heads: byte ranges, as long as possible, that are contiguous in both tensors, and their positions.
// Static functions, since files compiled for several instruction sets must not share symbols.

#include "ds/kernels/tensor.h"

namespace ds {

struct Runs {
  i64 bytes = 0;                 // bytes per run; 0: nothing to move
  i64 size[3] = {1, 1, 1};       // number of runs, outermost first
  i64 from[3] = {}, to[3] = {};  // their distances in bytes
};

static Runs runs_of(const TensorView& y, const TensorView& x) noexcept {
  Runs r;
  if (x.numel() == 0) return r;
  const i64 width = dtype_bytes(x.dtype);
  r.bytes = x.dim(3) * width;
  int outer = 3;  // the outermost dim so far; 3: the run itself
  for (int d = 2; d >= 0; --d) {
    const i64 n = x.dim(d);
    if (n == 1) continue;
    const i64 from = x.stride[d] * width, to = y.stride[d] * width;
    if (outer == 3 && from == r.bytes && to == r.bytes) {
      r.bytes *= n;
    } else if (outer < 3 && from == r.from[outer] * r.size[outer] && to == r.to[outer] * r.size[outer]) {
      r.size[outer] *= n;
    } else {
      --outer;
      r.size[outer] = n;
      r.from[outer] = from;
      r.to[outer] = to;
    }
  }
  return r;
}

}  // namespace ds
