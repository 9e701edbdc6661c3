// SPDX-License-Identifier: Apache-2.0
// Whatever is compressed where, the copies of one element on several ranks stay the same: rows that ranks of tp hold
// whole, embeddings that two stages tie, whole states of dp. A code that decoded to another value for one copy would
// let models drift apart that nobody compares.

#include "equivalence/copies.h"
#include "equivalence/layouts.h"

namespace ds::testing {
namespace compressed_copies_test {

constexpr i64 kSteps = 8;  // in the last of them 0/1 Adam's ranks and DiLoCo's workers meet

struct Method {
  const char* name;
  i64 stage;
  void (*choose)(Config&);
  int workers = 1;
};

void by_signs(Config& c, OptimizerType type) {
  c.optimizer.type = type;
  c.optimizer.bias_correction = false;
  c.optimizer.beta2 = 0.9;
  c.optimizer.freeze_step = 3;
  c.gradient_clipping = 0;
}

const Method kMethods[] = {
    {"1-bit Adam", 1, [](Config& c) { by_signs(c, OptimizerType::OneBitAdam); }},
    {"1-bit LAMB", 1, [](Config& c) { by_signs(c, OptimizerType::OneBitLamb); }},
    {"0/1 Adam", 0,
     [](Config& c) {
       by_signs(c, OptimizerType::ZeroOneAdam);
       c.optimizer.var_freeze_step = 4, c.optimizer.var_update_scaler = 2;
       c.optimizer.local_step_scaler = 1, c.optimizer.local_step_clipper = 4;
     }},
    {"ZeRO++", 3,
     [](Config& c) {
       c.zero.quantized_weights = c.zero.quantized_gradients = true;
       c.zero.loco.enabled = true;
     }},
    {"codes of 8 bits", 0,
     [](Config& c) {
       c.communication_data_type = WireType::Int8;
       c.zero.loco.enabled = true;
     }},
    {"codes of 4 bits beside sparse gradients", 2,
     [](Config& c) {
       c.communication_data_type = WireType::Int4;
       c.sparse_gradients = true;
     }},
    {"DiLoCo in 8 bits", 1, [](Config& c) { c.optimizer.diloco.outer_gradient_bits = 8; }, 2},
    {"DiLoCo in 4 bits", 0, [](Config& c) { c.optimizer.diloco.outer_gradient_bits = 4; }, 2},
    {"DiLoCo over ZeRO++", 3,
     [](Config& c) {
       c.zero.quantized_weights = c.zero.quantized_gradients = true;
       c.optimizer.diloco.outer_gradient_bits = 4;
     },
     2},
};

class CompressedCopies : public ::testing::TestWithParam<Method> {};

TEST_P(CompressedCopies, StayTheSame) {
  const Method& method = GetParam();
  for (const Layout& cut : {Layout{.tp = 2}, {.pp = 2}, {.pp = 2, .tp = 2}}) {
    Layout l = cut;
    l.dp = method.workers > 1 ? 1 : 2;
    l.stage = method.stage;
    ModelConfig model = of_four_heads(tiny_gpt2());
    // So wide that the layers of the last stage end within a block of codes, if the tied matrix comes after them.
    if (l.tp == 1) model.hidden = 192, model.head_dim = 48, model.intermediate = 4 * 192;
    Config c = config_of(model, l, 2 * l.dp);
    c.optimizer.lr = 1e-3;
    if (method.workers > 1) {
      c.optimizer.diloco = {.enabled = true, .workers = method.workers, .sync_every = 4};
      c.batch.train *= method.workers;
    }
    method.choose(c);
    const std::string what = fmt::format("{} {}", method.name, l.name());
    Copies copies;
    Hooks hooks;
    hooks.after_step = [&](engine::Engine& engine, i64 step) {
      if (step + 1 == kSteps) copies.check(engine, what);
    };
    const std::vector<Trace> traces = traces_of_threads(c, l.ranks() * method.workers, kSteps, 1, hooks);
    for (const Trace& t : traces) EXPECT_TRUE(std::isfinite(t.losses.back())) << what;
    EXPECT_GE(copies.most(), 2) << what;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CompressedCopies, ::testing::ValuesIn(kMethods),
                         [](const auto& instance) { return fmt::format("{}", instance.index); });

}  // namespace compressed_copies_test
}  // namespace ds::testing
