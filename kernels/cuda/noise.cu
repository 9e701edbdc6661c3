// SPDX-License-Identifier: Apache-2.0
// Random numbers of routers: computed from the element's index, so nothing is stored for the backward pass.

#include <cmath>

#include "cuda/elementwise.h"

namespace ds::cuda {
namespace {

template <NoiseKind kKind>
struct Noise {
  RngKey rng;
  i64 offset;
  float amount;

  template <int kWidth>
  DS_DEVICE void operator()(float (&y)[1][kWidth], const float (&x)[1][kWidth], i64 first) const {
    PhiloxBlock block{};
    i64 number = -1;  // of the block
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      const i64 at = offset + first + e;  // negative only for elements that do not exist
      if (number != at >> 2) block = rng.block(static_cast<u64>(number = at >> 2));
      const float u = RngKey::uniform(block[static_cast<size_t>(at & 3)]);
      if constexpr (kKind == NoiseKind::Uniform) y[0][e] = u;
      if constexpr (kKind == NoiseKind::Jitter) y[0][e] = x[0][e] * (1.0f + amount * (u + u - 1.0f));
      if constexpr (kKind == NoiseKind::Gumbel) y[0][e] = x[0][e] - std::log(-std::log(u));
    }
  }
};

}  // namespace

void add_noise(TensorView y, TensorView x, NoiseKind kind, float amount, RngKey rng, i64 offset, Stream& s) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    const auto run = [&]<NoiseKind kKind>(const TensorView& from) {
      elementwise<T, T>("add_noise", s, {y}, {from}, Noise<kKind>{rng, offset, amount});
    };
    switch (kind) {
      case NoiseKind::Uniform: return run.template operator()<NoiseKind::Uniform>(y);
      case NoiseKind::Jitter: return run.template operator()<NoiseKind::Jitter>(x);
      case NoiseKind::Gumbel: return run.template operator()<NoiseKind::Gumbel>(x);
    }
  });
}

}  // namespace ds::cuda
