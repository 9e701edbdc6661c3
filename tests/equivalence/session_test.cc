// SPDX-License-Identifier: Apache-2.0
// Many texts at once: each has the bytes that it has alone, whatever else is under way, however passes are cut, and
// however few blocks the caches have.

#include <random>

#include "equivalence/sessions.h"
#include "equivalence/tiny_experts.h"
#include "infer/session_plan.h"
#include "plan/scratch.h"
#include "slow_set.h"

namespace ds::testing {
namespace session_test {

// Prompts of different lengths; the second one has a single token.
Texts prompts() {
  Texts all;
  for (const i32 length : {5, 1, 9, 3, 3, 12, 2}) {
    std::vector<i32>& prompt = all.emplace_back();
    for (i32 t = 0; t < length; ++t) prompt.push_back((7 * length + 5 * t + static_cast<i32>(all.size())) % 61);
  }
  return all;
}

void expect_texts_as_alone(const ModelConfig& model, const Layout& l, DType work) {
  const std::string what = fmt::format("{} {} {}", family_name(model.family), l.name(), dtype_name(work));
  with_engines(generating(model, l, work), l.ranks(), [&](engine::Engine& engine) {
    const Texts given = prompts();
    for (const double temperature : {0.0, 0.9}) {
      Writing w{.max_tokens = 11, .sampling = {.temperature = temperature, .seed = 5}};
      Texts alone;
      for (const auto& prompt : given) alone.push_back(text_of(engine, prompt, w));
      const i32 last = alone[2][4];  // texts end at unlike places
      for (auto& text : alone) {
        if (const auto at = std::ranges::find(text, last); at != text.end()) text.erase(at + 1, text.end());
      }
      EXPECT_LE(alone[2].size(), 5u);
      for (const i64 at_once : {1, 3, 6, 100}) {
        for (const i64 chunk : {512, 4}) {
          w.sizes = {.at_once = at_once, .context = 23, .chunk = chunk};
          EXPECT_EQ(texts_of(engine, given, w, last), alone) << what << " " << temperature << " " << at_once;
        }
      }
    }
  });
}

TEST(Session, EachTextIsThatOfItsPromptAlone) {
  ModelConfig dynamic = of_four_heads(tiny_llama());
  dynamic.rope = {.type = RopeType::Dynamic, .factor = 2, .original_max_positions = 12};
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama()), dynamic, tiny_latent()}) {
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) expect_texts_as_alone(model, {}, work);
    for (const Layout& l : {Layout{.dp = 2, .stage = 3}, {.pp = 2}, {.tp = 2, .sequence = true}, {.sp = 2}})
      expect_texts_as_alone(model, l, DType::F32);
  }
}

void expect_planned(engine::Engine& engine, const infer::SessionPlan& session) {
  const plan::TagBytes said = session.bytes();
  for (size_t t = 0; t < said.size(); ++t) {
    if (static_cast<Tag>(t) == Tag::Scratch) continue;
    EXPECT_EQ(engine.ledger().peak(static_cast<Tag>(t)), engine.plan().memory.by_tag[t] + said[t])
        << tag_name(static_cast<Tag>(t));
  }
}

