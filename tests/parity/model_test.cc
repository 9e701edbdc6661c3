// SPDX-License-Identifier: Apache-2.0
// Whole models against PyTorch: logits, losses, every gradient, the moments of one step, ten AdamW steps. The criterion
// is the two-times rule: our error against fp64 is at most twice PyTorch's own in the same dtype, plus a floor of 1e-6
// of the tensor's scale.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numbers>
#include <sstream>

#include "base/json.h"
#include "engine/engine.h"
#include "engine/host_state.h"
#include "formats/tensor_io.h"
#include "model/models.h"
#include "parity/device_ops.h"
#include "run/weights.h"
#include "test_data.h"

namespace ds {
namespace model_test {

constexpr const char* kModels[] = {"gpt2",
                                   "llama",
                                   "llama-tied",
                                   "qwen2",
                                   "qwen3",
                                   "gpt2-untied",
                                   "gpt2-unscaled",
                                   "llama-bias",
                                   "qwen2-window",
                                   "bert",
                                   "mixtral",
                                   "olmoe",
                                   "qwen2_moe",
                                   "qwen3_moe",
                                   "glm4_moe",
                                   "deepseek_v2",
                                   "deepseek_v2_lite",
                                   "deepseek_v3"};
constexpr const char* kSparseModels[] = {"mixtral",  "olmoe",       "qwen2_moe",        "qwen3_moe",
                                         "glm4_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3"};
constexpr DType kTypes[] = {DType::F32, DType::BF16, DType::F16};

struct Fixture {
  explicit Fixture(const std::string& name)
      : dir(testing::test_data(name)),
        config(load_model_config(dir)),
        expected(open_source(dir + "/expected.safetensors")) {
    std::ifstream in(dir + "/expected_errors.json");
    std::stringstream text;
    text << in.rdbuf();
    errors = parse_json(text.str(), "expected_errors.json").root;
    const TensorInfo& info = expected->at("input_ids");
    B = info.shape[0];
    T = info.shape[1];
    ids = read<i32>("input_ids");
    targets = read<i32>("targets");
  }
  bool has(std::string_view name) const {
    return std::ranges::any_of(expected->list(), [&](const TensorInfo& t) { return t.name == name; });
  }
  template <class T>
  std::vector<T> read(const std::string& name) const {
    const TensorInfo& info = expected->at(name);
    EXPECT_EQ(info.dtype, dtype_of<T>) << name;
    std::vector<T> values(static_cast<size_t>(info.numel()));
    expected->read(name, 0, info.numel(), values.data());
    return values;
  }
  // The reference of this dtype: "fp64.x" for fp32, else that of the rounded weights.
  std::vector<double> reference(DType t, const std::string& name) const {
    if (name.starts_with("balanced.")) return read<double>(name);
    if (t == DType::F32) return read<double>("fp64." + name);
    const std::vector<float> v = read<float>(fmt::format("{}.{}", dtype_name(t), name));
    return {v.begin(), v.end()};
  }
  // Softmax passes over what all keys add to a score. So where nothing rotates them the gradient of their bias is zero,
  // and PyTorch's and ours are rounding alone: judged by that of their weight, whose inputs have unit size.
  bool is_zero_but_for_rounding(DType t, const std::string& name, std::span<const float> got) const {
    constexpr std::string_view kKeyBias = "self.key.bias", kBias = "bias";
    if (!name.ends_with(kKeyBias)) return false;
    double scale = 0, largest = 0;
    for (const double x : reference(t, name.substr(0, name.size() - kBias.size()) + "weight"))
      scale = std::max(scale, std::abs(x));
    for (const float x : got) largest = std::max(largest, std::abs(static_cast<double>(x)));
    const double roundoff = t == DType::BF16 ? 0x1p-8 : t == DType::F16 ? 0x1p-11 : 0x1p-24;
    EXPECT_LE(largest, 32 * roundoff * scale) << name << " " << dtype_name(t);
    return true;
  }
  // Our error against the reference at most twice PyTorch's.
  void judge(DType t, const std::string& name, std::span<const float> got) const {
    const std::vector<double> want = reference(t, name);
    ASSERT_EQ(got.size(), want.size()) << name;
    if (is_zero_but_for_rounding(t, name, got)) return;
    double max_error = 0, scale = 0, sum_error = 0, sum = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double e = static_cast<double>(got[i]) - want[i];
      ASSERT_TRUE(std::isfinite(e)) << name;
      max_error = std::max(max_error, std::abs(e));
      scale = std::max(scale, std::abs(want[i]));
      sum_error += e * e;
      sum += want[i] * want[i];
    }
    const Json& torch = errors.at(name).at(std::string(dtype_name(t)));
    // Tensor cores round probabilities, which PyTorch keeps in fp32 on the fixtures' CPU. If every query sees all keys,
    // all gradients have a part in that, and the largest of a few errors may be a third one. So it is for the bias of
    // keys that are rotated: its contributions to all scores of a query cancel, and only such roundings are left.
    const bool cancels = name.ends_with("k_proj.bias");
    const double times = testing::test_device() != nullptr && (!config.causal() || cancels) ? 3 : 2;
    EXPECT_LE(max_error, times * torch.at("max_abs").get<double>() + 1e-6 * scale)
        << name << " " << dtype_name(t) << ": max abs";
    EXPECT_LE(std::sqrt(sum_error), ((cancels ? times : 2) * torch.at("rel_l2").get<double>() + 1e-6) * std::sqrt(sum))
        << name << " " << dtype_name(t) << ": relative L2";
  }
  // All gradients of the last step; `kind`: of which loss.
  void judge_gradients(DType t, engine::Engine& engine, Device& device, double loss_scale,
                       const std::string& kind = "") const {
    for (const auto& [name, grad] : gradients(engine, device, loss_scale)) judge(t, kind + "grad." + name, grad);
  }
  // By name.
  static std::map<std::string, std::vector<float>> gradients(engine::Engine& engine, Device& device,
                                                             double loss_scale) {
    std::map<std::string, std::vector<float>> all;
    i64 param = 0;
    const float unscale = static_cast<float>(1 / loss_scale);
    for (const auto& unit : engine.plan().rows) {
      for (const model::ParamRow& row : unit) {
        const zero::RowPlace& place = engine.plan().dp().layout.rows()[param++];
        if (!row.trained) continue;  // a balancing bias
        std::vector<float>& grad = all[row.name];
        grad.resize(static_cast<size_t>(row.numel()));
        device.download(
            grad.data(),
            engine.gradient({.param = place.param, .segment = place.segment, .segment_offset = place.offset}).data(),
            narrow<i64>(grad.size()) * 4);
        for (float& g : grad) g *= unscale;
      }
    }
    return all;
  }
  // The global norm of the reference's gradients.
  double grad_norm(DType t) const {
    double sum = 0;
    for (const auto& [name, errors_of_dtypes] : errors.items()) {
      if (!name.starts_with("grad.")) continue;
      for (double g : reference(t, name)) sum += g * g;
    }
    return std::sqrt(sum);
  }
  // The loss of each token: the mean over one target, every other one ignored.
  std::vector<float> token_losses(engine::Engine& engine) const {
    std::vector<float> losses(targets.size());
    for (size_t token = 0; token < targets.size(); ++token) {
      const auto loss = engine.evaluate(1, [&](i64, std::span<i32> to_ids, std::span<i32> to_targets, std::span<i32>) {
        std::copy(ids.begin(), ids.end(), to_ids.begin());
        std::fill(to_targets.begin(), to_targets.end(), -100);
        to_targets[token] = targets[token];
        return true;
      });
      losses[token] = static_cast<float>(loss.value());
    }
    return losses;
  }
  Config run_config(DType t) const {
    Config c;
    c.model = config;
    c.batch = {.train = B, .micro = B, .accumulation = 1};
    c.data.seq_length = T;
    c.bf16.enabled = t == DType::BF16;
    c.fp16 = {.enabled = t == DType::F16, .loss_scale = 1024};
    c.communication_data_type = wire_type_of(t);
    static_cast<UpdateConfig&>(c.optimizer) = {
        .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8f, .weight_decay = 0.1};
    c.optimizer.router_bias_update_rate = 0;  // transformers moves no bias
    c.gradient_clipping = 1.0;
    return c;
  }

