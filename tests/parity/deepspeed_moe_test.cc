// SPDX-License-Identifier: Apache-2.0
// GPT-2 with DeepSpeed's layer of experts, residual or not, against the same model with DeepSpeed's own gates and
// experts, in fp64: logits, losses, every gradient, ten AdamW steps (tests/golden/make_moe.py).

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "engine/engine.h"
#include "formats/tensor_io.h"
#include "parity/device_ops.h"
#include "run/weights.h"
#include "test_data.h"

namespace ds {
namespace deepspeed_moe_test {

class DeepSpeedMoe : public ::testing::TestWithParam<std::string> {
 protected:
  DeepSpeedMoe()
      : dir_(testing::test_data(fmt::format("gpt2-moe-{}", GetParam()))),
        expected_(open_source(dir_ + "/expected.safetensors")),
        ids_(read<i32>("input_ids")),
        targets_(read<i32>("targets")) {
    const TensorInfo& info = expected_->at("input_ids");
    config_.model = load_model_config(dir_);
    config_.batch = {.train = info.shape[0], .micro = info.shape[0], .accumulation = 1};
    config_.data.seq_length = info.shape[1];
    static_cast<UpdateConfig&>(config_.optimizer) = {
        .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8f, .weight_decay = 0.1};
    config_.gradient_clipping = 1.0;
  }
  template <class T>
  std::vector<T> read(const std::string& name) const {
    std::vector<T> values(static_cast<size_t>(expected_->at(name).numel()));
    expected_->read(name, 0, std::ssize(values), values.data());
    return values;
  }
  // Under DeepSpeed's names: one tensor, or those of all experts.
  std::vector<double> gradient(const std::string& name, i64 experts) const {
    constexpr std::string_view kBatch = ".mlp.experts.", kRouter = ".mlp.gate.weight";
    if (name.ends_with(kRouter)) {
      const std::string block = name.substr(0, name.size() - kRouter.size());
      return read<double>(fmt::format("grad.{}.mlp.deepspeed_moe.gate.wg.weight", block));
    }
    const size_t at = name.find(kBatch);
    if (at == name.npos) return read<double>("grad." + name);
    std::vector<double> all;
    for (i64 e = 0; e < experts; ++e) {
      const std::vector<double> one =
          read<double>(fmt::format("grad.{}.mlp.deepspeed_moe.experts.deepspeed_experts.{}.{}", name.substr(0, at), e,
                                   name.substr(at + kBatch.size())));
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  static void expect_near(std::span<const float> got, const std::vector<double>& want, double error,
                          const std::string& what) {
    ASSERT_EQ(got.size(), want.size()) << what;
    double sum = 0, difference = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      sum += want[i] * want[i];
      difference += (static_cast<double>(got[i]) - want[i]) * (static_cast<double>(got[i]) - want[i]);
    }
    EXPECT_LE(std::sqrt(difference), error * std::sqrt(sum)) << what;
  }

  std::string dir_;
  std::unique_ptr<TensorSource> expected_;
  std::vector<i32> ids_, targets_;
  Config config_;
};

TEST_P(DeepSpeedMoe, LogitsLossesGradientsAndTenSteps) {
  const auto device = testing::make_test_device(2);
  Mesh mesh = testing::make_test_mesh(*device);
  MemoryLedger ledger;
  engine::Engine engine(config_, mesh, ledger, *device);
  run::load_weights(engine, dir_);

  const std::vector<double> losses = read<double>("train.loss");
  i64 dropped = 0;
  for (size_t step = 0; step < losses.size(); ++step) {
    const StepRecord r = engine.train_step({ids_, targets_});
    EXPECT_NEAR(r.loss, losses[step], 2e-5) << step;
    for (const ExpertTokens& layer : r.experts) dropped += layer.dropped;
    if (step > 0) continue;
    const double balance = read<double>("balance")[0], coefficient = config_.model.experts.balance_loss;
    ASSERT_TRUE(r.aux_loss.has_value());
    EXPECT_NEAR(*r.aux_loss, coefficient * balance, 1e-6 * balance);
    i64 param = 0;
    for (const auto& unit : engine.plan().rows) {
      for (const model::ParamRow& row : unit) {
        const zero::RowPlace& place = engine.plan().dp().layout.rows()[static_cast<size_t>(param++)];
        std::vector<float> grad(static_cast<size_t>(row.numel()));
        device->download(
            grad.data(),
            engine.gradient({.param = place.param, .segment = place.segment, .segment_offset = place.offset}).data(),
            row.numel() * 4);
        expect_near(grad, gradient(row.name, row.shape[0]), 2e-5, row.name);
      }
    }
  }
  EXPECT_GT(dropped, 0);
}

// With the capacity of training.
TEST_P(DeepSpeedMoe, LogitsOfEvaluations) {
  config_.model.experts.capacity.eval_factor = config_.model.experts.capacity.factor;
  const auto device = testing::make_test_device(2);
  Mesh mesh = testing::make_test_mesh(*device);
  MemoryLedger ledger;
  engine::Engine engine(config_, mesh, ledger, *device);
  run::load_weights(engine, dir_);
  const auto loss = engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
    std::ranges::copy(ids_, ids.begin());
    std::ranges::copy(targets_, targets.begin());
    return true;
  });
  EXPECT_NEAR(*loss, read<double>("loss")[0], 1e-5);
  std::vector<float> logits;
  engine.read_logits(logits);
  expect_near(logits, read<double>("logits"), 1e-5, "logits");
}

INSTANTIATE_TEST_SUITE_P(Parity, DeepSpeedMoe, ::testing::Values("1", "2", "3", "residual", "pyramid"),
                         [](const auto& test) {
                           return test.param.size() == 1 ? fmt::format("k{}", test.param) : test.param;
                         });

}  // namespace deepspeed_moe_test
}  // namespace ds
