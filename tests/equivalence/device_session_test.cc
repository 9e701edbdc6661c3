// SPDX-License-Identifier: Apache-2.0
// Sessions on a CUDA device (DS_TEST_DEVICE: a GPU, or the simulator): a text has the same bits in every batch, chunk
// and cache, its logarithms of probabilities are the losses of an invariant forward pass, and codes move no bit.

#include "equivalence/sessions.h"
#include "model/coded_rows.h"
#include "parity/device_ops.h"

namespace ds::testing {
namespace device_session_test {

void with_engine(const Config& config, const std::function<void(engine::Engine&)>& body) {
  const auto device = make_test_device(1);
  Mesh mesh = make_test_mesh(*device);
  MemoryLedger ledger;
  engine::Engine engine(config, mesh, ledger, *device, {});
  engine.init_weights();
  body(engine);
}

// Rows of whole groups of 32, and heads that 16-byte copies reach.
ModelConfig sized(ModelConfig m, i64 vocab = 96) {
  m.vocab_size = vocab;
  m.hidden = 64;
  m.heads = m.kv_heads = 4;
  if (m.family != Family::Gpt2) m.kv_heads = 2;
  m.head_dim = 16;
  m.intermediate = 128;
  m.max_positions = 200;
  return m;
}

Texts some_prompts() {
  Texts all;
  for (const i32 length : {5, 1, 70, 3}) {
    std::vector<i32>& prompt = all.emplace_back();
    for (i32 t = 0; t < length; ++t) prompt.push_back((7 * length + 5 * t) % 61);
  }
  all.push_back(all[2]);  // shares a block
  all.back().push_back(3);
  return all;
}

struct Written {
  Texts texts;
  std::vector<std::vector<float>> logprobs;
  std::vector<std::map<i64, float>> scores;
};

Written write(engine::Engine& engine, const SessionSizes& sizes, i64 from = 0, i64 to = -1) {
  const Texts prompts = some_prompts();
  infer::Session session(engine.stage(), sizes);
  TokenCollector collector;
  Written w;
  for (i64 i = from; i < (to < 0 ? std::ssize(prompts) : to); ++i) {
    session.add({.tokens = prompts[static_cast<size_t>(i)],
                 .max_tokens = i == 3 ? 0 : 7,
                 .sampling = {.temperature = i % 2 == 0 ? 0.8 : 0, .top_p = 0.9, .seed = 3},
                 .scored_from = i == 3 ? 1 : -1,
                 .logprobs = true});
  }
  while (!session.idle()) session.step(collector);
  for (i64 i = 0; i < (to < 0 ? std::ssize(prompts) : to) - from; ++i) {
    w.texts.push_back(collector.texts[i]);
    w.logprobs.push_back(collector.logprobs[i]);
    w.scores.push_back(collector.scores[i]);
  }
  return w;
}

TEST(DeviceSession, BitsDependOnNothingElse) {
  for (const ModelConfig& model : {sized(tiny_gpt2()), sized(tiny_llama(), 97)}) {
    for (const DType work : {DType::BF16, DType::F32}) {
      with_engine(generating(model, {}, work, 200), [&](engine::Engine& engine) {
        Written alone;
        for (i64 i = 0; i < std::ssize(some_prompts()); ++i) {
          Written one = write(engine, {.at_once = 1, .context = 100, .chunk = 100}, i, i + 1);
          alone.texts.push_back(one.texts[0]);
          alone.logprobs.push_back(one.logprobs[0]);
          alone.scores.push_back(one.scores[0]);
        }
        EXPECT_EQ(alone.texts[2].size(), 7u);
        EXPECT_EQ(alone.scores[3].size(), 2u);
        for (const SessionSizes& sizes : {SessionSizes{.at_once = 5, .context = 100, .chunk = 9},
                                          SessionSizes{.at_once = 3, .context = 100, .chunk = 40, .cached = 128}}) {
          const Written together = write(engine, sizes);
          EXPECT_EQ(together.texts, alone.texts) << dtype_name(work);
          EXPECT_EQ(together.logprobs, alone.logprobs) << dtype_name(work);
          EXPECT_EQ(together.scores, alone.scores) << dtype_name(work);
        }
      });
    }
  }
}

TEST(DeviceSession, ScoresAreLossesOfInvariantPasses) {
  for (const ModelConfig& model : {sized(tiny_gpt2()), sized(tiny_llama(), 97)}) {
    for (const DType work : {DType::BF16, DType::F32}) {
      std::vector<i32> text(41);
      for (i32 t = 0; t < 41; ++t) text[t] = (11 * t + t * t % 7) % 61;
      std::map<i64, float> scores;
      with_engine(generating(model, {}, work, 40), [&](engine::Engine& engine) {
        infer::Session session(engine.stage(), {.at_once = 2, .context = 41, .chunk = 9});
        TokenCollector collector;
        const auto id = session.add({.tokens = text, .max_tokens = 0, .scored_from = 1});
        session.add({.tokens = {4, 5, 6}, .max_tokens = 5});
        while (!session.idle()) session.step(collector);
        scores = collector.scores[id];
      });
      ASSERT_EQ(scores.size(), 40u);
      Config c = generating(model, {}, work, 40);
      c.use = ConfigUse::Train;
      c.cuda.invariant_forward = true;
      with_engine(c, [&](engine::Engine& engine) {
        static_cast<void>(engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
          for (auto at = ids.begin(); at != ids.end(); at += 40) std::copy_n(text.begin(), 40, at);
          for (auto at = targets.begin(); at != targets.end(); at += 40) std::copy_n(text.begin() + 1, 40, at);
          return true;
        }));
        std::vector<float> losses(40);
        engine.stage().device().download(losses.data(), engine.stage().losses().data, 40 * i64{sizeof(float)});
        for (size_t t = 0; t < losses.size(); ++t)
          EXPECT_EQ(-losses[t], scores[static_cast<i64>(t) + 1]) << dtype_name(work) << " " << t;
      });
    }
  }
}

