// SPDX-License-Identifier: Apache-2.0
#pragma once
// Access to 16 bytes at a time, with work elements as floats; single elements if addresses or the end of a row require
// it.

#include <algorithm>
#include <initializer_list>

#include "cuda/simt.h"

namespace ds::cuda {

// Elements of T in 16 bytes.
template <class T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <class T>
DS_DEVICE float load(const T* p) {
  return to_float(*p);
}
template <class T>
DS_DEVICE void store(T* p, float x) {
  *p = from_float<T>(x);
}

DS_DEVICE void unpack16(float (&x)[4], const uint4& raw) {
  x[0] = std::bit_cast<float>(raw.x);
  x[1] = std::bit_cast<float>(raw.y);
  x[2] = std::bit_cast<float>(raw.z);
  x[3] = std::bit_cast<float>(raw.w);
}
template <class T>
DS_DEVICE void unpack16(float (&x)[8], const uint4& raw) {
  const float2 a = unpack2<T>(raw.x), b = unpack2<T>(raw.y), c = unpack2<T>(raw.z), d = unpack2<T>(raw.w);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

// p is 16-byte aligned.
template <class T>
DS_DEVICE void load16(float (&x)[kPack<T>], const T* p) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  if constexpr (sizeof(T) == 4) {
    unpack16(x, raw);
  } else {
    unpack16<T>(x, raw);
  }
}
template <class T>
DS_DEVICE void store16(T* p, const float (&x)[kPack<T>]) {
  uint4 raw;
  if constexpr (sizeof(T) == 4) {
    raw = make_uint4(std::bit_cast<u32>(x[0]), std::bit_cast<u32>(x[1]), std::bit_cast<u32>(x[2]),
                     std::bit_cast<u32>(x[3]));
  } else {
    raw = make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
  }
  *reinterpret_cast<uint4*>(p) = raw;
}

// Sum and maximum over a warp, the same on all its lanes, in a fixed order.
DS_DEVICE float warp_sum(float x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += warp_shuffle_xor(x, mask);
  return x;
}
DS_DEVICE float warp_max(float x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float y = warp_shuffle_xor(x, mask);
    x = x > y ? x : y;
  }
  return x;
}

// Calls f(T{}) with the element type of a work dtype.
template <class F>
void with_work_type(DType t, F&& f) noexcept {
  switch (t) {
    case DType::BF16: f(bf16{}); break;
    case DType::F16: f(f16{}); break;
    default: f(float{}); break;
  }
}

// Random word x keeps its element iff x >> 8 >= this value, which means RngKey::uniform(x) >= p. Found by bisection,
// since uniform is monotonic.
constexpr u32 least_kept(float p) noexcept {
  u32 low = 0, high = 1u << 24;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (RngKey::uniform(middle << 8) >= p) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

constexpr i64 ceil_div(i64 a, i64 b) noexcept { return (a + b - 1) / b; }

// True if all addresses are multiples of `bytes` (null is).
inline bool all_aligned(size_t bytes, std::initializer_list<const void*> addresses) noexcept {
  return std::all_of(addresses.begin(), addresses.end(),
                     [=](const void* p) { return reinterpret_cast<size_t>(p) % bytes == 0; });
}

// x[j] = p[j] for j < count, else `rest`. wide: p is 16-byte aligned.
template <int N, class T>
DS_DEVICE void load_some(float (&x)[N], const T* p, i64 count, bool wide, float rest = 0) {
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
    for (int j = 0; j < N; ++j) x[j] = j < count ? load(p + j) : rest;
  }
}
// p[j] = x[j] for j < count.
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

// True if 8 elements from any multiple of 8 in any row are 16-byte aligned; also for an empty view.
template <class T>
bool aligned_rows(const T* p, i64 stride, i64 rows) noexcept {
  return p == nullptr ||
         (reinterpret_cast<size_t>(p) % 16 == 0 && (rows <= 1 || stride * static_cast<i64>(sizeof(T)) % 16 == 0));
}

}  // namespace ds::cuda
