// SPDX-License-Identifier: Apache-2.0
#include "pipeline/simulate.h"

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

namespace ds::pipeline {
namespace {

struct Message {
  bool activation;
  i64 micro, block;  // the block that receives it
  double ready;
};

// The messages that a stage sends one way, in order.
struct Channel {
  std::vector<Message> sent;
  std::vector<double> taken;       // times of receipt; may be fewer
  std::vector<size_t> of_kind[2];  // of gradients and of activations: their places in `sent`
};

class Simulation {
 public:
  // Several steps, one after the other.
  struct Steps {
    size_t number = 1;
    std::span<const double> between = {};  // time of each stage after each of its steps; empty: none
    std::optional<TiedExchange> tied = {};
  };
  Simulation(std::span<const std::vector<Instr>> schedules, std::span<const Costs> costs, const Adversity& adversity,
             bool v, const Steps& steps)
      : schedules_(schedules),
        costs_(costs),
        adversity_(adversity),
        placement_{.stages = narrow<int>(std::ssize(schedules)), .v = v},
        rng_(adversity.seed),
        steps_(steps),
        use_after_(steps.tied && steps.tied->ahead ? use_complete_after(schedules.back()) : schedules.back().size()),
        next_(schedules.size()),
        now_(schedules.size()),
        validated_(schedules.size()),
        ends_(steps.number),
        channels_{std::vector<Channel>(schedules.size()), std::vector<Channel>(schedules.size())} {
    i64 chunks = 1;
    for (const auto& schedule : schedules) {
      for (const Instr& instr : schedule) chunks = std::max(chunks, instr.chunk + 1);
    }
    num_blocks_ = chunks * num_stages();
    timeline_.stages.resize(schedules.size());
  }

  Timeline run() {
    for (bool moves = true; moves;) {
      moves = false;
      for (i64 stage = 0; stage < num_stages(); ++stage) {
        while (step(stage)) moves = true;
      }
    }
    for (i64 stage = 0; stage < num_stages(); ++stage) check_done(stage);
    return std::move(timeline_);
  }
  // By step: when the last stage has ended it.
  const std::vector<double>& ends() const noexcept { return ends_; }

 private:
  i64 num_stages() const { return narrow<i64>(schedules_.size()); }
  const Costs& costs(i64 block) const {
    const bool by_stage = std::ssize(costs_) == num_stages();
    return costs_[static_cast<size_t>(by_stage ? placement_.stage_of(block) : block) % costs_.size()];
  }
  double delay() { return adversity_.delay > 0 ? adversity_.delay * static_cast<double>(rng_() >> 11) * 0x1p-53 : 0; }

  // Runs the stage's next instruction, or ends its step after the last one; false if there is none or it has to wait.
  bool step(i64 stage) {
    const size_t s = static_cast<size_t>(stage);
    const size_t length = schedules_[s].size(), number = next_[s] / (length + 1), at = next_[s] % (length + 1);
    if (number == steps_.number) return false;
    if (stage + 1 == num_stages() && at == use_after_ && uses_.size() == number) uses_.push_back(now_[s]);
    if (at == length ? !end_step(s, number) : !run(stage, schedules_[s][at])) return false;
    ++next_[s];
    return true;
  }

  // False: it has to wait.
  bool run(i64 stage, const Instr& instr) {
    const size_t s = static_cast<size_t>(stage);
    const i64 block = placement_.block_of(narrow<int>(stage), instr.chunk);
    const Costs& cost = costs(block);
    const bool takes = block + 1 < num_blocks_ && !placement_.stays(block),  // the next block takes a message
        gives = block > 0 && !placement_.stays(block - 1);                   // and so does the previous one
    switch (instr.op) {
      case Op::Load: return true;
      case Op::RecvActivation:
      case Op::RecvGrad: return receive(stage, instr, block);
      case Op::SendActivation: return send(stage, instr, {true, instr.micro, block + 1, now_[s]});
      case Op::SendGrad: return send(stage, instr, {false, instr.micro, block - 1, now_[s]});
      case Op::Forward: return pass(stage, instr, cost.forward, Op::SendActivation, takes);
      case Op::BackwardInput: return pass(stage, instr, cost.backward_input, Op::SendGrad, gives);
      case Op::BackwardWeight: return pass(stage, instr, cost.backward_weight, Op::SendGrad, false);
      case Op::Backward: return pass(stage, instr, cost.backward_input + cost.backward_weight, Op::SendGrad, gives);
      case Op::Validate: return validate(s);
    }
    return false;
  }