  std::string dir;
  ModelConfig config;
  std::unique_ptr<TensorSource> expected;
  Json errors;
  i64 B = 0, T = 0;
  std::vector<i32> ids, targets;
};

class Models : public ::testing::TestWithParam<std::tuple<const char*, DType>> {};

TEST_P(Models, LogitsLossAndEveryGradient) {
  const auto& [name, dtype] = GetParam();
  const Fixture f(name);
  const auto device = testing::make_test_device(2);
  Mesh mesh = testing::make_test_mesh(*device);
  MemoryLedger ledger;
  engine::Engine engine(f.run_config(dtype), mesh, ledger, *device);
  run::load_weights(engine, f.dir);

  std::vector<float> logits;
  engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
    std::copy(f.ids.begin(), f.ids.end(), ids.begin());
    std::copy(f.targets.begin(), f.targets.end(), targets.begin());
    return true;
  });
  engine.read_logits(logits);
  f.judge(dtype, "logits", logits);

  const std::vector<float> token_losses = f.token_losses(engine);
  f.judge(dtype, "token_losses", token_losses);

  // One number's error may be zero by luck, PyTorch's as well. The mean of n errors that fall independently is sqrt(n)
  // smaller than one of them: three of those standard deviations of PyTorch's.
  const StepRecord r = engine.train_step({f.ids, f.targets});
  const auto n = static_cast<double>(std::count_if(f.targets.begin(), f.targets.end(), [](i32 t) { return t >= 0; }));
  const double loss = f.reference(dtype, "loss")[0];
  double sum = 0, squares = 0;
  for (const float x : token_losses) sum += static_cast<double>(x);
  for (const double x : f.reference(dtype, "token_losses")) squares += x * x;
  const Json& torch = f.errors.at("token_losses").at(std::string(dtype_name(dtype)));
  EXPECT_NEAR(r.loss, loss, 3 * torch.at("rel_l2").get<double>() * std::sqrt(squares) / n + 1e-6 * loss);
  EXPECT_NEAR(r.loss, sum / n, 1e-9 * loss) << "training and evaluation";

  f.judge_gradients(dtype, engine, *device, r.loss_scale);
}

