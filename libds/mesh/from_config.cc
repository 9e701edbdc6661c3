// SPDX-License-Identifier: Apache-2.0
#include "mesh/from_config.h"

#include "base/check.h"

namespace ds {

MeshShape mesh_shape(const Config& config, int world_size) {
  const i64 workers = config.optimizer.diloco.workers, replica = config.ranks_per_replica() * workers;
  DS_ASSERT(world_size % replica == 0);
  return {.dp = narrow<int>(world_size / replica),
          .pp = narrow<int>(config.pipeline.stages),
          .tp = narrow<int>(config.tensor_parallel.tp_size),
          .sp = narrow<int>(config.sequence_parallel.size),
          .workers = narrow<int>(workers)};
}

std::vector<DpSplit> zeropp_splits(const Config& config) {
  std::vector<DpSplit> splits;
  if (!ds::trains(config.use) || config.zero.stage != 3) return splits;
  const int inner = narrow<int>(config.zero.hpz_partition_size);
  if (inner == 1) return splits;
  splits.push_back({.name = "near", .inner = inner, .along = DpSplit::Along::Inner});
  if (config.gradient_code_bits() > 0)
    splits.push_back({.name = "across", .inner = inner, .along = DpSplit::Along::Outer});
  return splits;
}

std::vector<DpSplit> mesh_splits(const Config& config, std::vector<DpSplit> splits) {
  for (const DpSplit& split : zeropp_splits(config)) splits.push_back(split);
  return splits;
}

}  // namespace ds
