// SPDX-License-Identifier: Apache-2.0
#include "pipeline/schedule.h"

#include <algorithm>
#include <array>
#include <set>

namespace ds::pipeline {
namespace {

struct Position {
  i64 micro, chunk;
};

// The k-th forward pass of a stage. Groups of as many micro-batches as there are stages pass through the chunks one
// after the other; the last group may be smaller. With one chunk this is micro-batch k; breadth first has one group for
// all.
Position forward_position(const ScheduleOptions& o, i64 k) {
  const i64 most = o.kind == ScheduleKind::BreadthFirst ? o.micro_batches : o.stages;
  const i64 per_group = most * o.chunks, first = k / per_group * most;
  const i64 group = std::min<i64>(most, o.micro_batches - first), at = k % per_group;
  return {first + at % group, at / group};
}

// The number of forward passes before the first backward pass. In 1F1B they fill the later stages. With interleaving a
// group passes through all chunks but the last, and each stage is two passes ahead of the next.
i64 num_warmup(const ScheduleOptions& o, i64 passes) {
  const i64 later_stages = o.stages - o.stage - 1;
  switch (o.kind) {
    case ScheduleKind::Naive: return 0;
    case ScheduleKind::GPipe:
    case ScheduleKind::BreadthFirst: return passes;
    case ScheduleKind::OneFOneB:
    case ScheduleKind::ZeroBubbleH1: return std::min(later_stages, passes);
    case ScheduleKind::Interleaved: return std::min(2 * later_stages + (o.chunks - 1) * i64{o.stages}, passes);
  }
  return 0;
}

std::vector<Instr> compute_order(const ScheduleOptions& o) {
  std::vector<Instr> order;
  const i64 passes = o.micro_batches * o.chunks, warmup = num_warmup(o, passes);
  const bool split = o.kind == ScheduleKind::ZeroBubbleH1;
  const auto forward = [&](i64 k) {
    const Position at = forward_position(o, k);
    order.push_back({Op::Forward, at.micro, at.chunk});
  };
  const auto backward_weight = [&](i64 k) { order.push_back({Op::BackwardWeight, k}); };
  const auto backward = [&](i64 k) {
    const Position at = forward_position(o, k);
    order.push_back({split ? Op::BackwardInput : Op::Backward, at.micro, o.chunks - 1 - at.chunk});
    if (split && k >= o.stage) backward_weight(k - o.stage);
  };
  for (i64 k = 0; k < warmup; ++k) forward(k);
  for (i64 k = 0; k < passes; ++k) {
    if (warmup + k < passes) forward(warmup + k);
    backward(k);
  }
  if (split) {
    for (i64 k = std::max<i64>(passes - o.stage, 0); k < passes; ++k) backward_weight(k);
  }
  return order;
}

// Adds the transfers of inputs and outputs to a stage's order of passes, and leaves out the backward passes that the
// model does not have.
std::vector<Instr> with_transfers(const std::vector<Instr>& order, const ScheduleOptions& o) {
  std::vector<Instr> schedule;
  const i64 last = i64{o.stages} * o.chunks - 1;
  for (const Instr& pass : order) {
    const i64 block = block_of(o.stages, o.stage, pass.chunk);
    if (pass.op != Op::Forward && block < o.backward_end) continue;
    const auto add = [&](bool needed, Op op) {
      if (needed) schedule.push_back({op, pass.micro, pass.chunk});
    };
    const bool forward = pass.op == Op::Forward, others = o.stages > 1;
    const bool input_grad = pass.op == Op::Backward || pass.op == Op::BackwardInput;
    add(forward && (block == 0 || (block == last && others)), Op::Load);
    add(forward && block > 0 && others, Op::RecvActivation);
    add(input_grad && block < last && others, Op::RecvGrad);
    schedule.push_back(pass);
    add(forward && block < last && others, Op::SendActivation);
    add(input_grad && block > o.backward_end && others, Op::SendGrad);
  }
  return schedule;
}

// The largest number of micro-batches between their first `begins` and their `ends` at any time.
i64 max_live(std::span<const Instr> schedule, i64 chunk, auto begins, auto ends) {
  i64 live = 0, most = 1;
  for (const Instr& instr : schedule) {
    if (instr.chunk != chunk) continue;
    if (begins(instr.op)) most = std::max(most, ++live);
    if (ends(instr.op)) --live;
  }
  return most;
}

}  // namespace

std::string_view op_name(Op op) noexcept {
  constexpr std::array<std::string_view, 9> names = {"Load",           "RecvActivation", "Forward",
                                                     "SendActivation", "RecvGrad",       "Backward",
                                                     "BackwardInput",  "BackwardWeight", "SendGrad"};
  return names[static_cast<size_t>(op)];
}

ScheduleOptions schedule_of(const Config& config) {
  const PipelineConfig& p = config.pipeline;
  return {.kind = p.stages * p.virtual_stages > 1 ? p.schedule : PipelineSchedule::OneFOneB,
          .stages = narrow<int>(p.stages),
          .micro_batches = config.batch.accumulation,
          .chunks = narrow<int>(p.virtual_stages)};
}

ScheduleOptions schedule_of(const Config& config, const model::Model& model, std::span<const i64> cuts) {
  ScheduleOptions options = schedule_of(config);
  options.backward_end = std::ranges::upper_bound(cuts, model.backward_end()) - cuts.begin() - 1;
  return options;
}

std::string why_not(const ScheduleOptions& o) {
  return schedule_problem({.stages = o.stages, .schedule = o.kind, .virtual_stages = o.chunks}, o.micro_batches);
}

std::vector<Instr> make_schedule(const ScheduleOptions& options) {
  const std::string why = why_not(options);
  DS_CHECK(why.empty(), Errc::Config, "{}", why);
  DS_ASSERT(options.stage >= 0 && options.stage < options.stages);
  return with_transfers(compute_order(options), options);
}

std::vector<Instr> make_eval_schedule(int stages, int stage, i64 micro_batches, int chunks) {
  DS_ASSERT(stage >= 0 && stage < stages && micro_batches >= 0 && chunks >= 1);
  const ScheduleOptions o{.stages = stages, .stage = stage, .micro_batches = micro_batches, .chunks = chunks};
  std::vector<Instr> order;
  for (i64 k = 0; k < micro_batches * chunks; ++k) {
    const Position at = forward_position(o, k);
    order.push_back({Op::Forward, at.micro, at.chunk});
  }
  return with_transfers(order, o);
}

StashSizes stash_sizes(std::span<const Instr> schedule, i64 chunk) {
  const auto is = [](auto... ops) { return [=](Op op) { return ((op == ops) || ...); }; };
  const auto frees = is(Op::Backward, Op::BackwardWeight);
  if (std::ranges::none_of(schedule, [&](const Instr& i) { return i.chunk == chunk && frees(i.op); })) return {};
  return {.forward = max_live(schedule, chunk, is(Op::Forward), frees),
          .backward = max_live(schedule, chunk, is(Op::BackwardInput), is(Op::BackwardWeight))};
}

KeptSlots kept_slots(std::span<const Instr> schedule, i64 chunks, i64 micro_batches) {
  const std::vector<std::vector<i64>> none(static_cast<size_t>(chunks),
                                           std::vector<i64>(static_cast<size_t>(micro_batches), 0));
  // By chunk and micro-batch: the instruction that returns the slot. Chunks of the only stage read the output in place.
  std::vector<std::vector<i64>> last_use = none;
  const bool in_place = std::ranges::find(schedule, Op::SendActivation, &Instr::op) == schedule.end();
  for (i64 at = 0; at < std::ssize(schedule); ++at) {
    const Instr& i = schedule[static_cast<size_t>(at)];
    if (i.op == Op::Load || i.op == Op::RecvActivation || i.op == Op::RecvGrad || i.op == Op::SendGrad) continue;
    last_use[i.chunk][i.micro] = at;
    if (in_place && i.chunk > 0) last_use[i.chunk - 1][i.micro] = at;
  }
  KeptSlots slots{.of = none};
  std::set<i64> free = {0};
  for (i64 at = 0; at < std::ssize(schedule); ++at) {
    const Instr& instr = schedule[static_cast<size_t>(at)];
    if (instr.op == Op::Forward) {
      if (free.empty()) free.insert(slots.count++);
      slots.of[instr.chunk][instr.micro] = free.extract(free.begin()).value();
    }
    for (i64 c = std::max<i64>(instr.chunk - 1, 0); c <= instr.chunk; ++c) {
      if (last_use[c][instr.micro] == at) free.insert(slots.of[c][instr.micro]);
    }
  }
  return slots;
}

}  // namespace ds::pipeline
