// SPDX-License-Identifier: Apache-2.0
#include "report/planned.h"

#include "base/check.h"

namespace ds::report {

MeshShape mesh_shape(const Config& config, int world_size) {
  const i64 workers = config.optimizer.diloco.workers, replica = config.ranks_per_replica() * workers;
  DS_ASSERT(world_size % replica == 0);
  return {.dp = narrow<int>(world_size / replica),
          .pp = narrow<int>(config.pipeline.stages),
          .tp = narrow<int>(config.tensor_parallel.tp_size),
          .sp = narrow<int>(config.sequence_parallel.size),
          .workers = narrow<int>(workers)};
}

std::vector<DpSplit> mesh_splits(const Config& config, std::vector<DpSplit> splits) {
  for (const DpSplit& split : zeropp_splits(config)) splits.push_back(split);
  return splits;
}

Planned::Planned(const Config& config, const MeshShape& mesh, int rank, DeviceKind device)
    : Planned(config, model::make_model(config, shard_of(config, mesh, coord_of(mesh, rank))), mesh, rank, device) {}

Planned::Planned(const Config& config, model::Model&& given, const MeshShape& mesh, int rank, DeviceKind device)
    : model(std::move(given)), plan(make_run_plan(config, model, mesh, coord_of(mesh, rank), device)) {}

}  // namespace ds::report
