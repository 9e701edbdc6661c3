// SPDX-License-Identifier: Apache-2.0
#include "plan/step_lengths.h"

#include <algorithm>

#include "config/curriculum.h"
#include "config/random_ltd.h"

namespace ds::plan {
namespace {

i64 sequence_of_step(const Config& c, i64 step) {
  const i64 whole = c.data.seq_length;
  return c.curriculum.enabled ? std::min(whole, curriculum_length(c.curriculum, step)) : whole;
}

i64 kept_of_step(const Config& c, i64 step) { return c.random_ltd.on() ? random_ltd_kept(c.random_ltd, step) : 0; }

// The last step up to `last` that has the value of `step`; values do not shrink.
template <class F>
i64 last_like(i64 step, i64 last, F&& value) {
  const i64 here = value(step);
  if (value(last) == here) return last;
  while (last - step > 1) {
    const i64 middle = step + (last - step) / 2;
    (value(middle) == here ? step : last) = middle;
  }
  return step;
}

// The last step up to `last` that has the lengths of `step`.
i64 last_like(const Config& c, i64 step, i64 last) {
  if (c.curriculum.enabled && c.curriculum.schedule == CurriculumSchedule::FixedDiscrete) {  // lengths may shrink
    const auto end = std::ranges::lower_bound(c.curriculum.max_step, step);
    if (end != c.curriculum.max_step.end()) last = std::min(last, *end);
  }
  last = last_like(step, last, [&](i64 s) { return sequence_of_step(c, s); });
  return last_like(step, last, [&](i64 s) { return kept_of_step(c, s); });
}

}  // namespace

PassLengths lengths_of_step(const Config& c, i64 step) {
  PassLengths lengths{.sequence = sequence_of_step(c, step), .kept = kept_of_step(c, step)};
  if (lengths.kept >= lengths.sequence) lengths.kept = 0;
  return lengths;
}

StepLengths step_lengths(const Config& c, i64 steps) {
  StepLengths all;
  const auto add = [&](i64 begin, i64 end) {  // steps (begin, end] are like the last one of them
    const PassLengths lengths = lengths_of_step(c, end);
    auto kind = std::ranges::find(all.kinds, lengths, &StepLengths::Kind::lengths);
    if (kind == all.kinds.end()) kind = all.kinds.insert(kind, {lengths, 0});
    kind->steps += end - begin;
  };
  for (i64 done = 0; done < steps && all.complete;) {
    const i64 end = last_like(c, done + 1, steps);
    add(done, end);
    done = end;
    all.complete = std::ssize(all.kinds) <= StepLengths::kMost;
  }
  if (all.complete) return all;
  all.kinds.clear();
  for (i64 k = 0; k < StepLengths::kMost; ++k)
    add(k * (steps / StepLengths::kMost), k + 1 < StepLengths::kMost ? (k + 1) * (steps / StepLengths::kMost) : steps);
  return all;
}

Config of_whole_sequences(Config config) {
  config.curriculum.enabled = false;
  config.random_ltd.require_steps = 0;
  return config;
}

}  // namespace ds::plan
