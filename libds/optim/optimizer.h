// SPDX-License-Identifier: Apache-2.0
#pragma once
// Optimizers: which states a parameter has, and which passes its update is made of. The arithmetic of a pass is a rule
// of the op `update` (kernels/update_rules.h); what an optimizer does around it is a file here. None knows ranks, ZeRO,
// files or where states are: an update goes to the states, wherever they are kept, pass by pass; and integers can be
// summed over all pieces of the same parameters.
//
// To add one: a rule (kernels/update_rules.h, its name in ops.h, its fp64 definition in kernels/ref/update.cc); a file
// here and its line in kind.h and optimizer.cc; its type in ds/config.h, name in config/keys.cc, keys and defaults in
// config/optimizer.cc; a row in each of tests/parity, tests/unit, tests/equivalence and tests/cli/optimizers.bats;
// lines of ds-config-keys(5) and the README.

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "device/device.h"
#include "ds/config.h"
#include "ds/state.h"
#include "model/layer.h"
#include "optim/lr_schedule.h"

namespace ds::optim {

// Updates of a run that do alike: the number of the first, and how many there are.
struct UpdateKind {
  i64 number = 1, times = 0;
};

// Parameters that are updated alike: a group of the configuration, or all that are in none.
struct Group {
  UpdateConfig update;
  bool frozen = false;
  double lr_ratio = 1;  // to the optimizer's own rate, which the schedule moves
  bool outer = false;   // an optimizer around this one has states, too

  StateSet states() const noexcept;  // of each of its parameters, the master not among them
  // What a state of a parameter of so many elements, over all ranks, is kept in. AdamW8bit leaves small ones alone, as
  // bitsandbytes does: they are not worth it, and norms and biases move by much.
  DType state_dtype(State s, i64 numel) const noexcept;
  bool needs_matrices() const noexcept { return !frozen && update.type == OptimizerType::Muon; }
  // Whether ranks average something of it by signs, and whether gradients are not summed in the update of that number.
  bool averages_by_signs() const noexcept { return !frozen && ds::averages_by_signs(update.type); }
  bool keeps_gradients_apart(i64 step) const noexcept;
  // Behind that update: whether signs have lost something, and whether ranks have parameters of their own.
  bool has_lost_signs(i64 step) const noexcept;
  bool is_apart_behind(i64 step) const noexcept;
  // What signs averaged in that update, or the last one that did: "momentum", "gradient" or "parameter".
  std::string_view signs_are_of(i64 step) const noexcept;
  // Those of a run of so many that differ in what ranks send for them.
  std::vector<UpdateKind> update_kinds(i64 updates) const;
  // How many numbers are kept of each parameter as a whole (Optimizer::numbers).
  i64 numbers_per_param() const noexcept;
  // Whether ranks may take steps of their own.
  bool steps_apart() const noexcept { return !frozen && update.type == OptimizerType::ZeroOneAdam; }
};

struct Groups {
  std::vector<Group> groups;      // those of the configuration in order; the last one has the rest
  std::vector<size_t> of_params;  // by number of the parameter
  const Group& of(i64 param) const noexcept { return groups[of_params[param]]; }
  bool frozen(i64 param) const noexcept { return of(param).frozen; }
  bool any_has(State s) const noexcept {
    return std::any_of(groups.begin(), groups.end(), [s](const Group& g) { return g.states()[s]; });
  }
};
// Throws Errc::Config, a line for each mistake: a pattern that matches no parameter of the model, a group whose
// parameters all belong to groups before it, Muon without a hidden matrix.
Groups make_groups(const OptimizerConfig& optimizer, const model::Model& model);

// The largest matrix of a group: elements, and its shorter side.
struct LargestMatrix {
  i64 elems = 0, side = 0;
};

// Of 1-bit LAMB: the mean of a parameter's ratios, and what multiplied it in the last update.
inline constexpr i64 kLambNumbers = 2;

// Parameters of fewer elements keep fp32 states under AdamW8bit.
inline constexpr i64 kLeastCoded = 4096;

// What this rank has of a group: `num_params` parameters that the ranks of dp and tp have here, pieces or copies of
// them.
struct GroupSize {
  i64 num_params = 0;
  LargestMatrix largest;
};

// This rank's pieces of the parameters of a group, where their states are kept (zero/state_store).
class GroupStates {
 public:
  virtual ~GroupStates() = default;
  // A pass over all pieces; their states are those of Group::states(), in that order. Factors [num_params] are by the
  // parameter's index in the group.
  virtual void update(const UpdateSpec& spec) = 0;
  // Calls visit(index of the parameter in the group, master, gradient or direction; [count] each) for what this rank
  // counts in sums over whole parameters: each element is one rank's.
  virtual void for_each_counted(FunctionRef<void(i64, TensorView, TensorView)> visit) = 0;
};

// Matrices of a group that ranks have in pieces, each on the one rank that looks at it as a whole.
class WholeMatrices {
 public:
  virtual ~WholeMatrices() = default;
  // Brings the gradients of each matrix of the group together, calls body(whole [rows, columns] fp32) for those that
  // this rank looks at, and gives the pieces of what body left there back to where they came from. Collective over the
  // ranks of dp and tp, which do it alike.
  virtual void for_each(FunctionRef<void(TensorView)> body) = 0;
};

// What ranks of dp average by signs (comm/one_bit), in updates whose gradients they have not summed: of all parameters
// of a group, whole on every rank. m is State::ExpAvg, g this rank's gradient, unscaled and finite. Collective.
class SignAverage {
 public:
  virtual ~SignAverage() = default;
  virtual void take_gradient(double keep, double share) = 0;  // m = keep m + share g
  // The same, and what a pass finds in the place of g is what m was.
  virtual void exchange_gradient(double keep, double share) = 0;
  virtual void take_mean_gradient(double keep, double share) = 0;  // m = keep m + share mean(g)
  virtual void average_momentum() = 0;                             // m = mean(m)
  virtual void average_directions() = 0;                           // what a pass left in the place of g = its mean
  // Of who lets ranks take steps of their own (Group::steps_apart): parameters that all ranks have in common.
  virtual void remember_parameters() = 0;
  virtual void recall_parameters() = 0;  // m = those
  virtual bool remembers() const noexcept = 0;
  virtual float& rates() noexcept = 0;  // the sum of those of the steps since then, for whoever counts them
  // A state of the group's parameters becomes what another one is.
  virtual void copy_state(State from, State to) = 0;
  // What signs have lost so far is of something else.
  virtual void forget_errors() = 0;
};

// What an update works with. The ops are those of a run, or they count.
struct UpdateContext {
  const OpTable& ops;
  Stream& stream;
  double lr;                        // of the group
  i64 step;                         // the number of this update, from 1
  u32 seed;                         // of what is rounded stochastically
  bool stochastic_masters = false;  // parameters that are their own masters in bf16 are
  std::optional<Betas> betas = {};  // instead of those of a group that has such
  // Reduces integers, where the ops run, over the ranks that have other pieces of the same parameters.
  FunctionRef<void(TensorView, ReduceOp)> reduce;
  FunctionRef<void(TensorView)> zero;
  // Between the host and where the ops run; the host waits. Of an optimizer that keeps numbers of parameters.
  FunctionRef<void(void*, const void*, i64 bytes)> download, upload;
  GroupStates& states;
  WholeMatrices* matrices;         // of the group, where Group::needs_matrices()
  SignAverage* average = nullptr;  // of the group, where Group::averages_by_signs()

