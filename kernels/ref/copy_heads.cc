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

void append_keys(TensorView cache, TensorView x, const AttentionParams& p, Stream& stream) noexcept {
  const i64 G = x.dim(2), D = x.dim(3);
  for (i64 row = 0; row < x.dim(1); ++row) {
    const i64 s = p.sequences.of_row(row);
    const i64 to = p.of_sequence(s).key_row(p.sequences.key_of(s, row));
    for (i64 g = 0; g < G; ++g) {
      const i64 width = dtype_bytes(x.dtype), at = to * G + g;
      char* const from = x.as<char>() + (row * x.stride[1] + g * x.stride[2]) * width;
      if (cache.dtype != DType::I8) {
        std::memcpy(cache.as<char>() + at * D * width, from, static_cast<size_t>(D * width));
        continue;
      }
      quantize(TensorView::of(cache.as<u8>() + at * D, DType::U8, {1, D}),
               TensorView::of(cache.scale + at, DType::F32, {1, 1}), TensorView::of(from, x.dtype, {1, D}), {},
               {.bits = 8, .block = 0}, {}, stream);
    }
  }
}

}  // namespace ds::ref
