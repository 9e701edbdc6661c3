// SPDX-License-Identifier: Apache-2.0
#include "zero/gather_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace ds::zero {
namespace {

constexpr i64 kNever = -1, kAbsent = -1;

// First-fit placement of the gathered units in one pool. It keeps the gaps, of which there are few, and not the units:
// a model may have 10^5 of them, and planning must not become quadratic.
class Pool {
 public:
  i64 take(i64 elems) {
    auto gap = gaps_.begin();
    while (gap->second < elems) ++gap;
    const auto [offset, free] = *gap;
    gaps_.erase(gap);
    if (free > elems) gaps_.emplace(offset + elems, free - elems);
    size_ = std::max(size_, offset + elems);
    return offset;
  }
  void give_back(i64 offset, i64 elems) {
    const auto after = gaps_.upper_bound(offset);
    if (after->first == offset + elems) {
      elems += after->second;
      gaps_.erase(after);
    }
    const auto next = gaps_.upper_bound(offset);
    if (next != gaps_.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
      std::prev(next)->second += elems;
    } else {
      gaps_.emplace(offset, elems);
    }
  }
  i64 size() const noexcept { return size_; }

 private:
  // Offset -> elements; the last gap, after all units, has no end.
  std::map<i64, i64> gaps_ = {{0, std::numeric_limits<i64>::max()}};
  i64 size_ = 0;
};

}  // namespace

GatherPlan plan_gathers(std::vector<Access> accesses, std::span<const i64> unit_elems, const GatherKnobs& knobs) {
  GatherPlan plan;
  plan.accesses = std::move(accesses);
  plan.steps.resize(plan.accesses.size());
  const size_t num_accesses = plan.accesses.size();
  const auto elems = [&](i64 unit) { return unit_elems[unit]; };

  // Uses are numbered along the trace. used_before[a]: elements used by the accesses before a.
  struct Use {
    i64 unit;
    size_t access;
    i64 next;  // the unit's next use, or kNever
  };
  std::vector<Use> uses;
  std::vector<i64> used_before = {0}, next_use(unit_elems.size(), kNever);  // next_use[unit]: of the present access
  for (size_t a = 0; a < num_accesses; ++a) {
    used_before.push_back(used_before.back());
    for (const i64 unit : plan.accesses[a]) {
      uses.push_back({unit, a, kNever});
      used_before.back() += elems(unit);
    }
  }
  for (i64 i = narrow<i64>(uses.size()); i-- > 0;) {
    Use& use = uses[i];
    use.next = std::exchange(next_use[use.unit], i);
  }

  // Units that are not gathered are in `wanted`, keyed by their next use: a prefetch visits them in the order of the
  // trace, and none that is gathered already.
  std::vector<i64> offset(unit_elems.size(), kAbsent);  // in the pool
  std::set<i64> wanted;
  for (const i64 use : next_use) {
    if (use != kNever && elems(uses[use].unit) > 0) wanted.insert(use);
  }
  i64 live_elems = 0;
  Pool pool;
  const auto launch = [&](GatherStep& step, i64 unit) {
    wanted.erase(next_use[unit]);
    live_elems += elems(unit);
    plan.gathered_elems += elems(unit);
    plan.peak_live_elems = std::max(plan.peak_live_elems, live_elems);
    offset[unit] = pool.take(elems(unit));
    step.launch.push_back({unit, offset[unit]});
  };

  for (size_t a = 0; a < num_accesses; ++a) {
    GatherStep& step = plan.steps[a];
    for (const i64 unit : plan.accesses[a]) {
      if (elems(unit) > 0 && offset[unit] == kAbsent) launch(step, unit);
    }
    for (i64 budget = knobs.prefetch_bucket; budget > 0 && !wanted.empty();) {
      const i64 unit = uses[*wanted.begin()].unit;
      if (live_elems + elems(unit) > knobs.max_live) break;  // a unit that does not fit ends the prefetch
      // The last one may exceed the budget, as in DeepSpeed: a unit is a whole layer, often larger than the bucket.
      budget -= elems(unit);
      launch(step, unit);
    }
    for (const i64 unit : plan.accesses[a]) {
      i64& next = next_use[unit];
      next = uses[next].next;
      i64& at = offset[unit];
      if (at == kAbsent) continue;
      if (knobs.keep_next && next != kNever && uses[next].access == a + 1) continue;
      if (next != kNever && live_elems <= knobs.max_live) {
        // Elements used from now on until the unit has been used again, that use included.
        const i64 distance = used_before[uses[next].access + 1] - used_before[a + 1];
        if (distance <= knobs.max_reuse_distance) continue;
      }
      step.release.push_back(unit);
      live_elems -= elems(unit);
      pool.give_back(at, elems(unit));
      at = kAbsent;
      if (next != kNever) wanted.insert(next);
    }
  }
  plan.pool_elems = pool.size();
  return plan;
}

