// SPDX-License-Identifier: Apache-2.0
#include "report/scratch.h"

namespace ds::report {

// Of what the engine calls beside layers (sums, norms, AdamW, communication) no op reserves any; layers evaluate with
// ops that they train with.
std::optional<i64> scratch_bytes(const model::Model& model, const RunPlan& plan, const OpTable& backend, int threads) {
  const OpTable* const ops = scratch_ops(backend.name);
  if (ops == nullptr) return std::nullopt;
  CountingCommunicator tp(plan.coord.tp, plan.mesh.tp), sp(plan.coord.sp, plan.mesh.sp);
  ScratchMeter meter{.threads = threads};
  Stream stream{.native = &meter};
  walk_layers(model, plan, {*ops, stream, tp, sp}, [](size_t, Pass) {});
  return threads * meter.most;
}

}  // namespace ds::report
