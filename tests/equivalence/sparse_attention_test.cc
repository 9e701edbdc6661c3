// SPDX-License-Identifier: Apache-2.0
// Training with block-sparse attention: a layout with all blocks is no layout, bit for bit; one with some gives the
// same bits whatever the ranks, stages and what is kept, and the same to the rounding where sums are cut; what is
// written with caches is what whole passes give; memory and messages are as planned.

#include "equivalence/layouts.h"

namespace ds::testing {
namespace sparse_attention_test {

constexpr i64 kSteps = 4, kLength = 128;

ModelConfig model_of(ModelConfig c) {
  c = of_four_heads(c);
  c.max_positions = kLength;
  c.layers = 4;
  return c;
}

using Mode = SparseAttentionMode;
SparseAttentionConfig layout_of(Mode mode, bool unidirectional) {
  SparseAttentionConfig s;
  s.mode = mode;
  s.unidirectional = unidirectional;
  s.different_layout_per_head = mode != Mode::Dense && mode != Mode::Local;
  s.num_local_blocks = 2;
  s.num_different_global_patterns = mode == Mode::Fixed ? 2 : 1;
  s.num_random_blocks = mode == Mode::BigBird || mode == Mode::Variable ? 1 : 0;
  return s;
}

Config config_with(const ModelConfig& model, const Layout& l, Mode mode) {
  Config c = config_of(model, l, 4);
  c.data.seq_length = kLength;
  c.sparse_attention = layout_of(mode, model.causal());
  return c;
}

Trace train(const ModelConfig& model, const Layout& l, Mode mode) {
  return train_threads(config_with(model, l, mode), l.ranks(), kSteps);
}

const ModelConfig kModels[] = {model_of(tiny_gpt2()), model_of(tiny_llama()), model_of(tiny_bert())};

TEST(SparseAttention, AllBlocksAreNoLayout) {
  for (const ModelConfig& model : kModels) {
    const Trace want = train(model, {}, Mode::None);
    for (const Layout& l : {Layout{},
                            {.dp = 2, .stage = 3},
                            {.tp = 2},
                            {.sp = 2},
                            {.sp = 2, .mode = SequenceParallelMode::Ring},
                            {.checkpoints = Granularity::Layer}}) {
      const bool whole = l.tp * l.sp == 1;
      expect_same_training(train(model, l, Mode::Dense), whole ? want : train(model, l, Mode::None),
                           std::string(family_name(model.family)) + " " + l.name());
    }
  }
}

TEST(SparseAttention, RanksAndWhatIsKeptChangeNoBit) {
  for (const ModelConfig& model : kModels) {
    const Trace dense = train(model, {}, Mode::None);
    for (const Mode mode : {Mode::Fixed, Mode::BigBird}) {
      const Trace want = train(model, {}, mode);
      EXPECT_NE(want.losses[0], dense.losses[0]);
      for (const Layout& l : {Layout{.dp = 2, .stage = 1},
                              {.dp = 2, .stage = 2},
                              {.dp = 4, .stage = 3},
                              {.pp = 2, .stage = 1},
                              {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 3},
                              {.checkpoints = Granularity::Layer},
                              {.checkpoints = Granularity::Selective},
                              {.schedule = Kind::BreadthFirst, .chunks = 2, .stage = 3}}) {
        const Trace got = train(model, l, mode);
        expect_same_training(got, want, std::string(family_name(model.family)) + " " + l.name());
        expect_planned(got, kSteps, l.name());
      }
    }
  }
}

TEST(SparseAttention, CutHeadsAndSequencesAreTheSameToTheRounding) {
  for (const ModelConfig& model : kModels) {
    for (const Mode mode : {Mode::Fixed, Mode::Variable, Mode::BigBird, Mode::BSLongformer, Mode::Local}) {
      const Trace want = train(model, {}, mode);
      for (const Layout& l : {Layout{.tp = 2},
                              {.tp = 4, .sequence = true},
                              {.sp = 2},
                              {.sp = 4, .stage = 1},
                              {.tp = 2, .sp = 2},
                              {.sp = 2, .mode = SequenceParallelMode::Ring},
                              {.sp = 4, .mode = SequenceParallelMode::Ring, .stage = 2}}) {
        const Trace got = train(model, l, mode);
        expect_close(got, want, std::string(family_name(model.family)) + " " + l.name());
        expect_planned(got, kSteps, l.name());
      }
    }
  }
}

// A cache, and a prompt, at any length: each new token sees what it sees in a whole pass.
TEST(SparseAttention, TextIsThatOfWholePasses) {
  for (const ModelConfig& model : {kModels[0], kModels[1]}) {
    for (const int tp : {1, 2}) {
      Config c = config_with(model, {.tp = tp}, Mode::Fixed);
      c.use = ConfigUse::Generate;
      with_engines(c, tp, [&](engine::Engine& engine) {
        std::vector<i32> prompt(20), unused(20);
        fill_sample(3, model.vocab_size, prompt, unused);
        const std::vector<i32> text = text_of(engine, prompt, {.max_tokens = 60});
        for (const size_t n : {size_t{1}, size_t{11}, size_t{30}, size_t{59}}) {
          std::vector<i32> longer = prompt;
          longer.insert(longer.end(), text.begin(), text.begin() + static_cast<std::ptrdiff_t>(n));
          EXPECT_EQ(text_of(engine, longer, {.max_tokens = 1}), std::vector{text[n]}) << n;
        }
      });
    }
  }
}

}  // namespace sparse_attention_test
}  // namespace ds::testing
