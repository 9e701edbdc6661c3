// SPDX-License-Identifier: Apache-2.0
#pragma once
// When workers of DiLoCo meet. A fragment meets at the end of a step, from 1; what it sends takes effect (it lands) at
// the end of that step, or overlap_steps later.

#include "ds/config.h"

namespace ds::update {

inline bool meets(const DilocoConfig& c, i64 fragment, i64 step) noexcept {
  return c.enabled && step > 0 && step % c.sync_every == fragment * c.sync_every / c.fragments;
}

inline bool lands(const DilocoConfig& c, i64 fragment, i64 step) noexcept {
  return meets(c, fragment, step - c.overlap_steps);
}

// Whether any fragment lands.
inline bool lands(const DilocoConfig& c, i64 step) noexcept {
  for (i64 f = 0; f < c.fragments; ++f) {
    if (lands(c, f, step)) return true;
  }
  return false;
}

// How often a fragment has met in steps 1 to `step`.
inline i64 meetings_until(const DilocoConfig& c, i64 fragment, i64 step) noexcept {
  const i64 first = fragment * c.sync_every / c.fragments;
  if (first == 0) return step / c.sync_every;
  return step < first ? 0 : (step - first) / c.sync_every + 1;
}

}  // namespace ds::update
