// SPDX-License-Identifier: Apache-2.0
// Texts that a model writes side by side: each has the bytes that it has alone, whatever else is under way.

#include "equivalence/layouts.h"
#include "infer/writer.h"
#include "infer/writing_memory.h"
#include "plan/scratch.h"
#include "slow_set.h"

namespace ds::testing {
namespace writing_test {

// Prompts of different lengths; the second one has a single token.
std::vector<std::vector<i32>> prompts() {
  std::vector<std::vector<i32>> all;
  for (const i32 length : {5, 1, 9, 3, 3, 12, 2}) {
    std::vector<i32>& prompt = all.emplace_back();
    for (i32 t = 0; t < length; ++t) prompt.push_back((7 * length + 5 * t + static_cast<i32>(all.size())) % 61);
  }
  return all;
}

using Texts = std::vector<std::vector<i32>>;

// A text ends at the token `last`, too.
Texts write(engine::Engine& engine, const std::vector<std::vector<i32>>& given, i64 at_once, const Writing& w,
            i32 last) {
  Texts texts(given.size());
  infer::write(engine.stage(), given, {.max_tokens = w.max_tokens, .sampling = w.sampling, .at_once = at_once},
               [&](size_t p, i32 id) {
                 texts[p].push_back(id);
                 return id != last;
               });
  return texts;
}

void expect_texts_as_alone(const ModelConfig& model, const Layout& l, DType work) {
  Config c = config_of(model, l, 4);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.communication_data_type = wire_type_of(work);
  c.use = ConfigUse::Generate;
  const std::string what = fmt::format("{} {} {}", family_name(model.family), l.name(), dtype_name(work));
  with_engines(c, l.ranks(), [&](engine::Engine& engine) {
    const auto given = prompts();
    for (const double temperature : {0.0, 0.9}) {
      const Writing w{.max_tokens = 11, .sampling = {.temperature = temperature, .seed = 5}};
      Texts alone;
      for (const auto& prompt : given) alone.push_back(write(engine, {prompt}, 1, w, -1)[0]);
      const i32 last = alone[2][4];  // texts end at unlike places
      for (auto& text : alone) {
        if (const auto at = std::ranges::find(text, last); at != text.end()) text.erase(at + 1, text.end());
      }
      EXPECT_LE(alone[2].size(), 5u);
      for (const i64 at_once : {1, 3, 6, 100})
        EXPECT_EQ(write(engine, given, at_once, w, last), alone) << what << " " << temperature << " " << at_once;
    }
  });
}

TEST(Writing, EachTextIsThatOfItsPromptAlone) {
  ModelConfig dynamic = of_four_heads(tiny_llama());
  dynamic.rope = {.type = RopeType::Dynamic, .factor = 2, .original_max_positions = 12};
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama()), dynamic, tiny_latent()}) {
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) expect_texts_as_alone(model, {}, work);
    for (const Layout& l : {Layout{.dp = 2, .stage = 3}, {.pp = 2}, {.tp = 2, .sequence = true}, {.sp = 2}})
      expect_texts_as_alone(model, l, DType::F32);
  }
}

TEST(Writing, TakesWeightsCachesAndOneForwardPass) {
  const ModelConfig model = of_four_heads(tiny_llama());
  Config c = config_of(model, {}, 4);
  c.use = ConfigUse::Generate;
  const auto activations = [&](i64 at_once) {
    i64 bytes = 0;
    with_engines(c, 1, [&](engine::Engine& engine) {
      write(engine, prompts(), at_once, {.max_tokens = 11}, -1);
      bytes = engine.ledger().peak(Tag::Activations);
      // As --check predicts it.
      const plan::TagBytes text = infer::plan_writing(engine.model(), engine.plan(), prompts(), 11, at_once).bytes();
      for (size_t t = 0; t < text.size(); ++t)
        EXPECT_EQ(engine.ledger().peak(static_cast<Tag>(t)), engine.plan().memory.by_tag[t] + text[t])
            << tag_name(static_cast<Tag>(t)) << " " << at_once;
    });
    return bytes;
  };
  // With one at once the longest prompt's cache; with all, those of all: keys and values of each layer and position.
  const auto cache = [&](i64 length) {
    return model.layers * 2 * align_up((length + 11) * model.kv_heads * model.head_dim * 4, 64);
  };
  i64 all = 0;
  for (const auto& prompt : prompts()) all += cache(std::ssize(prompt));
  EXPECT_EQ(activations(100) - activations(1), all - cache(12));
}

