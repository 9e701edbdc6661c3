// SPDX-License-Identifier: Apache-2.0
// The backward pass of whole models against directional finite differences, with what no fixture of PyTorch can have:
// dropout, whose masks must be the same in both passes.

#include <gtest/gtest.h>

#include <fnmatch.h>

#include <cmath>

#include "ds/linear.h"
#include "engine/engine.h"
#include "model/models.h"
#include "parity/device_ops.h"

namespace ds {
namespace model_gradient_test {

using Values = std::vector<std::vector<float>>;  // of every parameter

ModelConfig gpt2() {
  ModelConfig c;
  c.family = Family::Gpt2;
  c.vocab_size = 29;
  c.hidden = 18;
  c.layers = 2;
  c.heads = c.kv_heads = 3;
  c.head_dim = 6;
  c.intermediate = 22;
  c.max_positions = 16;
  return c;
}

// Grouped heads, head norms, tied embeddings, a window in one of two layers, rotations that also stretch.
ModelConfig qwen3() {
  ModelConfig c = gpt2();
  c.family = Family::Qwen3;
  c.kv_heads = 1;
  c.head_dim = 10;
  c.activation = Activation::Silu;
  c.attention_bias = c.output_bias = c.mlp_bias = false;
  c.qk_norm = true;
  c.sliding_window = 4;
  c.sliding_layers = {true, false};
  c.rope.type = RopeType::Yarn;
  c.rope.factor = 4;
  c.rope.attention_factor = 1.5f;
  return c;
}

// Experts in the second of two layers, beside a shared one, and norms over all heads. A token goes to all experts:
// where it goes to some, the loss jumps wherever the choice changes, and tests/golden has the gradients.
ModelConfig experts() {
  ModelConfig c = gpt2();
  c.family = Family::Qwen2Moe;
  c.activation = Activation::Silu;
  c.attention_bias = true, c.output_bias = c.mlp_bias = false;
  c.whole_qk_norm = true;
  c.experts = {.count = 3, .per_token = 3, .intermediate = 12, .shared = 14, .shared_gate = true};
  c.experts.layers = {false, true};
  return c;
}

// Latents of queries, keys and values; rotations that also stretch, and scores that YaRN scales.
ModelConfig latent() {
  ModelConfig c = gpt2();
  c.family = Family::DeepseekV2;
  c.activation = Activation::Silu;
  c.attention_bias = c.output_bias = true, c.mlp_bias = false;
  c.head_dim = 10;
  c.latent = {.rank = 7, .query_rank = 5, .rope_dim = 4, .value_dim = 8};
  c.rope.type = RopeType::Yarn;
  c.rope.factor = 4;
  c.rope.mscale_all_dim = 1;
  return c;
}

// DeepSpeed's layer of experts in the second of two layers. Whichever choices are dropped, at random, they are the same
// ones for any weights.
ModelConfig gpt2_experts() {
  ModelConfig c = gpt2();
  c.experts = {.count = 3,
               .per_token = 3,
               .intermediate = c.intermediate,
               .plain = true,
               .router = {.normalise = true},
               .capacity = {.limited = true, .factor = 0.6, .least = 1, .policy = DropPolicy::Random},
               .router_jitter = true,
               .layers = {false, true}};
  return c;
}

// Beside the MLP, which has a part in the output by a softmax. Nothing is dropped: an order of choices that changes
// with the weights would change the random priorities by which choices are dropped.
ModelConfig gpt2_residual() {
  ModelConfig c = gpt2_experts();
  c.experts.capacity.limited = false;
  c.experts.residual = true;
  c.experts.shared = c.intermediate;
  return c;
}

// Post-LayerNorm, attention over the whole sequence, a head with a bias of its own.
ModelConfig bert() {
  ModelConfig c = gpt2();
  c.family = Family::Bert;
  c.token_types = 2;
  c.pad_token_id = -1;  // the derivative has no rows that are left out
  c.activation = Activation::GeluErf;
  return c;
}

// Uniform in (-1, 1), other values for every parameter.
std::vector<float> noise(i64 n, size_t param, u32 site) {
  const RngKey key{static_cast<u32>(param), site, 0};
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = 2 * RngKey::uniform(key.bits(i)) - 1;
  return values;
}

struct ModelOptions {
  i64 kept = 0;                          // tokens of each sample that all layers but the first see; 0: all
  i64 branches = 0;                      // the rank of a branch beside each linear map; 0: none
  std::vector<std::string> frozen = {};  // patterns of parameters that are not trained
  i64 num_ids = 0;                       // the batch looks up all of the first ones; 0: the whole vocabulary
};

// A model with large random weights and one batch, with targets of the whole vocabulary, on the default backend in
// fp32.
class Model {
 public:
  explicit Model(const ModelConfig& model, const ModelOptions& options = {})
      : engine_(config(model, options.kept, options.frozen), options.branches) {
    const i64 num_ids = options.num_ids > 0 ? options.num_ids : model.vocab_size;
    for (i64 i = 0; i < kTokens; ++i) {
      ids_.push_back(static_cast<i32>((i * 7919 + 3) % num_ids));
      targets_.push_back(i % 5 == 2 ? -100 : static_cast<i32>((i * 104729 + 1) % model.vocab_size));
    }
    for (const auto& unit : engine_.engine.plan().rows) {
      for (const model::ParamRow& row : unit) {
        rows_.push_back(row);
        weights_.push_back(noise(row.numel(), weights_.size(), 3));
        for (float& w : weights_.back()) w = 0.3f * w + (row.init == model::Init::Ones ? 1.0f : 0.0f);
      }
    }
  }

