// SPDX-License-Identifier: Apache-2.0
#include "config/automatic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "config/keys.h"
#include "config/optimizer_table.h"
#include "config/reader.h"
#include "config/scheduler.h"

namespace ds {
namespace {

constexpr std::string_view kFp16Enabled = "fp16.enabled", kBf16Enabled = "bf16.enabled",
                           kTokenizerKey = "data.tokenizer", kTrainBatch = "train_batch_size",
                           kMicroBatch = "train_micro_batch_size_per_gpu",
                           kGradAccumulation = "gradient_accumulation_steps", kLrKey = "optimizer.params.lr",
                           kMuonLr = "optimizer.params.muon_lr", kAdamLr = "optimizer.params.adam_lr";

// Keys that results of training depend on, among those that take "auto"; a dot at the end stands for a section. What
// else takes it (buckets, limits and places of ZeRO, aio, pipeline.stages, reports) changes speed and memory alone, or
// is off by default.
constexpr std::string_view kDecides[] = {kTrainBatch,
                                         kMicroBatch,
                                         kGradAccumulation,
                                         "optimizer.params.",
                                         "gradient_clipping",
                                         "scheduler.params.",
                                         "fp16.",
                                         "bf16.",
                                         "communication_data_type",
                                         "zero_optimization.zeropp_loco_param.",
                                         kTokenizerKey};

bool decides(ConfigUse use, std::string_view path) {
  if (path == kFp16Enabled || path == kBf16Enabled) return true;
  if (use == ConfigUse::Inspect) return false;
  if (use != ConfigUse::Train) return path == kTokenizerKey;
  return std::ranges::any_of(
      kDecides, [&](std::string_view key) { return key.ends_with('.') ? path.starts_with(key) : path == key; });
}

// Whether the schedule has the rates; optimizer.params.lr then only says in what proportion those of groups are.
bool schedule_has_rates(const Config& c, const Reader& r) {
  switch (c.scheduler.type) {
    case SchedulerType::OneCycle:
    case SchedulerType::LRRangeTest: return true;
    case SchedulerType::WarmupLR:
    case SchedulerType::WarmupDecayLR: return r.given("scheduler.params.warmup_max_lr");
    case SchedulerType::Constant:
    case SchedulerType::WarmupCosineLR:
    case SchedulerType::Linear:
    case SchedulerType::Cosine:
    case SchedulerType::CosineRestarts:
    case SchedulerType::Wsd:
    case SchedulerType::InverseSqrt: return false;
  }
  return false;
}

// Whether nobody has chosen the value of a key.
bool is_open(const Config& c, std::string_view path, const Reader& r) {
  // "auto" makes one of the two precision keys true, perhaps not the one that says "auto".
  if (path == kFp16Enabled) return c.fp16.enabled && !r.given(kFp16Enabled);
  if (path == kBf16Enabled) return c.bf16.enabled && !r.given(kBf16Enabled);
  if (!r.automatic(path)) return false;
  // Or it follows from keys that are given, or has no effect beside them.
  if (path == kTrainBatch || path == kMicroBatch || path == kGradAccumulation)
    return !r.given(kTrainBatch) && !(r.given(kMicroBatch) && r.given(kGradAccumulation));
  if (path == kLrKey) return false;  // missing_rate says when it has an effect
  if (path.starts_with("fp16.")) return c.fp16.enabled;
  if (path.starts_with("bf16.")) return c.bf16.enabled;
  return true;
}

// Parameters that groups of optimizer.param_groups give rates to: none that is trained, some, or every one.
enum class Rated : u8 { None, Some, All };
Rated rated_by_groups(const Config& c, const ConfigText& text) {
  if (c.optimizer.groups.empty()) return Rated::None;
  const Json& groups = text.root().at("optimizer").at("param_groups");
  bool every = true, some = false;
  for (size_t g = 0; g < c.optimizer.groups.size(); ++g) {
    const ParamGroupConfig& group = c.optimizer.groups[g];
    const auto has = [&](const char* key) {
      const auto it = groups[g].find(key);
      return it != groups[g].end() && !it->is_null() && *it != "auto";
    };
    const bool rated =
        has("lr") || (optimizer_takes(group.type, "muon_lr") && has("muon_lr") && has("adam_lr")) || group.frozen;
    some |= rated && !group.frozen;
    every &= rated;
    if (std::ranges::find(group.params, "*") == group.params.end()) continue;
    if (every) return Rated::All;
    break;  // groups behind it have no parameters
  }
  return some ? Rated::Some : Rated::None;
}

// The key of the rate that nobody has given; empty: there is one.
std::string_view missing_rate(const Config& c, Rated rated, const Reader& r) {
  constexpr std::string_view kLeast = "scheduler.params.lr_range_test_min_lr";
  if (c.scheduler.type == SchedulerType::LRRangeTest && !r.given(kLeast)) return kLeast;
  if (schedule_has_rates(c, r) || rated == Rated::All || r.given(kLrKey)) return "";
  return optimizer_takes(c.optimizer.type, "muon_lr") && r.given(kMuonLr) && r.given(kAdamLr) ? "" : kLrKey;
}

}  // namespace

void tell_automatic(const Config& config, const ConfigText& text, Reader& r) {
  Config c = config;  // slots are writable
  constexpr std::string_view kScheduler = "scheduler.params.", kDecay = "optimizer.params.weight_decay";
  const Rated rated = rated_by_groups(c, text);
  const std::string_view rate = config.use == ConfigUse::Train ? missing_rate(c, rated, r) : "";
  std::vector<std::string> of_schedule, others;
  std::string_view first = rate;
  std::string taken;
  for (const Key& key : config_keys()) {
    if (!key.has_effect(c)) continue;
    const std::string value = slot_json(key.slot(&c)).dump();
    if (key.path == rate) {
      taken = value;
    } else if (!rate.empty() && key.path.starts_with(kScheduler)) {
      of_schedule.push_back(fmt::format("{} {}", key.path.substr(kScheduler.size()), value));
    } else if ((!rate.empty() && key.path == kDecay && !r.given(kDecay)) ||
               (decides(config.use, key.path) && is_open(c, key.path, r))) {
      others.push_back(fmt::format("{} {}", key.path, value));
      if (first.empty()) first = key.path == kBf16Enabled && !r.automatic(kBf16Enabled) ? kFp16Enabled : key.path;
    }
  }
  if (first.empty()) return;
  const std::string list = fmt::format("{}", fmt::join(others, ", "));
  if (rate.empty())
    return r.warning(first,
                     fmt::format("results depend on what \"auto\" leaves open; the run takes: {}; give the values "
                                 "that you want",
                                 list));
  const std::string schedule =
      c.scheduler.type == SchedulerType::Constant
          ? std::string("in every step, with neither warm-up nor decay")
          : fmt::format("with the schedule {} ({})", scheduler_name(c.scheduler.type), fmt::join(of_schedule, ", "));
  r.warning(rate, fmt::format("no learning rate is given{}, and the run takes {} {}{}{}; give the values that you want",
                              rate == kLrKey && rated == Rated::Some ? " beside those of optimizer.param_groups" : "",
                              taken, schedule, list.empty() ? "" : "; ", list));
}

}  // namespace ds
