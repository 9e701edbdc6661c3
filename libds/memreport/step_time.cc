// SPDX-License-Identifier: Apache-2.0
#include "memreport/step_time.h"

#include <algorithm>
#include <optional>
#include <set>

#include "memreport/hardware.h"
#include "memreport/models.h"
#include "mesh/from_config.h"
#include "pipeline/simulate.h"
#include "plan/planned.h"

namespace ds::memreport {
namespace {

using plan::Pass;

// A stage's terms.
struct StageTime {
  std::vector<pipeline::Costs> chunks;
  double compute = 0, recompute = 0, in_layers = 0;
  double exposed = 0, hidden = 0;
  double tied = 0;           // of `exposed`: a message of a tied matrix's gradient between two stages
  double least_exposed = 0;  // with whichever cut of the layers, and calls
  double optimizer = 0, publish = 0;
  double on_host = 0;            // of updates there, beside a GPU
  double files = 0, copies = 0;  // exposed: of what is offloaded
  std::map<std::string, double> messages;

  double busy() const noexcept { return compute + in_layers; }
};

class StageModel {
 public:
  StageModel(const StageWork& stage, const model::Model& model, const Machine& machine, const Links* links)
      : plan_(*stage.plan),
        work_(*stage.work),
        splits_(model.splits),
        machine_(machine),
        links_(links),
        stream_bytes_(plan_.activations.message_bytes) {}

  StageTime run() && {
    for (const plan::ChunkWork& chunk : work_.chunks) time_.chunks.push_back(costs_of(chunk));
    data_parallel();
    behind_the_passes();
    time_.optimizer += machine_.seconds(work_.optimizer) + copies_for_undo();
    return std::move(time_);
  }

 private:
  double micro_batches() const noexcept { return static_cast<double>(work_.micro_batches); }

  // The time of the messages of one text (comm/message_tag).
  double seconds(std::string_view text, const CommCount& count) {
    const MessageTag tag = message_tag(text);
    MeshShape mesh = plan_.mesh;
    if (tag.axis == Axis::Near) mesh.dp = near_ranks();  // ranks of dp side by side
    const auto split = std::ranges::find(splits_, text.substr(0, text.rfind('.')), &DpSplit::name);
    const AxisGroup group = split != splits_.end() ? group_of(mesh, *split, machine_.ranks_per_node)
                                                   : group_of(mesh, tag.axis, machine_.ranks_per_node);
    if (group.ranks == 1 || count.calls == 0) return 0;
    DS_CHECK(links_ != nullptr, Errc::Config,
             "links: {} over {} ranks, and nothing is known of links: give --links, or --machine with the rates of as "
             "many ranks",
             text, group.ranks);
    return message_seconds(*links_, tag.collective, group, count);
  }
  double sent(std::string_view text, const CommCount& count) {
    const double s = seconds(text, count);
    if (s > 0) time_.messages[std::string(text)] += s;
    return s;
  }
  double sent(Axis axis, Collective collective, const CommCount& count) {
    return sent(message_text(axis, collective), count);
  }
  // The plan's messages of a kind; none, unless it has some.
  CommCount traffic(const std::string& text) const {
    const auto found = plan_.traffic.last.find(text);
    return found != plan_.traffic.last.end() ? found->second : CommCount{};
  }
  CommCount traffic(Axis axis, Collective collective) const {
    return traffic(std::string(message_text(axis, collective)));
  }
  // The time of all messages of a kind over the groups that reduce rows of their own, such as those of experts.
  double sent_over_splits(Collective collective) {
    double s = 0;
    for (const DpSplit& split : splits_) {
      const std::string text = message_text(split.name, collective);
      if (message_tag(text).axis == Axis::Split) s += sent(text, traffic(text));  // ranks of ep reduce nothing
    }
    return s;
  }

