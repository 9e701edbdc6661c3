// SPDX-License-Identifier: Apache-2.0
// Idle time of pipelines, measured, beside the formula:
//   pipeline_bench timed [UNIT_MS]                    the real schedules over real communicators, computing is sleeping
//   pipeline_bench steps [UNIT_MS [tied]]             the same of consecutive steps of four stages
//   pipeline_bench real CONFIG [TURNS [KEY=VALUE]...]  whole steps of two stages with one thread each
//
// "timed": the instructions of each stage run on a thread of their own, messages through the mesh's communicators as in
// engine/train_step.cc. A pass sleeps instead of computing, so there may be more stages than cores: of one unit for all
// of a stage's forward pass, and two for its backward pass, half of which is the weights'. A stage's idle time is the
// time from the first pass of all to the last that it did not sleep. Its share of the whole, over all stages, is
// printed beside that of the formula. Time that a sleep takes longer than asked for counts as busy.
//
// "steps": ten steps one after the other. Between two of them all stages meet, as a norm over all gradients makes them;
// or, post-validated, they meet at Validate. The idle share is that of the time from the end of the second step to the
// end of the last one, on each stage.
//
// With "tied", the first and the last stage share a matrix: post-validated steps at whose ends the first stage waits
// for the last one's gradient of the matrix, and then the last one for the sum; the last stage sends its gradient with
// its last pass, or as soon as it is complete.
//
// "real": the same steps as one rank with one thread, in turns. If nothing but the schedule cost time, a pipeline of p
// stages would take 1 / (p (1 - bubble)) of that rank's time. The printed figure is 1 - one rank's time / (p * its
// time): the bubble, with uneven stages, communication, and shared memory bandwidth. On a machine with other load it
// means little.

#include <cstring>

#include "bench/arrangement.h"
#include "config/parallel.h"
#include "pipeline/simulate.h"

using namespace ds;
using namespace ds::bench;
using pipeline::Instr;
using pipeline::Op;
using pipeline::ScheduleOptions;

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr i64 kMessageBytes = 16384;

struct StageTimes {
  Clock::time_point begin = Clock::time_point::max(), end = Clock::time_point::min();
  double busy = 0;                        // seconds
  std::vector<Clock::time_point> ends{};  // by step
  std::vector<double> busy_until_end{};   // likewise
};

// Runs one stage's schedule as the engine does: a receive is posted before the pass ahead of it runs, a pass waits for
// its input and until the message of the pass before has been taken.
class TimedStage {
 public:
  TimedStage(Mesh& mesh, std::span<const Instr> schedule, const ScheduleOptions& options,
             const pipeline::Costs& seconds)
      : mesh_(mesh), schedule_(schedule), options_(options), seconds_(seconds) {
    const size_t n = static_cast<size_t>(options.chunks * options.micro_batches);
    for (auto* kind : {&inputs_, &outputs_, &grads_in_, &grads_out_}) {
      kind->resize(n);
      for (Message& m : *kind) m.bytes.resize(kMessageBytes);
    }
  }

  StageTimes run(int steps = 1) {
    for (int step = 0; step < steps; ++step) {
      run_step();
      share_matrix();
      if (steps > 1 && !options_.post_validate) meet();
      times_.ends.push_back(Clock::now());
      times_.busy_until_end.push_back(times_.busy);
    }
    for (auto* kind : {&outputs_, &grads_out_}) {
      for (Message& m : *kind) m.ticket.wait();
    }
    shared_.ticket.wait();
    return times_;
  }

 private:
  struct Message {
    std::vector<std::byte> bytes;
    Ticket ticket;
    bool expected = false;  // a receive of it has been posted
  };

  void run_step() {
    posted_ = 0;
    for (auto* kind : {&inputs_, &grads_in_}) {
      for (Message& m : *kind) m.expected = false;
    }
    for (size_t i = 0; i < schedule_.size(); ++i) {
      const Instr& instr = schedule_[i];
      switch (instr.op) {
        case Op::Load: break;
        case Op::RecvActivation:
        case Op::RecvGrad: post_receives(i + 1); break;
        case Op::SendActivation: send(outputs_, instr); break;
        case Op::SendGrad: send(grads_out_, instr); break;
        case Op::Forward: pass(i, inputs_, seconds_.forward); break;
        case Op::Backward: pass(i, grads_in_, seconds_.backward_input + seconds_.backward_weight); break;
        case Op::BackwardInput: pass(i, grads_in_, seconds_.backward_input); break;
        case Op::BackwardWeight: pass(i, grads_in_, seconds_.backward_weight); break;
        case Op::Validate: meet(); break;
      }
      if (is_last() && options_.sends_use_ahead && i + 1 == pipeline::use_complete_after(schedule_)) send_shared(0);
    }
    if (is_last() && !options_.sends_use_ahead) send_shared(0);
  }

