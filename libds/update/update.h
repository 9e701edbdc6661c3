// SPDX-License-Identifier: Apache-2.0
#pragma once
// The end of a training step, when all layers have run: the groups' sums of gradients are waited for and combined, one
// verdict is made over all of them, parameters are updated and published. The one description of it: an engine runs it,
// and over a device and communicators that only count (plan/counted_update) it says what a step takes, sends and
// computes.

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "update/combine.h"
#include "update/outer_step.h"
#include "update/sign_average.h"
#include "update/step_results.h"

namespace ds::update {

class Update {
 public:
  // The slices, by number of the parameter, that a rank of tp has of all of them.
  using SlicesOf = std::function<std::vector<model::ParamSlice>(int tp_rank)>;
  // Takes all memory of updates; all but `slices_of` outlive it.
  Update(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, Device& device, MemoryLedger& ledger,
         const SlicesOf& slices_of);
  ~Update();

  // Before gradients of the update of that number: whether ranks of dp will have their own ones, whole.
  bool keeps_gradients_apart(i64 number) const noexcept { return plan_.keeps_gradients_apart(number); }
  // Gradients come multiplied by the loss scale.
  void begin(i64 number, double loss_scale);
  // Of who counts single updates: all before that one have been.
  void go_on_at(i64 number) noexcept { momentum_is_whole_ = number > 1 && keeps_gradients_apart(number - 1); }
  // What this rank owns of the gradients, or has of its own, is final when it returns.
  void finish_gradients();
  // One verdict for the whole world, made where the gradients are. Both reductions are over integers, so the norm does
  // not depend on the layout. Where ranks have gradients of their own, it is that of all of them side by side.
  void judge(StepScalars& numbers, const JudgeParams& params);
  struct Step {
    double lr = 0;                    // before the groups' ratios
    i64 number = 1;                   // of the update
    u32 seed = 0;                     // of what is rounded stochastically
    std::optional<Betas> betas = {};  // instead of the groups' own
  };
  // Nothing happens on the devices if the verdict says so. What ranks average is known to be finite: the host waits for
  // the verdict first.
  void update_params(const Step& step, zero::VerdictHandle& verdict);

  // Behind the update of a step of that number, skipped ones counted: what of DiLoCo's fragments meets in it does.
  // Whether any has.
  bool outer_step(i64 step);
  // Null without DiLoCo.
  OuterStep* outer() noexcept { return outer_ ? &*outer_ : nullptr; }

  // What this rank has of its own behind the update of that number (SignAverage::rank_local, of all groups;
  // OuterStep::rank_local; GradStore::rank_local of dp); whether any rank has something; and after it was set.
  SignAverage::RankLocal rank_local(i64 number);
  bool has_rank_local(i64 number) const noexcept;
  void rank_local_was_set(i64 number);
  // Optimizer::numbers() of each parameter, by its number; empty of one that this rank does not update, or whose
  // optimizer keeps none.
  std::vector<std::span<double>> optimizer_numbers();
  // Masters and states were set from outside: nothing is lost of them, and only their owners have them.
  void states_were_set();
  // After that update, those of StepRecord::compression; none where it compresses nothing that it keeps errors of.
  // Collective.
  static constexpr i64 kNorms = 3;  // at most
  struct NamedNorm {
    std::string_view name{};
    double norm = 0;
  };
  using NamedNorms = std::array<NamedNorm, kNorms>;  // those without a name are none
  NamedNorms compression_norms(i64 number);
  // Behind a meeting, the norm of the gradients of the outer optimizer, over all parameters of the fragments that met
  // in that step: the mean of what workers' steps have done. Collective over a worker.
  double outer_gradient_norm(i64 step);

 private:
  u32 elements_here() const;
  class States;
  class Matrices;
  // A group of parameters that is trained and has some here.
  struct Trained {
    size_t group;
    std::unique_ptr<optim::Optimizer> optimizer;
    std::unique_ptr<States> states;
    std::unique_ptr<Matrices> matrices;    // where the group needs them
    std::unique_ptr<SignAverage> average;  // where ranks average by signs
  };
  std::unique_ptr<Matrices> make_matrices(size_t group, const SlicesOf& slices_of);
  void over_model_ranks(TensorView x, ReduceOp op, bool stages);
  void make_momentum_whole();
  // Euclidean, over all parameters and ranks of a worker, of what for_each(visit) shows twice, some perhaps nothing.
  std::array<double, kNorms> norms_of(FunctionRef<void(FunctionRef<void(i64 norm, const TensorView&)>)> for_each);

  const UpdatePlan& plan_;
  zero::AllShards& shards_;
  Axes axes_;
  Device& device_;
  Combine combine_;
  Buffer workspace_, matrix_memory_;
  Buffer norm_numbers_;  // of norms_of(), where norms are asked for
  std::vector<Trained> trained_;
  std::optional<OuterStep> outer_;
  bool apart_ = false;              // of this step: ranks have gradients of their own
  bool momentum_is_whole_ = false;  // every rank has what its owners have
};

}  // namespace ds::update
