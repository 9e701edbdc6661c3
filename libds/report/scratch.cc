// SPDX-License-Identifier: Apache-2.0
#include "report/scratch.h"

#include "report/counted_update.h"

namespace ds::report {

// Layers evaluate with ops that they train with. Of what the engine calls beside layers, the products of updates
// reserve some; sums, norms and communication none.
std::optional<i64> scratch_bytes(const model::Model& model, const RunPlan& plan, const OpTable& backend, int threads) {
  const OpTable* const ops = scratch_ops(backend.name);
  if (ops == nullptr) return std::nullopt;
  CountingCommunicator tp(plan.coord.tp, plan.mesh.tp), sp(plan.coord.sp, plan.mesh.sp);
  ScratchMeter meter{.threads = threads};
  Stream stream{.native = &meter};
  const Walk walk{*ops, stream, tp, sp};
  if (plan.trains()) {
    walk_layers(model, plan, walk, [](size_t, Pass) {});
    CountedUpdate(plan, *ops, &meter).run([](std::optional<size_t>, i64) {}, 1);
    if (plan.keeps_gradients_apart(plan.update_number))
      CountedUpdate(plan, *ops, &meter).run([](std::optional<size_t>, i64) {}, plan.update_number);
  } else if (plan.use != ConfigUse::Generate) {
    walk_forward(model, plan, plan.pass, {.mode = model::Mode::Eval, .B = plan.B, .T = plan.T}, walk,
                 [](i64, model::PassContext&) { return true; });
  }
  return threads * meter.most;
}

}  // namespace ds::report