namespace {

// Offsets in the pool by unit; kAbsent: not gathered.
using Offsets = std::vector<i64>;

// One pass. carried: those that are gathered at its begin, in this order.
struct StreamPass {
  GatherPlan plan;
  Offsets end;
};
StreamPass stream_pass(const std::vector<Access>& accesses, std::span<const i64> unit_elems,
                       const std::vector<std::vector<i64>>& wanted, const std::vector<GatherStep::Launch>& carried) {
  StreamPass pass{.plan = {}, .end = Offsets(unit_elems.size(), kAbsent)};
  GatherPlan& plan = pass.plan;
  Offsets& offset = pass.end;
  plan.accesses = accesses;
  plan.carried = carried;
  Pool pool;
  // The places of the pass before: what lies between them is free.
  std::vector<GatherStep::Launch> sorted = carried;
  std::ranges::sort(sorted, {}, &GatherStep::Launch::offset);
  std::vector<std::pair<i64, i64>> between;
  i64 at = 0;
  for (const auto& [unit, begin] : sorted) {
    if (begin > at) between.emplace_back(pool.take(begin - at), begin - at);
    offset[unit] = pool.take(unit_elems[unit]);
    plan.peak_live_elems += unit_elems[unit];
    at = begin + unit_elems[unit];
  }
  for (const auto& [begin, elems] : between) pool.give_back(begin, elems);
  i64 live = plan.peak_live_elems;
  for (size_t a = 0; a < accesses.size(); ++a) {
    GatherStep& step = plan.steps.emplace_back();
    const std::vector<i64>& window = wanted[a];
    for (const i64 unit : window) {
      if (offset[unit] != kAbsent) continue;
      offset[unit] = pool.take(unit_elems[unit]);
      step.launch.push_back({unit, offset[unit]});
      live += unit_elems[unit];
      plan.gathered_elems += unit_elems[unit];
    }
    plan.peak_live_elems = std::max(plan.peak_live_elems, live);
    const std::vector<i64>& later = wanted[(a + 1) % accesses.size()];
    for (const i64 unit : accesses[a]) {
      const bool stays = std::ranges::find(later, unit) != later.end() && (a + 1 < accesses.size() || !carried.empty());
      if (offset[unit] == kAbsent || stays) continue;
      step.release.push_back(unit);
      pool.give_back(std::exchange(offset[unit], kAbsent), unit_elems[unit]);
      live -= unit_elems[unit];
    }
  }
  plan.pool_elems = pool.size();
  return pass;
}

}  // namespace

GatherPlan plan_stream(std::vector<Access> accesses, std::span<const i64> unit_elems, size_t ahead, bool repeats) {
  const size_t n = accesses.size();
  // wanted[a]: the units of access a and of the next ones.
  const auto wanted_of = [&](bool wraps) {
    std::vector<std::vector<i64>> wanted(n);
    for (size_t a = 0; a < n; ++a) {
      size_t more = ahead + 1;
      for (size_t i = a; i < (wraps ? a + n : n) && more > 0; ++i) {
        bool any = i == a;
        for (const i64 unit : accesses[i % n]) {
          if (unit_elems[unit] == 0) continue;
          any = true;
          if (std::ranges::find(wanted[a], unit) == wanted[a].end()) wanted[a].push_back(unit);
        }
        more -= any ? 1 : 0;
      }
    }
    return wanted;
  };
  if (repeats && n > 0) {
    const std::vector<std::vector<i64>> wanted = wanted_of(true);
    // The beginning of a pass as the end of one leaves it; pools soon do the same in each pass.
    std::vector<GatherStep::Launch> carried;
    i64 at = 0;
    for (const i64 unit : wanted[n - 1]) {
      const bool goes = std::ranges::find(accesses[n - 1], unit) != accesses[n - 1].end() &&
                        std::ranges::find(wanted[0], unit) == wanted[0].end();
      if (!goes) carried.push_back({unit, std::exchange(at, at + unit_elems[unit])});
    }
    constexpr int kMostTries = 16;
    for (int i = 0; i < kMostTries && !carried.empty(); ++i) {
      StreamPass pass = stream_pass(accesses, unit_elems, wanted, carried);
      bool same = true;
      for (auto& [unit, offset] : carried) same &= std::exchange(offset, pass.end[unit]) == pass.end[unit];
      if (same) return std::move(pass.plan);
    }
  }
  return stream_pass(accesses, unit_elems, wanted_of(false), {}).plan;
}

}  // namespace ds::zero
