// SPDX-License-Identifier: Apache-2.0
#include "pipeline/simulate.h"

#include <algorithm>
#include <random>
#include <utility>

namespace ds::pipeline {
namespace {

struct Message {
  i64 micro, block;  // the block that receives it
  double ready;
};

// The messages of one kind that a stage sends, in order.
struct Channel {
  std::vector<Message> sent;
  std::vector<double> taken;  // times of receipt; may be fewer
};

class Simulation {
 public:
  Simulation(std::span<const std::vector<Instr>> schedules, std::span<const Costs> costs, const Adversity& adversity)
      : schedules_(schedules),
        costs_(costs),
        adversity_(adversity),
        rng_(adversity.seed),
        next_(schedules.size()),
        now_(schedules.size()),
        activations_(schedules.size()),
        grads_(schedules.size()) {
    i64 chunks = 1;
    for (const auto& schedule : schedules) {
      for (const Instr& instr : schedule) chunks = std::max(chunks, instr.chunk + 1);
    }
    num_blocks_ = chunks * num_stages();
    timeline_.stages.resize(schedules.size());
  }

  Timeline run() && {
    for (bool moves = true; moves;) {
      moves = false;
      for (i64 stage = 0; stage < num_stages(); ++stage) {
        while (step(stage)) moves = true;
      }
    }
    for (i64 stage = 0; stage < num_stages(); ++stage) check_done(stage);
    return std::move(timeline_);
  }

 private:
  i64 num_stages() const { return narrow<i64>(schedules_.size()); }
  i64 wrap(i64 stage) const { return (stage + num_stages()) % num_stages(); }
  const Costs& costs(i64 block) const { return costs_[static_cast<size_t>(block) % costs_.size()]; }
  double delay() { return adversity_.delay > 0 ? adversity_.delay * static_cast<double>(rng_() >> 11) * 0x1p-53 : 0; }

  // Runs the stage's next instruction; false if there is none or it has to wait.
  bool step(i64 stage) {
    const size_t s = static_cast<size_t>(stage);
    if (next_[s] == schedules_[s].size()) return false;
    const Instr& instr = schedules_[s][next_[s]];
    const i64 block = block_of(narrow<int>(num_stages()), narrow<int>(stage), instr.chunk);
    const Costs& cost = costs(block);
    const bool goes = [&] {
      switch (instr.op) {
        case Op::Load: return true;
        case Op::RecvActivation: return receive(activations_, wrap(stage - 1), stage, instr, block);
        case Op::RecvGrad: return receive(grads_, wrap(stage + 1), stage, instr, block);
        case Op::SendActivation: return send(activations_[s], {instr.micro, block + 1, now_[s]});
        case Op::SendGrad: return send(grads_[s], {instr.micro, block - 1, now_[s]});
        case Op::Forward: return pass(stage, instr, cost.forward, activations_[s], block + 1 < num_blocks_);
        case Op::BackwardInput: return pass(stage, instr, cost.backward_input, grads_[s], block > 0);
        case Op::BackwardWeight: return pass(stage, instr, cost.backward_weight, grads_[s], false);
        case Op::Backward: return pass(stage, instr, cost.backward_input + cost.backward_weight, grads_[s], block > 0);
      }
      return false;
    }();
    if (goes) ++next_[s];
    return goes;
  }

  static bool send(Channel& channel, Message message) {
    channel.sent.push_back(message);
    return true;
  }

  bool receive(std::vector<Channel>& channels, i64 from, i64 stage, const Instr& instr, i64 block) {
    Channel& channel = channels[from];
    if (channel.taken.size() == channel.sent.size()) return false;
    const Message& message = channel.sent[channel.taken.size()];
    DS_CHECK(
        message.micro == instr.micro && message.block == block, Errc::Internal,
        "internal error: stage {} is at {} of micro-batch {} for block {}, and the next message is micro-batch {} for "
        "block {}",
        stage, op_name(instr.op), instr.micro, block, message.micro, message.block);
    const i64 sender_block = &channels == &grads_ ? block + 1 : block - 1;
    double& now = now_[stage];
    now = std::max(now, message.ready) + costs(sender_block).send + delay();
    channel.taken.push_back(now);
    return true;
  }

