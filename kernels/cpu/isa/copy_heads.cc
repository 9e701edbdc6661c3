// SPDX-License-Identifier: Apache-2.0
// Strided copies; a tile is some runs, or a part of a long one.

#include <cstring>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "runs.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void copy_heads(TensorView y, TensorView x, Stream& stream) noexcept {
  const Runs r = runs_of(y, x);
  if (r.bytes == 0) return;
  constexpr i64 kTileBytes = 64 * 1024;
  const i64 count = r.size[0] * r.size[1] * r.size[2];
  const i64 parts = (r.bytes + kTileBytes - 1) / kTileBytes, per_tile = std::max<i64>(1, kTileBytes / r.bytes);
  const auto copy = [&](i64 run, i64 num_runs, i64 first_byte, i64 bytes) {
    for (i64 end = run + num_runs; run < end;) {
      const i64 i = run / (r.size[1] * r.size[2]), j = run / r.size[2] % r.size[1], k = run % r.size[2];
      char* to = y.as<char>() + i * r.to[0] + j * r.to[1] + k * r.to[2] + first_byte;
      const char* from = x.as<char>() + i * r.from[0] + j * r.from[1] + k * r.from[2] + first_byte;
      const i64 row_end = std::min(end, run + r.size[2] - k);
      for (; run < row_end; ++run, to += r.to[2], from += r.from[2]) {
        std::memcpy(to, from, static_cast<size_t>(bytes));
      }
    }
  };
  stream.pool->parallel_for((count + per_tile - 1) / per_tile * parts, [&](i64 tile, int) {
    const i64 run = tile / parts * per_tile, first_byte = tile % parts * kTileBytes;
    copy(run, std::min(per_tile, count - run), first_byte, std::min(kTileBytes, r.bytes - first_byte));
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