  bool is_last() const { return options_.tied && options_.stage + 1 == options_.stages; }

  void send_shared(int to) {
    shared_.ticket.wait();
    shared_.ticket = mesh_.pp().send(shared_.bytes.data(), kMessageBytes, to, "pp.send");
  }

  // As in update/combine.cc.
  void share_matrix() {
    const bool first = options_.tied && options_.stage == 0;
    if (!first && !is_last()) return;
    shared_.ticket.wait();
    mesh_.pp().recv(shared_.bytes.data(), kMessageBytes, first ? options_.stages - 1 : 0, "pp.recv").wait();
    if (first) send_shared(options_.stages - 1);
  }

  // The two reductions of a verdict.
  void meet() {
    i64 numbers[2] = {1, 1};
    mesh_.pp().all_reduce(numbers, 1, DType::I64, ReduceOp::Max, "pp.stats").wait();
    mesh_.pp().all_reduce(numbers, 2, DType::I64, ReduceOp::Sum, "pp.stats").wait();
  }

  Message& of(std::vector<Message>& kind, const Instr& instr) {
    return kind[instr.chunk * options_.micro_batches + instr.micro];
  }

  void post_receives(size_t end) {
    for (; posted_ < end; ++posted_) {
      const Instr& instr = schedule_[posted_];
      const bool activation = instr.op == Op::RecvActivation;
      if (!activation && instr.op != Op::RecvGrad) continue;
      Message& m = of(activation ? inputs_ : grads_in_, instr);
      m.ticket = way_of(instr).recv(m.bytes.data(), kMessageBytes, peer_of(instr), "pp.recv");
      m.expected = true;
    }
  }

  Communicator& way_of(const Instr& instr) {
    return options_.placement().way_of(instr.op, instr.chunk) == pipeline::Way::Down ? mesh_.down() : mesh_.up();
  }
  int peer_of(const Instr& instr) const { return options_.placement().peer_of(options_.stage, instr.op, instr.chunk); }

  void send(std::vector<Message>& kind, const Instr& instr) {
    Message& m = of(kind, instr);
    m.ticket.wait();  // of the step before
    std::memcpy(m.bytes.data(), &instr.micro, sizeof instr.micro);
    m.ticket = way_of(instr).send(m.bytes.data(), kMessageBytes, peer_of(instr), "pp.send");
  }

  void pass(size_t at, std::vector<Message>& needs, double seconds) {
    const auto stops = [](const Instr& i) {
      return i.op == Op::RecvActivation || i.op == Op::RecvGrad || i.op == Op::Validate;
    };
    const auto next = std::find_if(schedule_.begin() + static_cast<std::ptrdiff_t>(at), schedule_.end(), stops);
    if (next != schedule_.end()) post_receives(static_cast<size_t>(next - schedule_.begin()) + 1);

    const Instr& instr = schedule_[at];
    Message& input = of(needs, instr);
    input.ticket.wait();
    if (input.expected) {
      i64 micro = -1;
      std::memcpy(&micro, input.bytes.data(), sizeof micro);
      DS_CHECK(micro == instr.micro, Errc::Internal, "stage {}: micro-batch {} came for {}", options_.stage, micro,
               instr.micro);
    }
    const auto begin = Clock::now();
    std::this_thread::sleep_until(begin + std::chrono::duration_cast<Clock::duration>(Seconds(seconds)));
    const auto end = Clock::now();
    times_.begin = std::min(times_.begin, begin);
    times_.end = std::max(times_.end, end);
    times_.busy += Seconds(end - begin).count();
  }

  Mesh& mesh_;
  std::span<const Instr> schedule_;
  ScheduleOptions options_;
  pipeline::Costs seconds_;
  std::vector<Message> inputs_, outputs_, grads_in_, grads_out_;
  Message shared_{.bytes = std::vector<std::byte>(kMessageBytes), .ticket = {}};
  size_t posted_ = 0;
  StageTimes times_;
};

struct Measured {
  double bubble, makespan;  // of all stages
};

Measured measure(const std::vector<std::unique_ptr<Mesh>>& meshes, ScheduleOptions options,
                 const pipeline::Costs& seconds) {
  const std::vector<std::vector<Instr>> schedules = pipeline::make_schedules(options);
  std::vector<StageTimes> times(schedules.size());
  on_ranks(options.stages, [&](int stage) {
    const size_t s = static_cast<size_t>(stage);
    ScheduleOptions own = options;
    own.stage = stage;
    times[s] = TimedStage(*meshes[s], schedules[s], own, seconds).run();
  });
  auto begin = Clock::time_point::max(), end = Clock::time_point::min();
  double busy = 0;
  for (const StageTimes& t : times) {
    begin = std::min(begin, t.begin);
    end = std::max(end, t.end);
    busy += t.busy;
  }
  const double makespan = Seconds(end - begin).count();
  return {1 - busy / (makespan * options.stages), makespan};
}

