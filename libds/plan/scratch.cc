// SPDX-License-Identifier: Apache-2.0
#include "plan/scratch.h"

#include "comm/nonzero_blocks.h"
#include "plan/counted_update.h"

namespace ds::plan {

namespace {

// Notes the scratch of sparse gradients with as many blocks as still save something. A counted update has the most
// blocks that there may be, and so may send a dense vector instead.
void note_sparse(const RunPlan& plan, const OpTable& ops, Stream& stream) {
  constexpr i64 kBlock = NonzeroBlocks::kBlock;
  float value = 0;
  for (const zero::ShardsPlan& s : plan.shards) {
    const int ranks = narrow<int>(s.layout.num_ranks());
    if (ranks == 1) continue;
    i64 largest = 0;
    const auto for_each = [&](auto&& visit) {
      for (const zero::SparseUnit& u : s.grads.sparse) {
        for (const zero::Segment& segment : s.grad_layout.segments_of(u.unit)) {
          if (!segment.persistent) visit(u, segment.slice);
        }
      }
    };
    for_each([&](const zero::SparseUnit&, i64 slice) { largest = std::max(largest, slice); });
    const auto note = [&](i64 slice, i64 blocks, DType dtype, i64 most) {
      const i64 width = dtype_bytes(dtype),
                rows = ranks * NonzeroBlocks::most_at_once(ranks, largest, slice * width, kBlock * width, most);
      if (rows == 0 || blocks == 0) return;
      ops.embedding_bwd(TensorView::of(&value, dtype, {blocks, kBlock}), TensorView::of(&value, dtype, {rows, kBlock}),
                        TensorView::of(&value, DType::I32, {rows}), 0, true, stream);
    };
    for_each([&](const zero::SparseUnit& u, i64 slice) {
      note(slice, slice / kBlock, s.grads.wire, u.of_rank);
      if (s.layout.states().shard_optimizer) return;
      for (const i64 others : {i64{s.rank}, i64{ranks - 1 - s.rank}})  // at stage 0 sums travel, too
        note(slice, others * (slice / kBlock), s.grads.sums, u.of_sum);
    });
  }
}

}  // namespace

// Layers evaluate with ops that they train with. Of what the engine calls beside layers, the products of updates
// reserve some; sums, norms and communication none.
void walk_run(const Config& config, const model::Model& model, const RunPlan& plan, const OpTable& ops, void* native,
              void* host_native) {
  const CountingAxes axes(model.shard);
  Stream stream{.native = native};
  const Walk walk{ops, stream, axes.comms()}, later{ops, stream, axes.comms(), true};
  bool evaluated = plan.use == ConfigUse::Generate;
  if (plan.trains()) {
    evaluated = !evaluates(config);
    for (const StepLengths::Kind& k : step_lengths(config, plan.update_number).kinds) {
      evaluated |= k.lengths == PassLengths{plan.sequence_length, 0};
      with_lengths(plan, config, model, k.lengths, [&](const model::Model& m, const RunPlan& p) {
        walk_layers(m, p, walk, [](size_t, Pass) {});
        if (p.fused) walk_layers(m, p, later, [](size_t, Pass) {});
      });
    }
    note_sparse(plan, ops, stream);
    CountedUpdate(plan, ops, native, {}, host_native).run([](std::optional<size_t>, i64) {}, 1);
    if (plan.keeps_gradients_apart(plan.update_number))
      CountedUpdate(plan, ops, native, {}, host_native).run([](std::optional<size_t>, i64) {}, plan.update_number);
  }
  if (evaluated) return;
  walk_packing(plan, ops, stream);
  walk_forward(model, plan, plan.activations.pass, {.mode = model::Mode::Eval, .B = plan.B, .T = plan.T}, walk,
               [](i64, model::PassContext&) { return true; });
}

GpuMeter meter_run(const Config& config, const model::Model& model, const RunPlan& plan, const GpuKernels& kernels) {
  GpuMeter meter, host;
  meter.kernels = kernels;
  walk_run(config, model, plan, gpu_scratch_ops(), &meter, &host);
  return meter;
}

std::optional<i64> scratch_bytes(const Config& config, const model::Model& model, const RunPlan& plan,
                                 const OpTable& backend, int threads) {
  const OpTable* const ops = scratch_ops(backend.name);
  if (ops == nullptr) return std::nullopt;
  ScratchMeter meter{.threads = threads};
  walk_run(config, model, plan, *ops, &meter);
  return threads * meter.most;
}

}  // namespace ds::plan
