// SPDX-License-Identifier: Apache-2.0
#pragma once
// The code of an optimizer, which its file gives to optimizer.cc. Its row in config/optimizer_table.h has the rest.

#include "optim/optimizer.h"

namespace ds::optim {

struct Kind {
  StateSet (*states)(const UpdateConfig&) noexcept;
  // The parameters of an update that is one pass. Null: `make` makes an Optimizer.
  UpdateParams (*pass)(const UpdateConfig&, double lr, i64 step) noexcept = nullptr;
  std::unique_ptr<Optimizer> (*make)(const UpdateConfig&, const GroupSize&, void* workspace) = nullptr;
  i64 (*workspace_bytes)(const GroupSize&) noexcept = nullptr;
  i64 numbers_per_param = 0;  // Optimizer::numbers
  // For optimizers that average by signs: ParamGroup::phase and ParamGroup::update_kinds.
  Phase (*phase)(const UpdateConfig&, i64 step) noexcept = nullptr;
  std::vector<UpdateKind> (*update_kinds)(const UpdateConfig&, i64 updates) = nullptr;
};
extern const Kind kAdam, kSgd, kLion, kLamb, kAdagrad, kMuon, kOneBitAdam, kZeroOneAdam, kOneBitLamb;

inline const Kind& kind_of(OptimizerType type) noexcept {
  switch (type) {
    case OptimizerType::AdamW:
    case OptimizerType::Adam:
    case OptimizerType::AdamW8bit: break;
    case OptimizerType::Sgd: return kSgd;
    case OptimizerType::Lion: return kLion;
    case OptimizerType::Lamb: return kLamb;
    case OptimizerType::Adagrad: return kAdagrad;
    case OptimizerType::Muon: return kMuon;
    case OptimizerType::OneBitAdam: return kOneBitAdam;
    case OptimizerType::ZeroOneAdam: return kZeroOneAdam;
    case OptimizerType::OneBitLamb: return kOneBitLamb;
  }
  return kAdam;
}

// 1-bit Adam and 1-bit LAMB: gradients are summed up to freeze_step, and momentums averaged by signs after it.
Phase phase_around_freeze(const UpdateConfig& update, i64 step) noexcept;
std::vector<UpdateKind> kinds_around_freeze(const UpdateConfig& update, i64 updates);

// The kind of an update of 0/1 Adam: a pure function of its parameters.
enum class ZeroOneStep : u8 {
  Refresh,  // gradients are summed, and change both moments
  Signs,    // the mean of gradients by signs changes the momentum
  Local,    // each rank takes a step of its own
  Sync,     // and then all ranks take the mean of the parameters that their steps have made
};
ZeroOneStep zero_one_step(const UpdateConfig& update, i64 step) noexcept;
std::vector<UpdateKind> zero_one_kinds(const UpdateConfig& update, i64 updates);

}  // namespace ds::optim
