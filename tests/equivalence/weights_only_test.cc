// SPDX-License-Identifier: Apache-2.0
// Evaluation and generation allocate only weights: they have the bits of a trainer and none of its other memory.

#include <memory>
#include <mutex>

#include "equivalence/layouts.h"
#include "model/models.h"

namespace ds::testing {
namespace weights_only_test {

struct Seen {
  double loss = 0;
  std::vector<i32> text;
  plan::TagBytes counted{}, predicted{};
};

Seen look(Config c, int ranks, ConfigUse use) {
  c.use = use;
  Seen seen;
  std::mutex mutex;
  with_engines(c, ranks, [&](engine::Engine& engine) {
    EXPECT_TRUE(engine.is_finite());
    plan::TagBytes counted{};
    double loss = 0;
    if (use != ConfigUse::Generate) {
      const i64 B = c.batch.micro, T = c.data.seq_length;
      loss = *engine.evaluate(3, [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
        for (i64 b = 0; b < B; ++b) {
          const size_t at = static_cast<size_t>(b * T), n = static_cast<size_t>(T);
          fill_sample((batch * engine.mesh().data_size() + engine.mesh().data_rank()) * B + b, c.model.vocab_size,
                      ids.subspan(at, n), targets.subspan(at, n));
        }
        return true;
      });
    }
    for (size_t t = 0; t < counted.size(); ++t) counted[t] = engine.ledger().peak(static_cast<Tag>(t));
    const std::vector<i32> text = text_of(engine, {3, 5, 7}, {.max_tokens = 4});
    const std::lock_guard lock(mutex);
    for (size_t t = 0; t < counted.size(); ++t)
      EXPECT_EQ(counted[t], engine.plan().memory.by_tag[t])
          << "rank " << engine.mesh().rank() << ": " << tag_name(static_cast<Tag>(t));
    if (engine.mesh().rank() == 0) seen = {loss, text, counted, engine.plan().memory.by_tag};
  });
  return seen;
}

TEST(WeightsOnly, HaveATrainersBitsAndNoneOfItsMemory) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
      for (const Layout& l : {Layout{},
                              {.dp = 2, .stage = 0},
                              {.dp = 2, .stage = 3},
                              {.pp = 2},
                              {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                              {.schedule = Kind::BreadthFirst, .chunks = 3},
                              {.schedule = Kind::BreadthFirst, .chunks = 2, .stage = 3},
                              {.pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 3},
                              {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                              {.tp = 2, .sequence = true},
                              {.sp = 2},
                              {.checkpoints = Granularity::Layer}}) {
        ModelConfig deep = model;
        deep.layers = 4;
        Config c = config_of(deep, l, 4);
        c.bf16.enabled = work == DType::BF16;
        c.fp16.enabled = work == DType::F16;
        c.communication_data_type = wire_type_of(work);
        const std::string what = fmt::format("{} {} {}", family_name(model.family), l.name(), dtype_name(work));
        const Seen trainer = look(c, l.ranks(), ConfigUse::Train), eval = look(c, l.ranks(), ConfigUse::Evaluate),
                   writer = look(c, l.ranks(), ConfigUse::Generate);
        EXPECT_EQ(std::bit_cast<u64>(eval.loss), std::bit_cast<u64>(trainer.loss)) << what;
        EXPECT_EQ(eval.text, trainer.text) << what;
        EXPECT_EQ(writer.text, trainer.text) << what;
        i64 all[3] = {};
        for (size_t t = 0; t < eval.counted.size(); ++t) {
          all[0] += trainer.counted[t];
          all[1] += eval.counted[t];
          all[2] += writer.counted[t];
        }
        for (const Tag tag : {Tag::Master, Tag::Optimizer, Tag::Grads, Tag::Buckets, Tag::GradAccum, Tag::Host}) {
          EXPECT_EQ(eval.counted[static_cast<size_t>(tag)], 0) << what << " " << tag_name(tag);
          EXPECT_EQ(writer.counted[static_cast<size_t>(tag)], 0) << what << " " << tag_name(tag);
        }
        EXPECT_EQ(eval.counted[static_cast<size_t>(Tag::Params)], trainer.counted[static_cast<size_t>(Tag::Params)]);
        EXPECT_LT(all[1], all[0]) << what;
        EXPECT_LT(all[2], all[1]) << what;
      }
    }
  }
}

// A head that notes the logits of generation, from a packed matrix.
class WatchedHead final : public model::Layer {
 public:
  using Logits = std::vector<std::vector<float>>;
  WatchedHead(std::unique_ptr<model::Layer> head, Logits& noted)
      : Layer(head->name()), head_(std::move(head)), noted_(noted) {
    rows_ = head_->rows();
  }
  std::string_view type() const noexcept override { return head_->type(); }
  model::LayerActs plan(model::ActivationPlanner& planner, const model::PlannedPass& pass) const override {
    return head_->plan(planner, pass);
  }
  void forward(const model::PassContext& ctx, model::RowViews params, TensorView x,
               const model::LayerActs& acts) const override {
    EXPECT_TRUE((params.shared ? params.shared : params.own.back()).panels);
    head_->forward(ctx, params, x, acts);
    const float* const z = ctx.logits.as<float>();
    noted_.emplace_back(z, z + ctx.logits.dim(1));
  }
  void backward_input(const model::PassContext&, model::RowViews, TensorView, TensorView,
                      const model::LayerActs&) const override {}
  void backward_weight(const model::PassContext&, model::RowViews, TensorView, TensorView,
                       const model::LayerActs&) const override {}

