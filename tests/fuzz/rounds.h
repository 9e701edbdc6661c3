// SPDX-License-Identifier: Apache-2.0
#pragma once
// The number of rounds of a fuzz test: DS_FUZZ_FACTOR times its usual rounds. The tests labelled slow set it.

#include <algorithm>
#include <cstdlib>

namespace ds::testing {

inline int rounds(int usual) {
  const char* factor = std::getenv("DS_FUZZ_FACTOR");
  return usual * std::max(1, factor == nullptr ? 1 : std::atoi(factor));
}

}  // namespace ds::testing
