// SPDX-License-Identifier: Apache-2.0
#include "run/plans.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "chart/pattern_chart.h"
#include "chart/plan_chart.h"
#include "checkpoint/step_writer.h"
#include "infer/drafter.h"
#include "infer/session_plan.h"
#include "mesh/from_config.h"
#include "pipeline/partition.h"
#include "pipeline/simulate.h"
#include "probe/host.h"
#include "run/connect.h"
#include "run/gpu_kernels.h"

namespace ds::run {

namespace {

chart::PlanChart chart_of(const Config& config, int world_size) {
  Plans plans(config, mesh_shape(config, world_size), resolve_device(config), world_size,
              kernels_of(config, kUnknownGpu));
  const model::Model& model = plans.of(0)->model;
  const pipeline::ScheduleOptions schedule = pipeline::schedule_of(config, model, pipeline::cuts_of(config, model));
  const pipeline::Costs costs;
  chart::PlanChart chart{
      .schedule = schedule, .timeline = pipeline::simulate(schedule, {&costs, 1}), .bubble_formula = {}};
  if (schedule.post_validate) chart.steady_bubble = pipeline::bubble_fraction(schedule);
  if (pipeline::formula_is_exact(schedule)) chart.bubble_formula = pipeline::bubble_formula(schedule, costs);
  for (const StagePlan& s : plan_stages(plans)) {
    chart::StageRow& row = chart.stages.emplace_back();
    row.ranks = s.ranks;
    for (const auto& [first, last] : s.layers) row.layers.push_back({first, last});
    row.heads = s.heads;
    row.shares = config.tensor_parallel.tp_size;
    row.params = s.num_params;
    row.memory_bytes = s.memory_bytes;
  }
  return chart;
}

}  // namespace

namespace {

CommBackend backend_of(const Config& config, const plan::RunPlan& plan, int ranks_per_node) {
  const CommBackend asked = config.communication.backend;
  return asked == CommBackend::Auto ? default_backend(plan.mesh.world(), ranks_per_node, true) : asked;
}

plan::Host host_of(const Config& config, const plan::RunPlan& plan, int ranks_per_node, const GpuKernels& gpu) {
  const CommBackend backend = backend_of(config, plan, ranks_per_node);
  return {.backend = backend == CommBackend::Self  ? "self"
                     : backend == CommBackend::Shm ? "shm"
                     : backend == CommBackend::Mpi ? "mpi"
                                                   : "shm+mpi",
          .kernels = probe::cpu_backend(),
          .threads = thread_count(config, {.local_world_size = ranks_per_node}),
          .gpu = gpu};
}

}  // namespace

plan::TagBytes own_memory(const Config& config, const model::Model& model, const plan::RunPlan& plan,
                          int ranks_per_node, const GpuKernels& gpu) {
  return plan::own_memory(config, model, plan, host_of(config, plan, ranks_per_node, gpu));
}

plan::TagBounds own_bounds(const Config& config, const plan::RunPlan& plan, int ranks_per_node) {
  return plan::own_bounds(config, plan, host_of(config, plan, ranks_per_node, {}), true);
}

SaveSizes save_sizes(const plan::RunPlan& plan) {
  // A save takes what is in files part by part.
  const bool in_parts = plan::total_of(plan.memory.files) > plan.memory.files[static_cast<size_t>(Tag::Activations)];
  SaveSizes save;
  for (const zero::ShardsPlan& shards : plan.shards) {
    const zero::Layout& layout = shards.layout;
    for (const zero::Piece& piece : layout.owned_pieces(shards.rank)) {
      if (!plan.counts(piece)) continue;
      const StateSet& states = shards.states.of_params()[piece.param];
      const i64 num_states = std::count(states.values.begin(), states.values.end(), true);
      save.bytes += piece.count * (num_states * 4 + dtype_bytes(plan.work));
      save.datasets += num_states + 1;
      save.largest = std::max(save.largest, piece.count * 4);
      for (const State s : kOptimizerStates) {
        if (states[s] && (in_parts || shards.states.dtype(s, piece.param) != DType::F32))
          save.decoded = std::max(save.decoded, piece.count * 4);
      }
    }
    // A segment that is cut in slices cuts as many pieces less one. Groups of fewer ranks than dp has, such as those of
    // experts, have a part of each parameter.
    const i64 parts = zero::num_shards(plan.mesh) / layout.num_ranks(),
              params = std::ranges::count_if(layout.rows(), [](const zero::RowPlace&r) { return r.segment >= 0; });
    save.cuts += (parts - 1) * params + parts * std::ssize(layout.segments()) * (layout.num_ranks() - 1);
  }
  return save;
}

ProcessBytes process_bytes(const Config& config, const plan::RunPlan& plan, const plan::TagBytes& own,
                           int ranks_per_node) {
  if (plan.device != DeviceKind::Cpu) return {};
  constexpr i64 kProcess = i64{3} << 20, kProcessWithMpi = i64{6} << 20;  // as ds-memreport(1) says
  const CommBackend backend = backend_of(config, plan, ranks_per_node);
  const bool mpi = backend == CommBackend::Mpi || backend == CommBackend::Composed;
  const i64 process = mpi ? kProcessWithMpi : kProcess;
  if (!plan.trains()) return {.own = process};  // it saves nothing, and measures no rate

  const SaveSizes sizes = save_sizes(plan);
  const i64 save =
      rank_file_memory(sizes.bytes, sizes.datasets, sizes.largest) + std::min(sizes.decoded, kChecksumBlock);
  // Communicators are there already when the device is measured.
  i64 taken = plan.total_memory();
  for (size_t t = 0; t < own.size(); ++t) taken += t == static_cast<size_t>(Tag::Comm) ? 0 : own[t];
  const int threads = thread_count(config, {.local_world_size = ranks_per_node});
  const i64 start = probe::matmul_rate_bytes(probe::cpu_backend(), threads, plan.work) - taken;
  // The pieces of all stages, as if they were alike.
  i64 of_params = 0;
  for (const StateSet& states : plan.dp().states.of_params())
    of_params = std::max<i64>(of_params, std::count(states.values.begin(), states.values.end(), true));
  const zero::Layout& dp = plan.dp().layout;
  const i64 params = std::max(std::ssize(dp.rows()), std::ssize(dp.places())) * plan.mesh.pp,
            pieces = (params + sizes.cuts * plan.mesh.pp) * plan.mesh.tp;
  const i64 momentary = std::max(save, start);
  return {.own = process,
          .momentary = momentary,
          .momentary_of_first = std::max(momentary, commit_memory(params, pieces * (of_params + 1)))};
}

namespace {

// Memory of inference, and the scratch of its kernels.
plan::TagBytes text_memory(const Config& config, const plan::Planned& planned, int ranks_per_node,
                           const SessionSizes& sizes) {
  const infer::SessionPlan session = infer::plan_session(planned.model, planned.plan, sizes);
  plan::TagBytes bytes = session.bytes();
  if (planned.plan.device == DeviceKind::Cpu) {
    bytes[static_cast<size_t>(Tag::Scratch)] =
        infer::session_scratch(planned.model, planned.plan, session, probe::cpu_backend(),
                               thread_count(config, {.local_world_size = ranks_per_node}))
            .value_or(0);
  }
  return bytes;
}

}  // namespace

WholePlan::WholePlan(const Config& config, const MeshShape& mesh, int rank, DeviceKind device, int ranks_per_node,
                     const GpuKernels& gpu, const std::optional<SessionSizes>& session)
    : Planned(config, mesh, rank, device),
      own(own_memory(config, model, plan, ranks_per_node, gpu)),
      bounds(own_bounds(config, plan, ranks_per_node)),
      text(!session ? plan::TagBytes{} : text_memory(config, *this, ranks_per_node, *session)),
      process(process_bytes(config, plan, own, ranks_per_node)) {}

void WholePlan::add_draft(const WholePlan& draft) {
  constexpr auto kScratch = static_cast<size_t>(Tag::Scratch);
  plan::TagBytes more = draft.memory();
  more[kScratch] = std::max<i64>(0, more[kScratch] - memory()[kScratch]);  // the models compute in turns
  text = plan::sum_of(text, more);
  draft_bytes = plan::total_of(more);
}

Plans::Plans(const Config& config, const MeshShape& mesh, DeviceKind device, int ranks_per_node, const GpuKernels& gpu,
             const std::optional<SessionSizes>& session, const DraftModel* draft)
    : config_(config), mesh_(mesh), device_(device), ranks_per_node_(ranks_per_node), gpu_(gpu), session_(session) {
  if (draft == nullptr) return;
  DS_CHECK(session, Errc::Config, "RunOptions::draft needs RunOptions::session, the sizes of inference");
  draft_ = std::make_shared<const WholePlan>(draft->config, MeshShape{}, 0, device, ranks_per_node, gpu,
                                             infer::draft_sizes(*session, draft->config.model));
}

std::shared_ptr<const WholePlan> Plans::of(int rank) {
  std::shared_ptr<const WholePlan>& plan = plans_[rank];
  if (plan) return plan;
  auto made = std::make_shared<WholePlan>(config_, mesh_, rank, device_, ranks_per_node_, gpu_, session_);
  if (draft_) made->add_draft(*draft_);
  return plan = std::move(made);
}

std::vector<int> ranks_of_stage(const MeshShape& mesh, int stage) {
  std::vector<int> ranks;
  for (int r = 0; r < mesh.world(); ++r) {
    if (coord_of(mesh, r).pp == stage) ranks.push_back(r);
  }
  return ranks;
}

std::vector<StagePlan> plan_stages(Plans& plans) {
  const MeshShape& mesh = plans.mesh();
  std::vector<StagePlan> stages;
  for (int stage = 0; stage < mesh.pp; ++stage) {
    StagePlan& s = stages.emplace_back();
    s.ranks = ranks_of_stage(mesh, stage);
    const WholePlan& planned = *plans.of(rank_at(mesh, plans.of_stage(stage).plan.fullest()));
    for (const plan::ChunkPlan& c : planned.plan.stage.chunks) {
      const auto& layers = planned.model.layers;
      s.layers.emplace_back(layers[c.chunk.begin]->name(), layers[static_cast<size_t>(c.chunk.end) - 1]->name());
    }
    const bool attends = std::ranges::any_of(planned.plan.stage.chunks, [&](const plan::ChunkPlan& c) {
      const auto& layers = planned.model.layers;
      return std::any_of(layers.begin() + c.chunk.begin, layers.begin() + c.chunk.end,
                         [](const auto& layer) { return layer->is_block(); });
    });
    s.heads = attends ? plans.config().model.heads / mesh.tp : 0;
    for (const zero::ShardsPlan& shards : planned.plan.shards) s.num_params += shards.layout.num_params();
    s.memory_bytes = planned.total_memory();
  }
  return stages;
}

bool trains_nothing(const plan::RunPlan& plan) {
  return plan.trains() &&
         std::ranges::all_of(plan.groups.of_params, [&](size_t g) { return plan.groups.groups[g].frozen; });
}

double bubble_fraction(const Config& config, const model::Model& model) {
  return pipeline::bubble_fraction(pipeline::schedule_of(config, model, pipeline::cuts_of(config, model)));
}

NodeBytes plan_memory(Plans& plans, int first, int count, int step) {
  const MeshShape& mesh = plans.mesh();
  // The fullest rank of each stage stands for all of its ranks.
  std::map<int, std::pair<NodeBytes, ProcessBytes>> of_stage;
  NodeBytes sum;
  for (int i = 0; i < count; ++i) {
    const int r = first + i * step, stage = coord_of(mesh, r).pp;
    if (!of_stage.contains(stage)) {
      MeshCoord coord = coord_of(mesh, r);
      coord.tp = 0;  // which has the largest share
      const WholePlan& any = *plans.of(rank_at(mesh, coord));
      const WholePlan& planned = *plans.of(rank_at(mesh, any.plan.fullest()));
      of_stage[stage] = {{planned.total_memory(), planned.memory()[static_cast<size_t>(Tag::Host)]}, planned.process};
    }
    const auto& [bytes, process] = of_stage[stage];
    sum.device += bytes.device + process.own + process.momentary_of(r);
    sum.host += bytes.host;
  }
  return sum;
}

}  // namespace ds::run

namespace ds {

std::string plan_text(const Config& config, int world_size, int width, bool colour) {
  return chart::plan_text(run::chart_of(config, world_size), {.width = width, .colour = colour});
}

std::string pattern_text(const Config& config, int width) { return chart::pattern_text(config, {.width = width}); }
std::string pattern_svg(const Config& config) { return chart::pattern_svg(config); }

std::string plan_svg(const Config& config, int world_size) {
  return chart::plan_svg(run::chart_of(config, world_size));
}

}  // namespace ds