 private:
  std::unique_ptr<model::Layer> head_;
  Logits& noted_;
};

// Logits of a text, written token by token from packed weights.
struct Written {
  std::vector<i32> tokens;
  WatchedHead::Logits logits;
};
Written write_watched(Config c, const std::vector<i32>& prompt, i64 tokens, const OpTable& ops) {
  Written w{prompt, {}};
  engine::EngineParts parts;
  parts.model = [&](const Config& config, const MeshShape& mesh, const MeshCoord& coord) {
    model::Model m = model::make_model(config, model::shard_of(config, mesh, coord));
    m.layers.back() = std::make_unique<WatchedHead>(std::move(m.layers.back()), w.logits);
    return m;
  };
  c.use = ConfigUse::Generate;
  with_engines(
      c, 1,
      [&](engine::Engine& engine) {
        const std::vector<i32> text = text_of(engine, prompt, {.max_tokens = tokens});
        w.tokens.insert(w.tokens.end(), text.begin(), text.end());
      },
      ops, 2, parts);
  return w;
}

// The logits of all positions of a text, in one pass.
std::vector<float> logits_in_one_pass(Config c, ConfigUse use, const std::vector<i32>& text, const OpTable& ops) {
  c.use = use;
  std::vector<float> logits;
  with_engines(
      c, 1,
      [&](engine::Engine& engine) {
        engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
          for (size_t i = 0; i < ids.size(); ++i) ids[i] = text[i % text.size()];
          std::ranges::fill(targets, 1);
          return true;
        });
        engine.read_logits(logits);
      },
      ops);
  return logits;
}

TEST(WeightsOnly, LogitsOfATextAreThoseOfATrainersPass) {
  ModelConfig tied = tiny_llama(), untied = tiny_gpt2(), deep = joinable_qwen2();
  tied.tie_embeddings = true;
  untied.tie_embeddings = false;
  deep.hidden = 800;  // several blocks of an inner dimension, whose matrices are joined in panels
  deep.vocab_size = 97;
  const std::vector<i32> prompt = {3, 5, 7, 11, 2};
  constexpr i64 kTokens = 15;
  for (const char* isa : {"avx2", "avx512", "avx512_bf16"}) {
    const OpTable* const ops = cpu_ops(isa);
    if (ops == nullptr) continue;
    for (const ModelConfig& model : {tiny_gpt2(), untied, tiny_llama(), tied, deep}) {
      for (const auto& [work, stage] : {std::pair{DType::F32, 0}, {DType::F32, 3}, {DType::BF16, 0}, {DType::F16, 2}}) {
        Config c = config_of(model, {.stage = stage}, 4);
        c.bf16.enabled = work == DType::BF16;
        c.fp16.enabled = work == DType::F16;
        c.communication_data_type = wire_type_of(work);
        c.data.seq_length = std::ssize(prompt) + kTokens - 1;
        const std::string what =
            fmt::format("{} {} {} {}", isa, family_name(model.family), model.hidden, dtype_name(work));
        Written w = write_watched(c, prompt, kTokens, *ops);
        w.tokens.pop_back();
        for (const ConfigUse use : {ConfigUse::Train, ConfigUse::Evaluate}) {
          const std::vector<float> all = logits_in_one_pass(c, use, w.tokens, *ops);
          ASSERT_EQ(std::ssize(w.logits), kTokens) << what;
          for (size_t i = 0; i < w.logits.size(); ++i) {
            const auto row = all.begin() + (std::ssize(prompt) - 1 + static_cast<i64>(i)) * model.vocab_size;
            EXPECT_TRUE(same_bits(w.logits[i], std::vector<float>(row, row + model.vocab_size))) << what << " " << i;
          }
        }
      }
    }
  }
}

}  // namespace weights_only_test
}  // namespace ds::testing
