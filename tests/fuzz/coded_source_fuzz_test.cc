// SPDX-License-Identifier: Apache-2.0
// Deterministic mutations of models that are stored as codes: whatever their config.json and their tensors, a model is
// refused, or every element and every code can be read, and they agree.

#include "formats/coded_source.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "fuzz/rounds.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace coded_source_fuzz_test {

using testing::read_file;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

// A digit, a word, a bit or a stretch.
std::string mutate(std::string s, size_t head, std::mt19937& rng) {
  const auto below = [&](size_t n) { return static_cast<size_t>(rng() % std::max<size_t>(n, 1)); };
  constexpr const char* kWords[] = {"0",     "-1",    "8",    "16",         "\"re:(a*)*b\"", "null",
                                    "true",  "[]",    "I8",   "F8_E4M3",    "9999999999",    "weight",
                                    "[0,5]", "group", "gptq", "\"tensor\"", "[1,2,3]",       "BF16"};
  for (size_t round = 1 + below(2); round > 0 && !s.empty(); --round) {
    const size_t at = below(below(3) == 0 ? s.size() : std::min(s.size(), head)), length = 1 + below(6);
    const std::string word = kWords[below(std::size(kWords))];
    switch (below(6)) {
      case 0: s[at] = static_cast<char>(s[at] ^ (1 << below(8))); break;
      case 1: s.replace(at, word.size(), word); break;
      case 2: s.erase(at, length); break;
      case 3: s.insert(at, word); break;
      case 4: {
        const size_t digit = s.find_first_of("0123456789", at);
        if (digit != s.npos) s[digit] = static_cast<char>('0' + below(10));
        break;
      }
      case 5: {  // a member becomes an unknown one, or another
        const size_t quote = s.find('"', at);
        if (quote != s.npos && quote + 1 < s.size()) s[quote + 1] = static_cast<char>('a' + below(26));
        break;
      }
    }
  }
  return s;
}

void read_all(const TensorSource& source) {
  std::vector<char> out;
  std::vector<u8> codes;
  for (const TensorInfo& t : source.list()) {
    ASSERT_LE(t.numel(), 1 << 20) << t.name;  // eight codes in each word of a small file
    out.resize(static_cast<size_t>(t.bytes()));
    source.read(t.name, 0, t.numel(), out.data());
    const CodedForm form = source.codes_of(t.name);
    if (!form || t.numel() == 0) continue;
    const i64 cols = t.shape.back(), rows = t.numel() / cols;
    codes.resize(static_cast<size_t>(rows * form.row_bytes(cols)));
    source.read_codes(t.name, 0, rows, codes.data());
    for (i64 i = 0; i < t.numel(); i += 7) {
      float want = 0;
      std::memcpy(&want, out.data() + i * 4, sizeof want);
      const float x = form.element(codes.data(), {}, rows, cols, i / cols, i % cols);
      ASSERT_TRUE(std::memcmp(&x, &want, sizeof x) == 0 || (std::isnan(x) && std::isnan(want))) << t.name << " " << i;
    }
  }
}

bool reads_all(const std::string& dir) {
  try {
    read_all(*open_source(dir));
    return true;
  } catch (const Error&) {
    return false;
  }
}

TEST(CodedSourceFuzz, MutatedModelsAreRefusedOrSound) {
  std::mt19937 rng(20261130);
  int opened = 0, refused = 0;
  for (const char* name : {"gptq-4-64-zeros", "gptq-8-64-zeros-order", "awq-32", "ct-4-32-zeros", "ct-mixed",
                           "ct-fp8-block", "ct-int8-zeros"}) {
    const std::string from = test_data(std::string("coded/") + name);
    const std::string config = read_file(from + "/config.json"), weights = read_file(from + "/model.safetensors");
    const TempDirectory dir;
    for (int i = 0; i < testing::rounds(120); ++i) {
      const bool of_config = rng() % 2 == 0;
      write_file(dir / "config.json", of_config ? mutate(config, config.size(), rng) : config);
      write_file(dir / "model.safetensors", of_config ? weights : mutate(weights, 1200, rng));
      ++(reads_all(dir.path()) ? opened : refused);
    }
  }
  EXPECT_GT(opened, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace coded_source_fuzz_test
}  // namespace ds
