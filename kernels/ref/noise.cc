// SPDX-License-Identifier: Apache-2.0
// Random numbers of routers, addressed by the element's index.

#include <cmath>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void add_noise(TensorView y, TensorView x, NoiseKind kind, float amount, RngKey rng, i64 offset, Stream&) noexcept {
  for (i64 i = 0; i < y.numel(); ++i) {
    const double u = static_cast<double>(RngKey::uniform(rng.bits(static_cast<u64>(offset + i))));
    switch (kind) {
      case NoiseKind::Uniform: put(y, i, u); break;
      case NoiseKind::Jitter: put(y, i, get(x, i) * (1 + static_cast<double>(amount) * (2 * u - 1))); break;
      case NoiseKind::Gumbel: put(y, i, get(x, i) - std::log(-std::log(u))); break;
    }
  }
}

}  // namespace ds::ref