TEST(Session, TakesWeightsCachesAndOneForwardPass) {
  const ModelConfig model = of_four_heads(tiny_llama());
  const auto activations = [&](const SessionSizes& sizes) {
    i64 bytes = 0;
    with_engines(generating(model, {}, DType::F32), 1, [&](engine::Engine& engine) {
      texts_of(engine, prompts(), {.max_tokens = 11, .sizes = sizes});
      expect_planned(engine, infer::plan_session(engine.model(), engine.plan(), sizes));
      bytes = engine.ledger().peak(Tag::Activations);
    });
    return bytes;
  };
  // Keys and values of each layer and position; four bytes for each block of a sequence, in lines; and twelve bytes for
  // each sequence of a pass.
  const i64 block = model.layers * 2 * 64 * model.kv_heads * model.head_dim * 4;
  const SessionSizes one{.at_once = 1, .context = 100, .chunk = 16};
  activations({.at_once = 2, .context = 100, .chunk = 16, .codes_cache = true});
  for (const i64 cached : {0, 100, 200, 10'000}) {
    SessionSizes more = one;
    more.at_once = 5;
    more.cached = cached;
    const i64 blocks = cached == 100 ? 2 : cached == 200 ? 4 : 10;
    EXPECT_EQ(activations(more) - activations(one), (blocks - 2) * block + 4 * (64 + 12)) << cached;
  }
}

// Codes in caches change results, but these still depend on the text alone; they take the planned memory, about half of
// that of 16 bits.
TEST(Session, CachesOfCodesMoveNoBitBetweenPasses) {
  ModelConfig model = of_four_heads(tiny_llama());
  model.max_positions = 300;
  for (const Layout& l : {Layout{}, {.pp = 2}, {.tp = 2}}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      i64 bytes[2] = {0, 0};
      with_engines(generating(model, l, work, 300), l.ranks(), [&](engine::Engine& engine) {
        Texts given = prompts();
        for (int t = 0; t < 100; ++t) given[3].push_back(t % 61);
        Writing w{.max_tokens = 30, .sampling = {.temperature = 0.8, .seed = 2}};
        Texts alone;
        w.sizes = {.at_once = 1, .context = 160, .codes_cache = true};
        for (const auto& prompt : given) alone.push_back(texts_of(engine, {prompt}, w)[0]);
        for (const SessionSizes& sizes : {SessionSizes{.at_once = 7, .context = 160, .codes_cache = true},
                                          {.at_once = 3, .context = 160, .chunk = 5, .codes_cache = true},
                                          {.at_once = 4, .context = 160, .cached = 200, .codes_cache = true}}) {
          w.sizes = sizes;
          EXPECT_EQ(texts_of(engine, given, w), alone) << l.name() << " " << sizes.chunk;
        }
        if (engine.mesh().rank() > 0 || l.ranks() > 1) return;
        for (const bool codes : {false, true}) {
          const SessionSizes sizes{.at_once = 4, .context = 256, .codes_cache = codes};
          bytes[codes] = infer::plan_session(engine.model(), engine.plan(), sizes).cache_bytes;
        }
        const i64 rows = 4 * 256 * model.layers * 2 * model.kv_heads;
        EXPECT_EQ(bytes[0], rows * model.head_dim * dtype_bytes(work));
        EXPECT_EQ(bytes[1], rows * (model.head_dim + 4));
      });
    }
  }
}

// Ranks that have other experts run their passes together, of any size, also without texts of their own.
TEST(Session, RanksOfExpertsHaveTextsOfTheirOwn) {
  for (const i64 experts : {2, 8}) {  // two: one on each rank
    const ModelConfig model = experts_test::tiny_experts({.experts = experts});
    const double room = experts == 2 ? 1 : 4;
    for (const Layout& l : {Layout{.dp = 2}, {.dp = 4}, {.dp = 2, .pp = 2}}) {
      Texts alone;
      const Writing w{.max_tokens = 9, .sampling = {.temperature = 0.8, .seed = 4}};
      with_engines(generating(model, {}, DType::F32), 1, [&](engine::Engine& engine) {
        for (const auto& prompt : prompts()) alone.push_back(text_of(engine, prompt, w));
      });
      Config config = generating(model, l, DType::F32);
      config.expert_parallel.enabled = true;
      config.expert_parallel.size = 2;
      config.expert_parallel.room = room;
      with_engines(config, l.ranks(), [&](engine::Engine& engine) {
        const SessionSizes sizes{.at_once = 3, .context = 23, .chunk = 5};
        infer::Session session(engine.stage(), sizes);
        TokenCollector collector;
        std::vector<size_t> mine;  // all texts but those of the first rank are few
        for (size_t i = 0; i < alone.size(); ++i) {
          const size_t owner = i % 5 == 4 ? static_cast<size_t>(l.dp - 1) : 0;
          if (owner != static_cast<size_t>(engine.mesh().coord().dp)) continue;
          session.add({.tokens = prompts()[i], .max_tokens = 9, .sampling = w.sampling, .logprobs = true});
          mine.push_back(i);
        }
        for (int pass = 0; pass < 80; ++pass) session.step(collector);
        EXPECT_TRUE(session.idle());
        for (size_t i = 0; i < mine.size(); ++i)
          EXPECT_EQ(collector.texts[i], alone[mine[i]]) << l.name() << " " << room;
      });
    }
  }
}

