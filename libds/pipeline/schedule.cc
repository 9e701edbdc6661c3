// SPDX-License-Identifier: Apache-2.0
#include "pipeline/schedule.h"

#include <algorithm>
#include <array>
#include <set>

#include "pipeline/v_schedule.h"
#include "pipeline/validation.h"

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
    case ScheduleKind::ZeroBubbleH2: return std::min(2 * later_stages, passes);
    case ScheduleKind::Interleaved: return std::min(2 * later_stages + (o.chunks - 1) * i64{o.stages}, passes);
    case ScheduleKind::ZeroBubbleV: break;  // v_orders()
  }
  return 0;
}

std::vector<Instr> compute_order(const ScheduleOptions& o) {
  std::vector<Instr> order;
  const i64 passes = o.micro_batches * o.chunks, warmup = num_warmup(o, passes);
  const bool split = splits_backward(o.kind);
  const i64 delay = o.kind == ScheduleKind::ZeroBubbleH2 ? 2 * o.stage : o.stage;  // of weight gradients
  const auto forward = [&](i64 k) {
    const Position at = forward_position(o, k);
    order.push_back({Op::Forward, at.micro, at.chunk});
  };
  const auto backward_weight = [&](i64 k) { order.push_back({Op::BackwardWeight, k}); };
  const auto backward = [&](i64 k) {
    const Position at = forward_position(o, k);
    order.push_back({split ? Op::BackwardInput : Op::Backward, at.micro, o.chunks - 1 - at.chunk});
    if (split && k >= delay) backward_weight(k - delay);
  };
  for (i64 k = 0; k < warmup; ++k) forward(k);
  for (i64 k = 0; k < passes; ++k) {
    if (warmup + k < passes) forward(warmup + k);
    backward(k);
  }
  if (split) {
    for (i64 k = std::max<i64>(passes - delay, 0); k < passes; ++k) backward_weight(k);
  }
  return order;
}

