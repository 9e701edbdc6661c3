// SPDX-License-Identifier: Apache-2.0
#pragma once
// The clock for durations.

#include <chrono>

namespace ds {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) noexcept {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace ds
