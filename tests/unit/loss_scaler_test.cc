// SPDX-License-Identifier: Apache-2.0
// The loss-scale machine on scripted sequences of overflows.
#include "precision/loss_scaler.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace ds {
namespace loss_scaler_test {

Fp16Config scripted() {
  Fp16Config c;
  c.enabled = true;
  c.initial_scale_power = 4;
  c.loss_scale_window = 3;
  return c;
}

struct Tick {
  bool overflow;
  double scale;    // after
  i64 hysteresis;  // after
};
// Start 16, window 3, hysteresis 2, minimum 1.
constexpr std::array<Tick, 16> kTrace = {{{false, 16, 2},
                                          {false, 16, 2},
                                          {false, 16, 2},
                                          {false, 32, 2},
                                          {false, 32, 2},
                                          {false, 32, 2},
                                          {false, 64, 2},
                                          {true, 64, 1},
                                          {false, 64, 1},
                                          {true, 32, 1},
                                          {true, 16, 1},
                                          {false, 16, 1},
                                          {false, 16, 1},
                                          {false, 16, 1},
                                          {false, 32, 2},
                                          {true, 32, 1}}};

TEST(LossScaler, FollowsTheScriptedTrace) {
  LossScaler scaler(scripted());
  ASSERT_TRUE(scaler.dynamic());
  for (size_t i = 0; i < kTrace.size(); ++i) {
    scaler.update(kTrace[i].overflow);
    EXPECT_EQ(scaler.scale(), kTrace[i].scale) << i;
    EXPECT_EQ(scaler.state().hysteresis, kTrace[i].hysteresis) << i;
  }
}

TEST(LossScaler, RestoredAnywhereContinuesTheTrace) {
  for (size_t cut = 0; cut < kTrace.size(); ++cut) {
    LossScaler first(scripted());
    for (size_t i = 0; i < cut; ++i) first.update(kTrace[i].overflow);
    LossScaler second(scripted());
    second.restore(first.state());
    for (size_t i = cut; i < kTrace.size(); ++i) {
      second.update(kTrace[i].overflow);
      EXPECT_EQ(second.scale(), kTrace[i].scale) << cut << " " << i;
    }
  }
}

TEST(LossScaler, DefaultsGrowOnTheThousandAndFirstCleanStep) {
  Fp16Config c;
  c.enabled = true;
  LossScaler scaler(c);
  EXPECT_EQ(scaler.scale(), 65536);
  for (int i = 0; i < 1000; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 65536);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 131072);
  for (int i = 0; i < 999; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 131072);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 262144);
}

TEST(LossScaler, ConsecutiveHysteresisRefillsOnEveryGoodStep) {
  Fp16Config c = scripted();
  c.consecutive_hysteresis = true;
  LossScaler scaler(c);
  for (int i = 0; i < 10; ++i) {  // an overflow every other step never reaches the second in a row
    scaler.update(true);
    EXPECT_EQ(scaler.state().hysteresis, 1);
    scaler.update(false);
    EXPECT_EQ(scaler.state().hysteresis, 2);
    EXPECT_EQ(scaler.scale(), 16);
  }
  scaler.update(true);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);
}

TEST(LossScaler, HysteresisOneHalvesAtOnce) {
  Fp16Config c = scripted();
  c.hysteresis = 1;
  LossScaler scaler(c);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);
  scaler.restore({.scale = 32, .iteration = 7, .last_overflow = 2, .hysteresis = 3});  // of a run that had patience
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 16);
}

TEST(LossScaler, OverflowAtTheMinimumIsFatalAndChangesNothing) {
  Fp16Config c = scripted();
  c.hysteresis = 1;
  c.min_loss_scale = 6;
  LossScaler scaler(c);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 6);  // not below the minimum
  const LossScaler::State before = scaler.state();
  try {
    scaler.update(true);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Numeric);
    EXPECT_NE(std::string(e.what()).find("fp16.min_loss_scale"), std::string::npos);
  }
  EXPECT_EQ(scaler.state(), before);
}

TEST(LossScaler, ConstantScaleIgnoresVerdictsButCountsThem) {
  Fp16Config c = scripted();
  c.loss_scale = 128;
  LossScaler scaler(c);
  EXPECT_FALSE(scaler.dynamic());
  for (int i = 0; i < 20; ++i) scaler.update(i % 2 == 0);
  EXPECT_EQ(scaler.scale(), 128);
  EXPECT_EQ(scaler.state().iteration, 20);
  LossScaler other(c);
  other.restore({.scale = 4, .iteration = 7, .last_overflow = 2, .hysteresis = 1});
  EXPECT_EQ(other.scale(), 128);  // a constant comes from the configuration, not from the checkpoint
  EXPECT_EQ(other.state().iteration, 7);
}

// Nor do good steps move it, however many.
TEST(LossScaler, WithoutFp16TheScaleIsOne) {
  for (const double scale : {0, 128}) {  // 0: of a scale that moves
    Fp16Config c = scripted();
    c.enabled = false;
    c.loss_scale = scale;
    LossScaler scaler(c);
    EXPECT_FALSE(scaler.dynamic());
    for (int i = 0; i < 20; ++i) {
      scaler.update(i == 0);
      EXPECT_EQ(scaler.scale(), 1);
    }
  }
}

TEST(LossScaler, AWindowOfOneGrowsOnEveryGoodStepButTheFirst) {
  Fp16Config c = scripted();
  c.loss_scale_window = 1;
  LossScaler scaler(c);
  for (const double scale : {16, 32, 64}) {
    scaler.update(false);
    EXPECT_EQ(scaler.scale(), scale);
  }
}

TEST(LossScaler, RefusesImpossibleStates) {
  LossScaler scaler(scripted());
  for (const LossScaler::State& bad : {LossScaler::State{0, 0, -1, 1}, LossScaler::State{1, 3, 3, 1},
                                       LossScaler::State{1, -1, -1, 1}, LossScaler::State{1, 0, -1, 0}}) {
    EXPECT_THROW(scaler.restore(bad), Error);
  }
}

}  // namespace loss_scaler_test
}  // namespace ds