  const std::vector<model::ParamRow>& rows() const { return rows_; }

  // At weights + h * direction, always with the dropout of the first step.
  double loss(const Values* direction = nullptr, double h = 0) {
    engine_.engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
      for (i64 i = 0; i < count; ++i) {
        const size_t p = static_cast<size_t>(param), at = static_cast<size_t>(begin + i);
        out[i] = weights_[p][at];
        if (direction != nullptr) out[i] += static_cast<float>(h) * (*direction)[p][at];
      }
    });
    return engine_.engine.train_step({ids_, targets_}).loss;
  }

  Values gradients() {
    loss();
    Values grads;
    const zero::Layout& layout = engine_.engine.plan().dp().layout;
    for (const zero::RowPlace& row : layout.rows()) {
      grads.emplace_back();
      if (!rows_[static_cast<size_t>(row.param)].trained) continue;
      const float* first =
          engine_.engine.gradient({.param = row.param, .segment = row.segment, .segment_offset = row.offset}).values();
      grads.back().resize(static_cast<size_t>(row.numel));
      engine_.device->download(grads.back().data(), first, row.numel * 4);
    }
    return grads;
  }

 private:
  static constexpr i64 kBatch = 3, kLength = 13, kTokens = kBatch * kLength;
  static Config config(const ModelConfig& model, i64 kept, const std::vector<std::string>& frozen) {
    Config c;
    c.model = model;
    if (!frozen.empty()) {
      ParamGroupConfig& group = c.optimizer.groups.emplace_back();
      static_cast<UpdateConfig&>(group) = c.optimizer;
      group.params = frozen;
      group.frozen = true;
    }
    RandomLtdConfig& ltd = c.random_ltd;
    ltd.data_efficiency = ltd.data_routing = ltd.enabled = kept > 0;
    ltd.min_value = kept, ltd.max_value = kLength, ltd.require_steps = 1'000'000, ltd.seq_per_step = 1;
    for (i64 l = 1; l < model.layers; ++l) ltd.layers.push_back(l);
    c.batch = {.train = kBatch, .micro = kBatch, .accumulation = 1};
    c.data.seq_length = kLength;
    c.seed = 5;
    return c;
  }
  struct Owned {  // all outlive the engine
    Owned(const Config& c, i64 branches) : engine(c, mesh, ledger, *device, parts(branches)) {}
    static engine::EngineParts parts(i64 branches) {
      engine::EngineParts parts;
      if (branches == 0) return parts;
      parts.model = [=](const Config& c, auto&...) {
        model::Model model = model::make_model(c);
        for (auto& layer : model.layers) layer->attach([=](auto&) { return model::LowRank{branches, 0.7f}; });
        return model;
      };
      return parts;
    }
    std::unique_ptr<Device> device = testing::make_test_device(1);
    Mesh mesh = testing::make_test_mesh(*device);
    MemoryLedger ledger;
    engine::Engine engine;
  };

