// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <vector>

#include "ref/ref.h"
#include "sampling.h"

namespace ds::ref {
namespace {

// Tokens in the order of their probabilities are cut by one filter after the other.
i32 draw_token(const std::vector<float>& z, const Draw& d) noexcept {
  std::vector<i32> ids(z.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids, [&](i32 a, i32 b) { return z[a] > z[b]; });
  if (d.temperature == 0 || z[ids[0]] == sampling::kBanned) return ids[0];
  const sampling::Weights weight = sampling::Weights::of(z[ids[0]], d.temperature);
  const auto total = [&] {
    u64 sum = 0;
    for (const i32 id : ids) sum += weight(z[id]);
    return sum;
  };
  if (d.top_k > 0 && d.top_k < std::ssize(ids)) ids.resize(static_cast<size_t>(d.top_k));
  if (d.top_p < 1) {
    const u64 need = sampling::share_of(d.top_p, total());
    size_t n = 0;
    for (u64 sum = 0; sum < need; ++n) sum += weight(z[ids[n]]);
    ids.resize(n);
  }
  if (d.min_p > 0) {
    const u64 least = sampling::share_of(d.min_p, sampling::kOne);
    std::erase_if(ids, [&](i32 id) { return weight(z[id]) < least; });
  }
  u64 left = sampling::place_of(d.random, total());
  size_t i = 0;
  for (; left >= weight(z[ids[i]]); ++i) left -= weight(z[ids[i]]);
  return ids[i];
}

}  // namespace

void sample(TensorView tokens, TensorView most_likely, TensorView logits, const Draw* draws, LogitChange* changes,
            Stream&) noexcept {
  for (i64 r = 0; r < logits.dim(0); ++r) {
    const float* const row = logits.as<float>() + r * logits.stride[0];
    std::vector<float> z(row, row + logits.dim(1));
    i32 &token = tokens.as<i32>()[r], &most = most_likely.as<i32>()[r];
    token = most = -1;
    if (!std::ranges::all_of(z, sampling::is_finite)) continue;
    most = static_cast<i32>(std::ranges::max_element(z) - z.begin());
    for (i64 i = 0; i < draws[r].num_changes; ++i) {
      const LogitChange& c = changes[draws[r].first_change + i];
      z[c.id] = sampling::changed(z[c.id], c);
    }
    token = draw_token(z, draws[r]);
  }
}

}  // namespace ds::ref
