// SPDX-License-Identifier: Apache-2.0
#include "run/predict.h"

#include <fmt/format.h>

#include "comm/make_communicator.h"
#include "ds/units.h"
#include "mesh/from_config.h"
#include "model/coded_rows.h"
#include "probe/host.h"
#include "run/connect.h"
#include "run/draft.h"
#include "run/gpu_kernels.h"
#include "run/run_record.h"

namespace ds {
namespace run {
namespace {

RunPrediction predict_on(const Device& device, Plans& plans, const RankInfo& ranks) {
  const Config& config = plans.config();
  const WholePlan& planned = *plans.of(ranks.rank);
  const model::Model& model = planned.model;
  const plan::RunPlan& plan = planned.plan;
  RunPrediction p;
  p.stages = plan_stages(plans);
  p.bubble_fraction = bubble_fraction(config, model);
  p.num_params = model.num_params();
  if (!plan.trains()) p.matrices = model::forms_of_matrices(model, plan.work);
  p.flops_per_token = model.flops_per_token(config.data.seq_length);
  p.memory = memory_table(planned.memory(), {}, planned.bounds);
  p.files = memory_table(plan.memory.files, {});
  p.streamed_bytes = plan.streamed_bytes();
  p.total_bytes = planned.total_memory();
  p.draft_bytes = planned.draft_bytes;
  p.process_bytes = planned.process.own;
  p.momentary_bytes = planned.process.momentary_of(ranks.rank);
  for (const auto& [name, count] : plan.traffic.last) p.comm_bytes[name] = count.bytes;
  p.mean_comm_bytes = plan.traffic.mean;
  p.most_comm_bytes = plan.traffic.most;
  p.host_bytes = device.is_host() ? 0 : plan.memory.by_tag[static_cast<size_t>(Tag::Host)];
  const probe::AvailableMemory node = probe::available_memory();
  p.available_bytes = device.is_host() ? node.bytes : device.memory().free;
  p.limited_by = device.is_host() ? node.limited_by : fmt::format("free on {}", device.name());
  p.device = device.is_host() ? "cpu" : "cuda";
  // Ranks of the node share its places in turn, so every so many'th rank shares the memory of this one.
  const int first = ranks.rank - ranks.local_rank;
  std::string ignored;
  const int places = device.is_host() ? 1 : num_cuda_devices(ignored);
  p.sharers = device.is_host() ? ranks.local_world_size : ranks_on_gpu(ranks, places);
  p.needed_bytes = plan_memory(plans, first + ranks.local_rank % places, p.sharers, places).device;
  return p;
}

}  // namespace

void check_memory(const Device& device, Plans& plans, const RankInfo& ranks) {
  const RunPrediction p = predict_on(device, plans, ranks);
  const bool on_cpu = device.is_host();
  if (p.needed_bytes > p.available_bytes) {
    std::string message =
        fmt::format("this run needs {} on this {} ({} rank{}), {} are there ({}); rank {}:", bytes_text(p.needed_bytes),
                    on_cpu ? "node" : "GPU", p.sharers, p.sharers == 1 ? "" : "s", bytes_text(p.available_bytes),
                    p.limited_by, ranks.rank);
    for (const TagMemory& row : p.memory)
      message += fmt::format("\n  {:<12} {:>14}", row.tag, bytes_text(row.predicted));
    throw Error(Errc::OutOfMemory, message);
  }
  const probe::AvailableMemory node = probe::available_memory();
  const i64 host = on_cpu ? 0 : plan_memory(plans, ranks.rank - ranks.local_rank, ranks.local_world_size, 1).host;
  DS_CHECK(host <= node.bytes, Errc::OutOfMemory,
           "the {} ranks of this node need {} of its memory beside their GPUs, for checkpoints and for inputs that "
           "layers keep there, and {} are there ({})",
           ranks.local_world_size, bytes_text(host), bytes_text(node.bytes), node.limited_by);
}

}  // namespace run

RunPrediction predict_run(const Config& config, const RankInfo& ranks, const std::optional<SessionSizes>& session,
                          const std::optional<DraftModel>& given) {
  const std::unique_ptr<Device> device = run::open_device(config, ranks);
  std::optional<DraftModel> draft;
  if (given) draft = run::beside(config, *given), run::check_draft(config, *draft);
  if (!device->is_host()) {
    const plan::Planned planned(config, mesh_shape(config, ranks.world_size), ranks.rank, device->kind());
    run::choose_attention(config, planned.model, planned.plan, *device, *make_self_communicator({}), ranks.rank == 0);
  }
  run::Plans plans(config, mesh_shape(config, ranks.world_size), device->kind(), ranks.local_world_size,
                   device->gpu_kernels(), session, draft ? &*draft : nullptr);
  return run::predict_on(*device, plans, ranks);
}

}  // namespace ds