  pipeline::Costs costs_of(const plan::ChunkWork& chunk) {
    const auto cost = [&](Pass pass) {
      const plan::PassWork& w = chunk.of(pass);
      const double first = machine_.seconds(w.ops), m = micro_batches();
      const double ops = chunk.later ? (first + (m - 1) * machine_.seconds(chunk.of_later(pass).ops)) / m : first;
      double messages = 0;
      for (const auto& [name, count] : w.messages)
        messages += sent(name, {count.calls * work_.micro_batches, count.bytes * work_.micro_batches});
      time_.compute += ops * m;
      time_.in_layers += messages;
      if (pass == Pass::Recompute) time_.recompute += ops * m;
      return ops + messages / m;
    };
    const double gradients = machine_.seconds(chunk.gradients), gathers = machine_.seconds(chunk.gathers);
    time_.compute += gradients + gathers;
    pipeline::Costs costs;
    costs.forward = cost(Pass::Forward);
    costs.backward_input = cost(Pass::Recompute) + cost(Pass::BackwardInput);
    costs.backward_weight = cost(Pass::BackwardWeight) + gradients / micro_batches();
    for (double* const pass : {&costs.forward, &costs.backward_input}) *pass += gathers / micro_batches() / 2;
    costs.send = seconds(message_text(Axis::Pp, Collective::Send), {1, stream_bytes_});
    return costs;
  }

  // Gathers and reductions beside the passes.
  void data_parallel() {
    const int P = zero::num_shards(plan_.mesh);
    const CommCount reductions = traffic(Axis::Dp, Collective::ReduceScatter);
    // One rank's sums are its own gradients, folded all the same.
    const double reduce =
        (P > 1 ? sent(Axis::Dp, Collective::ReduceScatter, reductions) : machine_.seconds(work_.reductions)) +
        sent_over_splits(Collective::ReduceScatter);
    const CommCount gathers = gathers_of_passes();
    const double gather = (shards_params() ? sent_over_splits(Collective::AllGather) : 0) +
                          sent(Axis::Dp, Collective::AllGather, gathers) +
                          sent(Axis::Near, Collective::AllGather, traffic(Axis::Near, Collective::AllGather));
    const CommCount codes = traffic(Axis::Dp, Collective::AllToAll);
    // Codes of two hops take the time of the slower hop with the bytes of both. Sparse gradients are waited for.
    const double all = reduce + gather + sent(Axis::Dp, Collective::AllToAll, codes);
    const double waits = sent(Axis::Dp, Collective::SparseGather, traffic(Axis::Dp, Collective::SparseGather));
    double forward = 0, backward = 0;
    for (const pipeline::Costs& c : time_.chunks) {
      forward += c.forward * micro_batches();
      backward += (c.backward_input + c.backward_weight) * micro_batches();
    }
    // Local sums of micro-batches are reduced beside the last one's backward pass.
    double beside = plan_.reduce_each_micro ? backward : backward / micro_batches();
    if (gathers.calls > 0) beside = forward + backward;
    const double n = static_cast<double>(std::max<i64>(1, reductions.calls + codes.calls + gathers.calls));
    const bool overlap = plan_.dp().grads.overlap && machine_.hides_communication();
    time_.exposed = waits + (overlap ? std::max(beside + all / n, beside / n + all) - beside : all);
    time_.least_exposed = overlap ? std::max(0.0, reduce - forward - backward) : reduce;  // how much is gathered varies
    time_.hidden = std::max(0.0, waits + all - time_.exposed);
  }

  bool shards_params() const noexcept { return plan_.dp().layout.states().shard_params; }
  int near_ranks() const noexcept {
    for (const DpSplit& split : plan_.dp().zeropp) {
      if (split.name == "near") return split.inner;
    }
    return 1;
  }
  // Stage 3's.
  CommCount gathers_of_passes() const {
    CommCount gathers;
    if (!shards_params()) return gathers;
    // The rest is publication of what is whole.
    const i64 P = zero::num_shards(plan_.mesh);
    gathers.bytes =
        traffic(Axis::Dp, Collective::AllGather).bytes - plan_.dp().whole / P * (P - 1) * dtype_bytes(plan_.work);
    std::set<i64> units;  // of second shards each comes once from all
    for (const zero::GatherStep& step : plan_.dp().train_gathers.steps) {
      gathers.calls += std::ssize(step.launch);
      for (const zero::GatherStep::Launch& launch : step.launch) units.insert(launch.unit);
    }
    if (near_ranks() > 1) gathers.calls = std::ssize(units);
    return gathers;
  }

