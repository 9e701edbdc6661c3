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

}  // namespace ds::zero
