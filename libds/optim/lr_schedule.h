// SPDX-License-Identifier: Apache-2.0
#pragma once
// Learning rate as a pure function of the number of ticks, with DeepSpeed's own arithmetic.

#include "ds/config.h"

namespace ds {

class LrSchedule {
 public:
  LrSchedule(const OptimizerConfig& optimizer, const SchedulerConfig& scheduler)
      : base_lr_(optimizer.lr), scheduler_(scheduler) {}

  // last_iteration: ticks so far minus 1, so -1 before the first. One tick follows each optimizer step that was not
  // skipped: with n steps applied, the next step runs at lr_at(n - 1). As in DeepSpeed a warm-up from 0 gives lr 0 to
  // the first two steps.
  double lr_at(i64 last_iteration) const;

 private:
  double base_lr_;
  SchedulerConfig scheduler_;
};

}  // namespace ds
