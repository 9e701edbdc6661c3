// SPDX-License-Identifier: Apache-2.0
#include "engine/param_table.h"

#include <algorithm>

#include "config/optimizer_table.h"

namespace ds::engine {
ParamTable make_param_table(const Config& config, const model::Model& model, const plan::RunPlan& plan) {
  ParamTable table;
  for (const model::ParamRow* row : model.params()) {
    ParamEntry& entry = table.params.emplace_back(ParamEntry{row->name, row->whole_shape(), "", {}});
    if (row->dtype(plan.work) != plan.work) entry.dtype = row->dtype(plan.work);
  }
  if (plan.trains()) {
    table.optimizer = std::string(kNoOptimizer);
    StateSet any;
    for (const size_t g : plan.groups.of_params) {
      const optim::ParamGroup& group = plan.groups.groups[g];
      table.optimizers.push_back({std::string(optimizer_row(group.update.type).saved_as()), group.states(),
                                  !group.frozen, group.numbers_per_param()});
      for (const State s : kOptimizerStates) any[s] |= group.states()[s];
      if (!group.frozen) table.optimizer = optimizer_row(config.optimizer.type).saved_as();
    }
    for (size_t p = 0; p < table.params.size(); ++p) {
      const ParamOptimizer& of = table.optimizers[p];
      table.params[p].frozen = !of.trains;
      if (of.trains && of.states != any) table.params[p].optimizer_states = of.states;
      if (of.trains && of.name != table.optimizer) table.params[p].optimizer = of.name;
    }
    table.optimizers.resize(table.params.size() + model.ties.size());
  }
  for (const model::Tie& tie : model.ties) {
    const auto named = std::ranges::find(table.params, tie.name, &ParamEntry::name);
    table.params.push_back({tie.alias, named->shape, tie.name});
  }
  return table;
}

}  // namespace ds::engine
