// SPDX-License-Identifier: Apache-2.0
#include "plan/traffic.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "comm/message_tag.h"
#include "plan/dry_run.h"
#include "update/meetings.h"

namespace ds::plan {
namespace {

// Messages of layers and of the pipeline, in the last step and in all steps together, which may differ in length.
struct LayerTraffic {
  std::map<std::string, CommCount> last;
  std::map<std::string, double> all;  // bytes
  std::map<std::string, i64> most;    // bytes in a step
  bool varies = false;
};

LayerTraffic count_layers(RunPlan& plan, const Config& config, const model::Model& model) {
  LayerTraffic traffic;
  MeshCalls& calls = plan.traffic.largest;
  const auto add = [&](const PassLengths& lengths, i64 steps) {
    with_lengths(plan, config, model, lengths, [&](const model::Model& m, const RunPlan& p) {
      traffic.last = count_messages(m, p, calls);
      for (const auto& [name, count] : traffic.last) {
        traffic.all[name] += static_cast<double>(steps) * static_cast<double>(count.bytes);
        traffic.most[name] = std::max(traffic.most[name], count.bytes);
      }
    });
  };
  const PassLengths whole{plan.sequence_length, 0}, last = lengths_of_step(config, plan.update_number);
  if (!plan.trains() || (model.shard.alone() && plan.mesh.pp == 1)) {
    add(whole, plan.update_number);
    return traffic;
  }
  std::vector<StepLengths::Kind> kinds = step_lengths(config, plan.update_number).kinds;
  std::ranges::stable_partition(kinds, [&](const StepLengths::Kind& k) { return k.lengths != last; });
  for (const StepLengths::Kind& k : kinds) add(k.lengths, k.steps);
  traffic.varies = kinds.size() > 1;
  if (evaluates(config) && std::ranges::find(kinds, whole, &StepLengths::Kind::lengths) == kinds.end())
    note_evaluation(model, plan, calls);
  return traffic;
}

// Sparse gradients that have nothing to send.
RunPlan without_blocks(const RunPlan& plan) {
  RunPlan nothing = plan;
  for (zero::ShardsPlan& s : nothing.shards) {
    for (zero::SparseUnit& u : s.grads.sparse) u.of_rank = u.of_sum = 0;
  }
  return nothing;
}

// Bytes that a step sends at most, where it has more than nothing to send of sparse gradients: `traffic` is of a step
// with as many blocks as there may be, `least` of one with none. A vector that does not travel densely takes less than
// it does so.
std::map<std::string, i64> most_sent(const std::map<std::string, CommCount>& traffic,
                                     const std::map<std::string, CommCount>& least, const std::string& sparse) {
  std::map<std::string, i64> most;
  i64 instead = 0;
  for (const auto& [name, count] : traffic) {
    const auto found = least.find(name);
    most[name] = count.bytes;
    if (name != sparse) instead += count.bytes - (found == least.end() ? 0 : found->second.bytes);
  }
  if (most.contains(sparse)) most[sparse] += instead;
  return most;
}

// Steps that send the same beside layers and meetings.
struct StepKind {
  i64 times = 0;
  std::map<std::string, CommCount> traffic;
  std::map<std::string, i64> least, most;  // bytes, whatever the tokens are
};

// Steps that come after an evaluation, which has left second shards of the parameters that it gathered.
struct AfterEvaluations {
  i64 steps = 0;
  bool last = false;  // the last step is one
};
AfterEvaluations after_evaluations(const RunPlan& plan, const Config& config) {
  const i64 every = config.eval.every, before = plan.update_number - 1;
  if (plan.dp().zeropp.empty() || !evaluates(config) || every == 0) return {};
  return {.steps = before / every, .last = before > 0 && before % every == 0};
}

std::vector<StepKind> count_kinds(RunPlan& plan, CountedUpdate& update, i64 steps, const AfterEvaluations& after) {
  std::vector<StepKind> all;
  const bool sparse = plan.has_sparse_gradients();
  std::optional<RunPlan> nothing;
  std::optional<CountedUpdate> of_nothing;
  if (sparse) of_nothing.emplace(nothing.emplace(without_blocks(plan)), no_ops());
  const auto count = [&](CountedUpdate& of, i64 number, MeshCalls& calls, bool evaluated = false) {
    of.begin_again();
    of.gather(evaluated);
    of.use_inputs();
    of.run([](std::optional<size_t>, i64) {}, number, false);
    return of.traffic(calls);
  };
  // In the order of the run: what is taken for some of them serves those that come later.
  std::vector<optim::UpdateKind> updates = plan.update_kinds(steps);
  std::ranges::sort(updates, {}, &optim::UpdateKind::number);
  for (const auto& [number, times] : updates) {
    StepKind& kind = all.emplace_back();
    kind.times = times;
    kind.traffic = count(update, number, plan.traffic.largest);
    MeshCalls ignored;
    const std::map<std::string, CommCount> least = sparse ? count(*of_nothing, number, ignored) : kind.traffic;
    kind.most = most_sent(kind.traffic, least, message_text(plan.dp().axis, Collective::SparseGather));
    for (const auto& [name, bytes] : kind.most) {
      const auto found = least.find(name);
      kind.least[name] = found == least.end() ? 0 : found->second.bytes;
    }
  }
  if (after.steps == 0) return all;
  StepKind evaluated = all.front();  // at stage 3 all updates are alike
  evaluated.times = after.steps;
  evaluated.traffic = count(update, 1, plan.traffic.largest, true);
  all.front().times -= after.steps;
  all.push_back(std::move(evaluated));
  return all;
}

// The most that a step may send under each name for which that is not one number.
void count_most_traffic(RunPlan& plan, const std::vector<StepKind>& kinds, const LayerTraffic& layers) {
  std::set<std::string> names;
  for (const StepKind& k : kinds) {
    for (const auto& [name, bytes] : k.most) names.insert(name);
  }
  for (const std::string& name : names) {
    i64 least = std::numeric_limits<i64>::max(), most = 0;
    for (const StepKind& k : kinds) {
      const auto found = k.most.find(name);
      least = std::min(least, found == k.most.end() ? 0 : k.least.at(name));
      most = std::max(most, found == k.most.end() ? 0 : found->second);
    }
    if (least == most) continue;
    const auto of_layers = layers.most.find(name);
    plan.traffic.most[name] = most + (of_layers == layers.most.end() ? 0 : of_layers->second);
  }
}

// The mean over steps that differ in kind, in length, or in which fragments of DiLoCo meet.
void count_mean_traffic(RunPlan& plan, const std::vector<StepKind>& kinds, i64 steps, const LayerTraffic& layers,
                        const std::vector<std::map<std::string, CommCount>>& meetings) {
  std::map<std::string, double> bytes = layers.all;
  const auto add = [&](const std::map<std::string, CommCount>& traffic, i64 times) {
    for (const auto& [name, count] : traffic) {
      if (!name.ends_with(".stats")) bytes[name] += static_cast<double>(times) * static_cast<double>(count.bytes);
    }
  };
  for (const StepKind& k : kinds) add(k.traffic, k.times);
  for (i64 f = 0; f < std::ssize(meetings); ++f) add(meetings[f], update::meetings_until(plan.diloco, f, steps));
  for (const auto& [name, sum] : bytes) {
    if (const i64 mean = std::llround(sum / static_cast<double>(steps)); mean > 0) plan.traffic.mean[name] = mean;
  }
}

// The messages of workers when each fragment meets. Notes the calls of those that meet in the run in `update`.
std::vector<std::map<std::string, CommCount>> count_meetings(RunPlan& plan, CountedUpdate& update) {
  std::vector<std::map<std::string, CommCount>> meetings;
  const DilocoConfig& d = plan.diloco;
  if (!d.enabled) return meetings;
  CountedUpdate all(plan, no_ops());
  bool landed = false;
  for (i64 f = 0; f < d.fragments; ++f) {
    for (const auto& [name, count] : meetings.emplace_back(all.meeting(f))) {
      plan.traffic.meetings[name].calls += count.calls;
      plan.traffic.meetings[name].bytes += count.bytes;
    }
    if (update::meetings_until(d, f, plan.update_number) > 0) update.meeting(f);
    landed |= update::meetings_until(d, f, std::max<i64>(plan.update_number - d.overlap_steps, 0)) > 0;
  }
  if (landed) update.norm_of_meeting();
  return meetings;
}

}  // namespace

void count_traffic(RunPlan& plan, CountedUpdate& update, const Config& config, const model::Model& model) {
  MeshCalls& calls = plan.traffic.largest;
  const LayerTraffic layers = count_layers(plan, config, model);
  update.publish();
  (void)update.traffic(calls);
  if (plan.trains()) {
    const auto meetings = count_meetings(plan, update);
    const AfterEvaluations after = after_evaluations(plan, config);
    const DilocoConfig& d = plan.diloco;
    const bool meet = plan.mesh.workers > 1 && (d.sync_every > 1 || d.fragments > 1),
               differ = meet || layers.varies || after.steps > 0 || plan.update_kinds(plan.update_number).size() > 1;
    if (differ || plan.has_sparse_gradients()) {
      const std::vector<StepKind> kinds = count_kinds(plan, update, plan.update_number, after);
      count_most_traffic(plan, kinds, layers);
      if (differ && config.steps > 1) count_mean_traffic(plan, kinds, config.steps, layers, meetings);
    }
    const auto step = [&] {
      update.begin_again();
      update.gather(after.last);
      update.use_inputs();
      update.run([](std::optional<size_t>, i64) {}, plan.update_number);
    };
    step();
    // The first step finds nothing in files, and no memory on the device of what is with the host.
    if (total_of(bytes_of(update.files())) > 0 || update.copies().to_device > 0) step();
    std::tie(plan.traffic.state_files, plan.traffic.array_files) = update.file_traffic();
    if (plan.device == DeviceKind::Cuda) plan.traffic.copies = update.copies();
    plan.traffic.last = update.traffic(calls);
    for (const zero::ShardsPlan& s : plan.shards) {  // who has nothing of a group sends nothing in it
      for (const Collective c : {Collective::ReduceScatter, Collective::AllGather})
        plan.traffic.last.try_emplace(message_text(s.axis, c));
    }
    for (const auto& [name, count] : layers.last) {
      plan.traffic.last[name].calls += count.calls;
      plan.traffic.last[name].bytes += count.bytes;
    }
  }
  // Numbers that all ranks sum or compare: whether all is finite; behind an evaluation loss, tokens and what is not
  // finite.
  constexpr i64 kFinite = 2 * 8, kEvaluation = 3 * 8;
  if (plan.trains() && plan.aux_losses > 0) {  // stages add their layers' losses
    CountingCommunicator pp(plan.coord.pp, plan.mesh.pp);
    pp.all_reduce(nullptr, plan.loss_counts().aux(), DType::I64, ReduceOp::Sum, kStatsText);
    calls.up.add(pp.largest());
  }
  if (plan.trains() && plan.expert_counts > 0) {
    CountingCommunicator dp(zero::shard_rank(plan.mesh, plan.coord), zero::num_shards(plan.mesh));
    dp.all_reduce(nullptr, plan.expert_counts, DType::F32, ReduceOp::Sum, kStatsText);
    calls.axes[Axis::Dp].add(dp.size(), dp.largest());
    CountingCommunicator pp(plan.coord.pp, plan.mesh.pp);
    pp.all_reduce(nullptr, plan.expert_counts, DType::F32, ReduceOp::Sum, kStatsText);
    calls.up.add(pp.largest());
  }
  if (plan.trains()) calls.world.add({.combined_bytes = kFinite});
  for (const i64 numbers : update.saved_numbers()) calls.world.add({.combined_bytes = numbers * 8});
  if (evaluates(config)) calls.world.add({.combined_bytes = kEvaluation});
}

}  // namespace ds::plan
