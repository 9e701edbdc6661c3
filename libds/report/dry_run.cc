// SPDX-License-Identifier: Apache-2.0
#include "report/dry_run.h"

#include <algorithm>

#include "comm/base_communicator.h"

namespace ds::report {
namespace {

using model::Mode;
using pipeline::LayerCall;

class Counter final : public BaseCommunicator {
 public:
  Counter(int rank, int size) : BaseCommunicator("none", rank, size) {}
  Buffer allocate(MemoryLedger&, Tag, i64) override { return {}; }
  void throw_if_failed() const override {}
  void abort(const Error&) noexcept override {}
  i64 staging_bytes() const noexcept override { return 0; }

 private:
  Ticket submit(Operation&&) override { return {}; }
};

// An op that does nothing, whatever its arguments.
struct Nothing {
  template <class... A>
  using Op = void (*)(A...) noexcept;
  template <class... A>
  constexpr operator Op<A...>() const noexcept {
    return [](A...) noexcept {};
  }
};

constexpr Nothing kNothing;
constexpr OpTable kNoOps = {.name = "none",
                            .matmul = kNothing,
                            .column_sum = kNothing,
                            .layernorm_fwd = kNothing,
                            .layernorm_bwd = kNothing,
                            .rmsnorm_fwd = kNothing,
                            .rmsnorm_bwd = kNothing,
                            .activation_fwd = kNothing,
                            .activation_bwd = kNothing,
                            .swiglu_fwd = kNothing,
                            .swiglu_bwd = kNothing,
                            .rope = kNothing,
                            .embedding_fwd = kNothing,
                            .embedding_bwd = kNothing,
                            .attention_fwd = kNothing,
                            .attention_bwd = kNothing,
                            .attention_merge = kNothing,
                            .linear_cross_entropy = kNothing,
                            .vocab_max = kNothing,
                            .vocab_sums = kNothing,
                            .vocab_grad = kNothing,
                            .dropout = kNothing,
                            .add = kNothing,
                            .bias_residual = kNothing,
                            .cast = kNothing,
                            .copy_heads = kNothing,
                            .fold = kNothing,
                            .quantize = kNothing,
                            .quantize_signs = kNothing,
                            .dequantize = kNothing,
                            .dequantize_fold = kNothing,
                            .max_abs = kNothing,
                            .sum_squares = kNothing,
                            .sum = kNothing,
                            .judge = kNothing,
                            .adamw = kNothing};

// The rows of a layer, without memory.
std::vector<TensorView> views_of(std::span<const model::ParamRow> rows, DType dtype) {
  std::vector<TensorView> views;
  for (const model::ParamRow& row : rows)
    views.push_back(row.shape.size() == 2 ? TensorView::of(nullptr, dtype, {row.shape[0], row.shape[1]})
                                          : TensorView::of(nullptr, dtype, {row.numel()}));
  return views;
}

}  // namespace

std::map<std::string, CommCount> count_messages(const model::Model& model, const RunPlan& plan) {
  Counter tp(plan.coord.tp, plan.mesh.tp), sp(plan.coord.sp, plan.mesh.sp), pp(plan.coord.pp, plan.mesh.pp);
  const i64 C = model.hidden, rows = model.shard.padded_rows(plan.B * plan.T), V = model.vocab_share();
  const auto none = [&](DType dtype, std::initializer_list<i64> shape) {
    return TensorView::of(nullptr, dtype, shape);
  };
  Stream stream;
  model::PassContext ctx{.ops = kNoOps, .stream = stream, .B = plan.B, .T = plan.T};
  ctx.ids = ctx.targets = ctx.row_positions = ctx.token_types = none(DType::I32, {plan.B * plan.T});
  ctx.losses = none(DType::F32, {plan.B * plan.T});
  ctx.logits = none(DType::F32, {std::max<i64>(plan.logits_chunk, 1), V});
  ctx.head_weight_grad = none(DType::F32, {V, C});
  ctx.groups = {.shard = model.shard,
                .tp = &tp,
                .sp = &sp,
                .partial = none(plan.work, {rows, C}),
                .sum = none(DType::F32, {rows / plan.mesh.tp, C}),
                .gathered = none(plan.work, {rows, C}),
                .stats = none(DType::F32, {3, plan.logits_chunk}),
                .sequence_length = plan.sequence_length};
  // What stands for memory where an op's argument must be there to be wanted.
  static float there = 0;
  TensorView shared;
  if (plan.tied()) shared = views_of(plan.rows[0], plan.work)[0];

  // One micro-batch of each chunk.
  for (const ChunkPlan& chunk : plan.chunks) {
    if (plan.mesh.tp * plan.mesh.sp == 1) break;  // layers talk to nobody
    model::ActivationPlanner planner;
    std::vector<model::LayerActs> acts = plan_acts(model, chunk, plan, planner, Mode::Train, plan.shape());
    for (model::LayerActs& a : acts) {
      for (TensorView& v : a.temporary) v.data = &there;
      for (TensorView& v : a.gradients) v.data = &there;
    }
    for (const auto* calls : {&chunk.forward, &chunk.backward, &chunk.weight}) {
      for (const LayerCall& call : *calls) {
        const size_t at = static_cast<size_t>(call.layer - chunk.chunk.begin);
        const model::Layer& layer = *model.layers[static_cast<size_t>(call.layer)];
        const model::LayerActs& a = acts[at];
        const std::vector<TensorView> own = views_of(layer.rows(), plan.work);
        const model::RowViews views{own, shared};
        const TensorView x = at > 0 ? acts[at - 1].output : none(plan.work, {plan.shape().stream_rows, C}),
                         dy = none(plan.work, {plan.shape().stream_rows, C});
        const bool again =
            calls == &chunk.backward && (call.again || call.kind == LayerCall::Kind::Forward);  // from a kept input
        if (again && at > 0 && acts[at - 1].stash.rank > 0 && plan.partition_inputs) {
          const AllGatherSegment all{nullptr, acts[at - 1].stash.bytes()};
          tp.all_gather({&all, 1}, "tp.all_gather");
        }
        switch (call.kind) {
          case LayerCall::Kind::Forward: layer.forward(ctx, views, x, a); break;
          case LayerCall::Kind::BackwardInput:
            if (call.again) layer.recompute(ctx, views, x, a, chunk.chunk.keep_of(call.layer));
            layer.backward_input(ctx, views, x, dy, a);
            break;
          case LayerCall::Kind::BackwardWeight: layer.backward_weight(ctx, views, x, dy, a); break;
        }
      }
    }
  }

  std::map<std::string, CommCount> messages;
  for (const Counter* c : {&tp, &sp}) {
    for (const auto& [name, count] : c->counts())
      messages[name] = {plan.micro_batches * count.calls, plan.micro_batches * count.bytes};
  }
  tp.reset_counts();

  const i64 stream_bytes = plan.shape().stream_rows * C * dtype_bytes(plan.work);
  const int peer = (plan.coord.pp + 1) % plan.mesh.pp;  // any: bytes are counted
  for (const pipeline::Instr& instr : plan.schedule) {
    const bool sends = instr.op == pipeline::Op::SendActivation || instr.op == pipeline::Op::SendGrad;
    const bool receives = instr.op == pipeline::Op::RecvActivation || instr.op == pipeline::Op::RecvGrad;
    if (sends) pp.send(nullptr, stream_bytes, peer, "pp.send");
    if (receives) pp.recv(nullptr, stream_bytes, peer, "pp.recv");
  }
  // Behind the data-parallel sums: tied embeddings, and rows whose gradients are parts.
  if (plan.tied() && plan.embeds() != plan.projects()) {
    for (const zero::Segment& s : plan.grad_layout.segments_of(plan.shared_grads())) {
      pp.send(nullptr, s.slice * 4, peer, "pp.send");
      pp.recv(nullptr, s.slice * 4, peer, "pp.recv");
    }
  }
  if (const i64 n = plan.parts_elems(model::ParamRow::Parts::Group); n > 0)
    tp.all_reduce(nullptr, n, DType::F32, ReduceOp::Sum, "tp.all_reduce");
  if (const i64 n = plan.parts_elems(model::ParamRow::Parts::Copies); n > 0) {
    const AllGatherSegment all{nullptr, n * 4};
    tp.all_gather({&all, 1}, "tp.all_gather");
  }

  for (const Counter* c : {&tp, &pp}) {
    for (const auto& [name, count] : c->counts()) {
      messages[name].calls += count.calls;
      messages[name].bytes += count.bytes;
    }
  }
  return messages;
}

}  // namespace ds::report
