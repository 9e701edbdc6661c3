// SPDX-License-Identifier: Apache-2.0
#pragma once
// A kind of optimizer, as its file describes it to optimizer.cc.

#include "optim/optimizer.h"

namespace ds::optim {

struct Kind {
  StateSet (*states)(const UpdateConfig&) noexcept;
  std::unique_ptr<Optimizer> (*make)(const UpdateConfig&, GroupTensors, void* workspace);
  i64 (*workspace_bytes)(i64 num_params, const LargestMatrix&) noexcept = nullptr;  // null: none
};
extern const Kind kAdam, kSgd, kLion, kLamb, kAdagrad, kMuon;

// One pass, and nothing around it.
class OnePass : public Optimizer {
 public:
  explicit OnePass(GroupTensors group) : group_(std::move(group)) {}
  void update(const UpdateContext& c) override {
    c.ops.update(group_.tensors, c.verdict, params(c.lr, c.step), c.stream);
  }

 protected:
  virtual UpdateParams params(double lr, i64 step) const = 0;

 private:
  GroupTensors group_;
};

}  // namespace ds::optim
