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

double ratio(i64 a, i64 b) noexcept { return static_cast<double>(a) / static_cast<double>(b); }
double half_cosine(double done) noexcept { return 0.5 * (1 + std::cos(std::numbers::pi * done)); }

double decay(DecayType type, double done) noexcept {
  switch (type) {
    case DecayType::Linear: return 1 - done;
    case DecayType::Cosine: return half_cosine(done);
    case DecayType::OneMinusSqrt: return 1 - std::sqrt(done);
  }
  return 1;
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
      const i64 rest = std::max<i64>(1, s.total_num_steps - steps);
      const double share = t < 0       ? 0
                           : t < steps ? warmup(s.warmup_type, t, steps)
                                       : std::max(0.0, ratio(s.total_num_steps - t, rest));
      return s.warmup_min_lr + (s.warmup_max_lr - s.warmup_min_lr) * share;
    }
    case SchedulerType::WarmupCosineLR: {
      if (t < 0) return 0;
      if (t < steps)
        return base_lr_ * (s.warmup_min_ratio + (1 - s.warmup_min_ratio) * warmup(s.warmup_type, t, steps));
      const double done = std::min(1.0, ratio(t - steps + 1, std::max<i64>(1, s.total_num_steps - steps)));
      return base_lr_ * (s.cos_min_ratio + (1 - s.cos_min_ratio) * half_cosine(done));
    }
    case SchedulerType::LRRangeTest: {
      constexpr double kMost = 3e38;  // as fp32 it is still a number
      const double intervals = ratio(t + 1, s.lr_range_test_step_size);
      return std::min(
          kMost, s.lr_range_test_min_lr *
                     (1 + s.lr_range_test_step_rate * (s.lr_range_test_staircase ? std::floor(intervals) : intervals)));
    }
    case SchedulerType::OneCycle: {
      const i64 cycle = s.cycle_first_step_size + s.cycle_second_step_size;
      if (t < cycle) return s.cycle_min_lr + (s.cycle_max_lr - s.cycle_min_lr) * cycle_share(t + 1);
      if (s.decay_step_size == 0) return s.cycle_min_lr;
      return s.cycle_min_lr / (1 + s.decay_lr_rate * ratio(t - cycle + 1, s.decay_step_size));
    }
    case SchedulerType::Linear:
    case SchedulerType::Cosine:
    case SchedulerType::CosineRestarts:
    case SchedulerType::Wsd:
    case SchedulerType::InverseSqrt: return base_lr_ * field_share(t + 1);
  }
  return base_lr_;
}

std::optional<Betas> LrSchedule::betas_at(i64 t) const {
  const SchedulerConfig& s = scheduler_;
  if (s.type != SchedulerType::OneCycle || !s.cycle_momentum) return std::nullopt;
  constexpr double kSecond = 0.99;
  const i64 cycle = s.cycle_first_step_size + s.cycle_second_step_size;
  if (t < 0) return Betas{s.cycle_min_mom, kSecond};
  if (t < cycle) return Betas{s.cycle_max_mom - (s.cycle_max_mom - s.cycle_min_mom) * cycle_share(t + 1), kSecond};
  if (s.decay_step_size == 0) return Betas{s.cycle_max_mom, kSecond};
  return Betas{s.cycle_max_mom * (1 + s.decay_mom_rate * ratio(t - cycle + 1, s.decay_step_size)), kSecond};
}

// In integers, so that no step falls off its stair by rounding.
double LrSchedule::cycle_share(i64 n) const noexcept {
  const SchedulerConfig& s = scheduler_;
  const i64 at = n % (s.cycle_first_step_size + s.cycle_second_step_size);
  const bool rises = at <= s.cycle_first_step_size;
  const i64 size = rises ? s.cycle_first_step_size : s.cycle_second_step_size;
  const i64 done = rises ? at : s.cycle_first_step_size + s.cycle_second_step_size - at;
  const i64 stairs = rises ? s.cycle_first_stair_count : s.cycle_second_stair_count;
  return stairs == 0 ? ratio(done, size) : ratio(done * stairs / size, stairs);
}

double LrSchedule::field_share(i64 n) const noexcept {
  const SchedulerConfig& s = scheduler_;
  const i64 W = s.warmup_num_steps, total = s.total_num_steps;
  if (n < W) return ratio(n, W);
  const auto down_to_least = [&](double share) { return s.min_lr_ratio + (1 - s.min_lr_ratio) * share; };
  const double done = std::min(1.0, ratio(n - W, std::max<i64>(1, total - W)));
  switch (s.type) {
    case SchedulerType::Linear: return down_to_least(1 - done);
    case SchedulerType::Cosine: return down_to_least(half_cosine(done));
    case SchedulerType::CosineRestarts:
      return down_to_least(done >= 1 ? 0 : half_cosine(std::fmod(static_cast<double>(s.num_cycles) * done, 1.0)));
    case SchedulerType::Wsd: {
      const i64 into = n - (total - s.decay_num_steps);
      if (into < 0) return 1;
      return down_to_least(n >= total ? 0 : decay(s.decay_type, ratio(into, s.decay_num_steps)));
    }
    case SchedulerType::InverseSqrt: return 1 / std::sqrt(ratio(n + s.timescale - W, s.timescale));
    case SchedulerType::Constant:
    case SchedulerType::WarmupLR:
    case SchedulerType::WarmupDecayLR:
    case SchedulerType::WarmupCosineLR:
    case SchedulerType::LRRangeTest:
    case SchedulerType::OneCycle: break;
  }
  return 1;
}

}  // namespace ds
