// SPDX-License-Identifier: Apache-2.0
#include "ds/kernels/state_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace ds {
namespace state_codes_test {

constexpr DType kCoded[] = {DType::I8, DType::U8};

struct Block {
  std::vector<u8> codes;
  std::vector<float> scales;
  TensorView view;
  Block(DType t, i64 n) : codes(static_cast<size_t>(n), 0xA5), scales(static_cast<size_t>(state_blocks(n)), 7) {
    view = TensorView::of(codes.data(), t, {n});
    view.scale = scales.data();
  }
};

std::vector<float> decoded(const Block& b) {
  std::vector<float> values(b.codes.size());
  decode_state(values.data(), b.view, 0, std::ssize(values));
  return values;
}
Block encoded(DType t, const std::vector<float>& values) {
  Block b(t, std::ssize(values));
  encode_state(b.view, values.data(), 0, std::ssize(values));
  return b;
}

// The value of a code, written from the text of the definition.
double value_of(DType t, int k) {
  const int bits = t == DType::I8 ? 7 : 8;
  if (k == 0) return 0;
  if (k == (1 << bits) - 1) return 1;
  const int e = static_cast<int>(std::log2(k));
  return (0.9 * ((k + 0.5) / std::pow(2, e)) - 0.8) * std::pow(10, e + 1 - bits);
}

TEST(StateCodes, SayWhatTheirDefinitionSays) {
  for (const DType t : kCoded) {
    double before = -1;
    for (int k = 0; k < (t == DType::I8 ? 128 : 256); ++k) {
      const double want = value_of(t, k);
      EXPECT_GT(want, before);
      before = want;
      EXPECT_NEAR(static_cast<double>(state_codes::decode(t, static_cast<u8>(k), 1)), want, want * 1e-6) << k;
      if (t == DType::I8) {
        EXPECT_EQ(state_codes::decode(t, static_cast<u8>(-k), 1), -state_codes::decode(t, static_cast<u8>(k), 1));
      }
    }
  }
  EXPECT_EQ(state_codes::decode(DType::I8, 127, 0.3f), 0.3f);
  EXPECT_EQ(state_codes::decode(DType::U8, 255, 0.3f), 0.3f);
}

// Every code, beside the largest one of either sign, at scales up to the ends of what blocks have.
TEST(StateCodes, DecodedAndEncodedAgainAreTheSame) {
  for (const DType t : kCoded) {
    for (const float scale : {1.0f, 0.1f, 3e-7f, 1e-12f, 0x1p-100f, 0x1.fffffep-100f, 1e30f, 0x1.fffffep127f}) {
      for (const int largest : {127, -127}) {
        Block b(t, 256);
        for (int k = 0; k < 256; ++k) b.codes[k] = static_cast<u8>(k == 0x80 && t == DType::I8 ? 0 : k);
        if (t == DType::I8) b.codes[127] = b.codes[129] = static_cast<u8>(largest);
        b.scales[0] = scale;
        const Block again = encoded(t, decoded(b));
        EXPECT_EQ(again.codes, b.codes) << scale;
        EXPECT_EQ(again.scales, b.scales) << scale;
      }
    }
  }
}

TEST(StateCodes, AreTheNearest) {
  const RngKey key{3, 1, 4};
  for (const DType t : kCoded) {
    const int codes = t == DType::I8 ? 128 : 256;
    std::vector<float> values(1 << 16);
    for (size_t i = 0; i < values.size(); ++i) {
      const u32 r = key.bits(i);
      const double x = std::pow(10, -9 * static_cast<double>(RngKey::uniform(r)));
      values[i] = static_cast<float>(t == DType::I8 && (r & 1) != 0 ? -x : x);
    }
    for (size_t i = 0; i < values.size(); i += 256) values[i] = 1;
    const std::vector<float> got = decoded(encoded(t, values));
    for (size_t i = 0; i < values.size(); ++i) {
      const double x = std::abs(static_cast<double>(values[i]));
      double best = t == DType::I8 ? x : 1;  // zero is no candidate for what has no sign
      for (int k = 1; k < codes; ++k) best = std::min(best, std::abs(x - value_of(t, k)));
      ASSERT_LE(std::abs(static_cast<double>(got[i]) - static_cast<double>(values[i])), best + x * 1e-6) << values[i];
      if (t == DType::U8) {
        ASSERT_GT(got[i], 0) << values[i];
      }
    }
  }
}

TEST(StateCodes, LargestMagnitudesOfEitherSignAreExact) {
  std::vector<float> values(300, 0.25f);
  values[7] = -0.7f;
  values[299] = -3.0f;
  const std::vector<float> got = decoded(encoded(DType::I8, values));
  EXPECT_EQ(got[7], -0.7f);
  EXPECT_EQ(got[299], -3.0f);
  EXPECT_NEAR(got[0], 0.25f, 0.25f * 0.01f);
}

TEST(StateCodes, ZerosAndWhatIsNearToThemAreZeros) {
  for (const DType t : kCoded) {
    for (const float x : {0.0f, -0.0f, 1e-45f, 0x1.fffffep-101f}) {
      const Block b = encoded(t, std::vector<float>(10, x));
      EXPECT_EQ(b.scales[0], 0);
      for (const float y : decoded(b)) EXPECT_EQ(y, 0);
      for (const u8 c : b.codes) EXPECT_EQ(c, 0);
    }
  }
}

// A value that is not finite makes its whole block not finite, and no other block. So does a negative value in an
// unsigned state.
TEST(StateCodes, WhatIsNotFiniteShows) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType t : kCoded) {
    for (const float bad : {inf, -inf, nan, -nan, -1.0f}) {
      if (bad == -1.0f && t == DType::I8) continue;
      for (const size_t at : {size_t{0}, size_t{300}, size_t{519}}) {
        std::vector<float> values(520, 0.5f);
        values[at] = bad;
        const Block b = encoded(t, values);
        const std::vector<float> got = decoded(b);
        for (size_t i = 0; i < got.size(); ++i) {
          if (i / 256 == at / 256) {
            EXPECT_TRUE(std::isnan(got[i]));
            EXPECT_EQ(b.codes[i], 0);
          } else {
            EXPECT_EQ(got[i], 0.5f);
          }
        }
      }
    }
  }
}

