// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void copy_heads(TensorView y, TensorView x, Stream&) noexcept {
  const i64 T = x.dim(1), H = x.dim(2), D = x.dim(3), width = dtype_bytes(x.dtype);
  for (i64 i = 0; i < x.numel(); ++i) {
    const i64 b = i / (T * H * D), t = i / (H * D) % T, h = i / D % H, d = i % D;
    const i64 to = b * y.stride[0] + t * y.stride[1] + h * y.stride[2] + d;
    const i64 from = b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + d;
    std::memcpy(y.as<char>() + to * width, x.as<char>() + from * width, static_cast<size_t>(width));
  }
}

}  // namespace ds::ref
