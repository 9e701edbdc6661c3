// SPDX-License-Identifier: Apache-2.0
#pragma once
// The draft of a run's inference: a second model, whole on each rank, which proposes tokens (infer/drafter.h).

#include <memory>

#include "run/run_data.h"
#include "run/start.h"
#include "run/trained.h"

namespace ds::run {

// Throws Errc::Config if it has another tokenizer than the model of `config`, which cannot verify its tokens, and
// Errc::Unavailable if attention has a block layout, with which passes that verify tokens may have other bits.
void check_draft(const Config& config, const DraftModel& draft);
// As it runs beside the model of `config`.
DraftModel beside(const Config& config, DraftModel draft);

class Draft {
 public:
  // Reads the weights. On the run's device, and in its ledger; planned: Plans::draft(). All arguments outlive it.
  Draft(const DraftModel& model, const RankInfo& ranks, std::shared_ptr<const plan::Planned> planned,
        MemoryLedger& ledger, Device& device);
  stage::Stage& stage() noexcept { return trained_.engine->stage(); }

 private:
  Request request_;
  std::unique_ptr<Mesh> mesh_;  // of one rank
  Trained trained_;
};

// Throws Errc::Config unless the draft computes the same proposals on all ranks: they must have the same kernels.
void check_same_kernels(Device& device, Communicator& world);

}  // namespace ds::run