  Owned engine_;
  std::vector<model::ParamRow> rows_;
  Values weights_;
  std::vector<i32> ids_, targets_;
};

struct GradientCase {
  const char* name;
  ModelConfig config;
  i64 kept = 0, branches = 0;
};

std::vector<GradientCase> gradient_cases() {
  const auto with_dropout = [](ModelConfig c, float embd, float resid, float attn) {
    c.embd_dropout = embd;
    c.resid_dropout = resid;
    c.attn_dropout = attn;
    return c;
  };
  ModelConfig untied = with_dropout(gpt2(), 0.3f, 0.3f, 0.3f);
  untied.tie_embeddings = false;
  ModelConfig weighted = experts();
  weighted.experts.router = {.normalise = true, .scale = 1.5f};
  weighted.experts.shared = 0;
  weighted.experts.layers = {true, true};
  ModelConfig jittered = experts();
  jittered.experts.input_jitter = 0.2f;
  ModelConfig unwindowed = qwen3();
  unwindowed.sliding_window = 0, unwindowed.sliding_layers = {};
  return {{"gpt2", gpt2()},
          {"gpt2_embd", with_dropout(gpt2(), 0.3f, 0, 0)},
          {"gpt2_resid", with_dropout(gpt2(), 0, 0.3f, 0)},
          {"gpt2_attn", with_dropout(gpt2(), 0, 0, 0.3f)},
          {"gpt2_all", with_dropout(gpt2(), 0.3f, 0.3f, 0.3f)},
          {"gpt2_all_untied", untied},
          {"bert", bert()},
          {"bert_all", with_dropout(bert(), 0.3f, 0.3f, 0.3f)},
          {"qwen3", qwen3()},
          {"qwen3_attn", with_dropout(qwen3(), 0, 0, 0.3f)},
          {"latent", latent()},
          {"latent_attn", with_dropout(latent(), 0, 0, 0.3f)},
          {"latent_branches", latent(), 0, 2},
          {"experts", experts()},
          {"experts_weighted", weighted},
          {"experts_jittered", jittered},
          {"gpt2_experts", gpt2_experts()},
          {"gpt2_experts_resid", with_dropout(gpt2_experts(), 0, 0.3f, 0)},
          {"gpt2_experts_dropping", gpt2_experts(), 8},
          {"gpt2_residual", with_dropout(gpt2_residual(), 0, 0.3f, 0)},
          {"gpt2_residual_branches", gpt2_residual(), 0, 2},
          {"gpt2_all_dropping", with_dropout(gpt2(), 0.3f, 0.3f, 0.3f), 8},
          {"bert_dropping", bert(), 9},
          {"qwen3_dropping", unwindowed, 9},
          {"gpt2_branches", with_dropout(gpt2(), 0.3f, 0.3f, 0.3f), 0, 3},
          {"qwen3_branches", qwen3(), 0, 2},
          {"bert_branches", bert(), 0, 2}};
}

class ModelGradients : public ::testing::TestWithParam<GradientCase> {};

