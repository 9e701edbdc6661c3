// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, pair by pair.

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void rope(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, const RopeParams& p,
          Stream&) noexcept {
  const i64 B = x.dim(0), T = x.dim(1), H = x.dim(2), half = x.dim(3) / 2;
  for (i64 row = 0; row < B * T * H; ++row) {
    const i64 b = row / (T * H), t = row / H % T, h = row % H;
    const i64 from = b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
    const i64 to = b * y.stride[0] + t * y.stride[1] + h * y.stride[2];
    const i64 angle = positions.as<i32>()[t] * half;
    for (i64 d = 0; d < half; ++d) {
      const double c = get(cos, angle + d), s = p.inverse ? -get(sin, angle + d) : get(sin, angle + d);
      const i64 at = p.interleaved ? 2 * d : d, other = p.interleaved ? at + 1 : at + half;
      const double first = get(x, from + at), second = get(x, from + other);
      put(y, to + at, first * c - second * s);
      put(y, to + other, second * c + first * s);
    }
  }
}

}  // namespace ds::ref