// Adam's updates hardly depend on the size of the gradient, its moments do: from zero they are (1 - beta1) g and
// (1 - beta2) g^2, with g the mean over the micro-batches, unscaled and clipped. Both micro-batches are the fixture's.
TEST_P(Models, MomentsOfOneStepAreThoseOfTheClippedGradient) {
  const auto& [name, dtype] = GetParam();
  const Fixture f(name);
  std::vector<i32> ids = f.ids, targets = f.targets;
  ids.insert(ids.end(), f.ids.begin(), f.ids.end());
  targets.insert(targets.end(), f.targets.begin(), f.targets.end());
  const double norm = f.grad_norm(dtype);
  for (const double clip : {0.0, norm / 3, 2 * norm}) {
    SCOPED_TRACE(fmt::format("gradient_clipping {}", clip));
    Config config = f.run_config(dtype);
    config.batch = {.train = 2 * f.B, .micro = f.B, .accumulation = 2};
    config.gradient_clipping = clip;
    config.gradient_accumulation_fusion = false;  // PyTorch's errors, too, are those of gradients in 16 bits
    const auto device = testing::make_test_device(2);
    Mesh mesh = testing::make_test_mesh(*device);
    MemoryLedger ledger;
    engine::Engine engine(config, mesh, ledger, *device);
    run::load_weights(engine, f.dir);
    engine.train_step({ids, targets});

    std::vector<std::string> names;
    for (const auto& unit : engine.plan().rows) {
      for (const model::ParamRow& row : unit) names.push_back("grad." + row.name);
    }
    const double clipped = clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0, beta1 = config.optimizer.beta1,
                 beta2 = config.optimizer.beta2;
    engine::HostState held(engine, engine.plan().dp().layout.owned_pieces(0));
    held.download();
    for (const StatePiece& piece : held.pieces()) {
      std::vector<float> grad(static_cast<size_t>(piece.count));
      for (size_t i = 0; i < grad.size(); ++i) {
        const double m = static_cast<double>(piece.values(State::ExpAvg)[i]), g = m / (1 - beta1);
        grad[i] = static_cast<float>(g / clipped);
        const double v = (1 - beta2) * g * g;
        ASSERT_NEAR(static_cast<double>(piece.values(State::ExpAvgSq)[i]), v, 1e-6 * v + 1e-37)
            << names[piece.param] << " " << i;
      }
      f.judge(dtype, names[piece.param], grad);  // one rank: a piece is a whole parameter
    }
  }
}

