// SPDX-License-Identifier: Apache-2.0
// Dropout: random numbers are computed from the element's index, so nothing is stored for the backward pass.

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "cpu/philox.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

void dropout(TensorView y, TensorView x, float p, RngKey rng, i64 offset, Stream& stream) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    for_tiles(stream, y.numel(), [=, to = y.as<T>(), from = x.as<T>()](i64 begin, i64 end) {
      constexpr i64 kChunk = 512;
      float buffer[keep_room(kChunk)];
      for (i64 i = begin; i < end; i += kChunk) {
        const i64 n = std::min(kChunk, end - i);
        const float* keep = keep_factors(buffer, rng, p, static_cast<u64>(offset + i), n);
        // A product alone would not turn a dropped NaN or infinity into zero.
        for_vectors(0, n, [&](i64 j, auto lanes) {
          const Vec factor = load(keep + j, lanes);
          store(to + i + j, select(less(zero(), factor), load(from + i + j, lanes) * factor, zero()), lanes);
        });
      }
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
