// SPDX-License-Identifier: Apache-2.0
#include "plan/own_memory.h"

#include <algorithm>

#include "plan/scratch.h"

namespace ds::plan {

TagBytes own_memory(const Config& config, const model::Model& model, const RunPlan& plan, const Host& host) {
  TagBytes bytes{};
  if (plan.device != DeviceKind::Cpu) {
    bytes[static_cast<size_t>(Tag::Scratch)] = meter_run(config, model, plan, host.gpu).scratch_bytes();
    return bytes;
  }
  bytes[static_cast<size_t>(Tag::Scratch)] = scratch_bytes(config, model, plan, host.kernels, host.threads).value_or(0);
  bytes[static_cast<size_t>(Tag::Comm)] = mesh_staging_size(plan.mesh, host.backend, plan.traffic.largest).value_or(0);
  return bytes;
}

TagBounds own_bounds(const Config& config, const RunPlan& plan, const Host& host, bool whole_run) {
  TagBounds bounds{};
  if (!plan.trains()) return bounds;
  Bound &scratch = bounds[static_cast<size_t>(Tag::Scratch)], &comm = bounds[static_cast<size_t>(Tag::Comm)];
  const StepLengths lengths = step_lengths(config, plan.update_number);
  const bool varies = lengths.kinds.size() > 1;
  if (!whole_run && varies) scratch = comm = Bound::AtMost;
  if (!whole_run && plan.diloco.enabled) comm = Bound::AtMost;
  // If ranks average by signs, steps that are skipped send nothing for their update.
  if (std::ranges::any_of(plan.groups.groups, &optim::ParamGroup::averages_by_signs)) comm = Bound::AtMost;
  if (plan.has_sparse_gradients()) {
    scratch = Bound::AtMost;
    if (host.backend == "mpi") comm = Bound::AtMost;  // which holds what it folds of dense ones
  }
  if (!lengths.complete) scratch = Bound::AtLeast;
  if (plan.device != DeviceKind::Cpu) comm = Bound::Exact;  // none
  return bounds;
}

BoundedBytes most_of(const BoundedBytes& a, const BoundedBytes& b) noexcept {
  const bool is_least = a.bound == Bound::AtLeast || b.bound == Bound::AtLeast;
  const bool is_exact = a.bytes == b.bytes && a.bound == Bound::Exact && b.bound == Bound::Exact;
  return {std::max(a.bytes, b.bytes), is_least ? Bound::AtLeast : is_exact ? Bound::Exact : Bound::AtMost};
}

}  // namespace ds::plan