// Layers whose attention has a window keep only its tokens; the others keep all. Each new token sees the same as in a
// whole pass.
TEST(Writing, KeepsWhatWindowsSee) {
  ModelConfig model = of_four_heads(tiny_llama());
  model.max_positions = 400;
  model.sliding_window = 20;
  model.sliding_layers.assign(static_cast<size_t>(model.layers), true);
  model.sliding_layers[0] = false;
  for (const DType work : {DType::F32, DType::BF16}) {
    Config c = config_of(model, {}, 4);
    c.data.seq_length = 400;
    c.bf16.enabled = work == DType::BF16;
    c.communication_data_type = wire_type_of(work);
    c.use = ConfigUse::Generate;
    with_engines(c, 1, [&](engine::Engine& engine) {
      const std::vector<std::vector<i32>> given = {std::vector<i32>(150, 5), {1, 2, 3}};
      const Texts texts = write(engine, given, 2, {.max_tokens = 200}, -1);
      const auto plan = infer::plan_writing(engine.model(), engine.plan(), given, 200, 2);
      const auto caches = plan.plan_caches(150);
      ASSERT_EQ(caches.size(), 2u);
      EXPECT_EQ(caches[0].keys.rows(), 350);
      EXPECT_EQ(caches[1].keys.rows(), 2 * 64);
      const auto activations = static_cast<size_t>(Tag::Activations);
      EXPECT_EQ(engine.ledger().peak(Tag::Activations),
                engine.plan().memory.by_tag[activations] + plan.bytes()[activations]);
      for (size_t p = 0; p < given.size(); ++p) {
        for (const size_t n : {size_t{1}, size_t{63}, size_t{120}, size_t{199}}) {
          std::vector<i32> longer = given[p];
          longer.insert(longer.end(), texts[p].begin(), texts[p].begin() + static_cast<std::ptrdiff_t>(n));
          EXPECT_EQ(write(engine, {longer}, 1, {.max_tokens = 1}, -1)[0], std::vector{texts[p][n]}) << p << " " << n;
        }
      }
    });
  }
}

// Keys and values of a long text are made in several parts from its latents. Each token sees the same as in a whole
// pass, which makes them at once; the cache has a latent and a rotary key for each position.
TEST(Writing, MakesKeysAndValuesFromLatents) {
  ModelConfig model = tiny_latent();
  model.max_positions = 640;
  const Config c = [&] {
    Config config = config_of(model, {}, 4);
    config.data.seq_length = 640;
    config.use = ConfigUse::Generate;
    return config;
  }();
  with_engines(c, 1, [&](engine::Engine& engine) {
    const std::vector<std::vector<i32>> given = {std::vector<i32>(150, 5), {1, 2, 3}};
    const Texts texts = write(engine, given, 2, {.max_tokens = 400}, -1);
    const auto plan = infer::plan_writing(engine.model(), engine.plan(), given, 400, 2);
    const plan::TagBytes predicted = plan.bytes();
    for (const Tag tag : {Tag::Activations, Tag::Workspace})
      EXPECT_EQ(engine.ledger().peak(tag),
                engine.plan().memory.by_tag[static_cast<size_t>(tag)] + predicted[static_cast<size_t>(tag)]);
    i64 bytes = 0;
    for (const i64 positions : {550, 403}) {
      for (const i64 dim : {model.latent.rank, model.latent.rope_dim})
        bytes += model.layers * align_up(positions * dim * 4, 64);
    }
    EXPECT_EQ(plan.caches_bytes, bytes);
    for (size_t p = 0; p < given.size(); ++p) {
      for (const size_t n : {size_t{1}, size_t{105}, size_t{107}, size_t{260}, size_t{399}}) {
        std::vector<i32> longer = given[p];
        longer.insert(longer.end(), texts[p].begin(), texts[p].begin() + static_cast<std::ptrdiff_t>(n));
        EXPECT_EQ(write(engine, {longer}, 1, {.max_tokens = 1}, -1)[0], std::vector{texts[p][n]}) << p << " " << n;
      }
    }
  });
}