  // States beside a GPU are copied by its host (offload_to_host).
  double copies_for_undo() const {
    const plan::RunPlan::Kept kept = plan_.kept_for_undo();
    const bool here = plan_.device == DeviceKind::Cpu || plan_.offload.states.device == OffloadDevice::None;
    const i64 copied = 2 * (kept.params + (here ? kept.states : 0));  // read and written
    return machine_.memory.empty() ? 0 : machine_.memory.seconds(static_cast<double>(copied));
  }

  // The time for which all ranks wait when the passes are done.
  void behind_the_passes() {
    CommCount publish = traffic(Axis::Dp, Collective::AllGather);
    const CommCount gathers = gathers_of_passes();
    publish.calls -= gathers.calls;
    publish.bytes -= gathers.bytes;
    double& gathered =
        plan_.dp().layout.states().shard_optimizer ? time_.publish : time_.exposed;  // stage 0: gradients
    const double publication = sent(Axis::Dp, Collective::AllGather, publish) +
                               (shards_params() ? 0 : sent_over_splits(Collective::AllGather));
    gathered += publication;
    if (&gathered == &time_.exposed) time_.least_exposed += publication;

    // Messages beyond the passes of layers: of maxima, and of tp and pp sums over parameters that several of their
    // ranks hold.
    std::map<std::string, CommCount> rest = plan_.traffic.last;
    for (const plan::ChunkWork& chunk : work_.chunks) {
      for (const plan::PassWork& pass : chunk.passes) {
        for (const auto& [name, count] : pass.messages) {
          rest[name].calls -= count.calls * work_.micro_batches;
          rest[name].bytes -= count.bytes * work_.micro_batches;
        }
      }
    }
    time_.publish +=
        sent(Axis::Dp, Collective::AllReduce, rest[std::string(message_text(Axis::Dp, Collective::AllReduce))]);
    CommCount streams;
    for (const pipeline::Instr& i : plan_.stage.schedule) {
      if (i.op == pipeline::Op::SendActivation || i.op == pipeline::Op::SendGrad) ++streams.calls;
    }
    streams.bytes = streams.calls * stream_bytes_;
    if (streams.calls > 0) sent(Axis::Pp, Collective::Send, streams);  // in the simulation
    CommCount& sends = rest[std::string(message_text(Axis::Pp, Collective::Send))];
    sends.calls -= streams.calls;
    sends.bytes -= streams.bytes;
    for (const auto& [text, count] : rest) {
      const MessageTag tag = message_tag(text);
      if (tag.axis == Axis::Near) continue;   // counted with other gathers and reductions
      if (tag.axis == Axis::Outer) continue;  // of the last step, if it meets
      if (tag.axis == Axis::Dp && tag.collective != Collective::OneBit) continue;
      const double s = sent(text, count);
      time_.exposed += s;
      if (tag.axis == Axis::Pp && tag.collective == Collective::Send) time_.tied += s;
    }
    // Fragments of DiLoCo meet once in sync_every steps.
    const DilocoConfig& d = plan_.diloco;
    double meetings = 0;
    for (const auto& [name, count] : plan_.traffic.meetings) {
      const double s = seconds(name, count);
      if (s > 0) time_.messages[name] += s / static_cast<double>(d.sync_every);
      meetings += s;
    }
    const double beside = static_cast<double>(d.fragments * d.overlap_steps) * (time_.busy() + time_.exposed);
    time_.exposed += std::max(0.0, meetings - beside) / static_cast<double>(d.sync_every);
    // The verdict: two small sums over each axis.
    for (const Axis axis : {Axis::Dp, Axis::Tp, Axis::Pp}) time_.exposed += sent(axis, Collective::AllReduce, {2, 32});
  }

