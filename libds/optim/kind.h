// SPDX-License-Identifier: Apache-2.0
#pragma once
// A kind of optimizer, as its file describes it to optimizer.cc.

#include "optim/optimizer.h"

namespace ds::optim {

struct Kind {
  StateSet (*states)(const UpdateConfig&) noexcept;
  // An update that is one pass: its parameters. Else null, and what follows is there.
  UpdateParams (*pass)(const UpdateConfig&, double lr, i64 step) noexcept = nullptr;
  std::unique_ptr<Optimizer> (*make)(const UpdateConfig&, const GroupSize&, void* workspace) = nullptr;
  i64 (*workspace_bytes)(const GroupSize&) noexcept = nullptr;
};
extern const Kind kAdam, kSgd, kLion, kLamb, kAdagrad, kMuon, kOneBitAdam, kZeroOneAdam, kOneBitLamb;

}  // namespace ds::optim
