// SPDX-License-Identifier: Apache-2.0
// Texts of which a draft model proposes tokens: the bytes are those without it, whatever it proposes.

#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "comm/make_communicator.h"
#include "equivalence/sessions.h"
#include "infer/drafter.h"
#include "infer/session_plan.h"
#include "slow_set.h"

namespace ds::testing {
namespace drafts_test {

using infer::Drafter;
using infer::Session;

// A draft, whole on one rank, on the device of a model.
struct Draft {
  Config config;
  Mesh mesh{make_self_communicator({})};
  MemoryLedger ledger;
  engine::Engine engine;

  Draft(const ModelConfig& model, DType work, i64 seed, Device& device)
      : config(seeded(generating(model, {}, work, model.max_positions), seed)), engine(config, mesh, ledger, device) {
    engine.init_weights();
  }
  static Config seeded(Config c, i64 seed) {
    c.seed = seed;
    return c;
  }
};

// Another model of the same tokens.
ModelConfig other_model() {
  ModelConfig model = of_four_heads(tiny_gpt2());
  model.vocab_size = 61;
  model.max_positions = 400;
  return model;
}

// Proposes anything.
struct Guesser : infer::Proposer {
  std::mt19937 random{3};
  void propose(std::span<Place> places) override {
    for (Place& place : places) {
      for (auto n = static_cast<i64>(random() % static_cast<u32>(place.most + 1)); n > 0; --n)
        place.tokens.push_back(static_cast<i32>(random() % 61));
    }
  }
  void forget(u64) override {}
};

// A draft with the weights of the model proposes exactly the tokens that the model draws, greedy or sampled: each pass
// but the first yields all proposed tokens and one more.
TEST(Drafts, TheModelItselfIsAlwaysRight) {
  ModelConfig windows = workload_model(), dynamic = workload_model(), latent = tiny_latent(), gpt2 = other_model();
  windows.sliding_window = 20;
  windows.sliding_layers.assign(static_cast<size_t>(windows.layers), true);
  windows.sliding_layers[0] = false;
  dynamic.rope = {.type = RopeType::Dynamic, .factor = 2, .original_max_positions = 12};
  latent.max_positions = 400;
  for (const ModelConfig& model : {workload_model(), gpt2, windows, dynamic, latent}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const Layout& l : {Layout{}, Layout{.pp = 2}, Layout{.sp = 2}}) {
        const std::string what = fmt::format("{} {} {}", family_name(model.family), dtype_name(work), l.name());
        with_engines(generating(model, l, work, 400), l.ranks(), [&](engine::Engine& engine) {
          Draft draft(model, work, Config().seed, engine.device());
          for (const infer::Sampling& sampling :
               {infer::Sampling{.temperature = 0},
                {.temperature = 1.5, .top_p = 0.9, .repetition_penalty = 1.2, .seed = 4, .index = 2}}) {
            const std::vector<i32> prompt(70, 5);
            const std::vector<i32> alone = text_of(engine, prompt, {.max_tokens = 121, .sampling = sampling});
            const SessionSizes sizes{.at_once = 2, .context = 200, .chunk = 100, .draft_tokens = 4};
            Drafter drafter(draft.engine.stage(), sizes, model.vocab_size);
            Session session(engine.stage(), sizes, &drafter);
            TokenCollector texts;
            session.add({.tokens = prompt, .max_tokens = 121, .sampling = sampling});
            while (!session.idle()) session.step(texts);
            EXPECT_EQ(texts.texts[0], alone) << what;
            EXPECT_EQ(session.counts().proposed, 4 * 24) << what;
            EXPECT_EQ(session.counts().accepted, 4 * 24) << what;
            EXPECT_EQ(session.counts().passes, 1 + 24) << what;
          }
        });
      }
    }
  }
}

