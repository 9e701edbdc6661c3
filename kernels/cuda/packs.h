// SPDX-License-Identifier: Apache-2.0
#pragma once
// The few elements that one thread takes at a time: as floats, in 16-byte accesses where addresses allow that, one by
// one where they do not and at the end of a row or tensor.

#include <algorithm>
#include <initializer_list>

#include "cuda/vectors.h"

namespace ds::cuda {

// Calls f with a value of the element type that `dtype` names: float, bf16 or f16.
template <class F>
void with_work_type(DType dtype, F&& f) noexcept {
  switch (dtype) {
    case DType::F32: f(float{}); break;
    case DType::BF16: f(bf16{}); break;
    case DType::F16: f(f16{}); break;
    default: break;  // the dispatcher admits no other
  }
}

inline bool all_aligned(size_t bytes, std::initializer_list<const void*> addresses) noexcept {
  return std::all_of(addresses.begin(), addresses.end(),
                     [=](const void* p) { return reinterpret_cast<size_t>(p) % bytes == 0; });
}

// x[j] = p[j] where j < count, else 0. wide: p is 16-byte aligned.
template <int N, class T>
DS_DEVICE void load_some(float (&x)[N], const T* p, i64 count, bool wide) {
  constexpr int kEach = kPack<T>;
  static_assert(N % kEach == 0);
  if (wide && count >= N) {
    DS_UNROLL
    for (int i = 0; i < N; i += kEach) {
      float part[kEach];
      load16(part, p + i);
      DS_UNROLL
      for (int j = 0; j < kEach; ++j) x[i + j] = part[j];
    }
  } else {
    DS_UNROLL
    for (int j = 0; j < N; ++j) x[j] = j < count ? load(p + j) : 0.0f;
  }
}
// p[j] = x[j] where j < count.
template <int N, class T>
DS_DEVICE void store_some(T* p, const float (&x)[N], i64 count, bool wide) {
  constexpr int kEach = kPack<T>;
  static_assert(N % kEach == 0);
  if (wide && count >= N) {
    DS_UNROLL
    for (int i = 0; i < N; i += kEach) {
      float part[kEach];
      DS_UNROLL
      for (int j = 0; j < kEach; ++j) part[j] = x[i + j];
      store16(p + i, part);
    }
  } else {
    DS_UNROLL
    for (int j = 0; j < N; ++j) {
      if (j < count) store(p + j, x[j]);
    }
  }
}

}  // namespace ds::cuda
