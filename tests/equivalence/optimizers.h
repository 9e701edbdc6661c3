// SPDX-License-Identifier: Apache-2.0
#pragma once
// The optimizers that tests train with; a new one is a row.

#include "config/optimizer_table.h"
#include "equivalence/layouts.h"

namespace ds::testing {

struct OptimizerCase {
  const char* name;
  void (*choose)(OptimizerConfig&);
  bool rounds_states = false;  // ranks of tp have blocks and random numbers of their own
};

// Whether one of its optimizers has a property: a member of OptimizerRow.
template <class Property>
bool any_optimizer(const OptimizerCase& of, Property property) {
  OptimizerConfig o;
  of.choose(o);
  return ds::any_optimizer(o, property);
}

inline ParamGroupConfig group(const UpdateConfig& update, std::vector<std::string> params) {
  ParamGroupConfig g;
  static_cast<UpdateConfig&>(g) = update;
  g.params = std::move(params);
  return g;
}

inline const OptimizerCase kOptimizers[] = {
    {"AdamW", [](OptimizerConfig&) {}},
    {"AdamL2", [](OptimizerConfig& o) { o.type = OptimizerType::Adam, o.adam_w_mode = false; }},
    {"Sgd", [](OptimizerConfig& o) { o.type = OptimizerType::Sgd, o.lr = 0.05; }},
    {"Momentum",
     [](OptimizerConfig& o) { o.type = OptimizerType::Sgd, o.momentum = 0.9, o.dampening = 0.1, o.lr = 0.02; }},
    {"Nesterov",
     [](OptimizerConfig& o) { o.type = OptimizerType::Sgd, o.momentum = 0.9, o.nesterov = true, o.lr = 0.02; }},
    {"Lion", [](OptimizerConfig& o) { o.type = OptimizerType::Lion, o.beta2 = 0.99, o.lr = 1e-3; }},
    {"Lamb", [](OptimizerConfig& o) { o.type = OptimizerType::Lamb, o.lr = 0.02; }},
    {"Adagrad", [](OptimizerConfig& o) { o.type = OptimizerType::Adagrad, o.lr = 0.02; }},
    {"Muon",
     [](OptimizerConfig& o) {
       o.type = OptimizerType::Muon, o.lr = o.muon_lr = 0.02, o.adam_lr = 3e-3;
       o.momentum = 0.95, o.nesterov = true, o.beta2 = 0.95, o.eps = 1e-10f;
     }},
    {"Groups",
     [](OptimizerConfig& o) {
       UpdateConfig momentum = o, slow = o;
       momentum.type = OptimizerType::Sgd;
       momentum.momentum = 0.9;
       slow.lr = o.lr / 4;
       slow.weight_decay = 0;
       o.groups = {group(momentum, {"*mlp*weight"}), group(slow, {"*"}), group(o, {"*attn*weight"})};
       o.groups[2].frozen = true;
       std::swap(o.groups[1], o.groups[2]);  // the first that matches has it
     }},
    {"AdamW8bit", [](OptimizerConfig& o) { o.type = OptimizerType::AdamW8bit; }, true},
    {"Bf16States", [](OptimizerConfig& o) { o.state_dtype = StateDtype::BF16; }, true},
    {"GroupsOfKinds",
     [](OptimizerConfig& o) {
       UpdateConfig coded = o, momentum = o;
       coded.type = OptimizerType::AdamW8bit;
       momentum.type = OptimizerType::Sgd, momentum.momentum = 0.9, momentum.state_dtype = StateDtype::BF16;
       o.groups = {group(coded, {"*mlp*"}), group(momentum, {"*attn*"})};
     },
     true},
};

}  // namespace ds::testing