// Texts that begin alike share blocks; few blocks make texts wait and be computed again. Neither changes a bit.
TEST(Session, BlocksMoveNoBit) {
  ModelConfig model = of_four_heads(tiny_llama());
  model.max_positions = 700;
  for (const DType work : {DType::F32, DType::BF16}) {
    with_engines(generating(model, {}, work, 700), 1, [&](engine::Engine& engine) {
      std::mt19937 random(7);
      std::vector<i32> begin(300);
      for (i32& id : begin) id = static_cast<i32>(random() % 61);
      Texts given;
      for (const i64 shared : {300, 300, 200, 130, 64, 0}) {
        std::vector<i32>& prompt = given.emplace_back(begin.begin(), begin.begin() + shared);
        for (int t = 0; t < 20; ++t) prompt.push_back(static_cast<i32>(random() % 61));
      }
      const infer::Sampling sampling{.temperature = 0.7, .seed = 3};
      Texts alone;
      for (const auto& prompt : given)
        alone.push_back(text_of(engine, prompt, {.max_tokens = 90, .sampling = sampling}));
      for (const SessionSizes& sizes : {SessionSizes{.at_once = 6, .context = 410},
                                        {.at_once = 6, .context = 410, .chunk = 33, .cached = 900},
                                        {.at_once = 4, .context = 410, .chunk = 7, .cached = 410}}) {
        infer::Session session(engine.stage(), sizes);
        TokenCollector collector;
        for (const auto& prompt : given)
          session.add({.tokens = prompt, .max_tokens = 90, .sampling = sampling, .logprobs = true});
        while (!session.idle()) session.step(collector);
        for (size_t i = 0; i < given.size(); ++i) EXPECT_EQ(collector.texts[i], alone[i]) << sizes.cached << " " << i;
        EXPECT_EQ(session.counts().put_off > 0, sizes.cached > 0);
        // A second time the prompts are there, as far as they have not lost their place.
        const i64 before = session.counts().reused;
        const infer::Session::Id again = session.add({.tokens = given[0], .max_tokens = 90, .sampling = sampling});
        while (!session.idle()) session.step(collector);
        EXPECT_EQ(collector.texts[again], alone[0]);
        const i64 reused = session.counts().reused - before;
        EXPECT_TRUE(sizes.cached > 0 || reused == 256) << reused;
      }
    });
  }
}

// The losses of the tokens after the first one.
std::vector<float> losses_of(engine::Engine& engine, const std::vector<i32>& text) {
  const auto T = static_cast<std::ptrdiff_t>(text.size()) - 1;
  static_cast<void>(engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
    for (auto at = ids.begin(); at != ids.end(); at += T) std::copy_n(text.begin(), T, at);
    for (auto at = targets.begin(); at != targets.end(); at += T) std::copy_n(text.begin() + 1, T, at);
    return true;
  }));
  const float* const losses = engine.stage().losses().as<float>();
  return {losses, losses + T};
}

