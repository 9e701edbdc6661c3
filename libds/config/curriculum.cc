// SPDX-License-Identifier: Apache-2.0
#include "config/curriculum.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "config/parallel.h"

namespace ds {
namespace {

using Schedule = CurriculumSchedule;

constexpr std::string_view kSection = "curriculum_learning.", kMin = "curriculum_learning.min_difficulty",
                           kMax = "curriculum_learning.max_difficulty", kType = "curriculum_learning.schedule_type",
                           kTotal = "curriculum_learning.schedule_config.total_curriculum_step",
                           kStep = "curriculum_learning.schedule_config.difficulty_step",

                           kLengths = "curriculum_learning.schedule_config.difficulty",
                           kSteps = "curriculum_learning.schedule_config.max_step";

// The first step whose sequences have so many tokens or more; 0: none has. Lengths do not shrink.
i64 first_step_of(const CurriculumConfig& c, i64 length) {
  i64 low = 0, high = c.total_curriculum_step;
  if (curriculum_length(c, high) < length) return 0;
  while (high - low > 1) {
    const i64 middle = low + (high - low) / 2;
    (curriculum_length(c, middle) < length ? low : high) = middle;
  }
  return high;
}

// Whether the lengths of a list can be asked for at all.
bool check_discrete(const CurriculumConfig& c, Reader& r) {
  if (r.any_broken({kLengths, kSteps})) return false;
  if (c.difficulty.empty()) {
    r.error(kLengths, "is missing: the lengths of \"fixed_discrete\"");
    return false;
  }
  if (c.difficulty.size() != c.max_step.size() + 1) {
    r.error(kSteps, fmt::format("has {} numbers for the {} of {}: each length but the last one has its last step",
                                c.max_step.size(), c.difficulty.size(), kLengths));
    return false;
  }
  if (std::ranges::adjacent_find(c.max_step, std::greater_equal<>()) != c.max_step.end()) {
    r.error(kSteps, "must be steps that grow");
    return false;
  }
  return true;
}

bool check_growing(const CurriculumConfig& c, Reader& r) {
  for (const std::string_view key : {kMin, kMax, kTotal, kStep}) {
    if (r.broken(key)) return false;
  }
  bool all = true;
  const auto demand = [&](std::string_view key, std::string_view what) {
    if (r.given(key)) return;
    r.error(key, fmt::format("is missing: {}", what));
    all = false;
  };
  demand(kMax, "tokens of the last sequences");
  demand(kTotal, "steps until the longest sequences");
  if (!all) return false;
  if (c.min_difficulty > c.max_difficulty) {
    r.error(kMin, fmt::format("{} is above {}, {}", c.min_difficulty, kMax, c.max_difficulty));
    return false;
  }
  return true;
}

}  // namespace

i64 curriculum_length(const CurriculumConfig& c, i64 step) {
  if (c.schedule == Schedule::FixedDiscrete) {
    const auto past = std::ranges::lower_bound(c.max_step, step) - c.max_step.begin();
    return c.difficulty[static_cast<size_t>(past)];
  }
  const double min = static_cast<double>(c.min_difficulty), max = static_cast<double>(c.max_difficulty);
  const double degree = c.schedule == Schedule::FixedRoot ? static_cast<double>(c.root_degree) : 1;
  const double share = std::pow(static_cast<double>(step) / static_cast<double>(c.total_curriculum_step), 1.0 / degree);
  const double length = std::min(std::floor(share * (max - min) + min), 0x1p40);
  const i64 whole = static_cast<i64>(length), step_size = c.difficulty_step;
  const i64 least = (c.min_difficulty + step_size - 1) / step_size * step_size;
  return std::min(std::max(whole - whole % step_size, least), c.max_difficulty);
}

std::vector<i64> curriculum_lengths(const CurriculumConfig& c, i64 most) {
  std::vector<i64> lengths;
  if (c.schedule == Schedule::FixedDiscrete) {
    lengths = c.difficulty;
    std::ranges::sort(lengths);
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    return lengths;
  }
  for (i64 length = curriculum_length(c, 1); length < std::min(c.max_difficulty, most); length += c.difficulty_step) {
    const i64 step = first_step_of(c, length);
    if (step > 0 && curriculum_length(c, step) == length) lengths.push_back(length);
  }
  // Behind the last step of the schedule lengths go on to grow, to the longest.
  lengths.push_back(c.max_difficulty);
  return lengths;
}

void check_curriculum(const Config& config, Reader& r) {
  const CurriculumConfig& c = config.curriculum;
  if (!c.enabled || !trains(config.use) || r.broken(kType)) return;
  if (config.model.layers > 0 && !config.model.causal())
    return r.error(fmt::format("{}enabled", kSection),
                   "cuts off the end of samples, and samples of a model that is not causal end with [SEP]",
                   Errc::Unavailable);
  if (config.sparse_attention.mode != SparseAttentionMode::None)
    return r.error(fmt::format("{}enabled", kSection), "a layout of sparse attention is of sequences of one length",
                   Errc::Unavailable);
  if (config.activation_checkpointing.cpu_checkpointing || !config.activation_checkpointing.nvme_path.empty())
    return r.error(fmt::format("{}enabled", kSection),
                   "inputs of layers that are kept away from the device are of sequences of one length",
                   Errc::Unavailable);
  if (config.data.packing != DataPacking::None)
    return r.error(fmt::format("{}enabled", kSection),
                   "cuts off the end of samples, and would never see the last documents that data.packing put "
                   "into them",
                   Errc::Unavailable);
  const bool discrete = c.schedule == Schedule::FixedDiscrete;
  if (discrete ? !check_discrete(c, r) : !check_growing(c, r)) return;
  if (r.broken("data.seq_length")) return;
  const i64 whole = config.data.seq_length;
  const i64 longest = discrete ? std::ranges::max(c.difficulty) : c.max_difficulty;
  if (longest > whole)
    r.warning(discrete ? kLengths : kMax,
              fmt::format("{} is beyond data.seq_length {}: samples are whole from there on", longest, whole));
  // Parallelism that cuts sequences must be able to cut every length.
  if (config.sequence_parallel.size == 1 && !config.tensor_parallel.sequence_parallel) return;
  const std::vector<i64> lengths = curriculum_lengths(c, whole);
  for (const i64 length : lengths) {
    if (length >= whole) break;
    const std::string why = length_problem(config, length);
    if (why.empty()) continue;
    return r.error(discrete ? kLengths : kStep, fmt::format("makes sequences of {} tokens: {}", length, why));
  }
}

}  // namespace ds
