// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "ds/memreport.h"
#include "engine/plans.h"
#include "memreport/models.h"
#include "model/building_blocks.h"
#include "pipeline/simulate.h"
#include "report/planned.h"

namespace ds::memreport {
namespace {

// `first`: rank 0 is among them.
RankGroup group_of(const report::RunPlan& plan, const report::TagBytes& own, const report::TagBounds& bounds,
                   const engine::ProcessBytes& process, bool first) {
  RankGroup group;
  group.process_bytes = process.own;
  group.momentary_bytes = process.momentary_of(first ? 0 : 1);
  group.stage = plan.coord.pp;
  group.num_params = plan.dp().layout.num_params();
  group.device_bytes = plan.total_memory();
  for (size_t t = 0; t < plan.memory.size(); ++t) {
    const i64 bytes = plan.memory[t] + own[t];
    if (bytes > 0) group.memory.push_back({std::string(tag_name(static_cast<Tag>(t))), bytes, bounds[t]});
    if (plan.files[t] > 0) group.files.push_back({std::string(tag_name(static_cast<Tag>(t))), plan.files[t]});
    group.device_bytes += own[t];
  }
  group.served = plan.offload.states.device == OffloadDevice::Server;
  group.file_read_bytes = plan.state_files.read_bytes + plan.array_files.read_bytes;
  group.file_written_bytes = plan.state_files.written_bytes + plan.array_files.written_bytes;
  group.host_bytes = plan.device == DeviceKind::Cpu ? 0 : plan.memory[static_cast<size_t>(Tag::Host)];
  for (const auto& [name, count] : plan.traffic) {
    if (count.bytes > 0) group.traffic.push_back({name, count.calls, count.bytes});
  }
  group.mean_traffic = plan.mean_traffic;
  group.most_traffic = plan.most_traffic;
  return group;
}

bool same(const RankGroup& a, const RankGroup& b) {
  return a.num_params == b.num_params && a.memory == b.memory && a.files == b.files && a.traffic == b.traffic &&
         a.mean_traffic == b.mean_traffic && a.most_traffic == b.most_traffic;
}

// Ranks of a stage differ in little but their rows of a vocabulary that does not divide evenly.
std::vector<RankGroup> groups_of(const Config& config, const World& world, const MeshShape& mesh, int stage,
                                 DeviceKind device, const std::vector<i64>& cuts, Models& models) {
  std::vector<RankGroup> groups;
  const auto group_at = [&](const report::RunPlan& plan) {
    const report::TagBytes own = models.own_memory(config, world, plan);
    const int per_node = world.ranks / world.nodes;
    return group_of(plan, own, engine::own_bounds(config, plan, per_node),
                    engine::process_bytes(config, plan, own, per_node), plan.coord.pp == 0 && plan.coord.tp == 0);
  };
  i64 share = -1;
  for (int tp = 0; tp < mesh.tp; ++tp) {
    const model::Shard shard{.tp = mesh.tp, .tp_rank = tp};
    const i64 V = config.model.vocab_size,
              rows = model::vocab_begin(V, shard, tp + 1) - model::vocab_begin(V, shard, tp);
    if (std::exchange(share, rows) != rows) {
      const report::RunPlan any = models.plan(config, mesh, {.pp = stage, .tp = tp}, device, cuts);
      const MeshCoord most = any.fullest();
      RankGroup group = most == any.coord ? group_at(any) : group_at(models.plan(config, mesh, most, device, cuts));
      if (groups.empty() || !same(groups.back(), group)) groups.push_back(std::move(group));
    }
    MeshCoord at{.pp = stage, .tp = tp};
    for (at.worker = 0; at.worker < mesh.workers; ++at.worker) {
      for (at.dp = 0; at.dp < mesh.dp; ++at.dp) {
        for (at.sp = 0; at.sp < mesh.sp; ++at.sp) groups.back().ranks.push_back(rank_at(mesh, at));
      }
    }
  }
  for (RankGroup& g : groups) std::ranges::sort(g.ranks);
  return groups;
}

NodeBytes fullest_node(const Prediction& p) {
  std::vector<i64> bytes(static_cast<size_t>(p.world.nodes), 0);
  const int ranks_per_node = p.world.ranks / p.world.nodes;
  for (const RankGroup& g : p.groups) {
    for (const int rank : g.ranks) {
      i64& sum = bytes[rank / ranks_per_node];
      const std::optional<i64> more = checked_add(sum, p.device == "cpu" ? g.device_bytes : g.host_bytes);
      DS_CHECK(more.has_value(), Errc::Config, "the {} ranks of a node need more than 2^63 bytes together",
               ranks_per_node);
      sum = *more;
    }
  }
  const auto most = std::ranges::max_element(bytes);
  return {static_cast<int>(most - bytes.begin()), *most};
}

}  // namespace

report::TagBytes Models::own_memory(const Config& config, const World& world, const report::RunPlan& plan) {
  return engine::own_memory(config, of(config, plan.mesh, plan.coord), plan, world.ranks / world.nodes);
}

Prediction predict(const Config& config, const World& world, DeviceKind device) {
  Models models;
  return predict(config, world, device, models);
}

Prediction predict(const Config& config, const World& world, DeviceKind device, Models& models) {
  DS_CHECK(world.nodes >= 1 && world.ranks % world.nodes == 0, Errc::Config,
           "{} ranks do not spread evenly over {} nodes", world.ranks, world.nodes);
  if (device == DeviceKind::Auto) device = DeviceKind::Cpu;
  Prediction p;
  p.world = world;
  p.mesh = report::mesh_shape(config, world.ranks);
  p.device = device == DeviceKind::Cpu ? "cpu" : "cuda";
  const model::Model& whole = models.of(config, p.mesh, {});
  p.num_params = whole.num_params();
  p.flops_per_token = whole.flops_per_token(config.data.seq_length);
  p.tokens_per_step = config.batch.train * config.data.seq_length;
  p.bubble_fraction = pipeline::bubble_fraction(report::schedule_of(config));
  const std::vector<i64> cuts = models.cuts(config, p.mesh);
  for (int stage = 0; stage < p.mesh.pp; ++stage) {
    for (RankGroup& g : groups_of(config, world, p.mesh, stage, device, cuts, models)) p.groups.push_back(std::move(g));
  }
  p.worst = static_cast<size_t>(std::ranges::max_element(p.groups, {}, &RankGroup::device_bytes) - p.groups.begin());
  p.fullest = fullest_node(p);
  return p;
}

}  // namespace ds::memreport
