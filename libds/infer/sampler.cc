// SPDX-License-Identifier: Apache-2.0
#include "infer/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

namespace ds::infer {

namespace {

// The first of the largest. Finite numbers compare as these integers, but for zeros, so the loop is one of vectors.
i32 most_likely(std::span<const float> logits) noexcept {
  const auto order = [](float x) {
    const i32 bits = std::bit_cast<i32>(x + 0.0f);  // -0 becomes 0
    return bits < 0 ? bits ^ 0x7fffffff : bits;
  };
  i32 most = std::numeric_limits<i32>::min();
  for (const float x : logits) most = std::max(most, order(x));
  return static_cast<i32>(std::ranges::find(logits, most, order) - logits.begin());
}

}  // namespace

std::span<const float> Sampler::penalised(std::span<const float> logits, const Sampling& o, std::span<const i32> text,
                                          i64 prompt) {
  logits_.assign(logits.begin(), logits.end());
  if (o.repetition_penalty != 1) {
    const float penalty = static_cast<float>(o.repetition_penalty);
    for (const i32 id : std::set<i32>(text.begin(), text.end()))
      logits_[id] = logits_[id] < 0 ? logits_[id] * penalty : logits_[id] / penalty;
  }
  if (o.presence_penalty != 0 || o.frequency_penalty != 0) {
    std::map<i32, i64> times;
    for (const i32 id : text.subspan(static_cast<size_t>(prompt))) ++times[id];
    for (const auto& [id, n] : times)
      logits_[id] -= static_cast<float>(o.presence_penalty + o.frequency_penalty * static_cast<double>(n));
  }
  if (std::ssize(text) - prompt >= o.banned_for) return logits_;
  for (const i32 id : o.banned) logits_[id] = -std::numeric_limits<float>::infinity();
  return logits_;
}

i32 Sampler::sample(std::span<const float> given, const Sampling& o, std::span<const i32> text, i64 prompt) {
  const std::span<const float> logits = o.changes_logits() ? penalised(given, o, text, prompt) : given;
  const i32 top = most_likely(logits);
  if (o.temperature == 0 || o.top_k == 1) return top;
  const auto before = [&](i32 a, i32 b) {
    const float x = logits[a], y = logits[b];
    return x > y || (x == y && a < b);
  };
  const double most = static_cast<double>(logits[top]);
  const auto weight = [&](i32 id) { return std::exp((static_cast<double>(logits[id]) - most) / o.temperature); };
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  if (o.top_k > 0 && o.top_k < std::ssize(order_)) {
    std::nth_element(order_.begin(), order_.begin() + (o.top_k - 1), order_.end(), before);
    order_.resize(o.top_k);
    std::sort(order_.begin(), order_.end());  // so that the sum is in the order of ids
  }
  double total = 0;
  for (const i32 id : order_) total += weight(id);

  // From the most likely token on. A few usually suffice, so there is no need to sort all of them. Tokens that have
  // been taken gather at the end, the first one last.
  const auto after = [&](i32 a, i32 b) { return before(b, a); };
  auto end = order_.end();
  const auto next = [&] {
    std::pop_heap(order_.begin(), end, after);
    return *--end;
  };
  std::make_heap(order_.begin(), end, after);
  const bool filtered = o.top_p < 1 || o.min_p > 0;
  double kept = filtered ? 0 : total;
  while (filtered && (kept == 0 || kept < o.top_p * total) && end != order_.begin()) {
    const double w = weight(next());
    if (kept > 0 && w < o.min_p) {  // the largest weight is 1
      ++end;
      break;
    }
    kept += w;
  }
  constexpr u32 kSamplingSite = 0x40000000u;
  const RngKey key{o.seed, kSamplingSite, o.index};
  double left = kept * static_cast<double>(RngKey::uniform(key.bits(static_cast<u64>(std::ssize(text)))));
  const auto last = filtered ? end : order_.begin();
  for (auto at = order_.end(); at != last;) {
    if (at == end) next();
    left -= weight(*--at);
    if (left <= 0) return *at;
  }
  return *last;
}

}  // namespace ds::infer
