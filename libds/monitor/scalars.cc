// SPDX-License-Identifier: Apache-2.0
#include "monitor/scalars.h"

namespace ds::monitor {

std::vector<Scalar> scalars_of(const StepRecord& r, bool has_loss_scale) {
  std::vector<Scalar> all;
  const auto over_samples = [&](const char* tag, double value) { all.push_back({tag, value, r.samples}); };
  const auto over_steps = [&](std::string tag, double value) { all.push_back({std::move(tag), value, r.step}); };
  over_samples(kTrainLossTag, r.loss);
  over_samples("Train/Samples/lr", r.lr);
  if (has_loss_scale) over_samples("Train/Samples/loss_scale", r.loss_scale);
  if (r.phases) {
    over_samples("Train/Samples/elapsed_time_ms_forward", r.phases->forward_ms);
    over_samples("Train/Samples/elapsed_time_ms_backward", r.phases->backward_ms + r.phases->reduce_ms);
    over_samples("Train/Samples/elapsed_time_ms_backward_inner", r.phases->backward_ms);
    over_samples("Train/Samples/elapsed_time_ms_backward_allreduce", r.phases->reduce_ms);
    over_samples("Train/Samples/elapsed_time_ms_step", r.phases->update_ms);
  }
  for (const StepField& f : step_fields()) {
    if (f.curve == nullptr) continue;
    const StepField::Value value = f.value(r);
    if (const auto* const number = std::get_if<double>(&value)) over_steps(f.curve, *number);
    if (const auto* const named = std::get_if<StepField::Named>(&value)) {
      for (const auto& [name, number] : *named)
        over_steps(f.curve + name, std::visit([](auto x) { return static_cast<double>(x); }, number));
    }
  }
  return all;
}

Scalar validation_scalar(i64 step, double loss) { return {"validation/loss", loss, step}; }

}  // namespace ds::monitor
