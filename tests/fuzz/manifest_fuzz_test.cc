// SPDX-License-Identifier: Apache-2.0
// Deterministic mutations of a good manifest, sealed again with a right checksum, as damage never is but malice may be:
// each is refused, or describes a checkpoint that can be walked without leaving its files.

#include <random>

#include "checkpoint/reader.h"
#include "fuzz/rounds.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace manifest_fuzz_test {

using testing::read_file;
using testing::write_file;

const std::string kTokens[] = {"{",
                               "}",
                               "[",
                               "]",
                               ",",
                               ":",
                               "\"",
                               "0",
                               "-1",
                               "1e300",
                               "0.5",
                               "null",
                               "true",
                               "\"x\"",
                               "9223372036854775807",
                               "18446744073709551615",
                               "4611686018427387904",
                               "\\u0000",
                               "../",
                               "\"tied_to\":\"wte.weight\"",
                               "\"param\"",
                               "\"slice\":{\"dim\":0,\"ranges\":[[0,1]]},",
                               "[0,1],",
                               "[]",
                               "{}",
                               "\xff"};

std::string mutate(std::string s, std::mt19937& rng) {
  const auto below = [&](size_t n) { return static_cast<size_t>(rng() % std::max<size_t>(n, 1)); };
  for (size_t round = 1 + below(3); round > 0 && !s.empty(); --round) {
    const size_t at = below(s.size()), length = 1 + below(40);
    switch (below(6)) {
      case 0: s[at] = static_cast<char>(rng()); break;
      case 1: s.erase(at, length); break;
      case 2: s.insert(at, kTokens[below(std::size(kTokens))]); break;
      case 3: s.insert(below(s.size()), s.substr(at, length)); break;
      default: {  // another value instead of a number
        const size_t digit = s.find_first_of("0123456789", at);
        if (digit == std::string::npos) break;
        const size_t end = s.find_first_not_of("0123456789", digit);
        s.replace(digit, end - digit, below(2) == 0 ? kTokens[7 + below(4)] : std::to_string(below(100)));
      }
    }
  }
  return s;
}

// Elements of a dim, all of every other, and all.
void read_all(CheckpointReader& reader) {
  std::vector<char> out;
  for (size_t p = 0; p < reader.params().size(); ++p) {
    const ParamEntry& entry = reader.params()[p];
    const auto param = static_cast<i64>(p);
    if (!entry.tied_to.empty()) continue;
    const DType dtype = reader.stored_dtype(State::Param, param);
    const auto read = [&](const model::ParamSlice& slice) {
      const i64 n = model::SliceMap(slice, entry.shape).numel();
      out.resize(n * dtype_bytes(dtype));
      reader.read(State::Param, dtype, param, slice, 0, n, out.data());
    };
    read({});
    for (int d = 0; std::cmp_less(d, entry.shape.size()); ++d) {
      const i64 size = entry.shape[d];
      if (size > 2) read({d, {{0, 1}, {size - 1, size}}});
    }
  }
}

// Version 1, and version 2: pieces of slices.
class ManifestFuzz : public ::testing::TestWithParam<const char*> {};

TEST_P(ManifestFuzz, ForgedManifestsAreRefusedOrSound) {
  const testing::TempDirectory dir;
  const std::string step = dir / "step-00000003", path = step + "/manifest.json";
  std::filesystem::copy(testing::test_data(GetParam()) + "/step-00000003", step);
  const std::string good = read_file(path), body = good.substr(0, good.rfind(",\n\"checksum\""));
  const auto seal = [](const std::string& text) {
    return fmt::format("{},\n\"checksum\": \"{:016x}\"\n}}\n", text,
                       checksum(text.data(), static_cast<i64>(text.size())));
  };
  ASSERT_EQ(seal(body), good);

  std::mt19937 rng(20240229);
  int accepted = 0, refused = 0;
  for (int i = 0; i < testing::rounds(6000); ++i) {
    const std::string text = seal(mutate(body, rng));
    try {
      parse_manifest(text, "mutant");
      write_file(path, text);
      CheckpointReader reader(step);  // sizes
      ++accepted;
      // Every range that the manifest names, and every parameter by them.
      if (reader.verify({}).empty()) read_all(reader);
    } catch (const Error& e) {
      ++refused;
      ASSERT_TRUE(e.code() == Errc::Corrupt || e.code() == Errc::Unavailable) << e.what() << "\n" << text;
    }
  }
  EXPECT_GT(accepted, 50);
  EXPECT_GT(refused, 3000);
}

INSTANTIATE_TEST_SUITE_P(Versions, ManifestFuzz, ::testing::Values("checkpoint-v1", "checkpoint-v2"),
                         [](const auto& p) { return p.index == 0 ? "One" : "Two"; });

}  // namespace manifest_fuzz_test
}  // namespace ds
