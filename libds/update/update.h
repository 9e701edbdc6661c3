// SPDX-License-Identifier: Apache-2.0
#pragma once
// The end of a training step, when all layers have run: the groups' sums of gradients are waited for and combined, one
// verdict is made over all of them, parameters are updated and published. The one description of it: an engine runs it,
// and over a device and communicators that only count (report/counted_update) it says what a step takes, sends and
// computes.

#include <functional>
#include <memory>
#include <vector>

#include "update/combine.h"
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

  // What this rank owns of the gradients is final when it returns.
  void finish_gradients();
  // One verdict for the whole world, made where the gradients are. Both reductions are over integers, so the norm does
  // not depend on the layout.
  void judge(StepScalars& numbers, const JudgeParams& params);
  struct Step {
    double lr = 0;                    // before the groups' ratios
    i64 number = 1;                   // of the update
    u32 seed = 0;                     // of what is rounded stochastically
    std::optional<Betas> betas = {};  // instead of the groups' own
  };
  // Nothing happens on the devices if the verdict says so.
  void update_params(const Step& step, zero::VerdictHandle& verdict);

 private:
  class States;
  class Matrices;
  // A group of parameters that is trained and has some here.
  struct Trained {
    size_t group;
    std::unique_ptr<optim::Optimizer> optimizer;
    std::unique_ptr<States> states;
    std::unique_ptr<Matrices> matrices;  // where the group needs them
  };
  std::unique_ptr<Matrices> make_matrices(size_t group, const SlicesOf& slices_of);
  void over_model_ranks(TensorView x, ReduceOp op, bool stages);

  const UpdatePlan& plan_;
  zero::AllShards& shards_;
  Axes axes_;
  Device& device_;
  Combine combine_;
  Buffer workspace_, matrix_memory_;
  std::vector<Trained> trained_;
};

}  // namespace ds::update
