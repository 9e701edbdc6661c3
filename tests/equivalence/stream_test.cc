// SPDX-License-Identifier: Apache-2.0
// Weights that are streamed from a file, or from the memory of the host: the texts of a run that has them in memory, in
// the memory of a few layers.

#include "equivalence/layouts.h"
#include "expect_error.h"
#include "infer/session_plan.h"
#include "slow_set.h"
#include "temp_directory.h"

namespace ds::testing {
namespace stream_test {

using ::testing::HasSubstr;

Config config_for(ModelConfig model, const Layout& l, DType work) {
  model.layers = 5;
  Config c = config_of(model, l, 4);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.communication_data_type = wire_type_of(work);
  c.use = ConfigUse::Generate;
  return c;
}

Config streamed(Config c, const std::string& dir, i64 threshold = 0) {
  c.zero.stage = 3;
  c.zero.param_persistence_threshold = threshold;
  c.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir, .buffer_count = 0};
  return c;
}

// Ids at both ends of the vocabulary; a chunk smaller than a prompt; sequences that end in different passes.
Texts texts_of_run(engine::Engine& engine, i64 chunk = 6) {
  Texts given;
  for (const i32 length : {5, 1, 9, 3, 12, 2}) {
    std::vector<i32>& prompt = given.emplace_back();
    for (i32 t = 0; t < length; ++t) prompt.push_back((7 * length + 5 * t) % 61);
  }
  given[0][1] = 0;
  given[4][3] = 60;
  return texts_of(engine, given,
                  {.max_tokens = 9,
                   .sampling = {.temperature = 0.8, .seed = 3},
                   .sizes = {.at_once = 3, .context = 24, .chunk = chunk}});
}

Texts texts_in_memory(const Config& c, int ranks) {
  Texts texts;
  with_engines(c, ranks, [&](engine::Engine& engine) {
    const Texts mine = texts_of_run(engine);
    if (engine.mesh().rank() == 0) texts = mine;
  });
  return texts;
}

void expect_same_texts(const ModelConfig& model, const Layout& l, DType work, i64 threshold,
                       const WeightsConfig& weights = {}) {
  const std::string what = fmt::format("{} {} {} {} {}", family_name(model.family), model.tie_embeddings, l.name(),
                                       dtype_name(work), threshold);
  Config whole = config_for(model, l, work);
  whole.weights = weights;
  const Texts want = texts_in_memory(whole, l.ranks());
  const TempDirectory dir;
  with_engines(streamed(whole, dir.path(), threshold), l.ranks(), [&](engine::Engine& engine) {
    EXPECT_EQ(engine.plan().looked_up >= 0, engine.plan().embeds) << what;
    // In the passes of a later session units are there from the pass before.
    for (int session = 0; session < 2; ++session) EXPECT_EQ(texts_of_run(engine), want) << what;
    const plan::TagBytes said =
        infer::plan_session(engine.model(), engine.plan(), {.at_once = 3, .context = 24, .chunk = 6}).bytes();
    for (size_t t = 0; t < said.size(); ++t) {
      if (static_cast<Tag>(t) == Tag::Scratch) continue;
      EXPECT_EQ(engine.ledger().peak(static_cast<Tag>(t)), engine.plan().memory.by_tag[t] + said[t])
          << what << " " << tag_name(static_cast<Tag>(t));
    }
    // Other weights replace those that are on their way.
    engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
      engine.init_values(param, begin, count, out);
      for (i64 i = 0; i < count; ++i) out[i] *= 1.5F;
    });
    EXPECT_NE(texts_of_run(engine), want) << what;
    engine.init_weights();
    EXPECT_EQ(texts_of_run(engine), want) << what;
  });
}

TEST(Stream, MovesNoBit) {
  ModelConfig tied = of_four_heads(tiny_llama());
  tied.tie_embeddings = true;
  test::EveryNth some(3);
  for (const ModelConfig& model : {of_four_heads(tiny_llama()), tied, of_four_heads(tiny_gpt2())}) {
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
      for (const Layout& l :
           {Layout{}, {.dp = 2}, {.dp = 3}, {.pp = 2}, {.tp = 2}, {.dp = 2, .tp = 2}, {.dp = 2, .pp = 2}}) {
        if (some()) expect_same_texts(model, l, work, 0);
      }
      expect_same_texts(model, {}, work, 0);
    }
    expect_same_texts(model, {.dp = 2}, DType::BF16, 0);
    expect_same_texts(model, {}, DType::BF16, 100);  // norms stay whole
  }
}

