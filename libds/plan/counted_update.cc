// SPDX-License-Identifier: Apache-2.0
#include "plan/counted_update.h"

#include <algorithm>

namespace ds::plan {
namespace {

// The verdict of nobody's gradients.
class NoVerdict final : public zero::VerdictHandle {
 public:
  const GradVerdict* on_device() const noexcept override { return nullptr; }
  const GradVerdict& resolve() override { return verdict_; }

 private:
  GradVerdict verdict_;
};

// The chunk with the layer of a unit, which may be a tile; of the shared unit, the first one.
size_t chunk_of(const RunPlan& plan, const zero::Layout& layout, i64 unit) {
  if (layout.is_tile(unit)) {
    const i64 param = layout.units()[unit].first_param;
    for (unit = 0; param >= layout.units()[unit].first_param + std::ssize(plan.rows[unit]);) ++unit;
  }
  for (size_t c = 0; c < plan.stage.chunks.size(); ++c) {
    if (unit < RunPlan::unit_of(plan.stage.chunks[c].chunk.end)) return c;
  }
  return 0;
}

// The chunk whose backward pass commits the gradients of a unit.
size_t chunk_of_grads(const RunPlan& plan, const zero::Layout& grads, i64 unit) {
  return unit == plan.head_use() ? plan.stage.chunks.size() - 1 : chunk_of(plan, grads, unit);
}

}  // namespace

CountedUpdate::CountedUpdate(const RunPlan& plan, const OpTable& ops, void* native,
                             std::function<void(const Operation&, int size)> reduced, void* host_native)
    : plan_(plan),
      device_(ops, native, addresses_),
      host_(ops, host_native, addresses_),
      tp_(plan.coord.tp, plan.mesh.tp),
      pp_(plan.coord.pp, plan.mesh.pp),
      outer_(plan.coord.worker, plan.mesh.workers, &addresses_),
      offload_(plan.offload, host_) {
  for (const DpSplit& split : plan.dp().zeropp)
    zeropp_[split.name] = std::make_unique<CountingCommunicator>(split_rank(plan.mesh, split, plan.coord),
                                                                 split_size(plan.mesh, split), &addresses_);
  for (const zero::ShardsPlan& s : plan.shards) {
    const bool is_new = groups_.empty() || s.axis != plan.dp().axis;  // balancing biases are over dp, too
    if (is_new)
      groups_.push_back(std::make_unique<CountingCommunicator>(s.rank, s.layout.num_ranks(), &addresses_, reduced));
    const zero::GroupRanks ranks{
        .all = is_new ? *groups_.back() : *groups_.front(), .near = split(s, "near"), .across = split(s, "across")};
    shards_.push_back(std::make_unique<zero::Shards>(s, plan.rows, plan.grad_rows, plan.trains(), ranks, device_,
                                                     ledger_, is_new ? offload_.tiers() : zero::Tiers()));
  }
  inputs_ = offload_.make_inputs(plan.activations.inputs, device_, ledger_);
  if (!plan.trains()) return;
  // Slices decide what is copied on a rank, and no more.
  const auto no_slices = [&](int) { return std::vector<model::ParamSlice>(plan.params.size()); };
  update_.emplace(plan, shards_, update::Axes{*groups_.front(), tp_, pp_, outer_}, device_, ledger_, no_slices);
}

void CountedUpdate::run(Enter enter, i64 number, bool meets) {
  DS_ASSERT(plan_.trains());
  update_->skip_to(number);
  update_->begin(number, 1);
  const i64 m = plan_.micro_batches;
  // The first micro-batch begins sums, and the last one ends them; all between them do the same.
  const auto in_passes = [&](i64 micro, i64 times, size_t first, size_t last) {
    if (times <= 0) return;
    const offload::FileCounts before = offload_.moved();
    const offload::HostCopies copies_before = offload_.copies();
    for (const auto& s : shards_) {
      const std::vector<std::vector<i64>>& passes = s->plan().grads.passes;
      for (size_t i = first; i < std::min(last, passes.size()); ++i) {
        enter(chunk_of_grads(plan_, s->plan().grad_layout, passes[i].front()), times);
        // A unit with tiles is committed after them.
        constexpr i64 kNone = -1;
        i64 open = kNone;
        const i64 parts = s->plan().grads.parts;
        const auto close = [&] {
          if (open != kNone) s->grads().commit(std::exchange(open, kNone), micro);
        };
        for (const i64 unit : passes[i]) {
          if (!s->plan().grad_layout.is_tile(unit)) close();
          for (i64 part = 0; part < parts; ++part) {
            s->grads().acquire(unit);
            if (std::ranges::binary_search(s->plan().grads.open, unit)) {
              open = unit;
            } else {
              s->grads().commit(unit, micro * parts + part);
            }
          }
        }
        close();
      }
    }
    take_messages(times);
    repeated_ = repeated_ + (times - 1) * (offload_.moved() - before);
    repeated_copies_ = repeated_copies_ + (times - 1) * (offload_.copies() - copies_before);
  };
  const auto micro_batches = [&](size_t first, size_t last) {
    in_passes(0, std::min<i64>(m, 1), first, last);
    in_passes(1, m - 2, first, last);
    in_passes(m - 1, m > 1 ? 1 : 0, first, last);
  };
  size_t passes = 0;
  for (const auto& s : shards_) passes = std::max(passes, s->plan().grads.passes.size());
  const size_t at_once = plan_.stage.breadth_first ? 1 : passes;
  for (size_t i = 0; i < passes; i += at_once) micro_batches(i, i + at_once);

  enter({}, 1);
  NoVerdict verdict;
  update::StepScalars& numbers = *static_cast<update::StepScalars*>(addresses_.take(sizeof(update::StepScalars)));
  update_->finish_gradients();
  update_->judge(numbers, {});
  if (plan_.validates_later()) {
    update_->assume(numbers, {});
    update_->keep();
  }
  float* const expert_tokens = static_cast<float*>(addresses_.take(plan_.expert_counts * 4));
  update_->update_params({.lr = 1, .number = number, .expert_tokens = expert_tokens}, verdict);
  if (meets) update_->outer_step(number);
  (void)update_->compression_norms(number);
  zero::publish_update(shards_);
  take_messages(1);
}

std::map<std::string, CommCount> CountedUpdate::meeting(i64 fragment) {
  update_->outer()->send(fragment);
  (void)update_->outer()->land(fragment);
  std::map<std::string, CommCount> sent = outer_.counts();
  outer_.reset_counts();
  return sent;
}

void CountedUpdate::norm_of_meeting() {
  (void)update_->outer_gradient_norm(plan_.diloco.sync_every + plan_.diloco.overlap_steps);
}

RankLocalBytes CountedUpdate::rank_local_bytes() {
  RankLocalBytes most;
  if (!update_) return most;
  if (plan_.mesh.workers > 1) {
    std::vector<zero::SavedArray> own;
    update_->outer()->own_states(own);
    for (const zero::SavedArray& array : own) most.instead += array.values.bytes();
  }
  // Between means of parameters there is more than behind them. The first worker has what there is beside its states.
  for (const i64 number : {plan_.update_number, plan_.update_number - 1}) {
    i64 bytes = plan_.coord.worker > 0 ? -most.instead : 0;
    for (const auto& [name, values] : update_->rank_local(number)) bytes += values.bytes();
    most.beside = std::max(most.beside, bytes);
  }
  return most;
}

std::vector<i64> CountedUpdate::saved_numbers() const {
  std::vector<i64> counts;
  for (const zero::SavedState* const state : update_ ? update_->saved_states() : std::span<zero::SavedState* const>()) {
    i64 numbers = 0;
    for (i64 p = 0; p < std::ssize(plan_.params); ++p) numbers += state->num_numbers(p);
    if (numbers > 0) counts.push_back(numbers);
  }
  return counts;
}

void CountedUpdate::publish() {
  zero::publish(shards_);
  take_messages(0);
}

void CountedUpdate::begin_again() {
  traffic_.clear();
  states_before_ = offload_.moved_states();
  all_before_ = offload_.moved();
  repeated_ = {};
  copies_before_ = offload_.copies();
  repeated_copies_ = {};
}

std::pair<offload::FileCounts, offload::FileCounts> CountedUpdate::file_traffic() const noexcept {
  const offload::FileCounts states = offload_.moved_states() - states_before_;
  return {states, offload_.moved() - all_before_ - states + repeated_};
}

void CountedUpdate::gather(Enter enter, bool evaluated) {
  for (const auto& s : shards_) {
    zero::ParamStore& params = s->params();
    const zero::GatherPlan& plan = s->plan().train_gathers;
    if (!params.in_place()) {  // in their order, and read ahead, which decides what is in memory still
      params.begin(plan);
      for (const zero::Access& access : plan.accesses) {
        enter(access.empty() ? 0 : chunk_of(plan_, s->plan().layout, access.front()), 1);
        (void)params.acquire();
      }
      take_messages(1);
      continue;
    }
    std::vector<i64> times(s->plan().layout.units().size(), 0);
    for (const zero::GatherStep& step : plan.steps) {
      for (const zero::GatherStep::Launch& launch : step.launch) ++times[launch.unit];
    }
    std::map<std::pair<i64, size_t>, std::vector<i64>> units;  // by how often they are gathered, and for which chunk
    for (size_t u = 0; u < times.size(); ++u) {
      const i64 unit = static_cast<i64>(u);
      if (times[u] > 0) units[{times[u], chunk_of(plan_, s->plan().layout, unit)}].push_back(unit);
    }
    for (const auto& [key, alike] : units) {
      const auto [n, chunk] = key;
      const bool second = params.keeps_second_shards();
      const i64 from_all = !second ? n : evaluated ? 0 : 1;
      enter(chunk, from_all);
      for (const i64 unit : alike) params.gather({unit, 0});
      for (const i64 unit : alike) params.arrive(unit);
      take_messages(from_all);
      if (!second) continue;
      enter(chunk, n - from_all);  // from those near
      for (const i64 unit : alike) params.gather({unit, 0});
      take_messages(n - from_all);
    }
  }
}

void CountedUpdate::use_inputs() {
  for (const offload::PartUse& use : plan_.activations.inputs.uses)
    inputs_->lease(use.at, plan_.activations.inputs.part_bytes, use.write ? zero::LeaseTo::Fill : zero::LeaseTo::Read);
}

CountingCommunicator* CountedUpdate::split(const zero::ShardsPlan& s, const std::string& name) const {
  const auto found = s.zeropp.empty() ? zeropp_.end() : zeropp_.find(name);
  return found == zeropp_.end() ? nullptr : found->second.get();
}

std::vector<std::vector<i64>> CountedUpdate::zeropp_allocations() const {
  std::vector<std::vector<i64>> allocations;
  for (const DpSplit& s : plan_.dp().zeropp) allocations.push_back(zeropp_.at(s.name)->allocations());
  return allocations;
}

void CountedUpdate::take_messages(i64 times) {
  const auto take = [&](CountingCommunicator& axis) {
    for (const auto& [name, count] : axis.counts()) {
      if (name.ends_with(".stats")) continue;
      traffic_[name].calls += times * count.calls;
      traffic_[name].bytes += times * count.bytes;
    }
    axis.reset_counts();
  };
  for (const auto& group : groups_) take(*group);
  take(tp_);
  take(pp_);
  take(outer_);
  for (const auto& [name, group] : zeropp_) take(*group);
}

std::map<std::string, CommCount> CountedUpdate::traffic(MeshCalls& calls) const {
  const auto add = [&](Axis axis, const CountingCommunicator& c) { calls.axes[axis].add(c.size(), c.largest()); };
  add(Axis::Dp, *groups_.front());
  for (size_t g = 1; g < groups_.size(); ++g)
    calls.split(plan_.shards[g].axis).add(groups_[g]->size(), groups_[g]->largest());
  for (const auto& [name, group] : zeropp_) calls.split(name).add(group->size(), group->largest());
  add(Axis::Tp, tp_);
  add(Axis::Outer, outer_);
  calls.up.add(pp_.largest());
  return traffic_;
}

}  // namespace ds::plan
