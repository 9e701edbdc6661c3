// SPDX-License-Identifier: Apache-2.0
#include "report/run_plan.h"

#include <algorithm>

#include "model/models.h"
#include "zero/param_store.h"

namespace ds::report {
namespace {

// Rows of logits at a time: about 64 MiB of fp32, so that they stay in caches, or 1 GiB on a GPU, whose products must
// be large; a multiple of 64 rows.
i64 logits_chunk(i64 rows, i64 vocab, DeviceKind device) {
  const i64 target_elems = device == DeviceKind::Cuda ? i64{256} << 20 : i64{16} << 20;
  const i64 chunk = std::min(rows, align_up(std::max<i64>(target_elems / vocab, 1), 64));
  if (device != DeviceKind::Cuda) return chunk;
  // Its kernels want rows of a multiple of eight elements and make that of fewer rows: room for those that this costs,
  // or the last of the micro-batch would be a chunk of their own, which reads the weight and adds to its gradient.
  return chunk + div_ceil(chunk * (align_up(vocab, 8) - vocab), vocab);
}

}  // namespace

i64 RunPlan::total_memory() const noexcept {
  i64 total = 0;
  for (const i64 bytes : memory) total += bytes;
  return device == DeviceKind::Cpu ? total : total - memory[static_cast<size_t>(Tag::Host)];
}

RunPlan make_run_plan(const Config& config, const model::Model& model, int ranks, DeviceKind device) {
  RunPlan plan;
  plan.device = device;
  plan.work = config.work_dtype();
  plan.wire = config.communication_data_type;
  plan.B = config.batch.micro;
  plan.T = config.data.seq_length;
  plan.micro_batches = config.batch.accumulation;
  for (const auto& layer : model.layers) plan.rows.emplace_back(layer->rows());

  const ZeroConfig& z = config.zero;
  plan.layout = zero::Layout::make(plan.rows, {.num_ranks = ranks,
                                               .stage = narrow<int>(z.stage),
                                               .persistence_threshold = z.param_persistence_threshold,
                                               .model_persistence_threshold = z.model_persistence_threshold});
  plan.grads = {.work = plan.work,
                .wire = plan.wire,
                .bucket_elems = z.reduce_bucket_size,
                .overlap = z.overlap_comm,
                .micro_batches = plan.micro_batches,
                .reduce_each_micro = config.reduce_order == ReduceOrder::Micro};
  std::vector<i64> backward_order;
  for (i64 u = narrow<i64>(plan.rows.size()); u-- > 0;) backward_order.push_back(u);
  plan.buckets = zero::plan_buckets(plan.layout, backward_order, z.reduce_bucket_size);

  const i64 P = ranks;
  std::vector<i64> gather_elems(plan.rows.size(), 0);
  i64 padded = 0, whole = 0;
  for (const zero::Segment& s : plan.layout.segments()) {
    padded += s.slice * P;
    if (!plan.layout.states().shard_params || s.persistent) {
      whole += s.slice * P;
    } else {
      gather_elems[static_cast<size_t>(s.unit)] += s.slice * P;
    }
  }
  const zero::GatherKnobs knobs{z.prefetch_bucket_size, z.max_live_parameters, z.max_reuse_distance};
  const i64 layers = narrow<i64>(plan.rows.size());
  plan.train_gathers =
      zero::plan_gathers(zero::training_trace(layers, model.tied, plan.micro_batches), gather_elems, knobs);
  plan.eval_gathers = zero::plan_gathers(zero::forward_trace(layers, model.tied), gather_elems, knobs);

  const i64 R = plan.B * plan.T;
  model::ActivationPlanner planner;
  for (const auto& layer : model.layers) {
    planner.begin_layer();
    layer->plan(planner, plan.work, plan.B, plan.T, model::Mode::Train);
  }
  plan.saved_bytes = planner.saved_bytes();
  plan.temporary_bytes = planner.temporary_bytes();
  plan.logits_chunk = logits_chunk(R, model.vocab, device);
  plan.rope_elems = narrow<i64>(model::make_rope_tables(config.model, plan.T).cos.size());

  const i64 work_bytes = dtype_bytes(plan.work), wire_bytes = dtype_bytes(plan.wire);
  const i64 shard = plan.layout.shard_elems();
  const auto tag = [&](Tag t) -> i64& { return plan.memory[static_cast<size_t>(t)]; };
  const i64 fresh = zero::fresh_grad_elems(plan.layout, plan.buckets, plan.grads) * wire_bytes;
  const i64 accum = zero::grad_accum_elems(plan.layout, plan.grads) * 4;
  const i64 gathered = std::max(plan.train_gathers.pool_elems, plan.eval_gathers.pool_elems) * work_bytes;
  plan.shared = {whole * work_bytes, gathered, fresh, accum};
  tag(Tag::Params) = (whole + (padded - whole) / P) * work_bytes;
  tag(plan.layout.states().shard_grads ? Tag::Buckets : Tag::Grads) = fresh;
  tag(Tag::GradAccum) = accum;
  tag(Tag::Master) = plan.work == DType::F32 ? 0 : shard * 4;  // fp32 parameters are their own masters
  tag(Tag::Optimizer) = 2 * shard * 4;
  tag(Tag::Gathered) = gathered;
  tag(Tag::Activations) = plan.saved_bytes;
  tag(Tag::Logits) = plan.logits_chunk * model.vocab * 4;
  // Temporaries, the gradient of the residual stream, the fp32 gradient of the output projection, staged gradients.
  tag(Tag::Workspace) = plan.temporary_bytes + R * model.hidden * work_bytes + model.vocab * model.hidden * 4 +
                        zero::staging_elems(plan.layout, plan.grads) * 4;
  // ids and targets of all micro-batches, positions, token types, losses, rotations; then the numbers of the step.
  const i64 token_types = model.token_types > 0 ? R : 0;
  tag(Tag::Data) = align_up((2 * plan.micro_batches * R + plan.T + 2 * R + token_types + 2 * plan.rope_elems) * 4, 8) +
                   static_cast<i64>(sizeof(StepScalars)) + P * plan.micro_batches * 8;

  // Checkpoints. Beside a GPU, while one is saved or loaded: what the shard arrays hold, and as many parameters. On the
  // CPU a save in the background has a copy of what this rank owns.
  const i64 state_bytes = (plan.work == DType::F32 ? 0 : 4) + 2 * 4 + work_bytes;
  if (device == DeviceKind::Cuda) {
    tag(Tag::Host) = shard * state_bytes;
  } else if (config.save.async) {
    tag(Tag::Host) = padded / P * state_bytes;
  }

  const i64 reductions = plan.grads.reduce_each_micro ? plan.micro_batches : 1;
  const auto sent = [P](i64 elems, i64 bytes) { return elems / P * (P - 1) * bytes; };
  plan.traffic["dp.reduce_scatter"] = {reductions * narrow<i64>(plan.buckets.size()),
                                       reductions * sent(padded, wire_bytes)};
  CommCount& gathers = plan.traffic["dp.all_gather"];
  if (!plan.layout.states().shard_optimizer) {
    gathers = {1, sent(padded, 4)};  // the fp32 accumulators
  } else {
    gathers.bytes = sent(whole, work_bytes) + sent(plan.train_gathers.gathered_elems, work_bytes);
    for (const zero::GatherStep& step : plan.train_gathers.steps) gathers.calls += narrow<i64>(step.launch.size());
    gathers.calls += zero::num_publish_calls(plan.layout, z.allgather_bucket_size);
  }
  return plan;
}

}  // namespace ds::report