// Matrices of codes are streamed as codes.
TEST(Stream, HasTheCodesOfTheMemory) {
  ModelConfig plain = of_four_heads(tiny_llama());
  plain.vocab_size = 96;
  plain.hidden = 64;
  plain.head_dim = 16;
  plain.intermediate = 128;
  ModelConfig tied = plain;
  tied.tie_embeddings = true;
  using Form = WeightsConfig::Form;
  test::EveryNth some(2);
  for (const ModelConfig& model : {plain, tied}) {
    for (const WeightsConfig& weights :
         {WeightsConfig{.form = Form::Int8}, WeightsConfig{.form = Form::Int4}, WeightsConfig{.form = Form::W8A8},
          WeightsConfig{.form = Form::Int4, .integers = true}}) {
      for (const Layout& l : {Layout{}, {.pp = 2}, {.tp = 2}}) {
        if ((l.tp > 1 && weights.sums_integers()) || (l.ranks() > 1 && !some())) continue;
        expect_same_texts(model, l, DType::BF16, 100, weights);
      }
      if (model.tie_embeddings) expect_same_texts(model, {}, DType::F32, 0, weights);
    }
  }
  // Half the bytes, and fewer with 4 bits.
  const auto streamed_bytes = [&](const WeightsConfig& weights) {
    const TempDirectory dir;
    ModelConfig wide = plain;
    wide.intermediate = 1024;
    Config c = streamed(config_for(wide, {}, DType::BF16), dir.path());
    c.weights = weights;
    i64 bytes = 0;
    with_engines(c, 1, [&](engine::Engine& engine) { bytes = engine.plan().streamed_bytes(); });
    return bytes;
  };
  const i64 numbers = streamed_bytes({.form = Form::Work}), pages = 14 * 4096;
  EXPECT_LE(streamed_bytes({.form = Form::Int8}), numbers * 34 / 64 + pages);
  EXPECT_LE(streamed_bytes({.form = Form::Int4}), numbers * 20 / 64 + pages);
  for (const bool tiles : {false, true}) {
    const TempDirectory dir;
    Config c = streamed(config_for(plain, {.dp = tiles ? 1 : 2}, DType::BF16), dir.path());
    c.weights.form = Form::Int8;
    c.zero.tile_size = tiles ? 1024 : 0;
    expect_error(Errc::Unavailable, HasSubstr(tiles ? "stage3_tile_size" : "in parts by 2 data-parallel ranks"),
                 [&] { with_engines(c, tiles ? 1 : 2, [](engine::Engine&) {}); });
  }
}

// A pass reads each matrix once, and rows of the embedding.
TEST(Stream, ReadsEachMatrixOncePerPass) {
  for (const bool tied : {false, true}) {
    ModelConfig model = of_four_heads(tiny_llama());
    model.tie_embeddings = tied;
    const TempDirectory dir;
    const Config c = streamed(config_for(model, {}, DType::BF16), dir.path());
    with_engines(c, 1, [&](engine::Engine& engine) {
      const auto moved = [&] { return engine.offload().moved(); };
      infer::Session session(engine.stage(), {.at_once = 1, .context = 20, .chunk = 1});
      TokenCollector collector;
      session.add({.tokens = {3, 4}, .max_tokens = 12, .sampling = {.temperature = 0}});
      session.step(collector);
      session.step(collector);
      const offload::FileCounts before = moved();
      constexpr i64 kPasses = 6, kPage = 4096;
      for (i64 i = 0; i < kPasses; ++i) session.step(collector);
      const offload::FileCounts after = moved() - before;
      EXPECT_EQ(after.written_bytes, 0);
      const i64 rows = after.read_bytes - kPasses * engine.plan().streamed_bytes();
      // A row, or a panel, of one token in each pass, unless it is still in a buffer.
      EXPECT_GE(rows, 0);
      EXPECT_LE(rows, 2 * kPasses * kPage);
      // All parameters but the embedding's, or all of them once if that is the head's, in whole pages.
      const i64 table = model.vocab_size * model.hidden, all = engine.model().num_params() - (tied ? 0 : table);
      EXPECT_GE(engine.plan().streamed_bytes(), 2 * all);
      EXPECT_LE(engine.plan().streamed_bytes(), 2 * all + (model.layers + 5) * kPage);
      // Three units at most; each has whole pages.
      EXPECT_LE(engine.plan().dp().gather_pool_elems, engine.plan().dp().padded * 2 / 3);
    });
  }
}

TEST(Stream, NeedsAPlaceOtherThanTheMemory) {
  const TempDirectory dir;
  Config c = streamed(config_for(tiny_llama(), {}, DType::BF16), dir.path());
  c.zero.offload_param.device = OffloadDevice::Cpu;
  expect_error(Errc::Config, HasSubstr("--stream cpu"), [&] { with_engines(c, 1, [](engine::Engine&) {}); });
}

}  // namespace stream_test
}  // namespace ds::testing