  bool pass(i64 stage, const Instr& instr, double cost, const Channel& channel, bool sends) {
    double& now = now_[stage];
    // The message that used this buffer before.
    const i64 before = narrow<i64>(channel.sent.size()) - adversity_.send_buffers;
    if (sends && before >= 0) {
      if (before >= narrow<i64>(channel.taken.size())) return false;
      now = std::max(now, channel.taken[before]);
    }
    const double end = now + cost + delay();
    timeline_.stages[stage].push_back({instr, now, end});
    timeline_.makespan = std::max(timeline_.makespan, end);
    now = end;
    return true;
  }

  void check_done(i64 stage) const {
    const size_t s = static_cast<size_t>(stage);
    if (next_[s] < schedules_[s].size()) {
      const Instr& instr = schedules_[s][next_[s]];
      throw Error(Errc::Internal,
                  fmt::format("internal error: stage {} waits forever at {} of micro-batch {}, chunk {}", stage,
                              op_name(instr.op), instr.micro, instr.chunk));
    }
    DS_CHECK(
        activations_[s].taken.size() == activations_[s].sent.size() && grads_[s].taken.size() == grads_[s].sent.size(),
        Errc::Internal, "internal error: stage {} sends a message that nobody receives", stage);
  }

  std::span<const std::vector<Instr>> schedules_;
  std::span<const Costs> costs_;
  const Adversity& adversity_;
  std::mt19937_64 rng_;
  i64 num_blocks_ = 0;
  // Per stage: its next instruction, its clock, its messages to the next and previous stages.
  std::vector<size_t> next_;
  std::vector<double> now_;
  std::vector<Channel> activations_, grads_;
  Timeline timeline_;
};

}  // namespace

double Timeline::idle(size_t stage) const noexcept {
  double busy = 0;
  for (const Span& span : stages[stage]) busy += span.end - span.begin;
  return makespan - busy;
}

double Timeline::bubble_fraction() const noexcept {
  if (makespan <= 0) return 0;
  double idle_time = 0;
  for (size_t stage = 0; stage < stages.size(); ++stage) idle_time += idle(stage);
  return idle_time / (makespan * static_cast<double>(stages.size()));
}

Timeline simulate(std::span<const std::vector<Instr>> schedules, std::span<const Costs> costs,
                  const Adversity& adversity) {
  DS_ASSERT(!schedules.empty() && !costs.empty() && adversity.send_buffers > 0);
  return Simulation(schedules, costs, adversity).run();
}

std::vector<std::vector<Instr>> make_schedules(ScheduleOptions options) {
  std::vector<std::vector<Instr>> schedules;
  for (options.stage = 0; schedules.empty() || options.stage < options.stages; ++options.stage) {
    schedules.push_back(make_schedule(options));
  }
  return schedules;
}

bool formula_is_exact(const ScheduleOptions& o, const Costs& c) {
  if (o.backward_end > 0) return false;  // blocks differ
  return o.kind != ScheduleKind::ZeroBubbleH1 ||
         (o.micro_batches >= o.stages && c.backward_weight <= std::min(c.forward, c.backward_input));
}

double idle_formula(const ScheduleOptions& o, const Costs& c) {
  const double other_stages = o.stages - 1, pass = c.forward + c.backward_input + c.backward_weight;
  switch (o.kind) {
    case ScheduleKind::Naive: return other_stages * pass * static_cast<double>(o.micro_batches);
    case ScheduleKind::GPipe:
    case ScheduleKind::OneFOneB:
    case ScheduleKind::Interleaved:
    case ScheduleKind::BreadthFirst: return other_stages * pass;
    case ScheduleKind::ZeroBubbleH1: return other_stages * (c.forward + c.backward_input - c.backward_weight);
  }
  return 0;
}

double bubble_formula(const ScheduleOptions& o, const Costs& c) {
  const double idle = idle_formula(o, c);
  const double busy =
      (c.forward + c.backward_input + c.backward_weight) * static_cast<double>(o.micro_batches * o.chunks);
  return idle / (idle + busy);
}

double bubble_fraction(const ScheduleOptions& o) {
  const Costs costs;
  return formula_is_exact(o, costs) ? bubble_formula(o, costs)
                                    : simulate(make_schedules(o), {&costs, 1}).bubble_fraction();
}

}  // namespace ds::pipeline
