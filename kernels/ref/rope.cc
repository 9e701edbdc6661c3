// SPDX-License-Identifier: Apache-2.0
// Rotary embedding: element d of the first half and element d of the second half of a head form a rotated pair.

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void rope(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, bool inverse,
          Stream&) noexcept {
  const i64 B = x.dim(0), T = x.dim(1), H = x.dim(2), half = x.dim(3) / 2;
  for (i64 row = 0; row < B * T * H; ++row) {
    const i64 b = row / (T * H), t = row / H % T, h = row % H;
    const i64 from = b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
    const i64 to = b * y.stride[0] + t * y.stride[1] + h * y.stride[2];
    const i64 angle = positions.as<i32>()[t] * half;
    for (i64 d = 0; d < half; ++d) {
      const double c = get(cos, angle + d), s = inverse ? -get(sin, angle + d) : get(sin, angle + d);
      const double first = get(x, from + d), second = get(x, from + half + d);
      put(y, to + d, first * c - second * s);
      put(y, to + half + d, second * c + first * s);
    }
  }
}

}  // namespace ds::ref
