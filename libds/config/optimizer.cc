// SPDX-License-Identifier: Apache-2.0
#include "config/optimizer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "config/optimizer_table.h"

namespace ds {
namespace {

// Whether a key is a hyperparameter's.
bool is_param(const Key& key) { return key.path != "params" && key.path != "frozen" && key.path != "type"; }

// Members of `u` whose keys are not given become those of `others`.
template <class Given>
void fill(UpdateConfig& u, UpdateConfig others, Given&& given) {
  for (const Key& key : param_group_keys()) {
    if (!is_param(key) || given(key.path)) continue;
    const Slot to = key.slot(&u), from = key.slot(&others);
    if (const auto* pair = std::get_if<BetasSlot>(&to)) {
      const auto& other = std::get<BetasSlot>(from);
      *pair->first = *other.first;
      *pair->second = *other.second;
    } else if (const auto* number = std::get_if<double*>(&to)) {
      **number = *std::get<double*>(from);
    } else if (const auto* single = std::get_if<float*>(&to)) {
      **single = *std::get<float*>(from);
    } else if (const auto* choice = std::get_if<EnumSlot>(&to)) {
      *choice->value = *std::get<EnumSlot>(from).value;
    } else if (const auto* count = std::get_if<i64*>(&to)) {
      **count = *std::get<i64*>(from);
    } else {
      *std::get<bool*>(to) = *std::get<bool*>(from);
    }
  }
}

// The names of the optimizers that take a key.
std::string takers_of(std::string_view key) {
  std::vector<std::string_view> names;
  for (const OptimizerRow& row : kOptimizers) {
    if (optimizer_takes(row.defaults.type, key)) names.push_back(row.name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void refuse_foreign(OptimizerType type, std::string_view prefix, Reader& r) {
  for (const Key& key : param_group_keys()) {
    const std::string path = fmt::format("{}{}", prefix, key.path);
    if (is_param(key) && !optimizer_takes(type, key.path) && (r.given(path) || r.automatic(path)))
      r.error(path, fmt::format("belongs to {}; the optimizer is {}", takers_of(key.path), optimizer_row(type).name));
  }
}

// A rate of Muon's that is not given is lr.
template <class Given>
void resolve_rates(UpdateConfig& u, Given&& given) {
  if (!optimizer_takes(u.type, "muon_lr")) return;
  if (!given("muon_lr") && (given("lr") || u.muon_lr == 0)) u.muon_lr = u.lr;
  if (!given("adam_lr") && (given("lr") || u.adam_lr == 0)) u.adam_lr = u.lr;
}

void check_values(const UpdateConfig& u, std::string_view prefix, Reader& r) {
  if (optimizer_takes(u.type, "dampening") && u.nesterov && (u.momentum == 0 || u.dampening != 0))
    r.error(fmt::format("{}nesterov", prefix), "needs a momentum above 0 and a dampening of 0");
  for (const auto& [key, lr] : {std::pair{"muon_lr", u.muon_lr}, {"adam_lr", u.adam_lr}}) {
    if (optimizer_takes(u.type, key) && u.lr == 0 && lr > 0)
      r.error(fmt::format("{}{}", prefix, key), "follows the schedule in proportion to lr, which is 0");
  }
  if (optimizer_takes(u.type, "min_coeff") && u.min_coeff > u.max_coeff)
    r.error(fmt::format("{}min_coeff", prefix), fmt::format("is above max_coeff, {}", u.max_coeff));
  if (optimizer_takes(u.type, "factor_min") && u.factor_min > u.factor_max)
    r.error(fmt::format("{}factor_min", prefix), fmt::format("is above factor_max, {}", u.factor_max));
}

}  // namespace

void resolve_optimizer(OptimizerConfig& o, const ConfigText& text, Reader& r, std::vector<Diagnostic>& diagnostics) {
  constexpr std::string_view kParams = "optimizer.params.", kGroups = "optimizer.param_groups";
  const auto given = [&](std::string_view key) { return r.given(fmt::format("{}{}", kParams, key)); };
  fill(o, optimizer_row(o.type).defaults, given);
  resolve_rates(o, given);
  refuse_foreign(o.type, kParams, r);
  check_values(o, kParams, r);

  const auto section = text.root().find("optimizer");
  if (section == text.root().end() || !section->is_object() || !section->contains("param_groups")) return;
  const Json& groups = section->at("param_groups");
  if (!groups.is_array()) return r.error(kGroups, "must be an array of objects, each with its params");
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string path = fmt::format("{}[{}]", kGroups, i);
    if (!groups[i].is_object()) {
      r.error(path, "must be an object with params and what is special about them");
      continue;
    }
    ParamGroupConfig group;
    UpdateConfig& u = group;
    u = o;
    Reader of_group(param_group_keys(), &u, text, path, diagnostics);
    of_group.read(groups[i]);
    UpdateConfig others = o;
    if (u.type != o.type) {  // of another optimizer: its own defaults, and what is given for both
      others = optimizer_row(u.type).defaults;
      if (given("lr")) others.lr = o.lr;
      if (given("weight_decay")) others.weight_decay = o.weight_decay;
    }
    const auto in_group = [&](std::string_view key) { return of_group.given(key); };
    fill(u, others, in_group);
    resolve_rates(u, in_group);
    if (group.frozen) {
      for (const Key& key : param_group_keys()) {
        if (key.path != "params" && key.path != "frozen" && (of_group.given(key.path) || of_group.automatic(key.path)))
          of_group.error(key.path, "has no effect: the group is frozen");
      }
    } else {
      refuse_foreign(u.type, "", of_group);
      check_values(u, "", of_group);
    }
    if (group.params.empty() && !of_group.broken("params"))
      of_group.error("params", fmt::format("{}: names of parameters, or patterns such as \"*.bias\"",
                                           of_group.given("params") ? "is empty" : "is missing"));
    if (of_group.given("lr") && o.lr == 0 && u.lr > 0)
      of_group.error("lr", "follows the schedule in proportion to optimizer.params.lr, which is 0");
    o.groups.push_back(std::move(group));
  }
}

namespace {

// Whether the ranks sum gradients in the same updates.
bool same_schedule(const UpdateConfig& a, const UpdateConfig& b) noexcept {
  return a.type == b.type && a.freeze_step == b.freeze_step && a.var_freeze_step == b.var_freeze_step &&
         a.var_update_scaler == b.var_update_scaler && a.local_step_scaler == b.local_step_scaler &&
         a.local_step_clipper == b.local_step_clipper;
}

}  // namespace

void check_signs(const Config& c, Reader& r) {
  constexpr std::string_view kType = "optimizer.type", kGroups = "optimizer.param_groups";
  std::vector<const UpdateConfig*> trained = {&c.optimizer};
  for (const ParamGroupConfig& g : c.optimizer.groups) {
    if (!g.frozen) trained.push_back(&g);
  }
  const auto found =
      std::ranges::find_if(trained, [](const UpdateConfig* u) { return optimizer_row(u->type).averages_by_signs; });
  if (found == trained.end()) return;
  const UpdateConfig& u = **found;
  const std::string_view name = optimizer_row(u.type).name;
  const bool local_steps = optimizer_row(u.type).takes_local_steps;
  if (std::ranges::any_of(trained, [&](const UpdateConfig* other) { return !same_schedule(u, *other); }))
    return r.error(kGroups,
                   fmt::format("{} leaves gradients on their ranks in some updates: it updates all parameters or "
                               "none, with the same {}",
                               name, local_steps ? "intervals" : "freeze_step"));
  if (c.zero.stage > (local_steps ? 0 : 1) && !r.broken("zero_optimization.stage")) {
    if (c.zero.stage > 1)
      r.error(kType,
              fmt::format("{} needs each rank's own gradients whole, which ZeRO stage {} reduces to slices while "
                          "they are made: zero_optimization.stage 0{}",
                          name, c.zero.stage, local_steps ? "" : " or 1"));
    else
      r.error(kType,
              fmt::format("behind var_freeze_step each rank of {} takes steps of its own with all parameters, and "
                          "needs all masters and states, which is zero_optimization.stage 0",
                          name));
  }
  if (c.zero.offload_optimizer.device != OffloadDevice::None)
    r.error("zero_optimization.offload_optimizer.device",
            fmt::format("{} has the momentum of all parameters on every rank, beside what it sends: states stay there",
                        name),
            Errc::Unavailable);
  if (local_steps && c.sequence_parallel.size > 1)
    r.error(kType,
            fmt::format("ranks of {} step for themselves, and those of sequence_parallel_size have parts of one "
                        "sequence alone",
                        name),
            Errc::Unavailable);
  if (local_steps && c.own_masters() && c.work_dtype() != DType::F32)
    r.error(kType,
            fmt::format("{} keeps what each rank's own steps made of parameters, in fp32: it needs masters", name),
            Errc::Unavailable);
  if (local_steps && c.grad_accum_dtype != DType::F32)
    r.error("data_types.grad_accum_dtype", fmt::format("{} averages sums of gradients in fp32", name),
            Errc::Unavailable);
  for (const UpdateConfig* other : trained) {
    if (local_steps && other->bias_correction) {
      r.error("optimizer.params.bias_correction", fmt::format("{} has none", name));
      break;
    }
  }
  const i64 last = local_steps ? 0 : u.freeze_step;
  if (c.gradient_clipping > 0 && c.steps > last && r.given("gradient_clipping"))
    r.warning("gradient_clipping",
              local_steps
                  ? std::string("is of updates with an exact mean of gradients: in others no rank knows their norm")
                  : fmt::format("ends with freeze_step {}: behind it gradients are not summed, and no rank knows "
                                "their norm",
                                u.freeze_step));
}

void check_router_bias(const Config& c, Reader& r) {
  constexpr std::string_view kRate = "optimizer.router_bias_update_rate";
  if (r.broken(kRate)) return;
  if (!c.model.experts.balancing_bias) {
    if (r.given(kRate) && c.model.layers > 0)
      r.error(kRate,
              "the model has no router with a balancing bias (those of type \"glm4_moe\" and \"deepseek_v3\" have): "
              "remove it");
    return;
  }
  if (!trains(c.use) || c.optimizer.router_bias_update_rate == 0) return;
  if (c.optimizer.diloco.workers > 1)
    r.error(
        kRate,
        fmt::format("{}: each of diloco.workers counts tokens of its own, by which the biases of routers would move "
                    "apart: set it to 0",
                    r.given(kRate) ? "is not 0" : "is not 0 by default"),
        Errc::Unavailable);
  if (c.zero.offload_optimizer.device == OffloadDevice::Server)
    r.error(kRate,
            "a server of states does not keep the biases of routers, which a run that attaches to it would lose: set "
            "it to 0, or zero_optimization.offload_optimizer.device to \"cpu\" or \"nvme\"",
            Errc::Unavailable);
}

Json param_groups_json(const OptimizerConfig& o) {
  Json groups = Json::array();
  for (ParamGroupConfig group : o.groups) {
    Json& row = groups.emplace_back(Json::object());
    for (const Key& key : param_group_keys()) {
      const bool of_all = key.path == "params" || key.path == "frozen";
      if (of_all || (!group.frozen && (key.path == "type" || optimizer_takes(group.type, key.path))))
        row[std::string(key.path)] = slot_json(key.slot(static_cast<UpdateConfig*>(&group)));
    }
  }
  return groups;
}

}  // namespace ds