TEST_P(Models, TenAdamWSteps) {
  const auto& [name, dtype] = GetParam();
  const Fixture f(name);
  const auto device = testing::make_test_device(2);
  Mesh mesh = testing::make_test_mesh(*device);
  MemoryLedger ledger;
  engine::Engine engine(f.run_config(dtype), mesh, ledger, *device);
  run::load_weights(engine, f.dir);
  const auto fixture = [&](std::string_view of, std::string_view what) {
    return f.read<double>(fmt::format("train.{}.{}", of, what));
  };
  const auto losses = fixture("fp64", "loss"), torch_losses = fixture(dtype_name(dtype), "loss"),
             norms = fixture("fp64", "grad_norm"), torch_norms = fixture(dtype_name(dtype), "grad_norm");
  double loss_error = 0, torch_loss_error = 0, norm_error = 0, torch_norm_error = 0;
  const auto add = [](double& error, double got, double want) { error = std::max(error, std::abs(got / want - 1)); };
  ASSERT_EQ(losses.size(), norms.size() + 1);  // the last one is that of the weights after the tenth update
  for (size_t s = 0; s < losses.size(); ++s) {
    const StepRecord r = engine.train_step({f.ids, f.targets});
    add(loss_error, r.loss, losses[s]);
    add(torch_loss_error, torch_losses[s], losses[s]);
    if (s == norms.size()) break;
    add(norm_error, r.grad_norm, norms[s]);
    add(torch_norm_error, torch_norms[s], norms[s]);
  }
  if (f.has(fmt::format("train.{}.eager.loss", dtype_name(dtype)))) {  // of a second implementation, with experts
    const std::string eager = fmt::format("{}.eager", dtype_name(dtype));
    const auto others = fixture(eager, "loss"), other_norms = fixture(eager, "grad_norm");
    for (size_t s = 0; s < losses.size(); ++s) add(torch_loss_error, others[s], losses[s]);
    for (size_t s = 0; s < norms.size(); ++s) add(torch_norm_error, other_norms[s], norms[s]);
  }
  // The fixtures are of a CPU, where PyTorch keeps probabilities in fp32; tensor cores round them. In 16 bit, the
  // gradient of a tied matrix is rounded for each of its two uses, so that it does not depend on their stages: its
  // error may be up to the square root of two larger than that of a sum that is rounded once.
  const bool twice = engine.model().tied() && dtype != DType::F32;
  const double times = testing::test_device() != nullptr ? 3 : twice ? 2 * std::numbers::sqrt2 : 2;
  EXPECT_LE(loss_error, times * torch_loss_error + 1e-5);
  EXPECT_LE(norm_error, times * torch_norm_error + 1e-5);
}

class SparseModels : public ::testing::TestWithParam<const char*> {};

// The loss that balances experts and its gradients, from transformers' router logits; the head's loss is that without.
TEST_P(SparseModels, LossThatBalancesExperts) {
  const Fixture f(GetParam());
  constexpr float kCoefficient = 0.05f;  // make_fixtures.py's BALANCE
  const auto device = testing::make_test_device(2);
  Mesh mesh = testing::make_test_mesh(*device);
  MemoryLedger ledger;
  Config config = f.run_config(DType::F32);
  config.model.experts.balance_loss = kCoefficient;
  engine::Engine engine(config, mesh, ledger, *device);
  run::load_weights(engine, f.dir);
  const StepRecord r = engine.train_step({f.ids, f.targets});
  const double loss = f.read<double>("fp64.loss")[0], balance = f.read<double>("balanced.balance")[0];
  EXPECT_NEAR(r.loss, loss, 1e-6 * loss);
  ASSERT_TRUE(r.aux_loss.has_value());
  EXPECT_NEAR(*r.aux_loss, kCoefficient * balance, 1e-6 * balance);
  EXPECT_NEAR(r.loss + *r.aux_loss, f.read<double>("balanced.loss")[0], 1e-6 * loss);
  f.judge_gradients(DType::F32, engine, *device, r.loss_scale, "balanced.");
}