// Neither the length that the run trains at nor that of other texts is asked for: 13 tokens here.
TEST(Writing, TakesTheScratchOfItsTexts) {
  ModelConfig gpt2 = of_four_heads(tiny_gpt2()), windows = of_four_heads(tiny_llama());
  ModelConfig latent = tiny_latent();
  gpt2.max_positions = windows.max_positions = latent.max_positions = 1800;
  windows.sliding_window = 20;
  windows.sliding_layers.assign(static_cast<size_t>(windows.layers), true);
  windows.sliding_layers[0] = false;
  const auto expect = [](const Config& c, int ranks, const OpTable& ops, int threads, const Texts& given, i64 tokens,
                         i64 at_once, bool exact) {
    const auto body = [&](engine::Engine& engine) {
      write(engine, given, at_once, {.max_tokens = tokens}, -1);
      const auto writing = infer::plan_writing(engine.model(), engine.plan(), given, tokens, at_once);
      const auto said = infer::writing_scratch(engine.model(), engine.plan(), writing, given, ops, threads);
      ASSERT_TRUE(said.has_value());
      const i64 held = engine.device().scratch_bytes();
      EXPECT_LE(held, *said);
      EXPECT_GE(held, exact ? *said : 1);
      EXPECT_EQ(plan::scratch_bytes(engine.config(), engine.model(), engine.plan(), ops, threads), 0);
    };
    with_engines(c, ranks, body, ops, threads);
  };
  test::EveryNth tried(5);
  for (const char* isa : {"avx2", "avx512", "avx512_bf16", "onednn", "amx"}) {
    const OpTable* const ops = cpu_ops(isa);
    if (ops == nullptr) continue;
    for (const ModelConfig& model : {gpt2, windows, latent}) {
      for (const DType work : {DType::F32, DType::BF16}) {
        for (const int threads : {1, 3}) {
          for (const Layout& l : {Layout{}, Layout{.pp = 2}, Layout{.tp = 2}}) {
            if (!tried()) continue;
            SCOPED_TRACE(fmt::format("{} {} {} {} threads {}", isa, family_name(model.family), dtype_name(work),
                                     threads, l.name()));
            Config c = config_of(model, l, 4);
            c.bf16.enabled = work == DType::BF16;
            c.communication_data_type = wire_type_of(work);
            c.use = ConfigUse::Generate;
            expect(c, l.ranks(), *ops, threads, prompts(), 1, 1, true);
            expect(c, l.ranks(), *ops, threads, prompts(), 11, 1, true);
            expect(c, l.ranks(), *ops, threads, prompts(), 11, 5, false);
            if (l.ranks() > 1) continue;
            // A token meets the keys of a long text in parts.
            expect(c, 1, *ops, threads, {std::vector<i32>(1530, 5), {1, 2, 3}}, 20, 2, true);
          }
        }
      }
    }
  }
}

// A sequence that has ended leaves its place to the next: nothing is taken for each text.
TEST(Writing, TakesNothingForEachText) {
  Config c = config_of(of_four_heads(tiny_gpt2()), {}, 4);
  c.use = ConfigUse::Generate;
  const auto allocations = [&](i64 texts) {
    i64 n = 0;
    with_engines(c, 1, [&](engine::Engine& engine) {
      write(engine, std::vector<std::vector<i32>>(static_cast<size_t>(texts), {1, 2, 3}), 3, {.max_tokens = 4}, -1);
      n = engine.ledger().num_allocations();
    });
    return n;
  };
  EXPECT_EQ(allocations(100), allocations(3));
}

}  // namespace writing_test
}  // namespace ds::testing