// Adds the transfers of inputs and outputs to a stage's order of passes, and leaves out the backward passes that the
// model does not have.
std::vector<Instr> with_transfers(const std::vector<Instr>& order, const Placement& placement, int stage, int chunks,
                                  i64 backward_end, bool loads_all) {
  std::vector<Instr> schedule;
  const i64 last = i64{placement.stages} * chunks - 1;
  for (const Instr& pass : order) {
    const i64 block = placement.block_of(stage, pass.chunk);
    if (pass.op != Op::Forward && block < backward_end) continue;
    const auto add = [&](bool needed, Op op) {
      if (needed) schedule.push_back({op, pass.micro, pass.chunk});
    };
    const bool forward = pass.op == Op::Forward;
    const bool input_grad = pass.op == Op::Backward || pass.op == Op::BackwardInput;
    const bool from_before = block > 0 && !placement.stays(block - 1),
               to_next = block < last && !placement.stays(block);
    const bool first_with_losses = block == last && placement.stage_of(0) != stage;
    // A stage's first chunk is the first to see a micro-batch.
    add(forward && (loads_all ? pass.chunk == 0 : block == 0 || first_with_losses), Op::Load);
    add(forward && from_before, Op::RecvActivation);
    add(input_grad && to_next, Op::RecvGrad);
    schedule.push_back(pass);
    add(forward && to_next, Op::SendActivation);
    add(input_grad && from_before && block > backward_end, Op::SendGrad);
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
  constexpr std::array<std::string_view, 10> names = {"Load",     "RecvActivation", "Forward",       "SendActivation",
                                                      "RecvGrad", "Backward",       "BackwardInput", "BackwardWeight",
                                                      "SendGrad", "Validate"};
  return names[static_cast<size_t>(op)];
}

ScheduleOptions schedule_of(const Config& config) {
  const PipelineConfig& p = config.pipeline;
  return {.kind = p.stages * p.virtual_stages > 1 ? p.schedule : PipelineSchedule::OneFOneB,
          .stages = narrow<int>(p.stages),
          .micro_batches = config.batch.accumulation,
          .chunks = narrow<int>(p.virtual_stages),
          .memory_limit = p.memory_limit,
          .post_validate = p.post_validate};
}

ScheduleOptions schedule_of(const Config& config, const model::Model& model, std::span<const i64> cuts) {
  ScheduleOptions options = schedule_of(config);
  options.backward_end = std::ranges::upper_bound(cuts, model.backward_end()) - cuts.begin() - 1;
  options.loads_all = std::ranges::any_of(model.layers, [](const auto& layer) { return layer->reads_tokens(); });
  const Placement placement = options.placement();
  options.tied = model.tied() && model.shared.front().trained &&
                 placement.stage_of(0) != placement.stage_of(i64{options.stages} * options.chunks - 1);
  // A message is sent out of memory that does not move until it is taken.
  options.sends_use_ahead = config.grad_accum_dtype == DType::F32 && !config.zero.offload_optimizer.gradients;
  return options;
}

std::string why_not(const ScheduleOptions& o) {
  return schedule_problem({.stages = o.stages,
                           .schedule = o.kind,
                           .virtual_stages = o.chunks,
                           .memory_limit = o.memory_limit,
                           .post_validate = o.post_validate},
                          o.micro_batches);
}

std::vector<Instr> make_schedule(const ScheduleOptions& options) {
  const std::string why = why_not(options);
  DS_CHECK(why.empty(), Errc::Config, "{}", why);
  DS_ASSERT(options.stage >= 0 && options.stage < options.stages);
  if (options.post_validate) return std::move(make_schedules(options)[static_cast<size_t>(options.stage)]);
  const bool v = options.kind == ScheduleKind::ZeroBubbleV;
  return with_transfers(v ? v_orders(options)[static_cast<size_t>(options.stage)] : compute_order(options),
                        options.placement(), options.stage, options.chunks, options.backward_end, options.loads_all);
}

std::vector<std::vector<Instr>> make_schedules(ScheduleOptions options) {
  const std::string why = why_not(options);
  DS_CHECK(why.empty(), Errc::Config, "{}", why);
  std::vector<std::vector<Instr>> orders(static_cast<size_t>(options.stages));
  if (options.kind == ScheduleKind::ZeroBubbleV) orders = v_orders(options);
  for (options.stage = 0; options.stage < options.stages; ++options.stage) {
    std::vector<Instr>& order = orders[static_cast<size_t>(options.stage)];
    if (options.kind != ScheduleKind::ZeroBubbleV) order = compute_order(options);
    order = with_transfers(order, options.placement(), options.stage, options.chunks, options.backward_end,
                           options.loads_all);
  }
  if (options.post_validate) add_validation(orders, options.placement());
  return orders;
}

size_t before_gradients(std::span<const Instr> schedule) noexcept {
  const auto at = std::ranges::find(schedule, Op::Validate, &Instr::op);
  return at == schedule.end() ? 0 : static_cast<size_t>(at - schedule.begin());
}

size_t use_complete_after(std::span<const Instr> schedule) noexcept {
  i64 chunk = 0;
  for (const Instr& i : schedule) chunk = std::max(chunk, i.chunk);
  const auto ends = [&](const Instr& i) {
    return i.chunk == chunk && (i.op == Op::Backward || i.op == Op::BackwardInput);
  };
  const auto is_pass = [](const Instr& i) {
    return i.op == Op::Forward || i.op == Op::Backward || i.op == Op::BackwardInput || i.op == Op::BackwardWeight;
  };
  const auto last = std::find_if(schedule.rbegin(), schedule.rend(), ends);
  if (last == schedule.rend()) return schedule.size();
  const auto next = std::find_if(last.base(), schedule.end(), is_pass);
  return static_cast<size_t>(next - schedule.begin()) + (next == schedule.end() ? 0 : 1);
}

std::vector<Instr> make_eval_schedule(const Placement& placement, int stage, i64 micro_batches, int chunks) {
  DS_ASSERT(stage >= 0 && stage < placement.stages && micro_batches >= 0 && chunks >= 1);
  std::vector<Instr> order;
  if (placement.v) {
    order = v_eval_order(placement, stage, micro_batches, chunks);
  } else {
    const ScheduleOptions o{.stages = placement.stages, .micro_batches = micro_batches, .chunks = chunks};
    for (i64 k = 0; k < micro_batches * chunks; ++k) {
      const Position at = forward_position(o, k);
      order.push_back({Op::Forward, at.micro, at.chunk});
    }
  }
  return with_transfers(order, placement, stage, chunks, 0, false);
}

StashSizes stash_sizes(std::span<const Instr> schedule, i64 chunk) {
  const auto is = [](auto... ops) { return [=](Op op) { return ((op == ops) || ...); }; };
  const auto frees = is(Op::Backward, Op::BackwardWeight);
  if (std::ranges::none_of(schedule, [&](const Instr& i) { return i.chunk == chunk && frees(i.op); })) return {};
  return {.forward = max_live(schedule, chunk, is(Op::Forward), frees),
          .backward = max_live(schedule, chunk, is(Op::BackwardInput), is(Op::BackwardWeight))};
}

i64 gradient_slots_before(std::span<const Instr> schedule, i64 chunk) {
  i64 live = 0, most = 1;
  for (const Instr& i : schedule) {
    if (i.chunk == chunk && (i.op == Op::Backward || i.op == Op::BackwardInput)) most = std::max(most, ++live);
    if (i.chunk == chunk - 1 && (i.op == Op::Backward || i.op == Op::BackwardWeight)) --live;
  }
  return most;
}

KeptSlots kept_slots(std::span<const Instr> schedule, i64 chunks, i64 micro_batches) {
  const std::vector<std::vector<i64>> none(static_cast<size_t>(chunks),
                                           std::vector<i64>(static_cast<size_t>(micro_batches), 0));
  // By chunk and micro-batch: the instruction that returns the slot. A chunk that receives nothing reads the output of
  // the previous one in place.
  std::vector<std::vector<i64>> last_use = none;
  std::vector<bool> in_place(static_cast<size_t>(chunks), true);
  for (const Instr& i : schedule) {
    if (i.op == Op::RecvActivation) in_place[i.chunk] = false;
  }
  for (i64 at = 0; at < std::ssize(schedule); ++at) {
    const Instr& i = schedule[static_cast<size_t>(at)];
    if (i.op == Op::Load || i.op == Op::RecvActivation || i.op == Op::RecvGrad || i.op == Op::SendGrad ||
        i.op == Op::Validate)
      continue;
    last_use[i.chunk][i.micro] = at;
    if (in_place[i.chunk] && i.chunk > 0) last_use[i.chunk - 1][i.micro] = at;
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
