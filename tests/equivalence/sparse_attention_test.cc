// SPDX-License-Identifier: Apache-2.0
// Training with block-sparse attention: a layout with all blocks is no layout, bit for bit. One with some gives the
// same bits whatever the ranks, stages and recomputation, and the same to the rounding if sums are cut. Text written
// with caches is that of whole passes; memory and messages are as planned.

#include "config/sparse_attention.h"
#include "equivalence/layouts.h"
#include "infer/session_plan.h"
#include "slow_set.h"

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
  test::EveryNth tried(5);
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
        if (!tried()) continue;
        const Trace got = train(model, l, mode);
        expect_same_training(got, want, std::string(family_name(model.family)) + " " + l.name());
        expect_planned(got, kSteps, l.name());
      }
    }
  }
}

TEST(SparseAttention, CutHeadsAndSequencesAreTheSameToTheRounding) {
  test::EveryNth tried(8);
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
        if (!tried()) continue;
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
    for (const auto& [tp, mode] : {std::pair{1, Mode::Fixed}, {2, Mode::Fixed}, {1, Mode::Local}, {2, Mode::BigBird}}) {
      Config c = config_with(model, {.tp = tp}, mode);
      c.use = ConfigUse::Generate;
      with_engines(c, tp, [&](engine::Engine& engine) {
        std::vector<i32> prompt(20), unused(20);
        fill_sample(3, model.vocab_size, prompt, unused);
        const SessionSizes sizes{.at_once = 1, .context = 80, .chunk = 16};
        const std::vector<i32> text = text_of(engine, prompt, {.max_tokens = 60, .sizes = sizes});
        // Not all of its 80 tokens are kept, unless some head meets each; the memory of those that are is as predicted.
        const auto session = infer::plan_session(engine.model(), engine.plan(), sizes);
        const auto activations = static_cast<size_t>(Tag::Activations);
        EXPECT_EQ(session.spaces[0].blocks * session.spaces[0].lives.block() < 80, mode != Mode::Fixed)
            << sparse_attention_name(mode);
        EXPECT_EQ(engine.ledger().peak(Tag::Activations),
                  engine.plan().memory.by_tag[activations] + session.bytes()[activations]);
        for (const size_t n : {size_t{1}, size_t{11}, size_t{30}, size_t{59}}) {
          std::vector<i32> longer = prompt;
          longer.insert(longer.end(), text.begin(), text.begin() + static_cast<std::ptrdiff_t>(n));
          EXPECT_EQ(text_of(engine, longer, {.max_tokens = 1}), std::vector{text[n]}) << n;
        }
      });
    }
  }
}

// Documents. Every sixth token or so ends one.
Config with_documents(Config c) {
  separate_documents(c, 7);
  return c;
}

// A document's results are those that it has alone, wherever it is in a sample.
TEST(Documents, SeeThemselvesAlone) {
  for (const ModelConfig& model : kModels) {
    Config c = with_documents(config_with(model, {}, Mode::None));
    c.batch.train = 2;
    c.batch.accumulation = 1;
    with_engines(c, 1, [&](engine::Engine& engine) {
      constexpr i64 kFirst = 37, kSecond = kLength - kFirst;
      const i64 V = model.vocab_size;
      const RngKey key{.seed = 8, .site = 2, .step = 0};
      // Sample 0: one document and then another; sample 1: the other first.
      const auto other = [&](i64 t) { return static_cast<i32>(8 + key.bits(static_cast<u64>(t)) % 40); };
      const auto fill = [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32> documents) {
        for (i64 t = 0; t < kFirst; ++t)
          ids[static_cast<size_t>(t)] = static_cast<i32>(t == kFirst - 1 ? 7 : 20 + t % 9);
        for (i64 t = 0; t < kSecond; ++t)
          ids[static_cast<size_t>(kFirst + t)] = ids[static_cast<size_t>(kLength + t)] =
              t == kSecond - 1 ? 7 : other(t);
        for (i64 t = 0; t < kFirst; ++t) ids[static_cast<size_t>(kLength + kSecond + t)] = static_cast<i32>(20 + t % 9);
        std::ranges::fill(targets, 1);
        if (!model.causal()) std::ranges::fill(targets, kIgnoredTarget), targets[0] = 1;
        fill_documents(c, kLength, ids, targets, documents);
        return true;
      };
      ASSERT_TRUE(engine.evaluate(1, fill));
      std::vector<float> logits;
      engine.read_logits(logits);
      double difference = 0, norm = 0;
      for (i64 t = 0; t < kSecond; ++t) {
        for (i64 v = 0; v < V; ++v) {
          const double a = logits[static_cast<size_t>((kFirst + t) * V + v)];
          const double b = logits[static_cast<size_t>((kLength + t) * V + v)];
          difference += (a - b) * (a - b);
          norm += a * a;
        }
      }
      EXPECT_LT(std::sqrt(difference / norm), 1e-5) << family_name(model.family);
    });
  }
}

TEST(Documents, RanksAndWhatIsKeptChangeNoBit) {
  test::EveryNth tried(5);
  for (const ModelConfig& model : kModels) {
    for (const Mode mode : {Mode::None, Mode::Fixed}) {
      const auto run = [&](const Layout& l) {
        return train_threads(with_documents(config_with(model, l, mode)), l.ranks(), kSteps);
      };
      const Trace want = run({});
      EXPECT_NE(want.losses[0], train(model, {}, mode).losses[0]);
      for (const Layout& l : {Layout{.dp = 2, .stage = 3},
                              {.pp = 2, .stage = 1},
                              {.pp = 3, .schedule = Kind::ZeroBubbleH1},
                              {.checkpoints = Granularity::Layer},
                              {.checkpoints = Granularity::Selective}}) {
        if (!tried()) continue;
        const Trace got = run(l);
        expect_same_training(got, want, std::string(family_name(model.family)) + " " + l.name());
        expect_planned(got, kSteps, l.name());
      }
      for (const Layout& l :
           {Layout{.tp = 2, .sequence = true}, {.sp = 2}, {.sp = 4, .mode = SequenceParallelMode::Ring}}) {
        if (tried()) expect_close(run(l), want, std::string(family_name(model.family)) + " " + l.name());
      }
    }
  }
}

}  // namespace sparse_attention_test
}  // namespace ds::testing
