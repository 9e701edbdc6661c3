// SPDX-License-Identifier: Apache-2.0
#include "optim/optimizer.h"

#include <fnmatch.h>

#include <algorithm>

#include "base/check.h"
#include "ds/nearest.h"
#include "model/coded_rows.h"
#include "optim/kind.h"

namespace ds::optim {
namespace {

// AdamW8bit keeps the states of parameters of fewer elements in fp32.
constexpr i64 kLeastCoded = 4096;

class OnePass final : public Optimizer {
 public:
  OnePass(const Kind& kind, const UpdateConfig& update) : kind_(kind), update_(update) {}
  void update(const UpdateContext& c) override {
    c.states.update({.params = c.pass(kind_.pass(c.at_this_step(update_), c.lr, c.step))});
  }

 private:
  const Kind& kind_;
  UpdateConfig update_;
};

// The names of each parameter: its own, and those of tied entries of checkpoints. None for balancing biases, which no
// optimizer moves.
std::vector<std::vector<std::string_view>> names_of(const model::Model& model) {
  std::vector<std::vector<std::string_view>> names;
  for (const model::ParamRow* row : model.params()) {
    names.emplace_back();
    if (row->balances >= 0) continue;
    names.back().push_back(row->name);
    for (const model::Tie& tie : model.ties) {
      if (tie.name == row->name) names.back().push_back(tie.alias);
    }
  }
  return names;
}

// Assigns each parameter to the first group of which a pattern matches. A mistake in a group is a line of `problems`.
void match_groups(const OptimizerConfig& o, const model::Model& model, ParamGroups& result,
                  std::vector<std::string>& problems) {
  if (o.groups.empty()) return;
  const auto names = names_of(model);
  std::vector<std::string_view> all;
  for (const auto& of_param : names) all.insert(all.end(), of_param.begin(), of_param.end());
  for (size_t g = 0; g < o.groups.size(); ++g) {
    bool matches = true, has = false;
    for (const std::string& pattern : o.groups[g].params) {
      bool any = false;
      for (size_t p = 0; p < names.size(); ++p) {
        if (std::ranges::none_of(names[p], [&](std::string_view name) {
              return ::fnmatch(pattern.c_str(), std::string(name).c_str(), 0) == 0;
            }))
          continue;
        any = true;
        if (result.of_params[p] == o.groups.size()) result.of_params[p] = g;
        has |= result.of_params[p] == g;
      }
      if (any) continue;
      matches = false;
      const std::string_view close = nearest(pattern, all);
      problems.push_back(fmt::format("optimizer.param_groups[{}].params: '{}' matches no parameter of the model{}", g,
                                     pattern,
                                     close.empty() ? fmt::format("; there is '{}', for one", all.front())
                                                   : fmt::format("; did you mean '{}'?", close)));
    }
    if (matches && !has)
      problems.push_back(
          fmt::format("optimizer.param_groups[{}].params: all that it matches belongs to groups before it", g));
  }
}

// Whether a parameter is a matrix, or several, between the embeddings and the head, by number.
std::vector<bool> hidden_matrices(const model::Model& model) {
  std::vector<bool> hidden(model.shared.size(), false);
  for (const auto& layer : model.layers) {
    for (const model::ParamRow& row : layer->rows()) hidden.push_back(layer->is_block() && row.matrices().count > 0);
  }
  return hidden;
}

// Muon updates hidden matrices alone. The other parameters of its group become a group that AdamW updates.
void split_matrices(const model::Model& model, ParamGroups& result, std::vector<std::string>& problems) {
  const auto ratio = [&](double lr, double given) { return lr == 0 ? 1.0 : given / lr; };
  const size_t groups = result.groups.size();
  for (size_t g = 0; g < groups; ++g) {
    if (!result.groups[g].needs_matrices()) continue;
    const std::vector<bool> hidden = hidden_matrices(model);
    ParamGroup aux = result.groups[g];
    const UpdateConfig u = aux.update;
    aux.update.type = OptimizerType::AdamW;
    aux.lr_ratio *= ratio(u.lr, u.adam_lr);
    result.groups[g].lr_ratio *= ratio(u.lr, u.muon_lr);
    bool any = false;
    for (size_t p = 0; p < hidden.size(); ++p) {
      if (result.of_params[p] != g) continue;
      any |= hidden[p];
      if (!hidden[p]) result.of_params[p] = result.groups.size();
    }
    if (!any)
      problems.push_back(
          fmt::format("optimizer{}: {} has nothing to update: none of its parameters is a matrix "
                      "between the embeddings and the head",
                      g + 1 < groups ? fmt::format(".param_groups[{}]", g) : ".type", result.groups[g].row().name));
    result.groups.push_back(std::move(aux));
  }
}

// Parameters of other groups that the model does not train become a frozen group.
void take_untrained(const model::Model& model, ParamGroups& result) {
  const size_t frozen = result.groups.size();
  i64 param = 0;
  for (const model::ParamRow* row : model.params()) {
    const i64 p = param++;
    if (row->trained || result.frozen(p)) continue;
    if (result.groups.size() == frozen) result.groups.push_back({.update = {}, .frozen = true});
    result.of_params[static_cast<size_t>(p)] = frozen;
  }
}

}  // namespace

StateSet ParamGroup::states() const noexcept {
  if (frozen) return {};
  StateSet states = kind_of(update.type).states(update);
  states[State::OuterParam] = states[State::OuterMomentum] = outer;
  return states;
}

i64 ParamGroup::numbers_per_param() const noexcept { return frozen ? 0 : kind_of(update.type).numbers_per_param; }

Phase ParamGroup::phase(i64 step) const noexcept {
  return averages_by_signs() ? kind_of(update.type).phase(update, step) : Phase{};
}

std::vector<UpdateKind> ParamGroup::update_kinds(i64 updates) const {
  return averages_by_signs() ? kind_of(update.type).update_kinds(update, updates)
                             : std::vector<UpdateKind>{{1, updates}};
}

DType ParamGroup::state_dtype(State s, i64 numel) const noexcept {
  if (is_outer_state(s)) return DType::F32;
  if (update.state_dtype == StateDtype::BF16) return DType::BF16;
  if (!row().codes_states || numel < kLeastCoded) return DType::F32;
  return s == State::ExpAvg ? DType::I8 : DType::U8;
}

ParamGroups make_groups(const OptimizerConfig& o, const model::Model& model) {
  ParamGroups result;
  for (const ParamGroupConfig& g : o.groups)
    result.groups.push_back({.update = g, .frozen = g.frozen, .lr_ratio = g.lr == o.lr ? 1 : g.lr / o.lr});
  result.groups.push_back({.update = o});
  for (ParamGroup& group : result.groups) group.outer = o.diloco.enabled;
  result.of_params.assign(model.params().size(), o.groups.size());
  std::vector<std::string> problems;
  match_groups(o, model, result, problems);
  split_matrices(model, result, problems);
  DS_CHECK(problems.empty(), Errc::Config, "{}", fmt::join(problems, "\n  "));
  take_untrained(model, result);
  return result;
}

// A form of 16 bits is the work dtype of a 16-bit run, or for one in fp32.
void check_storage(const model::ParamRow& row, DType work) {
  using model::Storage;
  if (row.storage == Storage::Work) return;
  DS_CHECK(!row.trained, Errc::Config, "{} is stored as {} and trained: only frozen parameters can be", row.name,
           model::storage_name(row.storage));
  const bool rounded = row.storage == Storage::BF16 || row.storage == Storage::F16;
  DS_CHECK(!rounded || work == DType::F32, Errc::Config, "{} is stored as {}, and the run computes in {}", row.name,
           model::storage_name(row.storage), dtype_name(work));
}

void freeze_groups(model::Model& model, const Config& config) {
  for (const model::ParamRow* row : model.params()) check_storage(*row, config.work_dtype());
  if (!trains(config.use)) return model::store_as_codes(model, config);
  const ParamGroups groups = make_groups(config.optimizer, model);
  i64 param = 0;
  for (model::ParamRow& row : model.shared) row.trained &= !groups.frozen(param++);
  for (const auto& layer : model.layers) {
    for (size_t r = 0; r < layer->rows().size(); ++r) {
      if (groups.frozen(param++)) layer->freeze(r);
    }
  }
}

std::unique_ptr<Optimizer> make_optimizer(const ParamGroup& group, const GroupSize& size, void* workspace) {
  const Kind& kind = kind_of(group.update.type);
  if (kind.pass != nullptr) return std::make_unique<OnePass>(kind, group.update);
  return kind.make(group.update, size, workspace);
}

i64 workspace_bytes(const ParamGroup& group, const GroupSize& size) noexcept {
  const Kind& kind = kind_of(group.update.type);
  return group.frozen || kind.workspace_bytes == nullptr ? 0 : kind.workspace_bytes(size);
}

}  // namespace ds::optim
