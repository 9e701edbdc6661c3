// SPDX-License-Identifier: Apache-2.0
#include "data/packing.h"

#include <gmock/gmock.h>

#include <map>

#include "data/objective.h"
#include "ds/kernels/philox.h"
#include "temp_directory.h"

namespace ds {
namespace packing_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TempDirectory;
using testing::write_file;

constexpr i32 kEnd = 7;

TokenStream stream_of(const TempDirectory& dir, const std::vector<u16>& tokens) {
  write_file(dir / "a.bin", std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  const std::string file = dir / "a.bin";
  return TokenStream(std::span(&file, 1),
                     {.format = DataFormat::Bin, .documents = {.apart = true, .packed = true, .token = kEnd}});
}

struct Sample {
  std::vector<i32> inputs, targets;
};
Sample sample_of(const Packing& packing, const TokenStream& stream, i64 sample, i64 T) {
  Sample s{std::vector<i32>(static_cast<size_t>(T), -5), std::vector<i32>(static_cast<size_t>(T), -5)};
  packing.make_sample(stream, sample, 65536, s.inputs, s.targets);
  return s;
}

constexpr i32 kNone = kIgnoredTarget;

TEST(Packing, PutsTheLongestFirstWhereTheLeastRoomIs) {
  const TempDirectory dir;
  // Documents of 3, 5, 2, 4 tokens, and one of a single token, which has no target; the last one has no end.
  const TokenStream stream =
      stream_of(dir, {11, 12, kEnd, 21, 22, 23, 24, kEnd, 31, kEnd, kEnd, 41, 42, 43, kEnd, 51, 52});
  const Packing packing(stream, 7);
  EXPECT_EQ(packing.num_documents(), 5);
  ASSERT_EQ(packing.num_samples(), 3);  // 5 + 2, 4 + 3, and 2
  const Sample first = sample_of(packing, stream, 0, 7), second = sample_of(packing, stream, 1, 7),
               third = sample_of(packing, stream, 2, 7);
  EXPECT_THAT(first.inputs, ElementsAre(21, 22, 23, 24, kEnd, 31, kEnd));
  EXPECT_THAT(first.targets, ElementsAre(22, 23, 24, kEnd, kNone, kEnd, kNone));
  EXPECT_THAT(second.inputs, ElementsAre(41, 42, 43, kEnd, 11, 12, kEnd));
  EXPECT_THAT(second.targets, ElementsAre(42, 43, kEnd, kNone, 12, kEnd, kNone));
  EXPECT_THAT(third.inputs, ElementsAre(51, 52, kEnd, kEnd, kEnd, kEnd, kEnd));
  EXPECT_THAT(third.targets, ElementsAre(52, kNone, kNone, kNone, kNone, kNone, kNone));
}

TEST(Packing, CutsWhatIsLongerThanASampleAndLosesNoTarget) {
  const TempDirectory dir;
  const TokenStream stream = stream_of(dir, {1, 2, 3, 4, 5, 6, 8, 9, kEnd, 31, kEnd});
  const Packing packing(stream, 4);
  ASSERT_EQ(packing.num_samples(), 3);
  EXPECT_THAT(sample_of(packing, stream, 0, 4).targets, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(sample_of(packing, stream, 1, 4).targets, ElementsAre(6, 8, 9, kEnd));
  EXPECT_THAT(sample_of(packing, stream, 2, 4).inputs, ElementsAre(31, kEnd, kEnd, kEnd));
}

// Every target of every document comes once, none is cut that fits, and samples are nearly as few as can be.
TEST(Packing, HasEveryTargetOnce) {
  const TempDirectory dir;
  constexpr i64 T = 64;
  std::vector<u16> tokens;
  i64 targets = 0, fits = 0, next = 100;
  const RngKey key{3, 1, 4};
  for (u64 d = 0; d < 3000; ++d) {
    const i64 n = 1 + key.bits(d) % (d % 10 == 0 ? 300 : 40);
    for (i64 i = 0; i + 1 < n; ++i) tokens.push_back(static_cast<u16>(100 + next++ % 60000));
    tokens.push_back(kEnd);
    if (n < 2) continue;
    targets += n - 1;
    fits += n;
  }
  const TokenStream stream = stream_of(dir, tokens);
  const Packing packing(stream, T);
  i64 seen = 0;
  std::map<std::pair<i32, i32>, i64> pairs;
  for (i64 s = 0; s < packing.num_samples(); ++s) {
    const Sample sample = sample_of(packing, stream, s, T);
    for (size_t t = 0; t < T; ++t) {
      if (sample.targets[t] == kNone) continue;
      ++seen;
      ++pairs[{sample.inputs[t], sample.targets[t]}];
    }
  }
  EXPECT_EQ(seen, targets);
  std::map<std::pair<i32, i32>, i64> wanted;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (tokens[i] != kEnd) ++wanted[{tokens[i], tokens[i + 1]}];
  }
  EXPECT_EQ(pairs, wanted);
  EXPECT_LT(packing.num_samples(), fits / T * 101 / 100 + 2);
}

TEST(Packing, OfATrainingRunIsAPermutationOfSamples) {
  const TempDirectory dir;
  const TokenStream stream = stream_of(dir, {1, 2, kEnd, 3, 4, kEnd, 5, 6, kEnd, 8, 9, 10, kEnd});
  const BatchLoader loader(stream, {1, 1, 4}, 5, 65536, next_token_of_documents(kEnd));
  ASSERT_EQ(loader.num_samples(), 4);
  EXPECT_THAT(loader.identity().objective, HasSubstr("packed by best fit"));
  std::vector<i32> firsts, inputs(4), targets(4);
  for (i64 s = 0; s < 4; ++s) {
    loader.load(s, 0, 0, inputs, targets);
    firsts.push_back(inputs[0]);
  }
  EXPECT_THAT(firsts, ::testing::UnorderedElementsAre(1, 3, 5, 8));
}

TEST(Packing, OfNoDocumentIsRefused) {
  const TempDirectory dir;
  try {
    Packing(stream_of(dir, {kEnd, kEnd, kEnd}), 4);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    EXPECT_THAT(std::string(e.what()), HasSubstr("no document of two tokens"));
  }
}

}  // namespace packing_test
}  // namespace ds
