// SPDX-License-Identifier: Apache-2.0
#pragma once
// For tests of what must not become quadratic: the processor time of a call in this thread, which other work on the
// machine hardly moves. Bounds are a hundred times what the call takes, and a hundredth of what it would take.

#include <ctime>

namespace ds::testing {

template <class F>
double cpu_seconds_of(F&& call) {
  const auto now = [] {
    timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
  };
  const double start = now();
  call();
  return now() - start;
}

}  // namespace ds::testing
