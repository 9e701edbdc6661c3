// SPDX-License-Identifier: Apache-2.0
#include "infer/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ds::infer {

i32 sample(std::span<const float> logits, const Sampling& o, i64 position, std::vector<i32>& order) {
  const auto less = [&](i32 a, i32 b) {
    const float x = logits[a], y = logits[b];
    return x < y || (x == y && a > b);
  };
  order.resize(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto top = std::max_element(order.begin(), order.end(), less);
  if (o.temperature == 0) return *top;
  const double most = static_cast<double>(logits[*top]);
  const auto weight = [&](i32 id) { return std::exp((static_cast<double>(logits[id]) - most) / o.temperature); };
  if (o.top_k > 0 && o.top_k < std::ssize(order)) {
    std::nth_element(order.begin(), order.begin() + (o.top_k - 1), order.end(),
                     [&](i32 a, i32 b) { return less(b, a); });
    order.resize(o.top_k);
    std::sort(order.begin(), order.end());  // so that the sum is in the order of ids
  }
  double total = 0;
  for (const i32 id : order) total += weight(id);
  constexpr u32 kSamplingSite = 0x40000000u;
  const RngKey key{o.seed, kSamplingSite, 0};
  double left = total * static_cast<double>(RngKey::uniform(key.bits(static_cast<u64>(position))));
  // From the most likely token on. A few usually suffice, so there is no need to sort all of them.
  std::make_heap(order.begin(), order.end(), less);
  for (auto end = order.end();; --end) {
    std::pop_heap(order.begin(), end, less);
    const i32 id = *(end - 1);
    left -= weight(id);
    if (left <= 0 || end - 1 == order.begin()) return id;
  }
}

}  // namespace ds::infer
