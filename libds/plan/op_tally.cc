// SPDX-License-Identifier: Apache-2.0
#include "plan/op_tally.h"

#include <span>
#include <utility>

#include "plan/counted_update.h"

namespace ds::plan {
namespace {

// passes: by chunk.
void tally_layers(std::span<ChunkWork::Passes* const> passes, const model::Model& model, const RunPlan& plan,
                  bool later) {
  const CountingAxes axes(model.shard);
  Stream stream;
  PassWork* pass = nullptr;
  const auto take_messages = [&] {
    axes.for_each([&](Axis, CountingCommunicator& comm) {
      if (comm.size() == 1 || pass == nullptr) return;
      for (const auto& [name, count] : comm.counts()) {
        pass->messages[name].calls += count.calls;
        pass->messages[name].bytes += count.bytes;
      }
      comm.reset_counts();
    });
  };
  const auto enter = [&](size_t chunk, Pass which) {
    take_messages();
    pass = &(*passes[chunk])[static_cast<size_t>(which)];
    stream.native = &pass->ops;
  };
  walk_layers(model, plan,
              {.ops = counting_ops(), .stream = stream, .comms = axes.comms(), .later = later, .predicts = true},
              enter);
  take_messages();
}

void tally_layers(StepWork& work, const model::Model& model, const RunPlan& plan) {
  std::vector<ChunkWork::Passes*> first, later;
  for (ChunkWork& chunk : work.chunks) {
    first.push_back(&chunk.passes);
    if (plan.fused) later.push_back(&chunk.later.emplace());
  }
  tally_layers(first, model, plan, false);
  if (plan.fused) tally_layers(later, model, plan, true);
}

// The losses of each micro-batch, in a rank's own sums: of the head, and of layers that add one; and tokens of experts.
void tally_losses(StepWork& work, const model::Model& model, const RunPlan& plan) {
  const auto add = [&](size_t chunk, i64 losses) {
    double sum = 0;
    float each = 0;
    OpTally once;
    Stream stream{.native = &once};
    counting_ops().sum(TensorView::of(&sum, DType::F64, {1}), TensorView::of(&each, DType::F32, {losses}), 1, stream);
    work.chunks[chunk].gradients.add(once, plan.micro_batches);
  };
  const auto count = [&](size_t chunk, i64 experts) {
    if (experts == 0) return;
    float sums = 0, tokens = 0;
    OpTally once;
    Stream stream{.native = &once};
    const TensorView of_micro = TensorView::of(&tokens, DType::F32, {experts});
    counting_ops().fold(TensorView::of(&sums, DType::F32, {experts}), {&of_micro, 1}, true, stream);
    work.chunks[chunk].gradients.add(once, plan.micro_batches);
  };
  for (size_t c = 0; c < plan.stage.chunks.size(); ++c) {
    const pipeline::Chunk& chunk = plan.stage.chunks[c].chunk;
    for (i64 n = model.aux_losses_before(chunk.begin); n < model.aux_losses_before(chunk.end); ++n) add(c, 1);
    for (i64 l = chunk.begin; l < chunk.end; ++l) count(c, model.layers[static_cast<size_t>(l)]->num_counts());
  }
  if (plan.projects) add(plan.stage.chunks.size() - 1, plan.B * plan.T);
}

// The reduction of gradients, the update, and gathers of parameters that are encoded for them.
void tally_update(StepWork& work, const RunPlan& plan) {
  OpTally once, *to = nullptr;
  i64 times = 1;
  const auto take = [&] {
    if (to != nullptr) to->add(std::exchange(once, {}), times);
  };
  const auto reduced = [&](const Operation& op, int size) {
    if (op.kind != OpKind::ReduceScatter) return;
    for (const OpSegment& s : op.segments) {
      const TensorView source = TensorView::of(nullptr, op.dtype, {s.slice_bytes / dtype_bytes(op.dtype)}),
                       sum = TensorView::of(nullptr, DType::F32, {source.numel()});
      work.reductions.add(fold_of(sum, source, size, op.accumulate), times);
    }
  };
  CountedUpdate update(plan, counting_ops(), &once, reduced, &work.host);
  update.run(
      [&](std::optional<size_t> chunk, i64 n) {
        take();
        to = chunk ? &work.chunks[*chunk].gradients : &work.optimizer;
        times = n;
      },
      plan.update_number);
  update.gather(
      [&](std::optional<size_t> chunk, i64 n) {
        take();
        to = &work.chunks[*chunk].gathers;
        times = n;
      },
      false);
  take();
}

}  // namespace

std::map<std::string_view, OpTotal> OpTally::by_op() const {
  std::map<std::string_view, OpTotal> totals;
  for (const auto& [call, n] : calls_) {
    OpTotal& t = totals[call.op];
    t.calls += n;
    t.flops += static_cast<double>(n) * static_cast<double>(call.flops);
    t.bytes += static_cast<double>(n) * static_cast<double>(call.bytes);
  }
  return totals;
}

OpTotal OpTally::total() const {
  OpTotal all;
  for (const auto& [op, t] : by_op()) {
    all.calls += t.calls;
    all.flops += t.flops;
    all.bytes += t.bytes;
  }
  return all;
}

OpTally StepWork::total() const {
  OpTally all = optimizer;
  for (size_t pass = 0; pass < kPasses; ++pass) all.add(total(static_cast<Pass>(pass)));
  for (const ChunkWork& chunk : chunks) {
    all.add(chunk.gathers);
    all.add(chunk.gradients);
  }
  return all;
}

OpTally StepWork::total(Pass pass) const {
  OpTally all;
  for (const ChunkWork& chunk : chunks) {
    if (micro_batches > 0) all.add(chunk.of(pass).ops);
    if (micro_batches > 1) all.add(chunk.of_later(pass).ops, micro_batches - 1);
  }
  return all;
}

StepWork tally_step(const model::Model& model, const RunPlan& plan) {
  StepWork work;
  work.micro_batches = plan.micro_batches;
  work.chunks.resize(plan.stage.chunks.size());
  tally_layers(work, model, plan);
  tally_losses(work, model, plan);
  tally_update(work, plan);
  return work;
}

}  // namespace ds::plan