// The logarithms of probabilities are minus the losses that an evaluation computes, and do not depend on whether a
// token is given or generated.
TEST(Session, ScoresAreLossesOfTraining) {
  for (ModelConfig model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama()), tiny_latent()}) {
    model.max_positions = 64;
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
      const std::string what = fmt::format("{} {}", family_name(model.family), dtype_name(work));
      std::vector<i32> text(41), prompt(5);
      std::vector<float> generated;
      std::map<i64, float> scores;
      with_engines(generating(model, {}, work, 40), 1, [&](engine::Engine& engine) {
        for (i32 t = 0; t < 5; ++t) prompt[t] = (3 * t + 11) % 61;
        infer::Session session(engine.stage(), {.at_once = 3, .context = 41, .chunk = 9});
        TokenCollector collector;
        const auto id = session.add(
            {.tokens = prompt, .max_tokens = 36, .sampling = {.temperature = 1, .seed = 2}, .logprobs = true});
        session.add({.tokens = {1, 2, 3}, .max_tokens = 20});
        while (!session.idle()) session.step(collector);
        text = prompt;
        text.insert(text.end(), collector.texts[id].begin(), collector.texts[id].end());
        generated = collector.logprobs[id];
        const auto scored = session.add({.tokens = text, .max_tokens = 0, .scored_from = 1});
        session.add({.tokens = {4, 5, 6}, .max_tokens = 9});
        while (!session.idle()) session.step(collector);
        scores = collector.scores[scored];
      });
      ASSERT_EQ(scores.size(), 40u) << what;
      for (size_t t = 0; t < generated.size(); ++t) EXPECT_EQ(generated[t], scores[static_cast<i64>(t) + 5]) << what;
      Config c = generating(model, {}, work, 40);
      c.use = ConfigUse::Evaluate;
      with_engines(c, 1, [&](engine::Engine& engine) {
        const std::vector<float> losses = losses_of(engine, text);
        for (size_t t = 0; t < losses.size(); ++t) EXPECT_EQ(-losses[t], scores[static_cast<i64>(t) + 1]) << what << t;
      });
    }
  }
}

// Layers whose attention has a window keep only its tokens; the others keep all. Each new token sees the same as in a
// whole pass.
TEST(Session, KeepsWhatWindowsSee) {
  ModelConfig model = of_four_heads(tiny_llama());
  model.max_positions = 400;
  model.sliding_window = 20;
  model.sliding_layers.assign(static_cast<size_t>(model.layers), true);
  model.sliding_layers[0] = false;
  for (const DType work : {DType::F32, DType::BF16}) {
    with_engines(generating(model, {}, work, 400), 1, [&](engine::Engine& engine) {
      const Texts given = {std::vector<i32>(150, 5), {1, 2, 3}};
      const SessionSizes sizes{.at_once = 2, .context = 350, .chunk = 50};
      const Texts texts = texts_of(engine, given, {.max_tokens = 200, .sizes = sizes});
      const infer::SessionPlan session = infer::plan_session(engine.model(), engine.plan(), sizes);
      ASSERT_EQ(session.spaces.size(), 2u);
      EXPECT_EQ(session.spaces[0].blocks, 2 * 6);
      EXPECT_EQ(session.spaces[1].blocks, 2 * 3);
      expect_planned(engine, session);
      for (size_t p = 0; p < given.size(); ++p) {
        for (const size_t n : {size_t{1}, size_t{63}, size_t{120}, size_t{199}}) {
          std::vector<i32> longer = given[p];
          longer.insert(longer.end(), texts[p].begin(), texts[p].begin() + static_cast<std::ptrdiff_t>(n));
          EXPECT_EQ(text_of(engine, longer, {.max_tokens = 1}), std::vector{texts[p][n]}) << p << " " << n;
        }
      }
    });
  }
}

