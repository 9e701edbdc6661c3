// SPDX-License-Identifier: Apache-2.0
#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ds {
namespace {

// Share of the warm-up that is done, 0 to 1. Requires: 0 <= t < steps.
double warmup(WarmupType type, i64 t, i64 steps) {
  if (type == WarmupType::Linear) return static_cast<double>(t) / static_cast<double>(steps);
  return std::log(static_cast<double>(t + 1)) / std::log(static_cast<double>(steps));
}

}  // namespace

double LrSchedule::lr_at(i64 t) const {
  const SchedulerConfig& s = scheduler_;
  const i64 steps = std::max<i64>(2, s.warmup_num_steps);
  switch (s.type) {
    case SchedulerType::Constant: return base_lr_;
    case SchedulerType::WarmupLR: {
      const double done = t < 0 ? 0 : t < steps ? warmup(s.warmup_type, t, steps) : 1;
      return s.warmup_min_lr + (s.warmup_max_lr - s.warmup_min_lr) * done;
    }
    case SchedulerType::WarmupDecayLR: {
      const double decay = static_cast<double>(std::max<i64>(1, s.total_num_steps - steps));
      const double share = t < 0       ? 0
                           : t < steps ? warmup(s.warmup_type, t, steps)
                                       : std::max(0.0, static_cast<double>(s.total_num_steps - t) / decay);
      return s.warmup_min_lr + (s.warmup_max_lr - s.warmup_min_lr) * share;
    }
    case SchedulerType::WarmupCosineLR: {
      if (t < 0) return 0;
      if (t < steps)
        return base_lr_ * (s.warmup_min_ratio + (1 - s.warmup_min_ratio) * warmup(s.warmup_type, t, steps));
      const i64 decay = std::max<i64>(1, s.total_num_steps - steps);
      const double done = std::min(1.0, static_cast<double>(t - steps + 1) / static_cast<double>(decay));
      return base_lr_ * (s.cos_min_ratio + (1 - s.cos_min_ratio) * 0.5 * (1 + std::cos(std::numbers::pi * done)));
    }
  }
  return base_lr_;
}

}  // namespace ds
