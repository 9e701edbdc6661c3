// SPDX-License-Identifier: Apache-2.0
// New keys and values to their places in pages, row by row, as they are or as codes.

#include <cstring>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void append_keys(TensorView cache, TensorView x, const AttentionParams& p, Stream& stream) noexcept {
  const i64 G = x.dim(2), D = x.dim(3), width = dtype_bytes(x.dtype);
  const bool adjacent = x.stride[2] == D;
  for_tiles(
      stream, x.dim(1),
      [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
          const i64 s = p.sequences.of_row(row);
          const i64 to = p.of_sequence(s).key_row(p.sequences.key_of(s, row)) * G;
          const char* const from = x.as<char>() + row * x.stride[1] * width;
          if (cache.dtype == DType::I8) {
            for (i64 g = 0; g < G; ++g)
              quantize_row(cache.as<u8>() + (to + g) * D, cache.scale + to + g, from + g * x.stride[2] * width, x.dtype,
                           D);
          } else if (adjacent) {
            std::memcpy(cache.as<char>() + to * D * width, from, static_cast<size_t>(G * D * width));
          } else {
            for (i64 g = 0; g < G; ++g)
              std::memcpy(cache.as<char>() + (to + g) * D * width, from + g * x.stride[2] * width,
                          static_cast<size_t>(D * width));
          }
        }
      },
      std::max<i64>(1, kTileElements / std::max<i64>(1, G * D)));
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
