// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bytes of token files that tests write: ids of uint16, and the index of Megatron-LM for them.

#include <string>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds::testing {

template <class T>
std::string raw_bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

inline std::string bin_bytes(const std::vector<i32>& ids) {
  return raw_bytes(std::vector<u16>(ids.begin(), ids.end()));
}

// lengths: tokens of each sequence. ends: 0, and the number of sequences before the end of each document.
inline std::string idx_bytes(const std::vector<i32>& lengths, const std::vector<i64>& ends) {
  std::vector<i64> places;
  i64 at = 0;
  for (const i32 n : lengths) {
    places.push_back(at);
    at += 2 * n;
  }
  const std::vector<u64> version = {1}, counts = {lengths.size(), ends.size()};
  return std::string("MMIDIDX\0\0", 9) + raw_bytes(version) + '\x08' + raw_bytes(counts) + raw_bytes(lengths) +
         raw_bytes(places) + raw_bytes(ends);
}

}  // namespace ds::testing
