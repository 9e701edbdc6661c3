// SPDX-License-Identifier: Apache-2.0
#include "zero/grad_store.h"

#include <algorithm>
#include <ranges>

namespace ds::zero {

GradStore::GradStore(const Layout& layout, GradRows rows, GradOptions options, const GradParts& parts)
    : layout_(layout),
      options_(std::move(options)),
      fresh_(layout, rows, options_, parts.ranks.all, parts.device, parts.ledger),
      sums_(layout, rows, options_, parts.ranks.all, parts.device, parts.ledger, parts.tier),
      summed_(fresh_.num_buckets(), false) {
  assign_reductions(parts);
}

void GradStore::assign_reductions(const GradParts& parts) {
  const std::span<const Segment> segments = layout_.segments();
  const size_t dense = options_.reductions.size();
  std::vector<std::vector<i64>> assigned(dense + 1);
  for (i64 s = 0; s < std::ssize(segments); ++s) {
    const auto has = [&](const ReductionKind& kind) {
      return kind.units.empty() || std::ranges::find(kind.units, segments[s].unit) != kind.units.end();
    };
    const auto found = std::ranges::find_if(options_.reductions, has);
    reduction_.push_back(segments[s].persistent ? dense : static_cast<size_t>(found - options_.reductions.begin()));
    assigned[reduction_.back()].push_back(s);
  }
  for (size_t k = 0; k <= dense; ++k) {
    const ReductionParts of_kind{.layout = layout_,
                                 .options = options_,
                                 .with = parts,
                                 .fresh = fresh_,
                                 .sums = sums_,
                                 .segments = std::move(assigned[k])};
    reductions_.push_back(k < dense ? options_.reductions[k].make(of_kind) : make_dense_reduction(of_kind));
  }
}

void GradStore::begin(const GradStep& step) {
  reduces_ = step.reduces;
  for (const auto& r : reductions_) r->begin(step);
}

std::span<const TensorView> GradStore::acquire(i64 unit) {
  const size_t bucket = fresh_.bucket_of(unit);
  const std::vector<i64>& units = fresh_.bucket(bucket).units;
  if (unit != units.front()) return rows(unit);
  for (const auto& r : reductions_ | std::views::reverse) r->release(bucket);
  if (summed_[bucket] && !sums_.in_place()) {
    for (const i64 u : units) {
      for (const Segment& s : layout_.segments_of(u)) sums_.expect_owned(s);
    }
  }
  fresh_.zero_padding(bucket);
  return rows(unit);
}

void GradStore::commit(i64 unit, i64 micro) {
  const bool last_micro = micro + 1 == options_.micro_batches;
  if (options_.fused) {
    if (!reduces_ || !last_micro) return;
    if (options_.sums_are_final(layout_.num_ranks())) return sums_.keep(unit);
    sums_.round(unit, fresh_.unit(unit));
  } else {
    fresh_.round(unit);
    if (!reduces_) return sums_.accumulate(unit, fresh_.unit(unit), micro > 0, false);
    if (options_.accumulates_locally()) sums_.accumulate(unit, fresh_.unit(unit), micro > 0, last_micro);
    if (!options_.reduce_each_micro && !last_micro) return;
  }
  const bool continues = options_.reduce_each_micro && micro > 0;
  for (const Segment& s : layout_.segments_of(unit)) reduction_of(s).committed(s, continues);
  const size_t bucket = fresh_.bucket_of(unit);
  if (unit == fresh_.bucket(bucket).units.back()) reduce(bucket, continues);
}

void GradStore::reduce(size_t bucket, bool continues) {
  for (const i64 unit : fresh_.bucket(bucket).units) {
    for (const Segment& s : layout_.segments_of(unit)) {
      if (!reduction_of(s).add(s, continues)) dense().add(s, continues);
    }
  }
  for (const auto& r : reductions_) r->start(bucket, continues);
  summed_[bucket] = options_.reduce_each_micro;
}

void GradStore::finish() {
  for (const auto& r : reductions_) r->finish();
  summed_.assign(fresh_.num_buckets(), false);
}

void GradStore::finish(i64 unit) {
  for (const auto& r : reductions_) r->release(fresh_.bucket_of(unit));
}

void GradStore::gather(std::span<const i64> wanted) {
  if (layout_.states().shard_optimizer) return;
  for (const i64 unit : wanted) {
    for (const Segment& s : layout_.segments_of(unit)) {
      if (!reduction_of(s).gather(s)) dense().gather(s);
    }
  }
  for (const auto& r : reductions_) r->finish_gather();
}

std::vector<SavedState*> GradStore::saved_states() const {
  std::vector<SavedState*> states;
  for (const auto& r : reductions_) {
    if (SavedState* const state = r->saved_state()) states.push_back(state);
  }
  return states;
}

}  // namespace ds::zero
