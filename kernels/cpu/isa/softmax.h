// SPDX-License-Identifier: Apache-2.0
#pragma once
// Softmax over a row of logits: its largest one, and the sum of exponentials relative to that.

#include <limits>
#include <type_traits>

#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// The largest of z, ignoring NaN: the x86 maximum returns its second operand if one is NaN.
template <class Z>
inline float row_max(const Z* z, i64 V) noexcept {
  Vec top = broadcast(-std::numeric_limits<float>::infinity());
  for_vectors(0, V, [&](i64 j, auto n) {
    const Vec x = load(z + j, n);
    if constexpr (std::is_same_v<decltype(n), AllLanes>) {
      top = max(x, top);
    } else {
      top = select(first(n), max(x, top), top);
    }
  });
  return reduce_max(top);
}

// The sum of e^(z - top).
template <class Z>
inline float row_sum(const Z* z, i64 V, float top) noexcept {
  // Partial sums of 64 vectors each, so the error of the sum stays near that of its terms for any vocabulary.
  Vec total = zero(), partial = zero();
  i64 count = 0;
  for_vectors(0, V, [&](i64 j, auto n) {
    Vec e = exp(load(z + j, n) - broadcast(top));
    if constexpr (!std::is_same_v<decltype(n), AllLanes>) e = select(first(n), e, zero());
    partial = partial + e;
    if (++count % 64 == 0) total = total + partial, partial = zero();
  });
  return reduce_add(total + partial);
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
