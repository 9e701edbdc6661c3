// SPDX-License-Identifier: Apache-2.0
// Layers that see some of the tokens: the arrangement of ranks changes no bit, and a layer computes the same as it
// would of those tokens alone.

#include "equivalence/optimizers.h"
#include "slow_set.h"

namespace ds::testing {
namespace random_ltd_test {

constexpr i64 kSteps = 6, kWhole = 16;

Config ltd_config(const ModelConfig& model, const Layout& l) {
  Config c = config_of(model, l, 4);
  c.data.seq_length = kWhole;
  RandomLtdConfig& ltd = c.random_ltd;
  ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
  ltd.layers = {0, 1};
  ltd.min_value = 5, ltd.max_value = 16, ltd.require_steps = 5, ltd.seq_per_step = 1;  // 5 7 9 11 13 16 tokens
  return c;
}

const Layout kLayouts[] = {{.stage = 3},
                           {.dp = 2, .stage = 1},
                           {.dp = 2, .stage = 2},
                           {.dp = 2, .stage = 3},
                           {.pp = 2, .stage = 1},
                           {.dp = 2, .pp = 2, .stage = 3},
                           {.tp = 2},
                           {.dp = 2, .tp = 2, .stage = 2}};

TEST(RandomLtd, IsTheSameInEveryArrangement) {
  test::EveryNth tried(5);
  for (const ModelConfig& model :
       {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama()), of_four_heads(tiny_bert())}) {
    for (const bool documents : {false, true}) {
      const auto train = [&](const Layout& l, CheckpointGranularity granularity, i64 evaluated) {
        Config c = ltd_config(model, l);
        c.activation_checkpointing.granularity = granularity;
        if (documents) separate_documents(c, 7);
        Hooks hooks;
        hooks.after_step = [&](engine::Engine& engine, i64 step) {
          if (step >= evaluated) return;
          const std::optional<double> loss =
              engine.evaluate(2, [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32> begins) {
                for (i64 b = 0; b < 2; ++b) {
                  const size_t at = static_cast<size_t>(b * kWhole), n = static_cast<size_t>(kWhole);
                  fill_sample(900 + 2 * batch + b, model.vocab_size, ids.subspan(at, n), targets.subspan(at, n));
                }
                fill_documents(c, kWhole, ids, targets, begins);
                return true;
              });
          EXPECT_TRUE(std::isfinite(loss.value()));
        };
        const Trace t = train_threads(c, l.ranks(), kSteps, 1, hooks);
        EXPECT_EQ(t.counted, t.predicted) << l.name();
        return t;
      };
      const Trace one = train({}, CheckpointGranularity::None, 0);
      Config all = ltd_config(model, {});
      all.random_ltd = {};
      EXPECT_NE(one.losses, train_threads(all, 1, kSteps, 1, {}).losses);
      for (const auto granularity :
           {CheckpointGranularity::None, CheckpointGranularity::Layer, CheckpointGranularity::Selective}) {
        for (const Layout& l : kLayouts) {
          if (!tried()) continue;
          const Trace t = train(l, granularity, 3);
          if (l.tp > 1) {
            expect_close(t, one, l.name());
          } else {
            expect_same_training(t, one, l.name());
          }
        }
      }
    }
  }
}

// The whole way of DeepSpeed's schedule: a run that never drops a token is one without.
TEST(RandomLtd, OfAllTokensIsARunWithout) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
    Config c = ltd_config(model, {});
    c.random_ltd.min_value = kWhole;
    const Trace t = train_threads(c, 1, kSteps, 1, {});
    c.random_ltd = {};
    expect_same_training(t, train_threads(c, 1, kSteps, 1, {}), "all tokens");
  }
}

}  // namespace random_ltd_test
}  // namespace ds::testing
