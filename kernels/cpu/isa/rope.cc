// SPDX-License-Identifier: Apache-2.0
// Rotary embedding: a tile is a few tokens; all heads of a token share its row of cosines and sines.

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void rope(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, bool inverse,
          Stream& stream) noexcept {
  const i64 T = x.dim(1), H = x.dim(2), half = x.dim(3) / 2, tokens = x.dim(0) * T;
  with_work_type(y.dtype, [&]<class E>(E) {
    const auto rotate_token = [&](i64 b, i64 t) {
      const i64 angle = positions.as<i32>()[t] * half;
      const float* const c = cos.as<float>() + angle;
      const float* const s = sin.as<float>() + angle;
      const Vec sign = broadcast(inverse ? -1.0f : 1.0f);
      for (i64 h = 0; h < H; ++h) {
        const E* from = x.as<E>() + b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
        E* to = y.as<E>() + b * y.stride[0] + t * y.stride[1] + h * y.stride[2];
        for_vectors(0, half, [&](i64 d, auto n) {
          const Vec cd = load(c + d, n), sd = sign * load(s + d, n);
          const Vec first = load(from + d, n), second = load(from + half + d, n);
          store(to + d, fma(zero() - second, sd, first * cd), n);
          store(to + half + d, fma(first, sd, second * cd), n);
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