// The mean idle share of the stages of post-validated steps, or of steps that wait for each other.
double measure_steps(const std::vector<std::unique_ptr<Mesh>>& meshes, const ScheduleOptions& options,
                     const pipeline::Costs& seconds) {
  constexpr int kSteps = 10, kFirst = 1;
  const std::vector<std::vector<Instr>> schedules = pipeline::make_schedules(options);
  std::vector<StageTimes> times(schedules.size());
  on_ranks(options.stages, [&](int stage) {
    const size_t s = static_cast<size_t>(stage);
    ScheduleOptions own = options;
    own.stage = stage;
    times[s] = TimedStage(*meshes[s], schedules[s], own, seconds).run(kSteps);
  });
  double idle = 0;
  for (const StageTimes& t : times) {
    const double busy = t.busy_until_end.back() - t.busy_until_end[kFirst];
    idle += (1 - busy / Seconds(t.ends.back() - t.ends[kFirst]).count()) / options.stages;
  }
  return idle;
}

std::vector<std::unique_ptr<Mesh>> meshes_of(int stages) {
  auto comms = make_thread_communicators(stages, {.timeout_s = 600});
  std::vector<std::unique_ptr<Mesh>> meshes(comms.size());
  on_ranks(stages, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    meshes[r] = std::make_unique<Mesh>(std::move(comms[r]), MeshShape{.pp = stages}, CommOptions{.timeout_s = 600});
  });
  return meshes;
}

