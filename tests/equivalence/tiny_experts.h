// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small models with experts, and runs of them.

#include "equivalence/layouts.h"
#include "equivalence/training.h"
#include "model/models.h"

namespace ds::testing::experts_test {

inline constexpr i64 kSteps = 4;

struct Kinds {
  i64 experts = 8, chosen = 2, shared = 0;
  bool gated = false, one_dense = false;
  RouterParams router{.normalise = true};
  float balance = 0.02f, z = 1e-3f;
  bool bias = false;
  BalanceOver over = BalanceOver::MicroBatch;
};

inline ModelConfig tiny_experts(const Kinds& k = {}) {
  ModelConfig m = of_four_heads(tiny_llama());
  m.layers = 4;
  m.experts = {.count = k.experts,
               .per_token = k.chosen,
               .intermediate = 24,
               .router = k.router,
               .balancing_bias = k.bias,
               .shared = k.shared,
               .shared_gate = k.gated,
               .balance_loss = k.balance,
               .z_loss = k.z,
               .layers = std::vector<bool>(4, true)};
  m.experts.balance_over = k.over;
  if (k.one_dense) m.experts.layers[1] = false;
  return m;
}

struct Experts {
  int ep = 1;
  bool data_first = false;
  double room = 2;
};

inline Config experts_config(const ModelConfig& model, const Layout& l, const Experts& x = {},
                             DType work = DType::F32) {
  Config c = config_of(model, l);
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  c.expert_parallel = {.enabled = x.ep > 1, .size = x.ep, .data_first = x.data_first, .room = x.room};
  return c;
}

inline Trace train(const Config& c, const Layout& l, Hooks hooks = {}, i64 steps = kSteps) {
  hooks.splits = model::expert_splits(model::shard_of(c, mesh_shape(c, l.ranks()), {}));
  hooks.same_logits &= c.expert_parallel.size == 1;
  return train_threads(c, l.ranks(), steps, 1, hooks);
}

}  // namespace ds::testing::experts_test
