// SPDX-License-Identifier: Apache-2.0
#pragma once
// Learning rate, and momentum where a schedule moves it, as pure functions of the number of ticks. DeepSpeed's
// schedules have its own arithmetic (deepspeed/runtime/lr_schedules.py); the field's are those of Hugging Face's
// transformers (optimization.py), but for what is said below.

#include <optional>

#include "ds/config.h"

namespace ds {

struct Betas {
  double first = 0, second = 0;
  bool operator==(const Betas&) const = default;
};

class LrSchedule {
 public:
  LrSchedule(const OptimizerConfig& optimizer, const SchedulerConfig& scheduler)
      : base_lr_(optimizer.lr), scheduler_(scheduler) {}

  // last_iteration: ticks so far minus 1, so -1 before the first. One tick follows each optimizer step that was not
  // skipped: with n steps applied, the next step runs at lr_at(n - 1). As in DeepSpeed a warm-up from 0 gives lr 0 to
  // the first two steps; the field's schedules give it to the first alone. Behind total_num_steps a rate stays where
  // it ended (transformers' cosine rises again).
  double lr_at(i64 last_iteration) const;

  // The betas of all groups that have some; empty if the schedule does not change them. As in DeepSpeed, the first step
  // has cycle_min_mom, and the second beta is 0.99.
  std::optional<Betas> betas_at(i64 last_iteration) const;

 private:
  double cycle_share(i64 n) const noexcept;  // of the way up, 0 to 1
  double field_share(i64 n) const noexcept;  // of base_lr_

  double base_lr_;
  SchedulerConfig scheduler_;
};

}  // namespace ds