TEST(Drafts, RandomWorkloads) {
  const int workloads = test::in_slow_set() ? 120 : 9;
  ModelConfig narrow = other_model(), wide = other_model(), small = workload_model();
  narrow.vocab_size = 60;
  narrow.max_positions = 150;
  wide.vocab_size = 97;
  wide.sliding_window = 20;
  small.layers = 1;
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{}, Layout{.pp = 2}, Layout{.tp = 2}, Layout{.dp = 2, .stage = 3}}) {
      with_engines(generating(workload_model(), l, work, 400), l.ranks(), [&](engine::Engine& engine) {
        Workloads all(engine, static_cast<u32>(l.ranks()) + 5);
        std::vector<std::unique_ptr<Draft>> drafts;
        for (const ModelConfig& model : {workload_model(), narrow, wide, small})
          drafts.push_back(std::make_unique<Draft>(model, work, drafts.empty() ? Config().seed : 9, engine.device()));
        for (int w = 0; w < workloads; ++w) {
          SessionSizes sizes = all.draw_sizes();
          sizes.draft_tokens = all.draw(1, 7);
          const auto which = static_cast<size_t>(w) % (drafts.size() + 1);
          std::unique_ptr<infer::Proposer> proposer = std::make_unique<Guesser>();
          if (which < drafts.size())
            proposer = std::make_unique<Drafter>(drafts[which]->engine.stage(), sizes, engine.model().vocab);
          const Session::Counts counts = all.run(sizes, proposer.get());
          EXPECT_GT(counts.proposed, 0);
          // Tensor-parallel ranks round the sums of their parts.
          EXPECT_TRUE(which > 0 || l.tp > 1 || counts.accepted == counts.proposed);
          EXPECT_TRUE(which == 0 || counts.accepted < counts.proposed) << which;
          EXPECT_TRUE(which < 3 || 20 * counts.accepted < counts.proposed) << which;
        }
      });
    }
  }
}

// The proposals of each round are those of a draft that sees the text for the first time.
struct Checked : infer::Proposer {
  Checked(engine::Engine& made, const SessionSizes& sizes) : draft(made), drafter(made.stage(), sizes, 61) {}
  void propose(std::span<Place> places) override {
    drafter.propose(places);
    for (const Place& place : places) {
      const std::vector<i32> text(place.text.begin(), place.text.end());
      EXPECT_EQ(place.tokens, text_of(draft, text, {.max_tokens = place.most, .sampling = place.request.sampling}));
      ++rounds;
    }
  }
  void forget(u64 id) override { drafter.forget(id); }
  engine::Engine& draft;
  Drafter drafter;
  i64 rounds = 0;
};

TEST(Drafts, TakeBackWhatDoesNotStand) {
  ModelConfig windows = workload_model(), latent = tiny_latent();
  windows.sliding_window = 20;
  windows.sliding_layers.assign(static_cast<size_t>(windows.layers), true);
  windows.sliding_layers[0] = false;
  latent.max_positions = 400;
  for (const ModelConfig& model : {workload_model(), windows, latent}) {
    with_engines(generating(workload_model(), {}, DType::F32, 400), 1, [&](engine::Engine& engine) {
      Draft draft(model, DType::F32, 9, engine.device());
      const SessionSizes sizes{.at_once = 6, .context = 200, .chunk = 10, .draft_tokens = 5};
      Checked checked(draft.engine, sizes);
      Session session(engine.stage(), sizes, &checked);
      TokenCollector texts;
      // The same requests again find blocks of the first ones, but none of tokens that did not stand.
      for (int again = 0; again < 3; ++again) {
        for (const double temperature : {0.0, 0.3})
          session.add({.tokens = std::vector<i32>(60, 5),
                       .max_tokens = 130,
                       .sampling = {.temperature = temperature, .seed = 3}});
        for (int step = 0; step < 20; ++step) session.step(texts);
      }
      while (!session.idle()) session.step(texts);
      EXPECT_GT(checked.rounds, 100);
      EXPECT_LT(session.counts().accepted, session.counts().proposed);
    });
  }
}

// Always proposes one token.
struct Stubborn : infer::Proposer {
  explicit Stubborn(i32 id) : token(id) {}
  void propose(std::span<Place> places) override {
    for (Place& place : places) place.tokens.assign(static_cast<size_t>(place.most), token);
  }
  void forget(u64) override {}
  i32 token;
};

// A proposed token that does not stand may have no finite keys and logits, and that is nobody's error.
TEST(Drafts, MayProposeTokensThatTheModelCannotCompute) {
  constexpr i32 kBad = 60;
  ModelConfig latent = tiny_latent();
  latent.max_positions = 400;
  for (const ModelConfig& model : {workload_model(), latent}) {
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
      with_engines(generating(model, {}, work, 400), 1, [&](engine::Engine& engine) {
        engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
          engine.init_values(param, begin, count, out);
          if (param != 0) return;  // the embedding
          for (i64 i = 0; i < count; ++i)
            if ((begin + i) / model.hidden == kBad) out[i] = std::numeric_limits<float>::quiet_NaN();
        });
        for (const double temperature : {0.0, 1.0}) {
          const infer::Request request{
              .tokens = std::vector<i32>(30, 5),
              .max_tokens = 50,
              .sampling = {.temperature = temperature, .seed = 3, .banned = {kBad}, .banned_for = 1000},
              .logprobs = true};
          const SessionSizes sizes{.at_once = 2, .context = 200, .chunk = 100, .draft_tokens = 3};
          TokenCollector alone, proposed;
          Session plain(engine.stage(), sizes);
          plain.add(request);
          while (!plain.idle()) plain.step(alone);
          Stubborn stubborn(kBad);
          Session session(engine.stage(), sizes, &stubborn);
          session.add(request);
          while (!session.idle()) session.step(proposed);
          EXPECT_EQ(proposed.texts[0], alone.texts[0]) << dtype_name(work);
          EXPECT_TRUE(same_bits(proposed.logprobs[0], alone.logprobs[0])) << dtype_name(work);
          EXPECT_EQ(session.counts().accepted, 0);
          EXPECT_GT(session.counts().proposed, 0);
        }
      });
    }
  }
}

