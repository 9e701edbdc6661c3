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
  over_steps("train/loss", r.loss);
  over_steps("train/grad_norm", r.grad_norm);
  if (r.outer_grad_norm) over_steps("train/outer_grad_norm", *r.outer_grad_norm);
  for (const auto& [name, norm] : r.compression) over_steps("compression/" + name, norm);
  over_steps("train/tokens_per_s", r.tokens_per_s);
  over_steps("train/mfu", r.mfu);
  for (const auto& [tag, bytes] : r.memory_bytes) over_steps("memory/" + tag, static_cast<double>(bytes));
  for (const auto& [name, bytes] : r.comm_bytes) over_steps("comm/" + name, static_cast<double>(bytes));
  return all;
}

Scalar validation_scalar(i64 step, double loss) { return {"validation/loss", loss, step}; }

}  // namespace ds::monitor
