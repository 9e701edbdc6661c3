// SPDX-License-Identifier: Apache-2.0
// Sequences that grow while a run trains: memory that was taken for the longest is laid out anew for shorter ones, and
// no bit is other than in a run whose sequences all have that length.

#include "equivalence/optimizers.h"

namespace ds::testing {
namespace curriculum_test {

constexpr i64 kSteps = 5, kWhole = 16;

const Layout kLayouts[] = {{},
                           {.stage = 3},
                           {.dp = 2, .stage = 1},
                           {.dp = 2, .stage = 3},
                           {.pp = 2, .stage = 1},
                           {.dp = 2, .pp = 2, .stage = 3},
                           {.tp = 2},
                           {.sp = 2},
                           {.dp = 2, .tp = 2, .stage = 2}};

Config whole_config(const ModelConfig& model, const Layout& l, i64 length) {
  Config c = config_of(model, l, 4);
  c.data.seq_length = length;
  return c;
}

TEST(Curriculum, AShorterSequenceIsThatOfARunOfItsLength) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const Layout& l : kLayouts) {
      for (const auto granularity : {CheckpointGranularity::None, CheckpointGranularity::Layer}) {
        const auto train = [&](i64 length, const Hooks& hooks) {
          Config c = whole_config(model, l, length);
          c.activation_checkpointing.granularity = granularity;
          return train_threads(c, l.ranks(), kSteps, 1, hooks);
        };
        Hooks shorter;
        shorter.length = [](i64) { return i64{8}; };
        const Trace t = train(kWhole, shorter), of_length = train(8, {});
        EXPECT_EQ(t.losses, of_length.losses) << l.name();
        EXPECT_EQ(t.norms, of_length.norms) << l.name();
        EXPECT_TRUE(same_bits(t.weights, of_length.weights)) << l.name();
        EXPECT_EQ(t.counted, t.predicted) << l.name();  // of the longest
      }
    }
  }
}

// Lengths that grow and shrink, with evaluations of whole samples between them: no layout moves a bit but those that
// share layers.
TEST(Curriculum, GrowsAlikeEverywhere) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    const auto train = [&](const Layout& l, i64 evaluated) {
      Hooks hooks;
      hooks.length = [](i64 step) { return std::array<i64, kSteps>{4, 8, 16, 12, 8}[static_cast<size_t>(step)]; };
      hooks.after_step = [&](engine::Engine& engine, i64 step) {
        if (step >= evaluated) return;
        const std::optional<double> loss =
            engine.evaluate(2, [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
              for (i64 b = 0; b < 2; ++b) {
                const size_t at = static_cast<size_t>(b * kWhole), n = static_cast<size_t>(kWhole);
                fill_sample(900 + 2 * batch + b, model.vocab_size, ids.subspan(at, n), targets.subspan(at, n));
              }
              return true;
            });
        EXPECT_TRUE(std::isfinite(loss.value()));
      };
      return train_threads(whole_config(model, l, kWhole), l.ranks(), kSteps, 1, hooks);
    };
    const Trace one = train({}, 0);
    for (const Layout& l : kLayouts) {
      const Trace t = train(l, 3);
      if (l.tp * l.sp > 1) {
        expect_close(t, one, l.name());
      } else {
        expect_same_training(t, one, l.name());
      }
    }
  }
}

}  // namespace curriculum_test
}  // namespace ds::testing
