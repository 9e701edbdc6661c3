// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 against the known-answer vectors of its authors, and how elements are addressed.

#include "ds/kernels/philox.h"

#include <gtest/gtest.h>

namespace ds {
namespace philox_test {

TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, 0, 0), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr u32 ones = 0xffffffff;
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, ones, ones),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, AnElementIsALaneOfItsBlock) {
  const RngKey key{.seed = 0xa4093822, .site = 0x299f31d0, .step = 7};
  const u64 block = 0x85a308d3243f6a88;
  const PhiloxBlock want = philox4x32({0x243f6a88, 0x85a308d3, 7, 0}, 0xa4093822, 0x299f31d0);
  EXPECT_EQ(key.block(block), want);
  for (u64 lane = 0; lane < 4; ++lane) {
    const u64 element = 4 * 0x0123456789abcdefull + lane;
    EXPECT_EQ(key.bits(element), key.block(0x0123456789abcdefull)[lane]);
  }
}

TEST(Philox, UniformStaysInsideTheUnitInterval) {
  EXPECT_EQ(RngKey::uniform(0), 0x1p-25f);
  EXPECT_GT(RngKey::uniform(0xff), 0.0f);
  EXPECT_LE(RngKey::uniform(0xffffffff), 1.0f);
  double sum = 0;
  const RngKey key{1, 2, 3};
  for (u64 e = 0; e < 100000; ++e) sum += static_cast<double>(RngKey::uniform(key.bits(e)));
  EXPECT_NEAR(sum / 100000, 0.5, 0.003);
}

}  // namespace philox_test
}  // namespace ds
