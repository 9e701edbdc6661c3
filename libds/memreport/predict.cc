// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "ds/building_blocks.h"
#include "ds/memreport.h"
#include "memreport/models.h"
#include "mesh/from_config.h"
#include "pipeline/simulate.h"
#include "plan/planned.h"
#include "run/gpu_kernels.h"
#include "run/plans.h"

namespace ds::memreport {
namespace {

// `first`: rank 0 is among them.
RankGroup group_of(const plan::RunPlan& plan, const plan::TagBytes& own, const plan::TagBounds& bounds,
                   const run::ProcessBytes& process, bool first) {
  RankGroup group;
  group.process_bytes = process.own;
  group.momentary_bytes = process.momentary_of(first ? 0 : 1);
  group.stage = plan.coord.pp;
  for (const zero::ShardsPlan& shards : plan.shards) group.num_params += shards.layout.num_params();
  group.device_bytes = plan.total_memory();
  for (size_t t = 0; t < plan.memory.by_tag.size(); ++t) {
    const i64 bytes = plan.memory.by_tag[t] + own[t];
    if (bytes > 0) group.memory.push_back({std::string(tag_name(static_cast<Tag>(t))), bytes, bounds[t]});
    if (plan.memory.files[t] > 0)
      group.files.push_back({std::string(tag_name(static_cast<Tag>(t))), plan.memory.files[t]});
    group.device_bytes += own[t];
  }
  group.served = plan.offload.states.device == OffloadDevice::Server;
  group.file_read_bytes = plan.traffic.state_files.read_bytes + plan.traffic.array_files.read_bytes;
  group.file_written_bytes = plan.traffic.state_files.written_bytes + plan.traffic.array_files.written_bytes;
  group.host_bytes = plan.device == DeviceKind::Cpu ? 0 : plan.memory.by_tag[static_cast<size_t>(Tag::Host)];
  for (const auto& [name, count] : plan.traffic.last) {
    if (count.bytes > 0) group.traffic.push_back({name, count.calls, count.bytes});
  }
  group.mean_traffic = plan.traffic.mean;
  group.most_traffic = plan.traffic.most;
  return group;
}

bool same(const RankGroup& a, const RankGroup& b) {
  return a.num_params == b.num_params && a.device_bytes == b.device_bytes && a.memory == b.memory &&
         a.files == b.files && a.traffic == b.traffic && a.mean_traffic == b.mean_traffic &&
         a.most_traffic == b.most_traffic && a.uneven_traffic == b.uneven_traffic;
}

void raise(memreport::TagBytes& to, const memreport::TagBytes& other) {
  const plan::BoundedBytes most = plan::most_of({to.bytes, to.bound}, {other.bytes, other.bound});
  to.bytes = most.bytes;
  to.bound = most.bound;
}

void raise(std::vector<memreport::TagBytes>& to, const std::vector<memreport::TagBytes>& others) {
  for (memreport::TagBytes& t : to) {
    if (std::ranges::find(others, t.tag, &memreport::TagBytes::tag) == others.end()) raise(t, {t.tag, 0});
  }
  for (const memreport::TagBytes& other : others) {
    auto own = std::ranges::find(to, other.tag, &memreport::TagBytes::tag);
    if (own == to.end()) own = to.insert(own, {other.tag, 0});
    raise(*own, other);
  }
}

Traffic traffic_of(const RankGroup& group, const std::string& name) {
  const auto found = std::ranges::find(group.traffic, name, &Traffic::name);
  return found == group.traffic.end() ? Traffic{name} : *found;
}

i64 mean_of(const RankGroup& group, const std::string& name) {
  const auto found = group.mean_traffic.find(name);
  return found == group.mean_traffic.end() ? 0 : found->second;
}

// The most of a step, of a group in which that is not always one number, or in which it is.
i64 most_of(const RankGroup& group, const std::string& name) {
  const auto found = group.most_traffic.find(name);
  return found == group.most_traffic.end() ? traffic_of(group, name).bytes : found->second;
}

// Takes ranks of a stage into a group.
void raise(RankGroup& to, const RankGroup& other) {
  raise(to.memory, other.memory);
  raise(to.files, other.files);
  for (i64 RankGroup::*const bytes :
       {&RankGroup::file_read_bytes, &RankGroup::file_written_bytes, &RankGroup::device_bytes, &RankGroup::host_bytes,
        &RankGroup::process_bytes, &RankGroup::momentary_bytes})
    to.*bytes = std::max(to.*bytes, other.*bytes);

  std::set<std::string> names;
  for (const RankGroup* g : std::array<const RankGroup*, 2>{&to, &other}) {
    for (const Traffic& t : g->traffic) names.insert(t.name);
    for (const auto& [name, bytes] : g->mean_traffic) names.insert(name);
    for (const auto& [name, bytes] : g->most_traffic) names.insert(name);
  }
  std::vector<Traffic> traffic;
  for (const std::string& name : names) {
    const Traffic a = traffic_of(to, name), b = traffic_of(other, name);
    const i64 mean = mean_of(to, name), other_mean = mean_of(other, name);
    if (!(a == b) || mean != other_mean) to.uneven_traffic.insert(name);
    if (to.most_traffic.contains(name) || other.most_traffic.contains(name))
      to.most_traffic[name] = std::max(most_of(to, name), most_of(other, name));
    if (std::max(mean, other_mean) > 0) to.mean_traffic[name] = std::max(mean, other_mean);
    if (std::max(a.bytes, b.bytes) > 0)
      traffic.push_back({name, std::max(a.calls, b.calls), std::max(a.bytes, b.bytes)});
  }
  to.traffic = std::move(traffic);
}

// Few ranks of dp among which are those that hold most of each: bytes of states, sums over tp, elements, pieces, the
// longest piece; and the first and the last one.
std::vector<MeshCoord> extremes(const plan::RunPlan& plan) {
  const zero::Layout& layout = plan.dp().layout;
  const auto ranks = static_cast<size_t>(layout.num_ranks());
  std::vector<i64> states = plan.dp().states.bytes_of_ranks(layout);
  states.resize(ranks);
  std::vector<i64> summed(ranks), elems(ranks), pieces(ranks), longest(ranks);
  const std::vector<update::UpdatePlan::SummedElems> of_widths = plan.summed_of_ranks();
  for (size_t r = 0; r < ranks; ++r) {
    for (const auto& [width, count] : of_widths[r]) summed[r] += count;
  }
  for (const zero::RowPlace& row : layout.places()) {
    const i64 slice = layout.segments()[row.segment].slice, end = row.offset + row.numel;
    for (i64 at = row.offset; at < end;) {
      const i64 rank = at / slice, next = std::min((rank + 1) * slice, end), count = next - at;
      elems[rank] += count;
      ++pieces[rank];
      longest[rank] = std::max(longest[rank], count);
      at = next;
    }
  }
  std::set<size_t> numbers = {0, ranks - 1};
  for (const std::vector<i64>* of_ranks : {&states, &summed, &elems, &pieces, &longest})
    numbers.insert(static_cast<size_t>(std::ranges::max_element(*of_ranks) - of_ranks->begin()));
  std::vector<MeshCoord> coords;
  for (const size_t n : numbers) {
    const int rank = narrow<int>(n);
    coords.push_back({.dp = rank / plan.mesh.sp, .pp = plan.coord.pp, .tp = plan.coord.tp, .sp = rank % plan.mesh.sp});
  }
  return coords;
}

// Ranks of a stage with the same rows of the vocabulary, those of tp from `first` to `last`: all of them in a world
// that is small; in a larger one those among which are the ones that hold most. Workers of DiLoCo behind the first are
// alike.
std::vector<MeshCoord> looked_at(const plan::RunPlan& any, int first, int last) {
  constexpr int kSmallWorld = 64;
  const MeshShape& mesh = any.mesh;
  const bool small = mesh.world() <= kSmallWorld;
  std::vector<MeshCoord> of_dp;
  if (small) {
    for (int dp = 0; dp < mesh.dp; ++dp) {
      for (int sp = 0; sp < mesh.sp; ++sp) of_dp.push_back({.dp = dp, .pp = any.coord.pp, .sp = sp});
    }
  } else {
    of_dp = extremes(any);
  }
  std::vector<MeshCoord> coords;
  for (int worker = 0; worker < (small ? mesh.workers : std::min(mesh.workers, 2)); ++worker) {
    for (int tp = first; tp <= last; tp = small ? tp + 1 : std::max(last, tp + 1)) {
      for (MeshCoord at : of_dp) {
        at.tp = tp;
        at.worker = worker;
        coords.push_back(at);
      }
    }
  }
  return coords;
}

// Ranks of a stage differ in their rows of a vocabulary that does not divide evenly, and in the slices that they own.
std::vector<RankGroup> groups_of(const Config& config, const World& world, const MeshShape& mesh, int stage,
                                 DeviceKind device, const std::vector<i64>& cuts, Models& models) {
  const int per_node = world.ranks / world.nodes;
  const auto group_at = [&](const plan::RunPlan& plan) {
    const plan::TagBytes own = models.own_memory(config, world, plan);
    return group_of(plan, own, run::own_bounds(config, plan, per_node), run::process_bytes(config, plan, own, per_node),
                    rank_at(mesh, plan.coord) == 0);
  };
  const auto rows_of = [&](int tp) {
    const model::Shard shard{.tp = mesh.tp, .tp_rank = tp};
    const i64 vocab = config.model.vocab_size;
    return model::vocab_begin(vocab, shard, tp + 1) - model::vocab_begin(vocab, shard, tp);
  };
  std::vector<RankGroup> groups;
  for (int first = 0, last = 0; first < mesh.tp; first = last + 1) {
    for (last = first; last + 1 < mesh.tp && rows_of(last + 1) == rows_of(first);) ++last;
    const plan::RunPlan any = models.plan(config, mesh, {.pp = stage, .tp = first}, device, cuts);
    RankGroup group = group_at(any);
    for (const MeshCoord& at : looked_at(any, first, last)) {
      if (at != any.coord) raise(group, group_at(models.plan(config, mesh, at, device, cuts)));
    }
    if (groups.empty() || !same(groups.back(), group)) groups.push_back(std::move(group));
    MeshCoord at{.pp = stage};
    for (at.worker = 0; at.worker < mesh.workers; ++at.worker) {
      for (at.dp = 0; at.dp < mesh.dp; ++at.dp) {
        for (at.sp = 0; at.sp < mesh.sp; ++at.sp) {
          for (at.tp = first; at.tp <= last; ++at.tp) groups.back().ranks.push_back(rank_at(mesh, at));
        }
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

plan::TagBytes Models::own_memory(const Config& config, const World& world, const plan::RunPlan& plan) {
  return run::own_memory(config, of(config, plan.mesh, plan.coord), plan, world.ranks / world.nodes,
                         run::kernels_of(config, world.compute_capability));
}

Prediction predict(const Config& config, const World& world, DeviceKind device) {
  Models models;
  Prediction p = predict(config, world, device, models);
  const std::vector<i64> cuts = models.cuts(config, p.mesh);
  for (int stage = 0; stage < p.mesh.pp; ++stage) {
    const MeshCoord at{.pp = stage};
    run::require_cudnn(config, models.of(config, p.mesh, at), models.plan(config, p.mesh, at, device, cuts),
                       run::kernels_of(config, world.compute_capability));
  }
  return p;
}

Prediction predict(const Config& config, const World& world, DeviceKind device, Models& models) {
  DS_CHECK(world.nodes >= 1 && world.ranks % world.nodes == 0, Errc::Config,
           "{} ranks do not spread evenly over {} nodes", world.ranks, world.nodes);
  if (device == DeviceKind::Auto) device = DeviceKind::Cpu;
  if (device != DeviceKind::Cpu) run::require_fp8(config, world.compute_capability, "the GPU");
  Prediction p;
  p.world = world;
  p.mesh = mesh_shape(config, world.ranks);
  p.expert_ranks = config.expert_parallel.size;
  p.measured_loads = !config.model.experts.loads.empty();
  p.device = device == DeviceKind::Cpu ? "cpu" : "cuda";
  const model::Model& whole = models.of(config, p.mesh, {});
  p.num_params = whole.num_params();
  p.num_active_params = whole.num_active_params();
  p.flops_per_token = whole.flops_per_token(config.data.seq_length);
  p.tokens_per_step = config.batch.train * config.data.seq_length;
  const std::vector<i64> cuts = models.cuts(config, p.mesh);
  p.bubble_fraction = pipeline::bubble_fraction(pipeline::schedule_of(config, whole, cuts));
  for (int stage = 0; stage < p.mesh.pp; ++stage) {
    for (RankGroup& g : groups_of(config, world, p.mesh, stage, device, cuts, models)) p.groups.push_back(std::move(g));
  }
  p.worst = static_cast<size_t>(std::ranges::max_element(p.groups, {}, &RankGroup::device_bytes) - p.groups.begin());
  p.fullest = fullest_node(p);
  return p;
}

}  // namespace ds::memreport
