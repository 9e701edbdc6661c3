// SPDX-License-Identifier: Apache-2.0
#pragma once
// The table of optimizers: the keys that a configuration may give to each, and the properties that the rest of libds
// depends on. A new optimizer is a row here; its passes and states are in optim/.

#include <algorithm>
#include <functional>
#include <string_view>

#include "ds/config.h"

namespace ds {

struct OptimizerRow {
  std::string_view name;  // optimizer.type
  std::string_view keys;  // of optimizer.params, separated by blanks
  UpdateConfig defaults;  // of those keys; its type is the row's
  // Needs of an update besides summed gradients and this rank's elements.
  bool needs_norms = false;        // sums over whole parameters, which ranks reduce within the update
  bool needs_matrices = false;     // whole matrices, each on one rank; AdamW updates the group's other parameters
  bool averages_by_signs = false;  // ranks keep their own gradients in some updates, and average by signs instead
  bool takes_local_steps = false;  // ranks may have parameters of their own between two averages

  bool has_betas = false;             // of its own passes, for OneCycle to move
  bool codes_states = false;          // large states are kept as codes of 8 bits
  std::string_view same_states_as{};  // the optimizer under whose name checkpoints keep its states; else its own

  constexpr bool sums_over_ranks() const noexcept { return needs_norms || needs_matrices; }
  constexpr std::string_view saved_as() const noexcept { return same_states_as.empty() ? name : same_states_as; }
};

inline constexpr std::string_view kAdamKeys = "lr betas eps weight_decay bias_correction adam_w_mode state_dtype";
inline constexpr OptimizerRow kOptimizers[] = {
    {.name = "AdamW", .keys = kAdamKeys, .defaults = {.type = OptimizerType::AdamW}, .has_betas = true},
    {.name = "Adam",
     .keys = kAdamKeys,
     .defaults = {.type = OptimizerType::Adam},
     .has_betas = true,
     .same_states_as = "AdamW"},
    {.name = "SGD",
     .keys = "lr momentum dampening nesterov weight_decay state_dtype",
     .defaults = {.type = OptimizerType::Sgd}},
    {.name = "Lion",
     .keys = "lr betas weight_decay state_dtype",
     .defaults = {.type = OptimizerType::Lion, .lr = 1e-4, .beta2 = 0.99},
     .has_betas = true},
    {.name = "Lamb",
     .keys = "lr betas eps weight_decay bias_correction min_coeff max_coeff",
     .defaults = {.type = OptimizerType::Lamb},
     .needs_norms = true,
     .has_betas = true},
    {.name = "Adagrad",
     .keys = "lr eps weight_decay state_dtype",
     .defaults = {.type = OptimizerType::Adagrad, .lr = 1e-2, .eps = 1e-10f}},
    {.name = "Muon",
     .keys = "lr muon_lr adam_lr momentum nesterov betas eps weight_decay adjust_lr_fn",
     .defaults =
         {.type = OptimizerType::Muon, .lr = 0.02, .beta2 = 0.95, .eps = 1e-10f, .momentum = 0.95, .nesterov = true},
     .needs_matrices = true},
    {.name = "AdamW8bit",
     .keys = "lr betas eps weight_decay bias_correction",
     .defaults = {.type = OptimizerType::AdamW8bit},
     .has_betas = true,
     .codes_states = true,
     .same_states_as = "AdamW"},
    {.name = "OneBitAdam",
     .keys = "lr betas eps weight_decay bias_correction freeze_step",
     .defaults = {.type = OptimizerType::OneBitAdam, .bias_correction = false},
     .averages_by_signs = true,
     .has_betas = true,
     .same_states_as = "AdamW"},
    {.name = "ZeroOneAdam",
     .keys = "lr betas eps weight_decay bias_correction var_freeze_step var_update_scaler local_step_scaler "
             "local_step_clipper",
     .defaults = {.type = OptimizerType::ZeroOneAdam, .bias_correction = false},
     .averages_by_signs = true,
     .takes_local_steps = true,
     .has_betas = true,
     .same_states_as = "AdamW"},
    {.name = "OneBitLamb",
     .keys = "lr betas eps weight_decay bias_correction min_coeff max_coeff freeze_step coeff_beta factor_min "
             "factor_max factor_threshold",
     .defaults = {.type = OptimizerType::OneBitLamb, .bias_correction = false},
     .needs_norms = true,
     .averages_by_signs = true,
     .has_betas = true},
};

constexpr const OptimizerRow& optimizer_row(OptimizerType type) noexcept {
  return kOptimizers[static_cast<size_t>(type)];
}
static_assert(std::ranges::all_of(kOptimizers, [](const OptimizerRow& row) {
  return &optimizer_row(row.defaults.type) == &row;  // rows stand in the order of OptimizerType
}));

// Whether optimizer.params.`key` belongs to an optimizer.
constexpr bool optimizer_takes(OptimizerType type, std::string_view key) noexcept {
  std::string_view keys = optimizer_row(type).keys;
  while (!keys.empty()) {
    const size_t end = std::min(keys.find(' '), keys.size());
    if (keys.substr(0, end) == key) return true;
    keys.remove_prefix(std::min(end + 1, keys.size()));
  }
  return false;
}

// Whether the row of the run's optimizer, or of a group that is trained, has a property: a member of OptimizerRow.
template <class Property>
bool any_optimizer(const OptimizerConfig& o, Property property) {
  return std::invoke(property, optimizer_row(o.type)) || std::ranges::any_of(o.groups, [&](const ParamGroupConfig& g) {
           return !g.frozen && std::invoke(property, optimizer_row(g.type));
         });
}

}  // namespace ds
