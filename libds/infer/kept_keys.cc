// SPDX-License-Identifier: Apache-2.0
#include "infer/kept_keys.h"

#include <algorithm>
#include <bit>
#include <queue>

namespace ds::infer {
namespace {

constexpr i64 kPage = 64;  // without a layout

// The last block of queries before `end` that attends to a block of keys in any of some heads; -1: none.
i64 last_query_block(const model::AttentionLayout& layout, i64 head, i64 heads, i64 key, i64 end) {
  i64 last = -1;
  const bool differ = layout.layouts() > 1;
  for (i64 h = differ ? head : 0; h < (differ ? head + heads : 1); ++h) {
    const u64* const bits = layout.queries_of(h, key);
    for (i64 word = (end - 1) / 64; word >= 0 && last < 64 * word + 63; --word) {
      u64 some = bits[word];
      if (end < 64 * (word + 1)) some &= (u64{1} << end % 64) - 1;
      if (some != 0) {
        last = std::max(last, 64 * word + 63 - std::countl_zero(some));
        break;
      }
    }
  }
  return last;
}

}  // namespace

KeptKeys::KeptKeys(const model::AttentionLayout* layout, i64 head, i64 heads, i64 window, i64 prompt, i64 positions)
    : rows_(positions) {
  if (layout == nullptr && window == 0) return;
  const i64 page = layout != nullptr ? layout->block() : kPage, count = (positions + page - 1) / page;
  // The last token that sees a key of the page.
  const auto last_reader = [&](i64 p) {
    i64 last = positions - 2;
    if (window > 0) last = std::min(last, std::min(positions, (p + 1) * page) - 1 + window - 1);
    if (layout == nullptr) return last;
    return std::min(last, (last_query_block(*layout, head, heads, p, last / page + 1) + 1) * page - 1);
  };
  struct Taken {
    i64 last_reader;
    i32 place;
    bool operator>(const Taken& other) const { return last_reader > other.last_reader; }
  };
  std::priority_queue<Taken, std::vector<Taken>, std::greater<>> taken;
  std::vector<i32> places(static_cast<size_t>(count), -1), free;
  i32 num_places = 0;
  for (i64 p = 0; p < count; ++p) {
    const i64 first_reader = std::max(prompt, p * page), last = last_reader(p);
    if (last < first_reader) continue;
    for (; !taken.empty() && taken.top().last_reader < first_reader; taken.pop()) free.push_back(taken.top().place);
    if (free.empty()) free.push_back(num_places++);
    places[p] = free.back();
    free.pop_back();
    taken.push({last, places[p]});
  }
  if (num_places * page >= positions) return;
  rows_ = num_places * page;
  page_ = page;
  places_ = std::move(places);
}

}  // namespace ds::infer
