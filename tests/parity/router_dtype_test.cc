// SPDX-License-Identifier: Apache-2.0
// Logits of routers that are rounded to the work dtype, against transformers in bf16
// (tests/golden/make_router_dtype.py): the balance loss and the entropy of a step are those of its logits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ds/config.h"
#include "engine/engine.h"
#include "formats/tensor_io.h"
#include "parity/device_ops.h"
#include "run/weights.h"
#include "test_data.h"

namespace ds {
namespace router_dtype_test {

// Sums over a router's probabilities.
struct Numbers {
  double balance = 0, entropy = 0;
};

Numbers numbers_of(const std::vector<float>& logits, i64 E, i64 k) {
  const i64 n = std::ssize(logits) / E;
  std::vector<double> counts(static_cast<size_t>(E)), sums(static_cast<size_t>(E));
  Numbers all;
  for (i64 r = 0; r < n; ++r) {
    const float* const z = logits.data() + r * E;
    double total = 0;
    for (i64 e = 0; e < E; ++e) total += std::exp(static_cast<double>(z[e]));
    std::vector<i64> order;
    for (i64 e = 0; e < E; ++e) {
      const double p = std::exp(static_cast<double>(z[e])) / total;
      sums[static_cast<size_t>(e)] += p;
      all.entropy -= p * std::log(p) / static_cast<double>(n);
      order.push_back(e);
    }
    std::ranges::stable_sort(order, [&](i64 a, i64 b) { return z[a] > z[b]; });
    for (i64 j = 0; j < k; ++j) ++counts[static_cast<size_t>(order[static_cast<size_t>(j)])];
  }
  for (size_t e = 0; e < counts.size(); ++e) all.balance += counts[e] * sums[e];
  all.balance *= static_cast<double>(E) / static_cast<double>(k * n * n);
  return all;
}

class RouterLogits : public ::testing::Test {
 protected:
  template <class T>
  std::vector<T> read(const std::string& name) const {
    std::vector<T> values(static_cast<size_t>(expected_->at(name).numel()));
    expected_->read(name, 0, std::ssize(values), values.data());
    return values;
  }
  Numbers of_a_step(RouterDtype dtype) const {
    const TensorInfo& info = expected_->at("input_ids");
    Config config;
    config.model = load_model_config(dir_);
    config.model.experts.router_dtype = dtype;
    config.model.experts.balance_loss = 1;
    config.bf16.enabled = true;
    config.communication_data_type = wire_type_of(DType::BF16);
    config.batch = {.train = info.shape[0], .micro = info.shape[0], .accumulation = 1};
    config.data.seq_length = info.shape[1];
    const auto device = testing::make_test_device(2);
    Mesh mesh = testing::make_test_mesh(*device);
    MemoryLedger ledger;
    engine::Engine engine(config, mesh, ledger, *device);
    run::load_weights(engine, dir_);
    const StepRecord r = engine.train_step({read<i32>("input_ids"), read<i32>("targets")});
    return {r.aux_loss.value_or(0), r.experts.at(0).entropy};
  }

  std::string dir_ = testing::test_data("router_dtype");
  std::unique_ptr<TensorSource> expected_ = open_source(dir_ + "/expected.safetensors");
};

TEST_F(RouterLogits, AreThoseOfTransformersInBf16) {
  const ModelConfig model = load_model_config(dir_);
  const Numbers want = numbers_of(read<float>("router_logits"), model.experts.count, model.experts.per_token),
                rounded = of_a_step(RouterDtype::Work), exact = of_a_step(RouterDtype::Fp32);
  EXPECT_NEAR(rounded.balance, want.balance, 2e-6);
  EXPECT_NEAR(rounded.entropy, want.entropy, 1.0 / 4096);  // a token's is a multiple of that
  EXPECT_GT(std::abs(exact.balance - want.balance), 1e-4);
  EXPECT_GT(std::abs(exact.entropy - want.entropy), 2.0 / 4096);
}

}  // namespace router_dtype_test
}  // namespace ds
