// SPDX-License-Identifier: Apache-2.0
// Dropout: one uniform number per element, addressed by the element's index.

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void dropout(TensorView y, TensorView x, float p, RngKey rng, i64 offset, Stream&) noexcept {
  const double scale = 1 / (1 - static_cast<double>(p));
  for (i64 i = 0; i < x.numel(); ++i) {
    const bool keep = RngKey::uniform(rng.bits(static_cast<u64>(offset + i))) >= p;
    put(y, i, keep ? get(x, i) * scale : 0);
  }
}

}  // namespace ds::ref
