// SPDX-License-Identifier: Apache-2.0
#pragma once
// Optimizers: the states of a parameter, and the passes of its update. The arithmetic of a pass is a rule of the op
// `update` (kernels/update_rules.h); an optimizer is a file here that calls passes, and a row of
// config/optimizer_table.h with all that other rooms need to know of it. It knows nothing of ranks, ZeRO or files, nor
// of where states are: passes run where these are kept, and integers can be summed over all pieces of a parameter.
// CONTRIBUTING.md says how to add one.

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "config/optimizer_table.h"
#include "device/device.h"
#include "ds/communicator.h"
#include "ds/config.h"
#include "ds/layer.h"
#include "ds/state.h"
#include "optim/lr_schedule.h"

namespace ds::optim {

// Updates of a run that send the same messages: the number of the first, and how many there are.
struct UpdateKind {
  i64 number = 1, times = 0;
};

// How far ranks of dp go apart in an update of an optimizer that averages by signs.
struct Phase {
  bool local_gradients = false;  // gradients are not summed: each rank has its own, whole
  bool local_params = false;     // after the update each rank has parameters of its own
  // The tensor that signs averaged in this update, or in the last one in which they did: "momentum", "gradient" or
  // "parameter". Empty: none so far, so there are no errors of signs to keep.
  std::string_view errors_of = {};
};

// Parameters that are updated alike: a group of the configuration, or the parameters that are in none.
struct ParamGroup {
  UpdateConfig update;
  bool frozen = false;
  double lr_ratio = 1;  // to the rate of the run's optimizer, which follows the schedule
  bool outer = false;   // an optimizer around this one has states, too