// In the work dtype each element is that of its code, so texts are those of the decoded weights; of integers they are
// the same in every batch.
TEST(DeviceSession, CodesMoveNoBit) {
  const ModelConfig model = sized(tiny_llama());
  using Form = WeightsConfig::Form;
  for (const Form form : {Form::Int8, Form::Int4, Form::W8A8}) {
    Config c = generating(model, {}, DType::BF16, 200);
    c.weights.form = form;
    Written coded;
    std::map<std::string, CodedForm> forms;
    with_engine(c, [&](engine::Engine& engine) {
      for (const model::ParamRow* row : engine.plan().params) {
        if (row->codes) forms[row->name] = row->codes;
      }
      coded = write(engine, {.at_once = 5, .context = 100, .chunk = 16});
      const Written alone = write(engine, {.at_once = 1, .context = 100, .chunk = 64});
      EXPECT_EQ(alone.texts, coded.texts);
      EXPECT_EQ(alone.logprobs, coded.logprobs);
    });
    if (form == Form::W8A8) continue;
    c.weights.form = Form::Work;
    with_engine(c, [&](engine::Engine& engine) {
      engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
        const model::ParamRow& row = engine.row_of(param);
        engine.init_values(param, begin, count, out);
        const auto found = forms.find(row.name);
        if (found == forms.end()) return;
        const CodedForm& f = found->second;
        const i64 K = row.shape.back();
        std::vector<float> x(static_cast<size_t>(K));
        std::vector<u8> codes(static_cast<size_t>(f.row_bytes(K)));
        for (i64 i = 0; i < count; ++i) {
          const i64 n = (begin + i) / K, k = (begin + i) % K;
          if (i == 0 || k == 0) {
            engine.init_values(param, n * K, K, x.data());
            model::encode_row(f, x, codes.data());
          }
          out[i] = f.element(codes.data(), {}, 1, K, 0, k);
        }
      });
      const Written decoded = write(engine, {.at_once = 5, .context = 100, .chunk = 16});
      EXPECT_EQ(decoded.texts, coded.texts);
      EXPECT_EQ(decoded.logprobs, coded.logprobs);
    });
  }
}

TEST(DeviceSession, CachesOfCodesAreTheSameInEveryBatch) {
  with_engine(generating(sized(tiny_llama()), {}, DType::BF16, 200), [&](engine::Engine& engine) {
    const Written alone = write(engine, {.at_once = 1, .context = 100, .chunk = 100, .codes_cache = true});
    const Written together = write(engine, {.at_once = 5, .context = 100, .chunk = 7, .codes_cache = true});
    EXPECT_EQ(together.texts, alone.texts);
    EXPECT_EQ(together.logprobs, alone.logprobs);
    const Written whole = write(engine, {.at_once = 5, .context = 100, .chunk = 7});
    EXPECT_NE(whole.logprobs, alone.logprobs) << "the cache has no codes";
  });
}

}  // namespace device_session_test
}  // namespace ds::testing
