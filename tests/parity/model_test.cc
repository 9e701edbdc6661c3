// SPDX-License-Identifier: Apache-2.0
// Whole models against PyTorch: logits, loss, every gradient, ten AdamW steps. The criterion is the two-times rule: our
// error against fp64 is at most twice PyTorch's own in the same dtype, plus a floor of 1e-6 of the tensor's scale.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "base/json.h"
#include "engine/engine.h"
#include "engine/weights.h"
#include "formats/tensor_io.h"
#include "model/models.h"

namespace ds {
namespace {

constexpr const char* kModels[] = {"gpt2",        "llama",         "llama-tied", "qwen2",       "qwen3",
                                   "gpt2-untied", "gpt2-unscaled", "llama-bias", "qwen2-window"};
constexpr DType kTypes[] = {DType::F32, DType::BF16, DType::F16};

struct Fixture {
  explicit Fixture(const std::string& name)
      : dir(std::string(DS_TEST_DATA) + "/" + name),
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
    if (t == DType::F32) return read<double>("fp64." + name);
    const std::vector<float> v = read<float>(fmt::format("{}.{}", dtype_name(t), name));
    return {v.begin(), v.end()};
  }
  // Our error against the reference at most twice PyTorch's.
  void judge(DType t, const std::string& name, std::span<const float> got) const {
    const std::vector<double> want = reference(t, name);
    ASSERT_EQ(got.size(), want.size()) << name;
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
    EXPECT_LE(max_error, 2 * torch.at("max_abs").get<double>() + 1e-6 * scale)
        << name << " " << dtype_name(t) << ": max abs";
    EXPECT_LE(std::sqrt(sum_error), (2 * torch.at("rel_l2").get<double>() + 1e-6) * std::sqrt(sum))
        << name << " " << dtype_name(t) << ": relative L2";
  }
  Config run_config(DType t) const {
    Config c;
    c.model = config;
    c.batch = {.train = B, .micro = B, .accumulation = 1};
    c.data.seq_length = T;
    c.bf16.enabled = t == DType::BF16;
    c.fp16 = {.enabled = t == DType::F16, .loss_scale = 1024};
    c.communication_data_type = t;
    c.optimizer = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
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
  Mesh mesh(make_self_communicator({}));
  MemoryLedger ledger;
  engine::Engine engine(f.run_config(dtype), mesh, ledger, *cpu_ops(), 2);
  engine::load_weights(engine, f.dir);

  std::vector<float> logits;
  engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets) {
    std::copy(f.ids.begin(), f.ids.end(), ids.begin());
    std::copy(f.targets.begin(), f.targets.end(), targets.begin());
  });
  engine.read_logits(logits);
  f.judge(dtype, "logits", logits);

  const engine::StepReport r = engine.train_step({f.ids, f.targets});
  const float loss = static_cast<float>(r.loss);
  if (dtype == DType::F32) {
    f.judge(dtype, "loss", {&loss, 1});
  } else {
    // One number: PyTorch's own error in it may be zero by luck. A loss moves at most twice as far as its logits do, so
    // the error of PyTorch's logits is the yardstick.
    const double allowed = 2 * f.errors.at("logits").at(std::string(dtype_name(dtype))).at("rel_l2").get<double>();
    EXPECT_NEAR(r.loss, f.reference(dtype, "loss")[0], allowed * r.loss);
  }

  i64 param = 0;
  const float unscale = static_cast<float>(1 / r.loss_scale);
  for (const auto& unit : engine.plan().rows) {
    for (const model::ParamRow& row : unit) {
      const zero::RowPlace& place = engine.plan().layout.rows()[static_cast<size_t>(param++)];
      const zero::Segment& s = engine.plan().layout.segments()[static_cast<size_t>(place.segment)];
      std::vector<float> grad(static_cast<size_t>(row.numel()));
      for (size_t i = 0; i < grad.size(); ++i) grad[i] = engine.grads().element(s, place.offset)[i] * unscale;
      f.judge(dtype, "grad." + row.name, grad);
    }
  }
}

TEST_P(Models, TenAdamWSteps) {
  const auto& [name, dtype] = GetParam();
  if (dtype == DType::F16) return;  // the fixture trains in fp32 and bf16
  const Fixture f(name);
  Mesh mesh(make_self_communicator({}));
  MemoryLedger ledger;
  engine::Engine engine(f.run_config(dtype), mesh, ledger, *cpu_ops(), 2);
  engine::load_weights(engine, f.dir);
  const auto reference = f.read<double>("train.fp64.loss"),
             torch = f.read<double>(fmt::format("train.{}.loss", dtype_name(dtype)));
  const auto norms = f.read<double>("train.fp64.grad_norm");
  double torch_error = 0, our_error = 0;
  for (size_t s = 0; s < 10; ++s) {
    const engine::StepReport r = engine.train_step({f.ids, f.targets});
    our_error = std::max(our_error, std::abs(r.loss / reference[s] - 1));
    torch_error = std::max(torch_error, std::abs(torch[s] / reference[s] - 1));
    EXPECT_NEAR(r.grad_norm / norms[s], 1, dtype == DType::F32 ? 1e-5 : 2e-2) << s;
  }
  EXPECT_LE(our_error, dtype == DType::F32 ? 1e-5 : 2 * torch_error + 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Parity, Models, ::testing::Combine(::testing::ValuesIn(kModels), ::testing::ValuesIn(kTypes)),
                         [](const auto& test) {
                           std::string name =
                               fmt::format("{}_{}", std::get<0>(test.param), dtype_name(std::get<1>(test.param)));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace ds
