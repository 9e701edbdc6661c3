// SPDX-License-Identifier: Apache-2.0
// Rotary tables by value: those that transformers 5 computes for each scaling (LlamaRotaryEmbedding, 8 frequencies),
// and the numbers of published models at full size. A frequency is read off position 1, the factor off position 0.

#include <gtest/gtest.h>

#include <cmath>

#include "model/models.h"

namespace ds::model {
namespace rope_tables_test {

Rotation rotary(i64 dim, float theta, i64 max_positions, const RopeScaling& rope) {
  return {.dim = dim, .theta = theta, .scaling = rope, .max_positions = max_positions};
}

double frequency(const RopeTables& t, size_t half, size_t k) {
  return std::atan2(static_cast<double>(t.sin[half + k]), static_cast<double>(t.cos[half + k]));
}

const std::vector<float> kShort = {1, 1.1f, 1.3f, 1.7f, 2.2f, 3, 4.5f, 6}, kLong = {1, 1.5f, 2.5f, 4, 7, 11, 18, 30};

struct Case {
  const char* name;
  i64 max_positions;
  RopeScaling rope;
  i64 length;
  double frequencies[8];
  double factor;
  double cos1, sin5;  // of the last position
};

TEST(RopeTables, EqualTransformers) {
  using enum RopeType;
  const RopeScaling llama3{.type = Llama3, .factor = 8, .original_max_positions = 64};
  const RopeScaling yarn{.type = Yarn, .factor = 4, .original_max_positions = 2048};
  RopeScaling yarn_short = yarn, yarn_whole = yarn, yarn_given = yarn;
  yarn_short.original_max_positions = 32;
  yarn_short.beta_fast = 4;
  yarn_whole.truncate = false;
  yarn_whole.mscale = 0.7f;
  yarn_whole.mscale_all_dim = 0.4f;
  yarn_given.attention_factor = 0.9f;
  const RopeScaling longrope{
      .type = LongRope, .factor = 4, .original_max_positions = 32, .short_factor = kShort, .long_factor = kLong};
  RopeScaling longrope_8 = longrope;
  longrope_8.factor = 8;
  // Dynamic scaling leaves positions within max_positions unscaled, whatever original_max_position_embeddings is.
  const RopeScaling dynamic{.type = RopeType::Dynamic, .factor = 2, .original_max_positions = 16};
  const Case cases[] = {
      {"linear",
       64,
       {.type = Linear, .factor = 4},
       37,
       {0.25, 0.079056941, 0.0250000004, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05},
       1,
       -0.956644177,
       0.0284566581},
      {"dynamic within",
       64,
       dynamic,
       37,
       {1, 0.316227764, 0.100000001, 0.0316227786, 0.00999999978, 0.00316227786, 0.00100000005, 0.000316227786},
       1,
       0.378916174,
       0.113596261},
      {"dynamic beyond",
       64,
       dynamic,
       100,
       {1, 0.283945143, 0.0806248412, 0.0228930302, 0.00650036521, 0.001845747, 0.000524090894, 0.000148813066},
       1,
       -0.986620486,
       0.18171376},
      {"llama3",
       128,
       llama3,
       37,
       {1, 0.244384587, 0.0130422562, 0.00395284733, 0.00124999997, 0.000395284733, 0.000125000006, 3.95284733e-05},
       1,
       -0.809830546,
       0.0142297698},
      {"yarn",
       128,
       yarn_short,
       37,
       {1, 0.197642356, 0.0250000004, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05},
       1.13862944,
       0.76680243,
       0.0324015878},
      {"yarn defaults",
       128,
       yarn,
       37,
       {1, 0.316227764, 0.100000001, 0.025693506, 0.00624999963, 0.00138349656, 0.000250000012, 7.90569466e-05},
       1.13862944,
       0.431445122,
       0.0566869937},
      {"yarn whole",
       128,
       yarn_whole,
       37,
       {1, 0.316227764, 0.100000001, 0.0238701962, 0.00505697168, 0.000811290462, 0.000250000012, 7.90569466e-05},
       1.03940382,
       0.393846899,
       0.0303529873},
      {"yarn given factor",
       128,
       yarn_given,
       37,
       {1, 0.316227764, 0.100000001, 0.025693506, 0.00624999963, 0.00138349656, 0.000250000012, 7.90569466e-05},
       0.9,
       0.341024548,
       0.0448067561},
      {"longrope short",
       128,
       longrope,
       32,
       {1, 0.287479758, 0.0769230798, 0.0186016336, 0.0045454544, 0.00105409266, 0.000222222225, 5.27046286e-05},
       1.18321596,
       -1.03096282,
       0.0386569165},
      {"longrope long",
       128,
       longrope,
       33,
       {1, 0.210818499, 0.0399999991, 0.00790569466, 0.00142857141, 0.000287479779, 5.55555562e-05, 1.05409254e-05},
       1.18321596,
       1.05863953,
       0.0108846677},
      {"longrope factor",
       128,
       longrope_8,
       33,
       {1, 0.210818499, 0.0399999991, 0.00790569466, 0.00142857141, 0.000287479779, 5.55555562e-05, 1.05409254e-05},
       1.26491106,
       1.13173318,
       0.0116361994},
      {"default",
       64,
       {},
       37,
       {1, 0.316227764, 0.100000001, 0.0316227786, 0.00999999978, 0.00316227786, 0.00100000005, 0.000316227786},
       1,
       0.378916174,
       0.113596261},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const RopeTables t = make_rope_tables(rotary(16, 1e4f, c.max_positions, c.rope), c.length);
    ASSERT_EQ(t.cos.size(), static_cast<size_t>(c.length * 8));
    ASSERT_EQ(t.sin.size(), t.cos.size());
    for (size_t k = 0; k < 8; ++k) {
      EXPECT_NEAR(frequency(t, 8, k) / c.frequencies[k], 1, 1e-6) << k;
      EXPECT_NEAR(t.cos[k], c.factor, 1e-6);
      EXPECT_EQ(t.sin[k], 0);
    }
    const size_t last = t.cos.size() - 8;
    EXPECT_NEAR(t.cos[last + 1], c.cos1, 1e-5);
    EXPECT_NEAR(t.sin[last + 5], c.sin5, 1e-6);
  }
}

TEST(RopeTables, GoldenNumbersAtFullSize) {
  struct Golden {
    size_t k;
    double inverse;
  };
  const RopeTables llama3 = make_rope_tables(
      rotary(128, 5e5f, 131072, {.type = RopeType::Llama3, .factor = 8, .original_max_positions = 8192}), 2);
  for (const auto& [k, inverse] : {Golden{0, 1},
                                   {20, 1.65604401e-2},
                                   {28, 3.21144599e-3},
                                   {30, 1.37189357e-3},
                                   {32, 5.24846161e-4},
                                   {40, 3.42810220e-5},
                                   {63, 3.06892599e-7}})
    EXPECT_NEAR(frequency(llama3, 64, k) / inverse, 1, 1e-6) << k;
  const RopeTables yarn = make_rope_tables(
      rotary(128, 1e6f, 131072, {.type = RopeType::Yarn, .factor = 4, .original_max_positions = 32768}), 2);
  for (const auto& [k, inverse] :
       {Golden{24, 5.37532149e-3}, {32, 6.02941176e-4}, {40, 4.44569853e-5}, {63, 3.10234440e-7}})
    EXPECT_NEAR(frequency(yarn, 64, k) / inverse, 1, 1e-6) << k;
  EXPECT_NEAR(yarn.cos[0], 1.138629436, 1e-6);
}

TEST(RopeTables, AreThoseOfTheConfiguration) {
  ModelConfig c;
  c.head_dim = 16, c.rope_theta = 1e4f, c.max_positions = 64, c.rope = {.type = RopeType::Linear, .factor = 3};
  EXPECT_EQ(make_rope_tables(rotation_of(c), 7).sin, make_rope_tables(rotary(16, 1e4f, 64, c.rope), 7).sin);
}

}  // namespace rope_tables_test
}  // namespace ds::model