TEST_P(ModelGradients, AreTheDirectionalDerivativeForEveryParameter) {
  const auto& [name, config, kept, branches] = GetParam();
  Model model(config, {.kept = kept, .branches = branches});
  const Values grads = model.gradients();
  const auto norm_of = [&](size_t p) {
    double sum = 0;
    for (const float g : grads[p]) sum += static_cast<double>(g) * static_cast<double>(g);
    return std::sqrt(sum);
  };
  for (size_t p = 0; p < grads.size(); ++p) {
    const double norm = norm_of(p);
    if (model.rows()[p].name.ends_with("self.key.bias")) {  // all keys add it to a score alike: softmax passes it over
      EXPECT_LT(norm, 1e-5 * norm_of(p - 2)) << name << ": the queries' bias has another size";
      continue;
    }
    ASSERT_GT(norm, 0) << name << " " << model.rows()[p].name;
    // Along the gradient the loss changes most; the noise sees what the gradient lacks.
    Values direction;
    for (const auto& g : grads) direction.emplace_back(g.size(), 0.0f);
    direction[p] = noise(static_cast<i64>(grads[p].size()), p, 9);
    double want = 0;
    for (size_t i = 0; i < grads[p].size(); ++i) {
      float& d = direction[p][i];
      d = static_cast<float>(static_cast<double>(grads[p][i]) / norm +
                             0.3 * static_cast<double>(d) / std::sqrt(static_cast<double>(grads[p].size())));
      want += static_cast<double>(d) * static_cast<double>(grads[p][i]);
    }
    const double h = 3e-3, got = (model.loss(&direction, h) - model.loss(&direction, -h)) / (2 * h);
    EXPECT_NEAR(got / want, 1, 1e-2) << name << ", " << model.rows()[p].name;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ModelGradients, ::testing::ValuesIn(gradient_cases()),
                         [](const auto& p) { return std::string(p.param.name); });

// Without the gradients that are not wanted all others have the bits that they have with them.
TEST_P(ModelGradients, OfTheOthersAreTheSameWhereSomeAreNotWanted) {
  const auto& [name, config, kept, branches] = GetParam();
  const Values want = Model(config, {.kept = kept, .branches = branches}).gradients();
  for (const std::vector<std::string>& frozen : {std::vector<std::string>{"*weight"},
                                                 {"*bias", "*norm*", "*LayerNorm*", "*ln_*"},
                                                 {"*word_embeddings*", "*wte*", "*embed_tokens*"},
                                                 {"*h.0*", "*layer.0*", "*layers.0*"},
                                                 {"*mlp*", "*dense*"}}) {
    std::vector<std::string> matching;  // patterns that match nothing are refused
    for (const std::string& pattern : frozen) {
      const Model all(config, {.kept = kept, .branches = branches});
      if (std::ranges::any_of(all.rows(), [&](const model::ParamRow& row) {
            return ::fnmatch(pattern.c_str(), row.name.c_str(), 0) == 0;
          }))
        matching.push_back(pattern);
    }
    if (matching.empty()) continue;
    Model model(config, {.kept = kept, .branches = branches, .frozen = matching});
    const Values got = model.gradients();
    size_t compared = 0;
    for (size_t p = 0; p < got.size(); ++p) {
      if (got[p].empty()) continue;
      ++compared;
      EXPECT_EQ(got[p], want[p]) << name << " " << model.rows()[p].name << " without " << matching.front();
    }
    EXPECT_LT(compared, want.size());
    EXPECT_TRUE(compared > 0 || config.family == Family::Qwen3) << name << " without " << matching.front();
  }
}

// The row of the padding token is that of the projection alone; all other gradients keep their bits, and so do all
// where nobody looks it up. (What the row should be: tests/golden/bert.)
TEST(ModelGradient, LookUpsOfThePaddingTokenGiveNone) {
  const ModelConfig unpadded = bert();
  const i64 C = unpadded.hidden, unused = unpadded.vocab_size - 1;
  Model whole(unpadded, {.num_ids = unused});
  const Values want = whole.gradients();
  for (const i64 padding : {i64{0}, i64{7}, unused}) {
    ModelConfig config = bert();
    config.pad_token_id = padding;
    Model padded(config, {.num_ids = unused});
    const Values got = padded.gradients();
    ASSERT_EQ(got.size(), want.size());
    for (size_t p = 0; p < got.size(); ++p) {
      const bool words = padded.rows()[p].name == "bert.embeddings.word_embeddings.weight";
      for (size_t i = 0; i < got[p].size(); ++i) {
        const bool left_out = words && padding != unused && static_cast<i64>(i) / C == padding;
        ASSERT_EQ(got[p][i] == want[p][i], !left_out) << padded.rows()[p].name << " " << i << ", padding " << padding;
      }
    }
  }
}

}  // namespace model_gradient_test
}  // namespace ds
