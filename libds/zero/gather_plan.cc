// SPDX-License-Identifier: Apache-2.0
#include "zero/gather_plan.h"

#include <algorithm>
#include <map>

namespace ds::zero {
namespace {

// First-fit placement of the gathered units in one pool.
class Pool {
 public:
  i64 take(i64 unit, i64 elems) {
    i64 offset = 0;
    for (const auto& [begin, block] : blocks_) {
      if (begin - offset >= elems) break;
      offset = begin + block.elems;
    }
    blocks_[offset] = {unit, elems};
    size_ = std::max(size_, offset + elems);
    return offset;
  }
  void give_back(i64 unit) {
    std::erase_if(blocks_, [unit](const auto& entry) { return entry.second.unit == unit; });
  }
  i64 size() const noexcept { return size_; }

 private:
  struct Block {
    i64 unit, elems;
  };
  std::map<i64, Block> blocks_;  // by offset
  i64 size_ = 0;
};

}  // namespace

GatherPlan plan_gathers(std::vector<Access> accesses, std::span<const i64> unit_elems, const GatherKnobs& knobs) {
  GatherPlan plan;
  plan.accesses = std::move(accesses);
  plan.steps.resize(plan.accesses.size());
  std::vector<bool> live(unit_elems.size(), false);
  const auto elems = [&](i64 unit) { return unit_elems[static_cast<size_t>(unit)]; };
  i64 live_elems = 0;
  Pool pool;

  const auto launch = [&](GatherStep& step, i64 unit) {
    live[static_cast<size_t>(unit)] = true;
    live_elems += elems(unit);
    plan.gathered_elems += elems(unit);
    plan.peak_live_elems = std::max(plan.peak_live_elems, live_elems);
    step.launch.push_back({unit, pool.take(unit, elems(unit))});
  };
  const auto absent = [&](i64 unit) { return elems(unit) > 0 && !live[static_cast<size_t>(unit)]; };
  // Elements used from access `from` on until `unit` has been used again, that use included; -1: never again.
  const auto reuse_distance = [&](size_t from, i64 unit) {
    i64 distance = 0;
    for (size_t a = from; a < plan.accesses.size(); ++a) {
      for (const i64 other : plan.accesses[a]) distance += elems(other);
      if (std::find(plan.accesses[a].begin(), plan.accesses[a].end(), unit) != plan.accesses[a].end()) return distance;
    }
    return i64{-1};
  };

  for (size_t a = 0; a < plan.accesses.size(); ++a) {
    GatherStep& step = plan.steps[a];
    for (const i64 unit : plan.accesses[a]) {
      if (absent(unit)) launch(step, unit);
    }
    i64 budget = knobs.prefetch_bucket;
    for (size_t ahead = a + 1; ahead < plan.accesses.size() && budget > 0; ++ahead) {
      for (const i64 unit : plan.accesses[ahead]) {
        if (!absent(unit)) continue;
        // The last one may exceed the budget, as in DeepSpeed: a unit is a whole layer, often larger than the bucket.
        if (budget <= 0 || live_elems + elems(unit) > knobs.max_live) {
          budget = 0;  // in trace order: what does not fit ends the prefetch
          break;
        }
        budget -= elems(unit);
        launch(step, unit);
      }
    }
    for (const i64 unit : plan.accesses[a]) {
      if (!live[static_cast<size_t>(unit)]) continue;
      const i64 distance = reuse_distance(a + 1, unit);
      if (distance >= 0 && distance <= knobs.max_reuse_distance && live_elems <= knobs.max_live) continue;
      step.release.push_back(unit);
      live[static_cast<size_t>(unit)] = false;
      live_elems -= elems(unit);
      pool.give_back(unit);
    }
  }
  plan.pool_elems = pool.size();
  return plan;
}

}  // namespace ds::zero
