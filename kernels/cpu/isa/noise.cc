// SPDX-License-Identifier: Apache-2.0
// Random numbers of routers: computed from the element's index, so nothing is stored for the backward pass.

#include <algorithm>
#include <cmath>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"
#include "cpu/philox.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr i64 kChunk = 512;
constexpr i64 kRoom = kChunk + 4 + 2 * Vec::kLanes;

// RngKey::uniform of elements first .. first + n - 1, at most kChunk, in `buffer`.
const float* fill_uniform(float* buffer, const RngKey& key, u64 first, i64 n) noexcept {
  const i64 skip = static_cast<i64>(first % 4);
  for (i64 i = 0; i < skip + n; i += 2 * Vec::kLanes) {
    const VecPair u = uniforms(key, first / 4 + static_cast<u64>(i / 4));
    store(buffer + i, u.first);
    store(buffer + i + Vec::kLanes, u.second);
  }
  return buffer + skip;
}

}  // namespace

void add_noise(TensorView y, TensorView x, NoiseKind kind, float amount, RngKey rng, i64 offset,
               Stream& stream) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    const auto chunk = [=, to = y.as<T>(), from = x.as<T>()](const float* u, i64 at, i64 n) {
      switch (kind) {
        case NoiseKind::Uniform:
          return for_vectors(0, n, [=](i64 i, auto lanes) { store(to + at + i, load(u + i, lanes), lanes); });
        case NoiseKind::Jitter:
          return for_vectors(0, n, [=](i64 i, auto lanes) {
            const Vec one = broadcast(1.0f), v = load(u + i, lanes);
            store(to + at + i, load(from + at + i, lanes) * (one + broadcast(amount) * (v + v - one)), lanes);
          });
        case NoiseKind::Gumbel:
          for (i64 i = at; i < at + n; ++i) to[i] = from_float<T>(to_float(from[i]) - std::log(-std::log(u[i - at])));
          return;
      }
    };
    for_tiles(stream, y.numel(), [=](i64 begin, i64 end) {
      float buffer[kRoom];
      for (i64 i = begin; i < end; i += kChunk) {
        const i64 n = std::min(kChunk, end - i);
        chunk(fill_uniform(buffer, rng, static_cast<u64>(offset + i), n), i, n);
      }
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