  bool end_step(size_t s, size_t number) {
    if (steps_.tied && !exchange(s, number)) return false;
    if (!steps_.between.empty()) now_[s] += steps_.between[s];
    ends_[number] = std::max(ends_[number], now_[s]);
    return true;
  }

  // The first stage adds the last one's use of the tied matrix to its own, and the last one gets the sum.
  bool exchange(size_t s, size_t number) {
    const bool first = s == 0;
    if (!first && s + 1 != schedules_.size()) return true;
    const std::vector<double>& from = first ? uses_ : sums_;
    if (from.size() == number) return false;
    now_[s] = std::max(now_[s], from[number]) + steps_.tied->send;
    if (first) sums_.push_back(now_[s]);
    return true;
  }

  // The stages meet.
  bool validate(size_t s) {
    const size_t round = validated_[s].rounds;
    if (meetings_.size() == round) meetings_.emplace_back();
    Meeting& meeting = meetings_[round];
    if (!std::exchange(validated_[s].is_there, true)) {
      ++meeting.stages;
      meeting.time = std::max(meeting.time, now_[s]);
    }
    if (meeting.stages < num_stages()) return false;
    now_[s] = meeting.time;
    validated_[s] = {.rounds = round + 1};
    return true;
  }

  std::vector<Channel>& channels_of(const Instr& instr, Op op) {
    return channels_[static_cast<size_t>(placement_.way_of(op, instr.chunk))];
  }

  bool send(i64 stage, const Instr& instr, const Message& message) {
    Channel& channel = channels_of(instr, instr.op)[stage];
    channel.of_kind[message.activation].push_back(channel.sent.size());
    channel.sent.push_back(message);
    return true;
  }

  bool receive(i64 stage, const Instr& instr, i64 block) {
    Channel& channel = channels_of(instr, instr.op)[placement_.peer_of(narrow<int>(stage), instr.op, instr.chunk)];
    if (channel.taken.size() == channel.sent.size()) return false;
    const Message& message = channel.sent[channel.taken.size()];
    const bool activation = instr.op == Op::RecvActivation;
    DS_CHECK(
        message.micro == instr.micro && message.block == block && message.activation == activation, Errc::Internal,
        "internal error: stage {} is at {} of micro-batch {} for block {}, and the next message is micro-batch {} for "
        "block {}",
        stage, op_name(instr.op), instr.micro, block, message.micro, message.block);
    const i64 sender_block = activation ? block - 1 : block + 1;
    double& now = now_[stage];
    now = std::max(now, message.ready) + costs(sender_block).send + delay();
    channel.taken.push_back(now);
    return true;
  }

  bool pass(i64 stage, const Instr& instr, double cost, Op send, bool sends) {
    double& now = now_[stage];
    const Channel& channel = channels_of(instr, send)[stage];
    // The message that used this buffer before.
    const std::vector<size_t>& of_kind = channel.of_kind[send == Op::SendActivation];
    const i64 before = narrow<i64>(of_kind.size()) - adversity_.send_buffers;
    if (sends && before >= 0) {
      if (of_kind[before] >= channel.taken.size()) return false;
      now = std::max(now, channel.taken[of_kind[before]]);
    }
    const double end = now + cost + delay();
    timeline_.stages[stage].push_back({instr, now, end});
    timeline_.makespan = std::max(timeline_.makespan, end);
    now = end;
    return true;
  }

  void check_done(i64 stage) const {
    const size_t s = static_cast<size_t>(stage);
    const size_t at = next_[s] % (schedules_[s].size() + 1);
    if (next_[s] < (schedules_[s].size() + 1) * steps_.number) {
      const Instr& instr = schedules_[s][std::min(at, schedules_[s].size() - 1)];
      throw Error(Errc::Internal,
                  fmt::format("internal error: stage {} waits forever at {} of micro-batch {}, chunk {}", stage,
                              op_name(instr.op), instr.micro, instr.chunk));
    }
    for (const std::vector<Channel>& way : channels_)
      DS_CHECK(way[s].taken.size() == way[s].sent.size(), Errc::Internal,
               "internal error: stage {} sends a message that nobody receives", stage);
  }

