// SPDX-License-Identifier: Apache-2.0
// Merges the attention to one block of keys with that to the previous blocks; a tile is a few tokens.

#include <cmath>
#include <limits>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void attention_merge(TensorView o, TensorView lse, TensorView o_part, TensorView lse_part, bool first,
                     Stream& stream) noexcept {
  constexpr float kNothing = std::numeric_limits<float>::infinity();  // the log-sum-exp over no keys
  const i64 T = o.dim(1), H = o.dim(2), D = o.dim(3);
  with_work_type(o_part.dtype, [&]<class E>(E) {
    const auto merge_row = [&](i64 b, i64 t, i64 h) {
      float* const to = o.as<float>() + b * o.stride[0] + t * o.stride[1] + h * o.stride[2];
      const E* const from = o_part.as<E>() + b * o_part.stride[0] + t * o_part.stride[1] + h * o_part.stride[2];
      float& sum = lse.as<float>()[b * lse.stride[0] + h * lse.stride[1] + t];
      const float part = lse_part.as<float>()[b * lse_part.stride[0] + h * lse_part.stride[1] + t];
      if (part == kNothing && !first) return;
      if (first || sum == kNothing) {
        for_vectors(0, D, [&](i64 d, auto n) { store(to + d, load(from + d, n), n); });
        sum = part;
      } else {
        const float top = sum > part ? sum : part;
        const float mine = std::exp(sum - top), other = std::exp(part - top), total = mine + other;
        const Vec keep = broadcast(mine / total), add = broadcast(other / total);
        for_vectors(0, D,
                    [&](i64 d, auto n) { store(to + d, fma(load(from + d, n), add, load(to + d, n) * keep), n); });
        sum = top + std::log(total);
      }
    };
    for_tiles(
        stream, o.dim(0) * T,
        [&](i64 begin, i64 end) {
          for (i64 token = begin; token < end; ++token) {
            for (i64 h = 0; h < H; ++h) merge_row(token / T, token % T, h);
          }
        },
        std::max<i64>(1, kTileElements / std::max<i64>(1, H * D)));
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
