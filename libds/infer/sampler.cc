// SPDX-License-Identifier: Apache-2.0
#include "infer/sampler.h"

#include <iterator>
#include <limits>
#include <map>

namespace ds::infer {

namespace {

constexpr u32 kSamplingSite = 0x40000000u;

std::map<i32, LogitChange> changes_of(const Sampling& o, std::span<const i32> text, i64 prompt) {
  std::map<i32, LogitChange> changes;
  if (o.repetition_penalty != 1) {
    for (const i32 id : text) changes[id].repetition = static_cast<float>(o.repetition_penalty);
  }
  const std::span<const i32> generated = text.subspan(static_cast<size_t>(prompt));
  if (o.presence_penalty != 0 || o.frequency_penalty != 0) {
    std::map<i32, i64> times;
    for (const i32 id : generated) ++times[id];
    for (const auto& [id, n] : times)
      changes[id].less = static_cast<float>(o.presence_penalty + o.frequency_penalty * static_cast<double>(n));
  }
  if (std::ssize(generated) < o.banned_for) {
    for (const i32 id : o.banned) changes[id].less = std::numeric_limits<float>::infinity();
  }
  return changes;
}

}  // namespace

Draw draw_of(const Sampling& o, std::span<const i32> text, i64 prompt, std::vector<LogitChange>& changes) {
  const auto bits = [&](u32 site) { return u64{RngKey{o.seed, site, o.index}.bits(text.size())}; };
  Draw draw{.temperature = o.temperature,
            .top_k = o.top_k,
            .top_p = o.top_p,
            .min_p = o.min_p,
            .random = bits(kSamplingSite) << 32 | bits(kSamplingSite + 1),
            .first_change = std::ssize(changes)};
  for (auto& [id, change] : changes_of(o, text, prompt)) {
    change.id = id;
    changes.push_back(change);
  }
  draw.num_changes = std::ssize(changes) - draw.first_change;
  return draw;
}

}  // namespace ds::infer