  // A pass: what it has in common with all others of this update, and the rule's own.
  UpdateParams pass(UpdateParams of_rule) const noexcept {
    of_rule.rng = {.seed = seed, .site = 0, .step = static_cast<u32>(step)};
    of_rule.stochastic = stochastic_masters;
    return of_rule;
  }
  UpdateConfig at_this_step(UpdateConfig update) const noexcept {
    if (betas) update.beta1 = betas->first, update.beta2 = betas->second;
    return update;
  }
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Enqueues the update of the group; allocates nothing. Of an optimizer that keeps numbers it is called only where the
  // verdict is known to be finite.
  virtual void update(const UpdateContext& context) = 0;
  // What it keeps of each parameter as a whole between updates, beside states: on the host, Group::numbers_per_param()
  // for each, none below zero, the same on all ranks that have pieces of the parameter.
  virtual std::span<double> numbers() noexcept { return {}; }
};

// `workspace`: workspace_bytes() where the ops run, 8-byte aligned, for the optimizer's life.
// What 0/1 Adam does in the update of that number: a pure function of its parameters.
enum class ZeroOneStep : u8 {
  Refresh,  // gradients are summed, and change both moments
  Signs,    // their mean by signs changes the momentum
  Local,    // each rank steps for itself
  Sync,     // and then all have the mean of what that made of parameters
};
ZeroOneStep zero_one_step(const UpdateConfig& update, i64 step) noexcept;
std::vector<UpdateKind> zero_one_kinds(const UpdateConfig& update, i64 updates);

std::unique_ptr<Optimizer> make_optimizer(const Group& group, const GroupSize& size, void* workspace);
i64 workspace_bytes(const Group& group, const GroupSize& size) noexcept;

}  // namespace ds::optim