  std::span<const std::vector<Instr>> schedules_;
  std::span<const Costs> costs_;
  const Adversity adversity_;
  Placement placement_;
  std::mt19937_64 rng_;
  i64 num_blocks_ = 0;
  const Steps steps_;
  const size_t use_after_;  // use_complete_after()
  // By step: when the last stage's use of the tied matrix may be sent, and when the first one has the sum of both.
  std::vector<double> uses_, sums_;
  // Per stage: its next instruction (one more ends a step), its clock, the meetings that it has left, and whether it
  // waits in the next one.
  std::vector<size_t> next_;
  std::vector<double> now_;
  struct Validated {
    size_t rounds = 0;
    bool is_there = false;
  };
  std::vector<Validated> validated_;
  struct Meeting {
    i64 stages = 0;  // that have come
    double time = 0;
  };
  std::vector<Meeting> meetings_;
  std::vector<double> ends_;
  std::vector<Channel> channels_[2];  // by Way: the messages of each stage
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
                  const Adversity& adversity, bool v) {
  DS_ASSERT(!schedules.empty() && !costs.empty() && adversity.send_buffers > 0);
  return Simulation(schedules, costs, adversity, v, {}).run();
}

SteadySteps simulate_steps(std::span<const std::vector<Instr>> schedules, std::span<const Costs> costs,
                           std::span<const double> between, bool v, std::optional<TiedExchange> tied) {
  DS_ASSERT(!tied || (schedules.size() > 1 && !v));
  // Delays of the first steps have passed through all stages by then, and what repeats, repeats within so many.
  constexpr size_t kSettled = 4;
  Simulation steps(schedules, costs, {}, v, {2 * kSettled, between, tied});
  const Timeline timeline = steps.run();
  const std::vector<double>& ends = steps.ends();
  SteadySteps steady{.period = (ends[2 * kSettled - 1] - ends[kSettled - 1]) / kSettled, .idle = {}};
  for (size_t s = 0; s < schedules.size(); ++s) {
    double busy = between.empty() ? 0 : between[s];
    for (const Span& span : timeline.stages[s]) busy += (span.end - span.begin) / (2 * kSettled);
    steady.idle.push_back(steady.period - busy);
  }
  return steady;
}

double SteadySteps::bubble_fraction() const noexcept {
  if (period <= 0) return 0;
  double idle_time = 0;
  for (const double of_stage : idle) idle_time += of_stage;
  return idle_time / (period * static_cast<double>(idle.size()));
}

Timeline simulate(const ScheduleOptions& options, std::span<const Costs> costs, const Adversity& adversity) {
  return simulate(make_schedules(options), costs, adversity, options.placement().v);
}

std::optional<TiedExchange> tied_exchange(const ScheduleOptions& o, double send) noexcept {
  if (!o.tied) return {};
  return TiedExchange{.send = send, .ahead = o.sends_use_ahead};
}

bool formula_is_exact(const ScheduleOptions& o, const Costs& c) {
  if (o.backward_end > 0) return false;  // blocks differ
  if (o.kind == ScheduleKind::ZeroBubbleH2)
    return o.post_validate && (!o.tied || o.sends_use_ahead) && o.micro_batches >= 2 * i64{o.stages} - 1 &&
           c.forward == c.backward_input && c.forward == c.backward_weight;
  if (o.post_validate) return false;
  if (o.kind == ScheduleKind::ZeroBubbleV)
    return o.memory_limit >= 1 && o.micro_batches >= o.stages && c.forward == c.backward_input &&
           c.forward == c.backward_weight;
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
    case ScheduleKind::ZeroBubbleH2:
      return other_stages * std::max(0.0, c.forward + c.backward_input - 2 * c.backward_weight);
    case ScheduleKind::ZeroBubbleV: return other_stages * c.forward;
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
  if (formula_is_exact(o, costs)) return bubble_formula(o, costs);
  if (o.post_validate)
    return simulate_steps(make_schedules(o), {&costs, 1}, {}, o.placement().v, tied_exchange(o)).bubble_fraction();
  return simulate(o, {&costs, 1}).bubble_fraction();
}

}  // namespace ds::pipeline