  const plan::RunPlan& plan_;
  const plan::StepWork& work_;
  const std::vector<DpSplit>& splits_;
  const Machine& machine_;
  const Links* links_;
  i64 stream_bytes_;  // of a message of the pipeline
  StageTime time_;
};

// Updates on the processors of the host beside a GPU, which the ranks of a node share, and copies. Those of page-locked
// memory run beside the rest, but what of them is hidden depends on the order of a step: none of it is counted on.
void offload_to_host(StageTime& t, const plan::RunPlan& plan, const plan::StepWork& work, const Machine& machine) {
  if (plan.device == DeviceKind::Cpu || !machine.knows_host()) return;
  t.on_host = machine.ranks_per_node * work.host.total().bytes / machine.host_updates;
  if (plan.offload.states.device != OffloadDevice::None)
    t.on_host += machine.ranks_per_node * 2 * static_cast<double>(plan.kept_for_undo().states) / machine.host_updates;
  t.copies = static_cast<double>(plan.traffic.copies.to_device + plan.traffic.copies.to_host) / machine.host_link;
  // A delayed update goes on beside the passes of the next step.
  t.optimizer += plan.offload.states.delayed_update ? std::max(0.0, t.on_host - t.busy()) : t.on_host;
}

// States come and go beside their updates, gradients, parameters and inputs of layers beside the passes; reads and
// writes take turns on a disk that the ranks of a node share.
double exposed_files(const plan::RunPlan& plan, const StageTime& t, const Machine& machine) {
  const auto seconds = [&](const offload::FileCounts& f) {
    if (f.read_bytes == 0 && f.written_bytes == 0) return 0.0;
    DS_CHECK(machine.disk_read > 0 && machine.disk_write > 0, Errc::Config,
             "the run has what is offloaded in files, and the disk's rate is not known: give --disk FILE, which "
             "ds-offload bench --json writes");
    return machine.ranks_per_node * (static_cast<double>(f.read_bytes) / machine.disk_read +
                                     static_cast<double>(f.written_bytes) / machine.disk_write);
  };
  const bool served = plan.offload.states.device == OffloadDevice::Server;  // by memory that both have
  const double states = served ? 0.0 : seconds(plan.traffic.state_files), arrays = seconds(plan.traffic.array_files);
  if (plan.device == DeviceKind::Cuda) {
    if (plan.offload.states.delayed_update)  // and its transfers beside it; arrays beside the same passes
      return std::max(0.0, std::max(states, t.on_host) + arrays - t.busy()) - std::max(0.0, t.on_host - t.busy());
    return std::max(0.0, states - t.on_host) + std::max(0.0, arrays - t.busy());
  }
  // A delayed update goes on beside the passes of the next step, too.
  if (plan.offload.states.delayed_update) return std::max(0.0, states + arrays - t.optimizer - t.busy());
  return std::max(0.0, states - t.optimizer) + std::max(0.0, arrays - t.busy());
}

std::vector<StageTime> times_of(const model::Model& model, std::span<const StageWork> stages, const Machine& machine,
                                const Links* links) {
  DS_ASSERT(!stages.empty());
  std::vector<StageTime> times;
  for (size_t s = 0; s < stages.size(); ++s) {
    const bool same = s > 0 && stages[s].plan == stages[s - 1].plan;
    times.push_back(same ? times.back() : StageModel(stages[s], model, machine, links).run());
    if (same) continue;
    offload_to_host(times.back(), *stages[s].plan, *stages[s].work, machine);
    times.back().files = exposed_files(*stages[s].plan, times.back(), machine);
  }
  return times;
}

// A step whose parts are known, but for what all stages wait for together and what they share; with what follows.
StepTime finished(StepTime step, const model::Model& model, const plan::RunPlan& plan, const Machine& machine,
                  const std::vector<StageTime>& times) {
  step.lacks_offload = plan.device == DeviceKind::Cuda && !machine.knows_host() &&
                       (plan.offload.states.device != OffloadDevice::None ||
                        plan.offload.params.device != OffloadDevice::None || plan.activations.offload_inputs);
  step.step_s =
      step.pipeline_s + step.communication_s + step.optimizer_s + step.publish_s + step.files_s + step.copies_s;
  if (const double sharing = machine.threads_per_core(); sharing > 1) {
    double work = 0;  // of a rank, in the mean
    for (const StageTime& t : times) work += (t.compute + t.optimizer) / static_cast<double>(times.size());
    const double sent = step.in_layer_communication_s + step.communication_s + step.publish_s;
    step.cores_s = std::max(0.0, sharing * work + sent - step.step_s);
    step.step_s += step.cores_s;
  }
  const double tokens = static_cast<double>(plan.B * plan.sequence_length * plan.micro_batches * plan.mesh.data_size());
  const double flops = model.flops_per_token(plan.sequence_length) * tokens / plan.mesh.world();
  step.tokens_per_s = tokens / step.step_s;
  step.mfu = flops / (step.step_s * machine.matmul_flops(plan.work));
  return step;
}

size_t busiest_of(const std::vector<StageTime>& times) {
  return static_cast<size_t>(std::ranges::max_element(times, {}, &StageTime::busy) - times.begin());
}

std::map<std::string, OpTime> ops_of(const plan::StepWork& work, const Machine& machine) {
  std::map<std::string, OpTime> ops;
  const plan::OpTally all = work.total();
  for (const auto& [call, n] : all.calls()) {
    const double times = static_cast<double>(n);
    OpTime& op = ops[std::string(call.op)];
    op.calls += n;
    op.flops += times * static_cast<double>(call.flops);
    op.bytes += times * static_cast<double>(call.bytes);
    op.seconds += times * machine.seconds(call);
  }
  return ops;
}

// The time of a step in which no stage is ever idle.
StepTime busy_step(const std::vector<StageTime>& times) {
  const StageTime& busiest = times[busiest_of(times)];
  StepTime step;
  step.pipeline_s = busiest.busy();
  step.compute_s = busiest.compute;
  step.recompute_s = busiest.recompute;
  step.in_layer_communication_s = busiest.in_layers;
  step.messages_s = busiest.messages;
  step.hidden_s = busiest.hidden;
  for (const StageTime& t : times) {  // all meet behind each
    step.communication_s = std::max(step.communication_s, t.exposed);
    step.optimizer_s = std::max(step.optimizer_s, t.optimizer);
    step.publish_s = std::max(step.publish_s, t.publish);
    step.files_s = std::max(step.files_s, t.files);
    step.copies_s = std::max(step.copies_s, t.copies);
  }
  return step;
}

// The time of a stage between the passes of two steps, and the longest such times of all stages in a step's terms.
double between_passes(const StageTime& t) { return t.exposed + t.optimizer + t.publish + t.files + t.copies; }
double between_passes(const StepTime& s) {
  return s.communication_s + s.optimizer_s + s.publish_s + s.files_s + s.copies_s;
}

// Post-validated steps run on: a stage begins the next one when its own update has ended. The time from one step to the
// next is less than the sum of the terms where the busiest stage is not the one with the longest update: the pipeline's
// term is the rest.
void set_period(StepTime& step, double period) { step.pipeline_s = period - between_passes(step); }

void run_on(StepTime& step, std::span<const std::vector<pipeline::Instr>> schedules,
            std::span<const pipeline::Costs> blocks, const std::vector<StageTime>& times, const plan::RunPlan& plan) {
  std::vector<double> between;
  for (const StageTime& t : times) between.push_back(between_passes(t) - t.tied);
  std::optional<pipeline::TiedExchange> tied;
  if (plan.tied() && plan.first_stage != plan.last_stage && plan.is_trained(0))
    tied = {.send = times.front().tied, .ahead = plan.sends_use_ahead};
  const pipeline::SteadySteps steps =
      pipeline::simulate_steps(schedules, blocks, between, plan.stage.placement.v, tied);
  set_period(step, steps.period);
  step.bubble_fraction = steps.bubble_fraction();
  if (times.size() > 1) step.stage_idle_s = steps.idle;
}

// The stages of a pipeline, each kind of them once.
class Stages {
 public:
  Stages(const Config& config, const World& world, DeviceKind device, const Hardware& hardware, Models& models)
      : model_(models.of(config, mesh_shape(config, world.ranks), {})),
        links_(hardware.state().links ? &*hardware.state().links : nullptr),
        machine_(hardware.state().machine) {
    machine_.ranks_per_node = world.ranks / world.nodes;
    const MeshShape mesh = mesh_shape(config, world.ranks);
    // Stages of as many layers with the same windows do the same work, but for the ends. Their gathers may differ
    // while the pipeline fills.
    cuts_ = models.cuts(config, mesh);
    const std::vector<i64>& cuts = cuts_;
    const bool trains_all = std::ranges::all_of(model_.params(), [](const auto* row) { return row->trained; });
    for (int stage = 0; stage < mesh.pp; ++stage) {
      std::vector<i64> layers = {stage == 0 ? 0 : stage == mesh.pp - 1 ? 2 : 1, trains_all ? 0 : stage};
      for (int chunk = 0; chunk < config.pipeline.virtual_stages; ++chunk) {
        const size_t block = static_cast<size_t>(pipeline::schedule_of(config).placement().block_of(stage, chunk));
        layers.push_back(cuts[block + 1] - cuts[block]);
        for (i64 l = cuts[block]; l < cuts[block + 1]; ++l) layers.push_back(model_.layers[l]->cache().window);
      }
      auto at = works_.find(layers);
      if (at == works_.end()) {
        plan::RunPlan plan = models.plan(config, mesh, {.pp = stage}, device, cuts);
        plan::StepWork work = plan::tally_step(model_, plan);
        at = works_.emplace(std::move(layers), std::pair(std::move(plan), std::move(work))).first;
      }
      stages_.push_back({&at->second.first, &at->second.second});
    }
  }

