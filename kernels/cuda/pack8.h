// SPDX-License-Identifier: Apache-2.0
#pragma once
// Eight neighbouring elements of any work dtype as floats, whole or in part, aligned or not; and the choice of a
// kernel's element type.

#include "cuda/vectors.h"

namespace ds::cuda {

// The first n of 8 elements; the others become `rest`. `aligned`: p is 16-byte aligned.
template <class T>
DS_DEVICE void load8(float (&x)[8], const T* p, i64 n, bool aligned, float rest = 0) {
  if (aligned && n >= 8) {
    if constexpr (sizeof(T) == 4) {
      float low[4], high[4];
      load16(low, p);
      load16(high, p + 4);
      for (int i = 0; i < 4; ++i) x[i] = low[i], x[4 + i] = high[i];
    } else {
      load16(x, p);
    }
    return;
  }
  for (int i = 0; i < 8; ++i) x[i] = i < n ? load(p + i) : rest;
}
template <class T>
DS_DEVICE void store8(T* p, const float (&x)[8], i64 n, bool aligned) {
  if (aligned && n >= 8) {
    if constexpr (sizeof(T) == 4) {
      const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
      store16(p, low);
      store16(p + 4, high);
    } else {
      store16(p, x);
    }
    return;
  }
  for (int i = 0; i < 8; ++i) {
    if (i < n) store(p + i, x[i]);
  }
}

// Whether 8 elements from any multiple of 8 in any row are 16-byte aligned. Nothing (null) is.
template <class T>
bool aligned_rows(const T* p, i64 stride, i64 rows) noexcept {
  return p == nullptr ||
         (reinterpret_cast<size_t>(p) % 16 == 0 && (rows <= 1 || stride * static_cast<i64>(sizeof(T)) % 16 == 0));
}

// f(T{}) with the element type of a work dtype.
template <class F>
void with_work_type(DType t, F&& f) noexcept {
  switch (t) {
    case DType::BF16: return f(bf16{});
    case DType::F16: return f(f16{});
    default: return f(float{});
  }
}

}  // namespace ds::cuda
