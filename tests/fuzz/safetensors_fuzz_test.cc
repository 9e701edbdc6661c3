// SPDX-License-Identifier: Apache-2.0
// Deterministic mutations of good headers: whatever the bytes, the parser either refuses with Errc::Corrupt or returns
// a table that covers the data exactly once.

#include "formats/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "fuzz/rounds.h"

namespace ds {
namespace safetensors_fuzz_test {

constexpr i64 kData = 46;
const std::string kGood =
    R"({"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]},"s":{"dtype":"F64","shape":[],"data_offsets":[34,42]},)"
    R"("m":{"dtype":"F8_E8M0","shape":[4,1],"data_offsets":[42,46]},"e":{"dtype":"U8","shape":[0],"data_offsets":[46,46]}})";

// Pieces that headers are made of, and pieces that break them.
const std::string kTokens[] = {"{",
                               "}",
                               "[",
                               "]",
                               ",",
                               ":",
                               "\"",
                               "0",
                               "24",
                               "-1",
                               "1e9",
                               "0.5",
                               "null",
                               "true",
                               "\\u0000",
                               "\"U8\"",
                               "\"F4\"",
                               "[]",
                               "{}",
                               "\"shape\"",
                               "\"dtype\"",
                               "\"data_offsets\"",
                               "__metadata__",
                               "9223372036854775807",
                               "18446744073709551616",
                               "\xff",
                               "\xEF\xBB\xBF",
                               " ",
                               "\n"};

std::string mutate(std::string s, std::mt19937& rng) {
  const auto below = [&](size_t n) { return static_cast<size_t>(rng() % std::max<size_t>(n, 1)); };
  for (size_t round = 1 + below(4); round > 0; --round) {
    const size_t at = below(s.size()), length = 1 + below(24);
    switch (below(6)) {
      case 0: s[at] = static_cast<char>(rng()); break;
      case 1: s.erase(at, length); break;
      case 2: s.insert(at, kTokens[below(std::size(kTokens))]); break;
      case 3: s.insert(below(s.size()), s.substr(at, length)); break;
      case 4: s[at] = static_cast<char>('0' + below(10)); break;
      case 5: s.resize(at); break;
    }
    if (s.empty()) return s;
  }
  return s;
}

TEST(SafetensorsFuzz, MutatedHeadersAreRefusedOrSound) {
  ASSERT_EQ(parse_safetensors(kGood, kData, "good").tensors.size(), 4u);
  std::mt19937 rng(20240229);
  int accepted = 0, refused = 0;
  for (int i = 0; i < testing::rounds(40000); ++i) {
    const std::string json = mutate(kGood, rng);
    try {
      const TensorTable t = parse_safetensors(json, kData, "mutant");
      ++accepted;
      for (size_t k = 0; k < t.tensors.size(); ++k) {
        const i64 begin = t.offsets[k] - 8 - static_cast<i64>(json.size());
        ASSERT_GE(begin, 0) << json;
        ASSERT_LE(begin + t.tensors[k].bytes(), kData) << json;
      }
    } catch (const Error& e) {
      ++refused;
      ASSERT_EQ(e.code(), Errc::Corrupt) << e.what() << "\n" << json;
    }
  }
  EXPECT_GT(accepted, 100);  // the mutations are small enough to reach deep
  EXPECT_GT(refused, 10000);
}

}  // namespace safetensors_fuzz_test
}  // namespace ds