// Any piece of blocks is encoded as in the whole; the last block may be short.
TEST(StateCodes, PiecesOfBlocksAreThoseOfTheWhole) {
  std::vector<float> values(1000);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = RngKey::uniform(RngKey{1, 2, 3}.bits(i)) * static_cast<float>(i);
  for (const DType t : kCoded) {
    const Block whole = encoded(t, values);
    Block parts(t, 1000);
    encode_state(parts.view, values.data() + 512, 512, 488);
    encode_state(parts.view, values.data(), 0, 512);
    EXPECT_EQ(parts.codes, whole.codes);
    EXPECT_EQ(parts.scales, whole.scales);
    const std::vector<float> all = decoded(whole);
    std::vector<float> some(100);
    decode_state(some.data(), whole.view, 250, 100);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + 250));
  }
}

TEST(StateCodes, OtherTypesPassThrough) {
  std::vector<float> values = {1.0f, -2.5f, 1e-30f}, got(3), stored(3);
  const TensorView fp32 = TensorView::of(stored.data(), DType::F32, {3});
  encode_state(fp32, values.data(), 0, 3);
  decode_state(got.data(), fp32, 0, 3);
  EXPECT_EQ(got, values);
  std::vector<u16> halves(3);
  const TensorView narrow = TensorView::of(halves.data(), DType::BF16, {3});
  encode_state(narrow, values.data(), 0, 3);
  decode_state(got.data(), narrow, 0, 3);
  EXPECT_EQ(got[1], -2.5f);
  EXPECT_EQ(got[2], to_float(to_bf16(1e-30f)));
}

// Rounds up and down so often that the mean is the number itself. Numbers that bf16 can represent stay, and so do those
// that are not finite.
TEST(StochasticRounding, HasTheNumberAsItsMean) {
  for (const float x : {1.0009766f, -3.1f, 1e-20f, 65000.7f}) {
    double sum = 0;
    for (u32 random = 0; random < 65536; ++random)
      sum += static_cast<double>(to_float(round_stochastically(x, random)));
    EXPECT_NEAR(sum / 65536, static_cast<double>(x), std::abs(static_cast<double>(x)) * 1e-6);
  }
  for (const float x : {0.0f, 1.5f, -2.0f, std::numeric_limits<float>::infinity()}) {
    for (const u32 random : {0u, 1u, 65535u}) EXPECT_EQ(to_float(round_stochastically(x, random)), x);
  }
  EXPECT_TRUE(std::isnan(to_float(round_stochastically(std::bit_cast<float>(0x7F800001u), 0))));
}

}  // namespace state_codes_test
}  // namespace ds
