// SPDX-License-Identifier: Apache-2.0
#pragma once
// 16 bytes at a time: work elements come and go as floats.

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

// Sums and maxima over a warp, the same on all its lanes; the order is fixed.
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

}  // namespace ds::cuda
