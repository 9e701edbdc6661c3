// SPDX-License-Identifier: Apache-2.0
#pragma once
// Long tests that repeat shorter ones in more arrangements form the slow set. scripts/test --slow sets DS_SLOW, which
// selects it; run it when a piece of work is finished. tests/CMakeLists.txt adds a test x.slow for each program that
// asks for the set.

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

namespace ds::test {

inline bool in_slow_set() noexcept { return std::getenv("DS_SLOW") != nullptr; }

// Thins the combinations that a test loops over: true for every n-th, and in the slow set for all. With an n that
// shares no factor with the numbers of values, each value is tried. Tests of one suite begin at different combinations.
class EveryNth {
 public:
  explicit EveryNth(int n, size_t begin = 0) : n_(in_slow_set() ? 1 : static_cast<size_t>(n)), next_(begin) {}
  bool operator()() noexcept { return next_++ % n_ == 0; }

 private:
  size_t n_, next_;
};

// Parameters of tests: those of every run, and in the slow set more.
template <class T>
auto values_of(std::vector<T> always, const std::vector<T>& in_slow) {
  if (in_slow_set()) always.insert(always.end(), in_slow.begin(), in_slow.end());
  return ::testing::ValuesIn(always);
}

}  // namespace ds::test