int steps(double unit_ms, bool tied) {
  constexpr int kStages = 4;
  using enum pipeline::ScheduleKind;
  const std::vector<std::unique_ptr<Mesh>> meshes = meshes_of(kStages);
  std::printf("passes of %.1f ms forward, %.1f ms backward; %d stages, %u cores\n\n", unit_ms, 2 * unit_ms, kStages,
              std::thread::hardware_concurrency());
  std::printf("%-12s %6s %14s %10s %10s\n", "schedule", "micro", tied ? "sent" : "steps", "simulated", "measured");
  for (const auto& [kind, chunks] :
       {std::pair{OneFOneB, 1}, {Interleaved, 2}, {ZeroBubbleH1, 1}, {ZeroBubbleV, 2}, {ZeroBubbleH2, 1}}) {
    for (const i64 m : {8, 16}) {
      for (const bool second : {false, true}) {  // post-validated, or sent ahead
        ScheduleOptions options{
            .kind = kind, .stages = kStages, .micro_batches = m, .chunks = chunks, .post_validate = tied || second};
        if (tied) options.tied = true, options.sends_use_ahead = second;
        if (!pipeline::why_not(options).empty() || (tied && options.placement().v)) continue;
        const double unit = unit_ms * 1e-3 / chunks;
        const double measured =
            measure_steps(meshes, options, {.forward = unit, .backward_input = unit, .backward_weight = unit});
        const char* const what = tied ? (second ? "ahead" : "at the end") : second ? "post-validated" : "wait";
        std::printf("%-12s %6ld %14s %10.3f %10.3f\n", std::string(schedule_name(kind)).c_str(), m, what,
                    pipeline::bubble_fraction(options), measured);
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

int timed(double unit_ms) {
  struct Kind {
    pipeline::ScheduleKind kind;
    int chunks;
    double memory_limit = 1;
  };
  constexpr Kind kKinds[] = {{pipeline::ScheduleKind::Naive, 1},
                             {pipeline::ScheduleKind::GPipe, 1},
                             {pipeline::ScheduleKind::OneFOneB, 1},
                             {pipeline::ScheduleKind::Interleaved, 2},
                             {pipeline::ScheduleKind::ZeroBubbleH1, 1},
                             {pipeline::ScheduleKind::ZeroBubbleV, 2},
                             {pipeline::ScheduleKind::ZeroBubbleV, 2, 0.75},
                             {pipeline::ScheduleKind::ZeroBubbleV, 2, 0.5}};
  std::printf("passes of %.1f ms forward, %.1f ms backward; %u cores\n\n", unit_ms, 2 * unit_ms,
              std::thread::hardware_concurrency());
  std::printf("%-12s %7s %7s %10s %10s %9s %12s %12s\n", "schedule", "stages", "micro", "formula", "measured", "off by",
              "step ms", "ideal ms");
  double worst = 0;
  std::vector<double> off;
  for (const int p : {2, 4, 8}) {
    std::vector<std::unique_ptr<Mesh>> meshes = meshes_of(p);
    for (const Kind& kind : kKinds) {
      for (const i64 m : {4, 8, 16, 32}) {
        const ScheduleOptions options{.kind = kind.kind,
                                      .stages = p,
                                      .micro_batches = m,
                                      .chunks = kind.chunks,
                                      .memory_limit = kind.memory_limit};
        if (!pipeline::why_not(options).empty()) continue;
        const double unit = unit_ms * 1e-3 / kind.chunks;
        const pipeline::Costs seconds{.forward = unit, .backward_input = unit, .backward_weight = unit};
        const Measured measured = measure(meshes, options, seconds);
        // If the formula does not hold (zb-h1 of fewer micro-batches than stages, a V of less memory), the simulation
        // gives the expected value.
        const bool holds = pipeline::formula_is_exact(options, seconds);
        const pipeline::Timeline ideal = pipeline::simulate(options, {&seconds, 1});
        const double expected = holds ? pipeline::bubble_formula(options, seconds) : ideal.bubble_fraction();
        off.push_back(std::abs(measured.bubble - expected));
        worst = std::max(worst, off.back());
        std::printf("%-12s %7d %7ld %9.3f%s %10.3f %+9.3f %12.1f %12.1f\n",
                    fmt::format("{}{}", schedule_name(kind.kind),
                                kind.memory_limit < 1 ? fmt::format(" {}", kind.memory_limit) : "")
                        .c_str(),
                    p, m, expected, holds ? " " : "*", measured.bubble, measured.bubble - expected,
                    measured.makespan * 1e3, ideal.makespan * 1e3);
        std::fflush(stdout);
      }
    }
    on_ranks(p, [&](int rank) { meshes[rank].reset(); });
  }
  std::printf("\n* by simulation\noff by: median %.3f, at most %.3f\n", median(off), worst);
  return 0;
}

int real(const std::string& config, int turns, const std::vector<std::string>& base) {
  std::vector<std::unique_ptr<Arrangement>> all;
  const auto add = [&](const std::string& name, std::vector<std::string> set, int ranks) {
    set.insert(set.begin(), base.begin(), base.end());
    all.push_back(std::make_unique<Arrangement>(name, config, set, ranks, 1));
  };
  add("one rank", {"pipeline.stages=1", "pipeline.schedule=1f1b"}, 1);
  for (const char* schedule : {"naive", "gpipe", "1f1b", "zb-h1"})
    add(schedule, {"pipeline.stages=2", fmt::format("pipeline.schedule={}", schedule)}, 2);
  add("interleaved", {"pipeline.stages=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"}, 2);
  add("zb-v", {"pipeline.stages=2", "pipeline.schedule=zb-v"}, 2);
  take_turns(all, turns);
  const Arrangement& one = *all.front();
  std::printf("%s: %ld micro-batches of %ld x %ld tokens, one thread per rank; %d turns\n\n", config.c_str(),
              one.engine(0).plan().micro_batches, one.config().batch.micro, one.config().data.seq_length, turns);
  std::printf("%-14s %10s %12s %12s %12s %12s %10s %8s\n", "", "step ms", "over 1 rank", "formula", "bubble", "formula",
              "cpu ratio", "bits");
  for (const auto& a : all) {
    const plan::RunPlan& plan = a->engine(0).plan();
    const ScheduleOptions options{.kind = a->config().pipeline.schedule,
                                  .stages = plan.mesh.pp,
                                  .micro_batches = plan.micro_batches,
                                  .chunks = narrow<int>(std::ssize(plan.stage.chunks))};
    const double bubble = plan.mesh.pp > 1 ? pipeline::bubble_formula(options) : 0;
    const double ratio = a->wall_over(one), p = plan.mesh.pp;
    std::printf("%-14s %10.1f %12.3f %12.3f %12.3f %12.3f %10.2f %8s\n", a->name().c_str(), a->wall() * 1e3, ratio,
                1 / (p * (1 - bubble)), 1 - 1 / (p * ratio), bubble, a->cpu_over(one),
                a->last().loss == one.last().loss ? "same" : "OTHERS");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "timed") return timed(argc > 2 ? std::atof(argv[2]) : 10);
  const bool tied = argc == 4 && std::string_view(argv[3]) == "tied";
  if (mode == "steps" && (argc < 4 || tied)) return steps(argc > 2 ? std::atof(argv[2]) : 10, tied);
  if (mode == "real" && argc > 2)
    return real(argv[2], argc > 3 ? std::max(1, std::atoi(argv[3])) : 5, {argv + std::min(4, argc), argv + argc});
  std::fprintf(
      stderr,
      "usage: pipeline_bench timed [UNIT_MS] | steps [UNIT_MS [tied]] | real CFG.json [TURNS [KEY=VALUE]...]\n");
  return 2;
}