// A draft that finds no room in its caches, or whose logits are not finite, proposes less, and that is all.
TEST(Drafts, MayHaveNeitherRoomNorFiniteLogits) {
  // Windows always have room, so more texts are under way than the caches of the draft hold.
  ModelConfig windows = workload_model();
  windows.sliding_window = 20;
  windows.sliding_layers.assign(static_cast<size_t>(windows.layers), true);
  for (const bool finite : {true, false}) {
    with_engines(generating(windows, {}, DType::F32, 400), 1, [&](engine::Engine& engine) {
      Draft draft(other_model(), DType::F32, 9, engine.device());
      if (!finite) {
        draft.engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
          draft.engine.init_values(param, begin, count, out);
          for (i64 i = 0; i < count && param == 0; ++i)
            if ((begin + i) / draft.engine.model().hidden > 40) out[i] = std::numeric_limits<float>::quiet_NaN();
        });
      }
      std::mt19937 random(7);
      std::vector<infer::Request> requests;
      for (i32 i = 0; i < 60; ++i)
        requests.push_back({.tokens = std::vector<i32>(1 + random() % 100, 1 + i % 60),
                            .max_tokens = 1 + static_cast<i64>(random() % 95),
                            .sampling = {.temperature = 0.9, .seed = 3}});
      for (const i64 cached : {0, 200, 260, 400}) {
        const SessionSizes sizes{.at_once = 10, .context = 200, .chunk = 60, .cached = cached, .draft_tokens = 4};
        TokenCollector alone, proposed;
        Session plain(engine.stage(), {.at_once = 1, .context = 200});
        Drafter drafter(draft.engine.stage(), sizes, 61);
        Session session(engine.stage(), sizes, &drafter);
        for (const infer::Request& request : requests) plain.add(request), session.add(request);
        while (!plain.idle()) plain.step(alone);
        while (!session.idle()) session.step(proposed);
        EXPECT_EQ(proposed.texts, alone.texts) << cached << " " << finite;
        EXPECT_EQ(session.counts().proposed > 0, finite);  // the table is the head's, too
      }
    });
  }
}

void expect_counted(const engine::Engine& engine, const SessionSizes& sizes) {
  const plan::TagBytes said = infer::plan_session(engine.model(), engine.plan(), sizes).bytes();
  for (size_t t = 0; t < said.size(); ++t) {
    if (static_cast<Tag>(t) == Tag::Scratch) continue;
    EXPECT_EQ(engine.ledger().peak(static_cast<Tag>(t)), engine.plan().memory.by_tag[t] + said[t])
        << tag_name(static_cast<Tag>(t));
  }
}

TEST(Drafts, TakeTheMemoryOfTheirPlans) {
  with_engines(generating(workload_model(), {}, DType::BF16, 400), 1, [&](engine::Engine& engine) {
    ModelConfig small = other_model();
    small.max_positions = 100;
    Draft draft(small, DType::F32, 9, engine.device());
    const SessionSizes sizes{.at_once = 3, .context = 200, .chunk = 16, .cached = 300, .draft_tokens = 4};
    Drafter drafter(draft.engine.stage(), sizes, 61);
    Session session(engine.stage(), sizes, &drafter);
    TokenCollector texts;
    for (i32 i = 0; i < 5; ++i) session.add({.tokens = {i, 2, 3}, .max_tokens = 150});
    while (!session.idle()) session.step(texts);
    expect_counted(engine, sizes);
    const SessionSizes own = infer::draft_sizes(sizes, small);
    EXPECT_EQ(own.context, 100);
    expect_counted(draft.engine, own);
    // Each row of a sequence's proposed tokens has logits, and no sequence takes the rows of prompts.
    const infer::SessionPlan plan = infer::plan_session(engine.model(), engine.plan(), sizes);
    EXPECT_EQ(plan.rows, 16 + 3 * 4);
    EXPECT_GE(plan.logit_rows, 3 * 5);
  });
}

}  // namespace drafts_test
}  // namespace ds::testing