  const OptimizerRow& row() const noexcept { return optimizer_row(update.type); }
  StateSet states() const noexcept;  // of each of its parameters, without the master
  // The dtype in which a state is kept, of a parameter of `numel` elements over all ranks. AdamW8bit keeps states of
  // small parameters in fp32, as bitsandbytes does: they take little memory, and norms and biases move by much.
  DType state_dtype(State s, i64 numel) const noexcept;
  i64 numbers_per_param() const noexcept;  // Optimizer::numbers
  bool needs_matrices() const noexcept { return !frozen && row().needs_matrices; }
  bool averages_by_signs() const noexcept { return !frozen && row().averages_by_signs; }
  bool takes_local_steps() const noexcept { return !frozen && row().takes_local_steps; }
  Phase phase(i64 step) const noexcept;  // in the update of that number, from 1
  // The kinds of the first `updates` updates of a run.
  std::vector<UpdateKind> update_kinds(i64 updates) const;
};

struct ParamGroups {
  // Those of the configuration in order, then the parameters that are in none, then those that AdamW updates beside
  // Muon's matrices.
  std::vector<ParamGroup> groups;
  std::vector<size_t> of_params;  // index into groups, by number of the parameter
  const ParamGroup& of(i64 param) const noexcept { return groups[of_params[param]]; }
  bool frozen(i64 param) const noexcept { return of(param).frozen; }
  bool any_has(State s) const noexcept {
    return std::any_of(groups.begin(), groups.end(), [s](const ParamGroup& g) { return g.states()[s]; });
  }
};
// Parameters that the model does not train are a frozen group, whatever their group in the configuration is. Throws
// Errc::Config, a line for each mistake: a pattern that matches no parameter of the model, a group whose parameters all
// belong to groups before it, Muon without a hidden matrix.
ParamGroups make_groups(const OptimizerConfig& optimizer, const model::Model& model);

// Decides which rows of a run's model are trained: in a run that trains, none of a frozen group. In one that does not,
// decides which are kept as codes (Config::weights). Throws what make_groups() and model::store_as_codes() do.
void freeze_groups(model::Model& model, const Config& config);

// The largest matrix of a group: elements, and its shorter side.
struct LargestMatrix {
  i64 elems = 0, side = 0;
};

// The size of a group on a rank: the parameters of which ranks of its dp and tp groups have pieces or copies.
struct GroupSize {
  i64 num_params = 0;
  LargestMatrix largest;
};

// This rank's pieces of the parameters of a group, where their states are kept (zero/state_store).
class GroupStates {
 public:
  virtual ~GroupStates() = default;
  // A pass over all pieces, with the states of ParamGroup::states() that its rule gets. Factors [num_params] are in the
  // order of the group's parameters.
  virtual void update(const UpdateSpec& spec) = 0;
  // Calls visit(index of the parameter in the group, master, gradient or direction; [count] each) for the pieces that
  // this rank adds to sums over whole parameters. Each element is counted on one rank.
  virtual void for_each_counted(FunctionRef<void(i64, TensorView, TensorView)> visit) = 0;
};

// The matrices of a group, each of which one rank sees as a whole; ranks hold pieces of them. A batch of matrices is as
// many matrices.
class WholeMatrices {
 public:
  virtual ~WholeMatrices() = default;
  // Gathers the gradient of each matrix on its rank, calls body(whole [rows, columns] fp32) there, and scatters what
  // body wrote to where the pieces came from. Collective over the ranks of dp, or of a split of it, and tp.
  virtual void for_each(FunctionRef<void(TensorView)> body) = 0;
};

// Averages by signs (comm/one_bit) over the ranks that reduce a parameter, in updates whose gradients they have not
// summed: of all parameters of a group, whole on every rank. m is State::ExpAvg, g this rank's gradient, unscaled and
// finite. Collective.
class SignAverage {
 public:
  virtual ~SignAverage() = default;
  virtual void take_gradient(double keep, double share) = 0;  // m = keep m + share g
  // The same, and g becomes the old m, for the passes that follow.
  virtual void exchange_gradient(double keep, double share) = 0;
  virtual void take_mean_gradient(double keep, double share) = 0;  // m = keep m + share mean(g)
  virtual void average_momentum() = 0;                             // m = mean(m)
  virtual void average_directions() = 0;                           // d = mean(d), the direction that a pass left in g
  // For optimizers that take local steps: the parameters that all ranks had in common last.
  virtual void remember_parameters() = 0;
  virtual void recall_parameters() = 0;  // m = those
  virtual bool remembers() const noexcept = 0;
  // The sum of the optimizer's learning rates since then.
  virtual void add_rate(float rate) = 0;
  virtual float rates() const noexcept = 0;
  virtual void copy_state(State from, State to) = 0;  // of all of the group's parameters
  virtual void forget_errors() = 0;                   // those of signs so far
};

// The tools of one update. The ops are those of a run, or they count.
struct UpdateContext {
  const OpTable& ops;
  Stream& stream;
  double lr;                        // of the group
  i64 step;                         // the number of this update, from 1
  u32 seed;                         // of stochastic rounding
  bool stochastic_masters = false;  // rounds parameters that are their own masters in bf16 stochastically
  std::optional<Betas> betas = {};  // the schedule's, instead of the group's
  // Reduces integers, in the ops' memory, over the ranks that have other pieces of the same parameters.
  FunctionRef<void(TensorView, ReduceOp)> reduce;
  FunctionRef<void(TensorView)> zero;
  // Copies between the host and the ops' memory; the host waits. For optimizers that keep numbers of parameters.
  FunctionRef<void(void*, const void*, i64 bytes)> download, upload;
  GroupStates& states;
  WholeMatrices* matrices;         // of the group, where ParamGroup::needs_matrices()
  SignAverage* average = nullptr;  // of the group, where ParamGroup::averages_by_signs()

  // The parameters of a pass: the rule's own, and those that all passes of this update share.
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
  // Enqueues the update of the group; allocates nothing. An optimizer that keeps numbers is called only when the
  // verdict is known to be finite.
  virtual void update(const UpdateContext& context) = 0;
  // The numbers that it keeps of each whole parameter between updates, besides states: on the host,
  // ParamGroup::numbers_per_param() for each parameter of the group in their order, not negative, and the same on all
  // ranks that have pieces of the parameter. Checkpoints hold them.
  virtual std::span<double> numbers() noexcept { return {}; }
};

// `workspace`: workspace_bytes() in the ops' memory, 8-byte aligned, which outlives the optimizer.
std::unique_ptr<Optimizer> make_optimizer(const ParamGroup& group, const GroupSize& size, void* workspace);
i64 workspace_bytes(const ParamGroup& group, const GroupSize& size) noexcept;

}  // namespace ds::optim
