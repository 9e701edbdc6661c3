// SPDX-License-Identifier: Apache-2.0
#pragma once
// The end of a training step, after all layers have run: waits for the groups' sums of gradients, combines them, makes
// one verdict over all of them, and updates and publishes parameters. This is its only description: an engine runs it,
// and a prediction runs it over a device and communicators that only count memory, messages and ops
// (plan/counted_update).

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "update/combine.h"
#include "update/outer_step.h"
#include "update/sign_average.h"
#include "update/step_results.h"

namespace ds::update {

class Update {
 public:
  // The slices that a rank of tp has of all parameters, by number of the parameter.
  using SlicesOf = std::function<std::vector<model::ParamSlice>(int tp_rank)>;
  // Allocates all memory of updates. All but `slices_of` outlive it. Collective.
  Update(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, Device& device, MemoryLedger& ledger,
         const SlicesOf& slices_of);
  ~Update();

  // Whether the update of that number leaves gradients on their ranks: each has the sums of its own, of all elements.
  bool keeps_gradients_apart(i64 number) const noexcept { return plan_.keeps_gradients_apart(number); }
  // Before the gradients of that update, which are multiplied by the loss scale.
  void begin(i64 number, double loss_scale);
  // For predictions of a single update: continues as if all updates before it had been applied.
  void skip_to(i64 number) noexcept { momentum_is_whole_ = number > 1 && keeps_gradients_apart(number - 1); }
  // With UpdatePlan::sends_use_ahead, on the last stage, after its instruction StageCalls::use_complete_after.
  void send_use() { combine_.send_use(); }
  // Collective. When it returns, the sums that this rank owns are final, or those of its own gradients.
  void finish_gradients();
  // Makes one verdict for all ranks of a worker, on the device. Both reductions are over integers, so the norm does not
  // depend on the layout. `params` are those of summed gradients: if gradients are left on their ranks, the divisor
  // becomes that of the mean over them, and nothing is clipped.
  void judge(StepScalars& numbers, JudgeParams params);
  // Makes the verdict that gradients are finite and that nothing is clipped, without a look at them; `numbers` are
  // zero.
  void assume(StepScalars& numbers, JudgeParams params);
  // The norm of this step: the verdict's, or the root mean square of the norms of the ranks' own gradients.
  double grad_norm(const GradVerdict& verdict) const noexcept;
  struct Step {
    double lr = 0;                    // groups multiply it by their ratios
    i64 number = 1;                   // of the update
    u32 seed = 0;                     // of stochastic rounding
    std::optional<Betas> betas = {};  // instead of the groups' own
    float* expert_tokens = nullptr;   // of the step, on the device, summed over dp: those by which biases move
  };
  // With ShardsPlan::undoes: keep() before an update by a verdict that is assumed, undo() after it, when
  // the verdict is another one. Gradients stay until the next step's.
  void keep();
  void undo();
  // Changes nothing if the verdict is not finite. The host waits for the verdict first if ranks average by signs in
  // this update, so that only finite values are sent, or if an optimizer keeps numbers of parameters.
  void update_params(const Step& step, zero::VerdictHandle& verdict);

  // After the update of a step of that number, skipped ones counted: DiLoCo's fragments that are due meet. Whether any
  // has taken effect.
  bool outer_step(i64 step);
  // Null if DiLoCo is off.
  OuterStep* outer() noexcept { return outer_ ? &*outer_ : nullptr; }

  // All state that is kept beside parameters and optimizer states, in the order in which a checkpoint holds it. The
  // functions below go through this list.
  std::span<zero::SavedState* const> saved_states() const noexcept { return saved_; }
  // After the update of that number: the arrays of this rank; whether any rank has some; and when they were set.
  std::vector<zero::SavedArray> rank_local(i64 number);
  bool has_rank_local(i64 number) const noexcept;
  void rank_local_was_set(i64 number);
  // Masters and states were set from outside: no errors are left, and only owners have momentum.
  void states_were_set();
  // Norms of saved state after that update (StepRecord::compression); none if the update changes no such state.
  // Collective.
  static constexpr i64 kNorms = 3;  // at most
  struct NamedNorm {
    std::string_view name{};
    double norm = 0;
  };
  using NamedNorms = std::array<NamedNorm, kNorms>;  // unused entries have no name
  NamedNorms compression_norms(i64 number);
  // After a meeting, the norm of the gradients of the outer optimizer, over all parameters of the fragments that met
  // in that step: of the mean over workers of how far their steps have moved parameters. Collective over a worker.
  double outer_gradient_norm(i64 step);

 private:
  class States;
  class Matrices;
  class OptimizerNumbers;
  // A group that is trained and has parameters on this rank.
  struct Trained {
    size_t group;
    std::unique_ptr<optim::Optimizer> optimizer;
    std::unique_ptr<States> states;
    std::unique_ptr<Matrices> matrices;    // if its optimizer needs whole matrices
    std::unique_ptr<SignAverage> average;  // if ranks average by signs
  };
  void list_saved_states();
  TensorView balance_of(const BalancedRouter& router) const;
  void move_balances(const Step& step, const GradVerdict* verdict);
  void over_model_ranks(TensorView x, ReduceOp op, bool stages);
  void make_momentum_whole();
  // Euclidean norms over all parameters and ranks of a worker. for_each(visit) is called twice, and calls
  // visit(index of the norm, values) for all values of this rank, perhaps none.
  std::array<double, kNorms> norms_of(FunctionRef<void(FunctionRef<void(i64 norm, const TensorView&)>)> for_each);

  const UpdatePlan& plan_;
  zero::AllShards& shards_;
  Axes axes_;
  Device& device_;
  Combine combine_;
  Buffer workspace_, matrix_memory_;
  Buffer norm_numbers_;   // for norms_of(), if there is saved state
  Buffer kept_balances_;  // for undo()
  std::vector<Trained> trained_;
  std::optional<OuterStep> outer_;
  std::optional<SignState> signs_;  // of all averages
  std::unique_ptr<OptimizerNumbers> numbers_;
  std::vector<zero::SavedState*> saved_;
  bool apart_ = false;              // this step leaves gradients on their ranks
  bool momentum_is_whole_ = false;  // every rank holds the momentum of all owners
};

}  // namespace ds::update
