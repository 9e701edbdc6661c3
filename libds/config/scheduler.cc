// SPDX-License-Identifier: Apache-2.0
#include "config/scheduler.h"

#include <fmt/format.h>

#include <algorithm>

#include "config/optimizer_table.h"

namespace ds {
namespace {

// A set of schedules.
template <class... Types>
constexpr u32 of(Types... types) noexcept {
  return (0u | ... | (1u << static_cast<u32>(types)));
}
constexpr u32 kWarmup = of(SchedulerType::WarmupLR, SchedulerType::WarmupDecayLR);
constexpr u32 kField =
    of(SchedulerType::Linear, SchedulerType::Cosine, SchedulerType::CosineRestarts, SchedulerType::Wsd);  // that end

constexpr struct {
  std::string_view param;
  u32 types;
} kParams[] = {
    {"warmup_min_lr", kWarmup},
    {"warmup_max_lr", kWarmup},
    {"warmup_num_steps", kWarmup | kField | of(SchedulerType::WarmupCosineLR, SchedulerType::InverseSqrt)},
    {"warmup_type", kWarmup | of(SchedulerType::WarmupCosineLR)},
    {"total_num_steps", kField | of(SchedulerType::WarmupDecayLR, SchedulerType::WarmupCosineLR)},
    {"warmup_min_ratio", of(SchedulerType::WarmupCosineLR)},
    {"cos_min_ratio", of(SchedulerType::WarmupCosineLR)},
    {"lr_range_test_min_lr", of(SchedulerType::LRRangeTest)},
    {"lr_range_test_step_size", of(SchedulerType::LRRangeTest)},
    {"lr_range_test_step_rate", of(SchedulerType::LRRangeTest)},
    {"lr_range_test_staircase", of(SchedulerType::LRRangeTest)},
    {"cycle_min_lr", of(SchedulerType::OneCycle)},
    {"cycle_max_lr", of(SchedulerType::OneCycle)},
    {"cycle_first_step_size", of(SchedulerType::OneCycle)},
    {"cycle_second_step_size", of(SchedulerType::OneCycle)},
    {"cycle_first_stair_count", of(SchedulerType::OneCycle)},
    {"cycle_second_stair_count", of(SchedulerType::OneCycle)},
    {"decay_lr_rate", of(SchedulerType::OneCycle)},
    {"decay_step_size", of(SchedulerType::OneCycle)},
    {"cycle_momentum", of(SchedulerType::OneCycle)},
    {"cycle_min_mom", of(SchedulerType::OneCycle)},
    {"cycle_max_mom", of(SchedulerType::OneCycle)},
    {"decay_mom_rate", of(SchedulerType::OneCycle)},
    {"min_lr_ratio", kField},
    {"num_cycles", of(SchedulerType::CosineRestarts)},
    {"decay_num_steps", of(SchedulerType::Wsd)},
    {"decay_type", of(SchedulerType::Wsd)},
    {"timescale", of(SchedulerType::InverseSqrt)},
};

std::string path_of(std::string_view param) { return fmt::format("scheduler.params.{}", param); }

// "WarmupLR and WarmupDecayLR"
std::string names_of(u32 types) {
  std::vector<std::string_view> names;
  for (u32 t = 0; types >> t != 0; ++t) {
    if ((types >> t & 1) != 0) names.push_back(scheduler_name(static_cast<SchedulerType>(t)));
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 < names.size() ? ", " : " and ", names[i]);
  return text;
}

// The highest rates of other groups, if the schedule has a highest rate of its own: they keep their ratio to the
// optimizer's.
void warn_of_rates(const Config& c, std::string_view param, double highest, Reader& r) {
  const double base = c.optimizer.lr;
  if (highest == base || base <= 0) return;
  const auto rises = [&](const std::string& path, double lr) {
    if (lr != base)
      r.warning(path, fmt::format("rises to {:.6g}: it follows the schedule in proportion to optimizer.params.lr, "
                                  "which is {:.6g}, and {} is {:.6g}",
                                  lr / base * highest, base, param, highest));
  };
  const auto rates = [&](const UpdateConfig& u, const std::string& prefix) {
    if (!optimizer_takes(u.type, "muon_lr")) return rises(prefix + "lr", u.lr);
    rises(prefix + "muon_lr", u.muon_lr);
    rises(prefix + "adam_lr", u.adam_lr);
  };
  rates(c.optimizer, "optimizer.params.");
  for (size_t g = 0; g < c.optimizer.groups.size(); ++g) {
    if (!c.optimizer.groups[g].frozen) rates(c.optimizer.groups[g], fmt::format("optimizer.param_groups[{}].", g));
  }
}

void resolve_cycle(Config& c, Reader& r) {
  SchedulerConfig& s = c.scheduler;
  for (const char* param : {"cycle_min_lr", "cycle_max_lr"}) {
    if (const std::string path = path_of(param); !r.given(path) && !r.broken(path)) r.error(path, "is missing");
  }
  if (!r.given(path_of("cycle_second_step_size"))) s.cycle_second_step_size = s.cycle_first_step_size;
  if (!r.given(path_of("cycle_second_stair_count"))) s.cycle_second_stair_count = s.cycle_first_stair_count;
  if (!s.cycle_momentum) {
    for (const char* param : {"cycle_min_mom", "cycle_max_mom", "decay_mom_rate"}) {
      if (const std::string path = path_of(param); r.given(path))
        r.warning(path, "has no effect: cycle_momentum is false");
    }
    return;
  }
  if (!any_optimizer(c.optimizer, &OptimizerRow::has_betas)) {
    if (r.given(path_of("cycle_momentum")))
      r.warning(path_of("cycle_momentum"), "has no effect: no optimizer of this run has betas");
    s.cycle_momentum = false;
    return;
  }
  if (r.given("optimizer.params.betas"))
    r.warning("optimizer.params.betas",
              "has no effect: OneCycle moves the first one, and the second is 0.99, as in DeepSpeed; "
              "scheduler.params.cycle_momentum false leaves both alone");
  for (size_t g = 0; g < c.optimizer.groups.size(); ++g) {
    const ParamGroupConfig& group = c.optimizer.groups[g];
    if (!group.frozen && optimizer_row(group.type).has_betas && group.type == c.optimizer.type &&
        (group.beta1 != c.optimizer.beta1 || group.beta2 != c.optimizer.beta2))
      r.warning(fmt::format("optimizer.param_groups[{}].betas", g), "has no effect: OneCycle moves them");
  }
  const i64 cycle = s.cycle_first_step_size + s.cycle_second_step_size;
  if (s.decay_mom_rate <= 0 || s.decay_step_size == 0 || c.steps <= cycle) return;
  const double last = s.cycle_max_mom * (1 + s.decay_mom_rate * static_cast<double>(c.steps - cycle) /
                                                 static_cast<double>(s.decay_step_size));
  if (last >= 1)
    r.error(path_of("decay_mom_rate"),
            fmt::format("lets the momentum grow to {:.4g} in {} steps; it must stay below 1", last, c.steps));
}

}  // namespace

bool scheduler_takes(SchedulerType type, std::string_view param) {
  const auto it = std::ranges::find_if(kParams, [&](const auto& p) { return p.param == param; });
  return it != std::end(kParams) && (it->types & of(type)) != 0;
}

void resolve_scheduler(Config& c, Reader& r) {
  SchedulerConfig& s = c.scheduler;
  if (!r.given("scheduler.type")) {
    s.type = SchedulerType::Constant;
    if (std::ranges::any_of(kParams, [&](const auto& p) { return r.given(path_of(p.param)); }) &&
        !r.broken("scheduler.type"))
      r.error("scheduler.type", fmt::format("is missing: {}", type_text(EnumSlot{nullptr, scheduler_names()}, {})));
    return;
  }
  for (const auto& p : kParams) {
    if (const std::string path = path_of(p.param); r.given(path) && !scheduler_takes(s.type, p.param))
      r.error(path, fmt::format("belongs to {}; the scheduler is {}", names_of(p.types), scheduler_name(s.type)));
  }
  if (!r.given(path_of("warmup_max_lr"))) {
    s.warmup_max_lr = c.optimizer.lr;
    constexpr double kTheirs = 1e-3;
    if (s.type == SchedulerType::WarmupDecayLR && s.warmup_max_lr != kTheirs && !r.automatic(path_of("warmup_max_lr")))
      r.warning("scheduler.type",
                fmt::format("warmup_max_lr is not given: it is optimizer.params.lr, {:.6g}, where DeepSpeed takes {}",
                            s.warmup_max_lr, kTheirs));
  }
  if (!r.given(path_of("total_num_steps"))) s.total_num_steps = c.steps;
  if ((kWarmup & of(s.type)) != 0) warn_of_rates(c, "warmup_max_lr", s.warmup_max_lr, r);
  if (s.type == SchedulerType::LRRangeTest) warn_of_rates(c, "lr_range_test_min_lr", s.lr_range_test_min_lr, r);
  if (s.type == SchedulerType::OneCycle) {
    warn_of_rates(c, "cycle_max_lr", s.cycle_max_lr, r);
    resolve_cycle(c, r);
  }
  if (!r.given(path_of("decay_num_steps"))) s.decay_num_steps = s.total_num_steps / 10;
  if (!r.given(path_of("timescale"))) s.timescale = std::max<i64>(s.warmup_num_steps, 1);

  const bool ends = scheduler_takes(s.type, "total_num_steps");
  if (ends && s.total_num_steps > 0 && s.total_num_steps < s.warmup_num_steps &&
      !r.any_broken({"steps", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"}))
    r.warning(path_of("warmup_num_steps"),
              fmt::format("{} warm-up steps do not fit into {} steps", s.warmup_num_steps, s.total_num_steps));
  else if (s.type == SchedulerType::Wsd && s.total_num_steps > 0 &&
           s.warmup_num_steps + s.decay_num_steps > s.total_num_steps)
    r.warning(path_of("decay_num_steps"), fmt::format("{} steps of decay begin within {} of warm-up: there are {}",
                                                      s.decay_num_steps, s.warmup_num_steps, s.total_num_steps));
}

}  // namespace ds