// The same over the global batch, of micro-batches of one sequence, on one rank. Gradients are those of two runs.
TEST_P(SparseModels, LossOverTheGlobalBatch) {
  const Fixture f(GetParam());
  constexpr float kCoefficient = 0.05f;
  const auto device = testing::make_test_device(2);
  double aux = 0;
  const auto gradients = [&](float coefficient) {
    Mesh mesh = testing::make_test_mesh(*device);
    MemoryLedger ledger;
    Config config = f.run_config(DType::F32);
    config.batch = {.train = f.B, .micro = 1, .accumulation = f.B};
    config.model.experts.balance_loss = coefficient;
    config.model.experts.balance_over = BalanceOver::GlobalBatch;
    engine::Engine engine(config, mesh, ledger, *device);
    run::load_weights(engine, f.dir);
    const StepRecord r = engine.train_step({f.ids, f.targets});
    if (coefficient > 0) aux = r.aux_loss.value_or(0);
    return Fixture::gradients(engine, *device, r.loss_scale);
  };
  const auto both = gradients(kCoefficient), head = gradients(0);
  const double balance = f.read<double>("global.balance")[0];
  EXPECT_GT(f.B, 1);
  EXPECT_NEAR(aux, kCoefficient * balance, 1e-6 * balance);
  EXPECT_GT(std::abs(balance - f.read<double>("balanced.balance")[0]), 1e-3 * balance);
  int routers = 0;
  for (const auto& [name, grad] : head) {
    if (!name.ends_with("mlp.gate.weight")) continue;
    const std::vector<double> want = f.read<double>("global.grad." + name);
    ASSERT_EQ(want.size(), grad.size());
    double largest = 0;
    for (size_t i = 0; i < grad.size(); ++i)
      largest = std::max({largest, std::abs(want[i]), std::abs(static_cast<double>(grad[i]))});
    for (size_t i = 0; i < grad.size(); ++i)
      EXPECT_NEAR(both.at(name)[i] - grad[i], want[i], 2e-5 * largest) << name << " " << i;
    ++routers;
  }
  EXPECT_GT(routers, 0);
}

// Those of which transformers has such a loss.
class BalancedModels : public SparseModels {};

// transformers' own loss counts all tokens. So its gradients of the routers are compared with those of the head's loss,
// and of the other one from runs in which no token is ignored.
TEST_P(BalancedModels, LossOverLayersIsThatOfTransformers) {
  const Fixture f(GetParam());
  constexpr float kCoefficient = 0.05f;
  const auto device = testing::make_test_device(2);
  std::vector<i32> all = f.targets;
  for (i32& t : all) t = std::max(t, 0);
  double aux = 0;
  const auto gradients = [&](float coefficient, const std::vector<i32>& targets) {
    Mesh mesh = testing::make_test_mesh(*device);
    MemoryLedger ledger;
    Config config = f.run_config(DType::F32);
    config.model.experts.balance_loss = coefficient;
    config.model.experts.balance_over = BalanceOver::Layers;
    engine::Engine engine(config, mesh, ledger, *device);
    run::load_weights(engine, f.dir);
    const StepRecord r = engine.train_step({f.ids, targets});
    if (coefficient > 0) aux = r.aux_loss.value_or(0);
    return Fixture::gradients(engine, *device, r.loss_scale);
  };
  const auto head = gradients(0, f.targets), both = gradients(kCoefficient, all), without = gradients(0, all);
  const double loss = f.read<double>("fp64.loss")[0];
  EXPECT_NEAR(loss + aux, f.read<double>("pooled.loss")[0], 1e-6 * loss);
  int routers = 0;
  for (const auto& [name, grad] : head) {
    if (!name.ends_with("mlp.gate.weight")) continue;
    const std::vector<double> want = f.read<double>("pooled.grad." + name);
    ASSERT_EQ(want.size(), grad.size());
    double largest = 0;
    for (const double g : want) largest = std::max(largest, std::abs(g));
    for (size_t i = 0; i < grad.size(); ++i)
      EXPECT_NEAR(grad[i] + both.at(name)[i] - without.at(name)[i], want[i], 2e-5 * largest) << name << " " << i;
    ++routers;
  }
  EXPECT_GT(routers, 1);
}

INSTANTIATE_TEST_SUITE_P(Parity, BalancedModels, ::testing::Values("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
                         [](const auto& test) { return std::string(test.param); });
INSTANTIATE_TEST_SUITE_P(Parity, SparseModels, ::testing::ValuesIn(kSparseModels),
                         [](const auto& test) { return std::string(test.param); });

INSTANTIATE_TEST_SUITE_P(Parity, Models, ::testing::Combine(::testing::ValuesIn(kModels), ::testing::ValuesIn(kTypes)),
                         [](const auto& test) {
                           std::string name =
                               fmt::format("{}_{}", std::get<0>(test.param), dtype_name(std::get<1>(test.param)));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace model_test
}  // namespace ds