// Keys and values of a text are made from its latents. Each token sees the same as in a whole pass; the cache has a
// latent and a rotary key for each position.
TEST(Session, MakesKeysAndValuesFromLatents) {
  ModelConfig model = tiny_latent();
  model.max_positions = 640;
  with_engines(generating(model, {}, DType::F32, 640), 1, [&](engine::Engine& engine) {
    const Texts given = {std::vector<i32>(150, 5), {1, 2, 3}};
    const SessionSizes sizes{.at_once = 2, .context = 550, .chunk = 64};
    const Texts texts = texts_of(engine, given, {.max_tokens = 400, .sizes = sizes});
    const infer::SessionPlan session = infer::plan_session(engine.model(), engine.plan(), sizes);
    expect_planned(engine, session);
    EXPECT_EQ(session.cache_bytes, model.layers * 2 * 9 * 64 * (model.latent.rank + model.latent.rope_dim) * 4);
    for (size_t p = 0; p < given.size(); ++p) {
      for (const size_t n : {size_t{1}, size_t{105}, size_t{107}, size_t{260}, size_t{399}}) {
        std::vector<i32> longer = given[p];
        longer.insert(longer.end(), texts[p].begin(), texts[p].begin() + static_cast<std::ptrdiff_t>(n));
        EXPECT_EQ(text_of(engine, longer, {.max_tokens = 1}), std::vector{texts[p][n]}) << p << " " << n;
      }
    }
  });
}

TEST(Session, TakesNoMoreScratchThanIsSaid) {
  ModelConfig gpt2 = of_four_heads(tiny_gpt2()), windows = of_four_heads(tiny_llama());
  ModelConfig latent = tiny_latent();
  gpt2.max_positions = windows.max_positions = latent.max_positions = 1800;
  windows.sliding_window = 20;
  windows.sliding_layers.assign(static_cast<size_t>(windows.layers), true);
  windows.sliding_layers[0] = false;
  test::EveryNth tried(5);
  for (const char* isa : {"avx2", "avx512", "avx512_bf16", "onednn", "amx"}) {
    const OpTable* const ops = cpu_ops(isa);
    if (ops == nullptr) continue;
    for (const ModelConfig& model : {gpt2, windows, latent}) {
      for (const DType work : {DType::F32, DType::BF16}) {
        for (const int threads : {1, 3}) {
          for (const Layout& l : {Layout{}, Layout{.pp = 2}, Layout{.tp = 2}}) {
            if (!tried()) continue;
            const std::string what = fmt::format("{} {} {} {} threads {}", isa, family_name(model.family),
                                                 dtype_name(work), threads, l.name());
            const bool codes = threads == 3 && model.family != latent.family;
            const SessionSizes sizes{.at_once = 4, .context = 300, .chunk = 200, .codes_cache = codes};
            const auto body = [&](engine::Engine& engine) {
              Texts given = prompts();
              given.emplace_back(270, 5);
              texts_of(engine, given, {.max_tokens = 20, .sizes = sizes});
              const auto session = infer::plan_session(engine.model(), engine.plan(), sizes);
              const auto said = infer::session_scratch(engine.model(), engine.plan(), session, *ops, threads);
              ASSERT_TRUE(said.has_value());
              EXPECT_LE(engine.device().scratch_bytes(), *said) << what;
              EXPECT_GE(2 * engine.device().scratch_bytes(), *said);
            };
            with_engines(generating(model, l, work), l.ranks(), body, *ops, threads);
          }
        }
      }
    }
  }
}

// A sequence that has ended leaves its place to the next: nothing is taken for each text.
TEST(Session, TakesNothingForEachText) {
  const auto allocations = [&](i64 texts) {
    i64 n = 0;
    with_engines(generating(of_four_heads(tiny_gpt2()), {}, DType::F32), 1, [&](engine::Engine& engine) {
      texts_of(engine, Texts(static_cast<size_t>(texts), {1, 2, 3}), {.max_tokens = 4, .sizes = {.at_once = 3}});
      n = engine.ledger().num_allocations();
    });
    return n;
  };
  EXPECT_EQ(allocations(100), allocations(3));
}

TEST(Session, RandomWorkloads) {
  const int workloads = test::in_slow_set() ? 120 : 12;
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{}, Layout{.pp = 2}, Layout{.tp = 2}}) {
      with_engines(generating(workload_model(), l, work, 400), l.ranks(), [&](engine::Engine& engine) {
        Workloads all(engine, static_cast<u32>(l.ranks()) + 5);
        for (int w = 0; w < workloads; ++w) all.run(all.draw_sizes(), nullptr);
      });
    }
  }
}

}  // namespace session_test
}  // namespace ds::testing
