// SPDX-License-Identifier: Apache-2.0
#include "report/own_memory.h"

#include "report/scratch.h"

namespace ds::report {

TagBytes own_memory(const model::Model& model, const RunPlan& plan, const Host& host) {
  TagBytes bytes{};
  bytes[static_cast<size_t>(Tag::Scratch)] = scratch_bytes(model, plan, host.kernels, host.threads).value_or(0);
  bytes[static_cast<size_t>(Tag::Comm)] = mesh_staging_size(plan.mesh, host.backend, plan.largest_calls).value_or(0);
  return bytes;
}

}  // namespace ds::report
