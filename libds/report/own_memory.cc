// SPDX-License-Identifier: Apache-2.0
#include "report/own_memory.h"

namespace ds::report {

TagBytes own_memory(const model::Model&, const RunPlan& plan, const Host& host) {
  TagBytes bytes{};
  bytes[static_cast<size_t>(Tag::Comm)] = mesh_staging_size(plan.mesh, host.backend, plan.largest_calls).value_or(0);
  return bytes;
}

}  // namespace ds::report
