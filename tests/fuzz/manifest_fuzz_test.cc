// SPDX-License-Identifier: Apache-2.0
// Deterministic mutations of a good manifest, sealed again with a right checksum, as damage never is but malice may be:
// each is refused, or describes a checkpoint that can be walked without leaving its files.

#include <random>

#include "checkpoint/reader.h"
#include "fuzz/rounds.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace {

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
      default: {  // another value in the place of a number
        const size_t digit = s.find_first_of("0123456789", at);
        if (digit == std::string::npos) break;
        const size_t end = s.find_first_not_of("0123456789", digit);
        s.replace(digit, end - digit, below(2) == 0 ? kTokens[7 + below(4)] : std::to_string(below(100)));
      }
    }
  }
  return s;
}

TEST(ManifestFuzz, ForgedManifestsAreRefusedOrSound) {
  const testing::TempDirectory dir;
  const std::string step = dir / "step-00000003", path = step + "/manifest.json";
  std::filesystem::copy(testing::test_data("checkpoint-v1/step-00000003"), step);
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
      reader.verify({});              // every range that the manifest names
      ++accepted;
    } catch (const Error& e) {
      ++refused;
      ASSERT_TRUE(e.code() == Errc::Corrupt || e.code() == Errc::Unavailable) << e.what() << "\n" << text;
    }
  }
  EXPECT_GT(accepted, 50);
  EXPECT_GT(refused, 3000);
}

}  // namespace
}  // namespace ds
