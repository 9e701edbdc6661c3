// SPDX-License-Identifier: Apache-2.0
#include "plan/planned.h"

namespace ds::plan {

namespace {

model::Model model_of(const Config& config, const MeshShape& mesh, const MeshCoord& coord) {
  return model::make_model(config, model::shard_of(config, mesh, coord));
}

model::Model with_frozen_groups(model::Model&& model, const Config& config) {
  optim::freeze_groups(model, config);
  return std::move(model);
}

}  // namespace

Planned::Planned(const Config& config, const MeshShape& mesh, int rank, DeviceKind device)
    : Planned(config, model_of(config, mesh, coord_of(mesh, rank)), mesh, rank, device) {}

Planned::Planned(const Config& config, model::Model&& given, const MeshShape& mesh, int rank, DeviceKind device)
    : model(with_frozen_groups(std::move(given), config)),
      plan(make_run_plan(config, model, mesh, coord_of(mesh, rank), device)) {}

}  // namespace ds::plan