  StepTime predicted(const Config& config) const {
    return predict_step(model_, stages_, pipeline::make_schedules(pipeline::schedule_of(config, model_, cuts_)),
                        machine_, links_);
  }
  LeastTime least() const { return least_step(model_, stages_, machine_, links_); }

 private:
  const model::Model& model_;
  const Links* links_;
  Machine machine_;
  std::vector<i64> cuts_;
  std::map<std::vector<i64>, std::pair<plan::RunPlan, plan::StepWork>> works_;
  std::vector<StageWork> stages_;
};

// As of_any_length() wants it.
StepTime extended(const StepTime& a, const StepTime& b, double times) {
  const auto at = [&](double of_a, double of_b) { return of_b + (of_b - of_a) * times; };
  StepTime t;
  for (double StepTime::*field :
       {&StepTime::compute_s, &StepTime::recompute_s, &StepTime::in_layer_communication_s, &StepTime::pipeline_s,
        &StepTime::communication_s, &StepTime::hidden_s, &StepTime::optimizer_s, &StepTime::publish_s,
        &StepTime::files_s, &StepTime::copies_s, &StepTime::cores_s, &StepTime::step_s})
    t.*field = at(a.*field, b.*field);
  for (size_t s = 0; s < b.stage_idle_s.size(); ++s) t.stage_idle_s.push_back(at(a.stage_idle_s[s], b.stage_idle_s[s]));
  for (const auto& [name, seconds] : b.messages_s) {
    const auto in_a = a.messages_s.find(name);
    t.messages_s[name] = at(in_a == a.messages_s.end() ? 0 : in_a->second, seconds);
  }
  for (const auto& [name, op] : b.ops) {
    const auto in_a = a.ops.find(name);
    const OpTime less = in_a == a.ops.end() ? OpTime() : in_a->second;
    t.ops[name] = {op.calls + (op.calls - less.calls) * static_cast<i64>(times), at(less.flops, op.flops),
                   at(less.bytes, op.bytes), at(less.seconds, op.seconds)};
  }
  // Quotients: their dividends grow evenly.
  const auto ratio = [&](double StepTime::*r, double StepTime::*by) {
    return t.*by > 0 ? at(a.*r * a.*by, b.*r * b.*by) / (t.*by) : 0;
  };
  t.bubble_fraction = ratio(&StepTime::bubble_fraction, &StepTime::pipeline_s);
  t.tokens_per_s = ratio(&StepTime::tokens_per_s, &StepTime::step_s);
  t.mfu = ratio(&StepTime::mfu, &StepTime::step_s);
  return t;
}
LeastTime extended(const LeastTime& a, const LeastTime& b, double times) {
  return {extended(a.own, b.own, times), extended(a.any_cut, b.any_cut, times)};
}

// Whole sequences, and no evaluations between steps, which leave second shards to the next one.
Config with_alike_steps(const Config& config) {
  Config alike = plan::of_whole_sequences(config);
  alike.eval.every = 0;
  return alike;
}

}  // namespace

StepTime predict_step(const model::Model& model, std::span<const StageWork> stages,
                      std::span<const std::vector<pipeline::Instr>> schedules, const Machine& machine,
                      const Links* links) {
  DS_ASSERT(stages.size() == schedules.size());
  const std::vector<StageTime> times = times_of(model, stages, machine, links);
  const pipeline::Placement& placement = stages[0].plan->stage.placement;
  const size_t chunks = stages[0].plan->stage.chunks.size();
  std::vector<pipeline::Costs> blocks(chunks * times.size());
  for (size_t s = 0; s < times.size(); ++s) {
    for (size_t c = 0; c < chunks; ++c)
      blocks[placement.block_of(static_cast<int>(s), static_cast<i64>(c))] = times[s].chunks[c];
  }
  StepTime step = busy_step(times);
  step.ops = ops_of(*stages[busiest_of(times)].work, machine);
  if (stages[0].plan->validates_later()) {
    run_on(step, schedules, blocks, times, *stages[0].plan);
    return finished(std::move(step), model, *stages[0].plan, machine, times);
  }
  const pipeline::Timeline timeline = pipeline::simulate(schedules, blocks, {}, placement.v);
  step.pipeline_s = timeline.makespan;
  step.bubble_fraction = timeline.bubble_fraction();
  for (size_t s = 0; s < times.size() && times.size() > 1; ++s) step.stage_idle_s.push_back(timeline.idle(s));
  return finished(std::move(step), model, *stages[0].plan, machine, times);
}

LeastTime least_step(const model::Model& model, std::span<const StageWork> stages, const Machine& machine,
                     const Links* links) {
  const std::vector<StageTime> times = times_of(model, stages, machine, links);
  StepTime any;
  const double part = 1 / static_cast<double>(times.size());
  for (const StageTime& t : times) {
    any.pipeline_s += part * t.busy();
    any.in_layer_communication_s += part * t.in_layers;
    any.communication_s += part * t.least_exposed;
    any.optimizer_s += part * t.optimizer;
    any.publish_s += part * t.publish;
    any.files_s += part * t.files;
    any.copies_s += part * t.copies;
  }
  StepTime own = busy_step(times);
  if (stages[0].plan->validates_later()) {
    double least = 0;
    for (const StageTime& t : times) least = std::max(least, t.busy() + between_passes(t));
    set_period(own, least);
  }
  return {finished(std::move(own), model, *stages[0].plan, machine, times),
          finished(std::move(any), model, *stages[0].plan, machine, times)};
}

StepTime predict_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware) {
  Models models;
  return predict_time(config, world, device, hardware, models);
}

StepTime predict_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware,
                      Models& models) {
  return of_any_length(
      with_alike_steps(config),
      [&](const Config& c) { return Stages(c, world, device, hardware, models).predicted(c); },
      [](const auto&... of) { return extended(of...); });
}

LeastTime least_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware,
                     Models& models) {
  return of_any_length(
      with_alike_steps(config), [&](const Config& c) { return Stages(c, world, device, hardware, models).least(); },
      [](const auto&... of) { return extended(of...); });
}

}  // namespace ds::memreport
