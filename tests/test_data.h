// SPDX-License-Identifier: Apache-2.0
#pragma once
// The directory of the tests' data: DS_TEST_DATA of the environment, for tests that have left the source tree
// (scripts/bundle --tests), or else tests/golden.

#include <cstdlib>
#include <string>

namespace ds::testing {

inline std::string test_data(const std::string& name) {
  const char* moved = std::getenv("DS_TEST_DATA");
  return std::string(moved != nullptr ? moved : DS_TEST_DATA) + "/" + name;
}

}  // namespace ds::testing
