// SPDX-License-Identifier: Apache-2.0
#pragma once
// Loops shared by the elementwise kernels: fixed tiles over threads, vectors with a tail, dispatch on the dtype.

#include <algorithm>

#include "cpu/simd.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Means "all lanes" in place of a lane count, so that one loop body serves whole vectors and the tail.
struct AllLanes {};
template <class T>
inline Vec load(const T* p, AllLanes) noexcept {
  return load(p);
}
template <class T>
inline void store(T* p, Vec a, AllLanes) noexcept {
  store(p, a);
}

// Calls f(i, lanes) for the vectors of [begin, end); lanes is AllLanes, or the number left in the last one.
template <class F>
inline void for_vectors(i64 begin, i64 end, F&& f) noexcept {
  i64 i = begin;
  for (; i + Vec::kLanes <= end; i += Vec::kLanes) f(i, AllLanes{});
  if (i < end) f(i, end - i);
}

// Calls f(begin, end) for tiles of n elements: small enough to distribute, large enough to hide the cost of claiming
// one.
inline constexpr i64 kTileElements = 16384;
template <class F>
inline void for_tiles(Stream& stream, i64 n, F&& f, i64 tile = kTileElements) noexcept {
  stream.pool->parallel_for((n + tile - 1) / tile, [&](i64 t, int) { f(t * tile, std::min(n, (t + 1) * tile)); });
}

// Calls f(i, lanes) for all vectors of n elements, over threads.
template <class F>
inline void for_all_vectors(Stream& stream, i64 n, F&& f) noexcept {
  for_tiles(stream, n, [&](i64 begin, i64 end) { for_vectors(begin, end, f); });
}

// Calls f with a value of the element type for `dtype`: float, bf16 or f16.
template <class F>
inline void with_work_type(DType dtype, F&& f) noexcept {
  switch (dtype) {
    case DType::F32: f(float{}); break;
    case DType::BF16: f(bf16{}); break;
    case DType::F16: f(f16{}); break;
    default: break;  // the dispatcher admits no other
  }
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
