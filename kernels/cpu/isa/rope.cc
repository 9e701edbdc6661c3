// SPDX-License-Identifier: Apache-2.0
// Rotary embedding: a tile is a few tokens; all heads of a token share its row of cosines and sines.
// Interleaved pairs are taken apart in a buffer, and rotated there.

#include <algorithm>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr i64 kPairs = 64;  // taken apart at a time

// Rotates n pairs of which `first` and `second` are the elements; sd: the sines, with the sign of the direction.
template <class T, class N>
[[gnu::always_inline]] inline void rotate_pairs(T* to_first, T* to_second, const T* first, const T* second, Vec cd,
                                                Vec sd, N n) noexcept {
  const Vec a = load(first, n), b = load(second, n);
  store(to_first, fma(zero() - b, sd, a * cd), n);
  store(to_second, fma(a, sd, b * cd), n);
}

// Rotates pairs [begin, begin + n) of a head, n <= kPairs, whose elements are neighbours.
template <class E>
void rotate_neighbours(E* to, const E* from, const float* c, const float* s, Vec sign, i64 n) noexcept {
  float both[2 * kPairs], first[kPairs], second[kPairs];
  for_vectors(0, 2 * n, [&](i64 i, auto lanes) { store(both + i, load(from + i, lanes), lanes); });
  for (i64 d = 0; d < n; ++d) first[d] = both[2 * d], second[d] = both[2 * d + 1];
  for_vectors(0, n, [&](i64 d, auto lanes) {
    rotate_pairs(first + d, second + d, first + d, second + d, load(c + d, lanes), sign * load(s + d, lanes), lanes);
  });
  for (i64 d = 0; d < n; ++d) both[2 * d] = first[d], both[2 * d + 1] = second[d];
  for_vectors(0, 2 * n, [&](i64 i, auto lanes) { store(to + i, load(both + i, lanes), lanes); });
}

}  // namespace

void rope(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, const RopeParams& p,
          Stream& stream) noexcept {
  const i64 T = x.dim(1), H = x.dim(2), half = x.dim(3) / 2, tokens = x.dim(0) * T;
  with_work_type(y.dtype, [&]<class E>(E) {
    const auto rotate_token = [&](i64 b, i64 t) {
      const i64 angle = positions.as<i32>()[t] * half;
      const float* const c = cos.as<float>() + angle;
      const float* const s = sin.as<float>() + angle;
      const Vec sign = broadcast(p.inverse ? -1.0f : 1.0f);
      for (i64 h = 0; h < H; ++h) {
        const E* from = x.as<E>() + b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
        E* to = y.as<E>() + b * y.stride[0] + t * y.stride[1] + h * y.stride[2];
        for (i64 d = 0; p.interleaved && d < half; d += kPairs)
          rotate_neighbours(to + 2 * d, from + 2 * d, c + d, s + d, sign, std::min(kPairs, half - d));
        if (p.interleaved) continue;
        for_vectors(0, half, [&](i64 d, auto n) {
          rotate_pairs(to + d, to + half + d, from + d, from + half + d, load(c + d, n), sign * load(s + d, n), n);
        });
      }
    };
    for_tiles(
        stream, tokens,
        [&](i64 begin, i64 end) {
          for (i64 i = begin; i < end; ++i) rotate_token(i / T, i % T);
        },
        std::max<i64>(1, kTileElements / (2 * H * half)));
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
