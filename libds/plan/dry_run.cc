// SPDX-License-Identifier: Apache-2.0
#include "plan/dry_run.h"

#include <algorithm>
#include <utility>

#include "comm/message_tag.h"
#include "model/attention_pattern.h"
#include "plan/stage.h"

namespace ds::plan {
namespace {

using model::Mode;
using pipeline::LayerCall;

// Stands for memory that is never read: a view of it is not null. Aligned for every dtype.
alignas(64) float there = 0;

TensorView present(DType dtype, std::initializer_list<i64> shape) { return TensorView::of(&there, dtype, shape); }

void make_present(std::vector<model::LayerActs>& acts) {
  for (model::LayerActs& a : acts) {
    for (auto* views : {&a.saved, &a.gradients, &a.temporary, &a.exchange}) {
      for (TensorView& v : *views) v.data = &there;
    }
    for (model::BranchActs& branch : a.branches) {
      for (TensorView* v : {&branch.inner, &branch.inner_grad, &branch.product}) v->data = &there;
    }
    for (TensorView* v : {&a.output, &a.input_grad, &a.drawn, &a.shared_stats})
      v->data = v->rank > 0 ? &there : nullptr;
    make_present(a.inner);
  }
}

void make_present(model::PassMemory& memory, const model::Model& model) {
  memory.for_each([](Tag, TensorView& v) { v.data = v.rank > 0 ? &there : nullptr; });
  // Ops that count read the layout.
  if (model.layout != nullptr) memory.layout_keys.data = const_cast<u64*>(model.layout->keys().data());
}

// The memory of a training pass with a head.
model::PassMemory memory_of(const model::Model& model, const RunPlan& plan) {
  model::PassSizes sizes = plan.activations.pass.sizes;
  if (sizes.B == 0)
    sizes = {.B = plan.B,
             .T = plan.T,
             .sequence_length = plan.sequence_length,
             .tile_cols = plan.tile_cols(),
             .work = plan.work};
  sizes.projects = sizes.gradients = true;
  sizes.fused = false;
  sizes.logits_rows = std::max<i64>(sizes.logits_rows, 1);
  model::PassMemory memory(model, sizes);
  make_present(memory, model);
  return memory;
}

// Matrices in tiles that are not there either.
class AbsentTiles final : public model::Tiles {
 public:
  AbsentTiles(const RunPlan& plan, i64 layer, DType dtype, bool gradients = false)
      : plan_(plan), layer_(layer), dtype_(dtype), gradients_(gradients) {}
  void for_each(size_t row, FunctionRef<void(i64, TensorView)> use) override {
    for (const zero::MatrixTile& tile : gradients_ ? plan_.grad_tiles_of(layer_, row) : plan_.tiles_of(layer_, row))
      use(tile.first, present(dtype_, {tile.rows, tile.cols}));
  }

 private:
  const RunPlan& plan_;
  i64 layer_;
  DType dtype_;
  bool gradients_;
};

// The rows of a layer, but for those that are in tiles; or their gradients, of those that are trained.
std::vector<TensorView> whole_rows(const model::Model& model, const RunPlan& plan, i64 layer, DType dtype,
                                   bool gradients = false) {
  const std::vector<model::ParamRow>& of_layer = model.layers[layer]->rows();
  std::vector<TensorView> rows = views_of(of_layer, dtype, &there);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (!plan.tiles_of(layer, r).empty() || (gradients && !of_layer[r].trained)) rows[r].data = nullptr;
  }
  return rows;
}

// Gives views of a unit's parameters the panels that they have in a run that does not train (ParamStore::pack).
void set_panels(std::span<TensorView> views, const RunPlan& plan, i64 unit, const OpTable& ops) {
  for (size_t r = 0; r < views.size() && !plan.trains(); ++r) {
    const model::ParamRow& row = plan.rows[unit][r];
    const zero::ShardsPlan& shards = plan.shards[row.group];
    const bool coded = !shards.coded.empty() && shards.coded[static_cast<size_t>(unit)];
    const i64 param = plan.dp().layout.units()[unit].first_param + static_cast<i64>(r);
    if (views[r] && !coded && shards.layout.packs(param, row)) views[r].panels = panels_of(ops, plan.work, row.codes);
  }
}

// A matrix that several layers have, in this dtype; or its gradient, if it is trained.
TensorView shared_rows(const RunPlan& plan, DType dtype, bool gradients = false) {
  if (!plan.tied() || (gradients && !plan.rows[0][0].trained)) return {};
  return views_of(plan.rows[0], dtype, &there)[0];
}

}  // namespace

std::vector<TensorView> views_of(std::span<const model::ParamRow> rows, DType dtype, void* data) {
  std::vector<TensorView> views;
  for (const model::ParamRow& row : rows) views.push_back(row.view(dtype, data));
  return views;
}

void walk_layers(const model::Model& model, const RunPlan& plan, const Walk& walk,
                 FunctionRef<void(size_t, Pass)> enter) {
  const model::PassMemory memory = memory_of(model, plan);
  model::PassContext ctx =
      model::make_context(memory, {.B = plan.B, .T = plan.T}, model, walk.ops, walk.stream, walk.comms);
  ctx.predicts = walk.predicts;
  ctx.alone = plan.invariant;
  if (plan.fused) ctx.term = walk.later ? model::GradTerm::Later : model::GradTerm::First;
  const TensorView stream = present(plan.work, {plan.shape().stream_rows, model.hidden});
  const DType fresh = plan.dp().grads.fresh();
  const TensorView shared = shared_rows(plan, plan.work), shared_grad = shared_rows(plan, fresh, true);
  for (size_t c = 0; c < plan.stage.chunks.size(); ++c) {
    const ChunkPlan& chunk = plan.stage.chunks[c];
    model::ActivationPlanner planner;
    std::vector<model::LayerActs> acts = plan_acts(model, chunk, plan, planner, Mode::Train, plan.shape(), stream);
    make_present(acts);
    ctx.shared_stats = acts.back().shared_stats;
    for (const auto* calls : {&chunk.forward, &chunk.backward, &chunk.weight}) {
      for (const LayerCall& call : *calls) {
        const size_t at = static_cast<size_t>(call.layer - chunk.chunk.begin);
        const model::Layer& layer = *model.layers[call.layer];
        const model::LayerActs& a = acts[at];
        const bool weight = call.kind == LayerCall::Kind::BackwardWeight;
        const DType dtype = weight ? fresh : plan.work;
        std::vector<TensorView> own = whole_rows(model, plan, call.layer, dtype, weight);
        AbsentTiles tiles(plan, call.layer, dtype, weight);
        const model::RowViews views{own, weight ? shared_grad : shared, &tiles};
        const TensorView x = at > 0 ? acts[at - 1].output : stream, dy = stream;
        const bool again =
            calls == &chunk.backward && (call.again || call.kind == LayerCall::Kind::Forward);  // from a kept input
        if (again) {
          enter(c, Pass::Recompute);
          if (call.restore && plan.activations.partition_inputs) {
            const AllGatherSegment all{nullptr, acts[at - 1].stash.bytes()};
            walk.comms[Axis::Tp]->all_gather({&all, 1}, message_text(Axis::Tp, Collective::AllGather));
          }
        }
        switch (call.kind) {
          case LayerCall::Kind::Forward:
            if (!again) enter(c, Pass::Forward);
            layer.forward(model::forward_context(ctx, model, call.layer, again), views, x, a);
            break;
          case LayerCall::Kind::BackwardInput:
            if (call.again)
              layer.recompute(model::forward_context(ctx, model, call.layer, true), views, x, a,
                              chunk.chunk.keep_of(call.layer));
            enter(c, Pass::BackwardInput);
            layer.backward_input(ctx, views, x, dy, a);
            break;
          case LayerCall::Kind::BackwardWeight:
            enter(c, Pass::BackwardWeight);
            for (i64 part = 0, parts = plan.reduce_each_micro ? layer.gradient_parts() : 1; part < parts; ++part) {
              ctx.part = parts > 1 ? part : -1;
              layer.backward_weight(ctx, views, x, dy, a);
            }
            ctx.part = -1;
            break;
        }
      }
    }
  }
}

void walk_forward(const model::Model& model, const RunPlan& plan, model::PassMemory memory, const model::Pass& pass,
                  const Walk& walk, FunctionRef<bool(i64, model::PassContext&)> before) {
  make_present(memory, model);
  model::PassContext ctx = model::make_context(memory, pass, model, walk.ops, walk.stream, walk.comms);
  ctx.alone = plan.invariant;
  const i64 stream_rows = pass.mode == Mode::Generate ? pass.B * pass.T : plan.shape().stream_rows;
  const TensorView stream = present(plan.work, {stream_rows, model.hidden});
  TensorView shared = shared_rows(plan, plan.work);
  if (shared) set_panels({&shared, 1}, plan, RunPlan::kSharedUnit, walk.ops);
  for (const ChunkPlan& chunk : plan.stage.chunks) {
    model::ActivationPlanner planner;
    auto acts = plan_acts(model, chunk, plan, planner, pass.mode, {pass.B, pass.T, stream_rows, memory.sizes.context});
    make_present(acts);
    for (i64 l = chunk.chunk.begin; l < chunk.chunk.end; ++l) {
      if (!before(l, ctx)) continue;
      std::vector<TensorView> own = whole_rows(model, plan, l, plan.work);
      set_panels(own, plan, RunPlan::unit_of(l), walk.ops);
      AbsentTiles tiles(plan, l, plan.work);
      const i64 at = l - chunk.chunk.begin;
      model.layers[l]->forward(ctx, {own, shared, &tiles}, at > 0 ? acts[at - 1].output : stream, acts[at]);
    }
  }
}

void walk_packing(const RunPlan& plan, const OpTable& ops, Stream& stream) {
  for (size_t unit = 0; unit < plan.rows.size(); ++unit) {
    std::vector<TensorView> views = views_of(plan.rows[unit], plan.work, &there);
    set_panels(views, plan, static_cast<i64>(unit), ops);
    for (TensorView& v : views) {
      if (std::exchange(v.panels, {}))
        zero::for_matrices(v, [&](const TensorView& one) { ops.pack_matrix(one, stream); });
    }
  }
}

std::map<std::string, CommCount> count_messages(const model::Model& model, const RunPlan& plan, MeshCalls& calls) {
  const CountingAxes axes(model.shard);
  if (!model.shard.alone()) {
    Stream stream;
    walk_layers(model, plan, {no_ops(), stream, axes.comms()}, [](size_t, Pass) {});
  }

  std::map<std::string, CommCount> messages;
  axes.for_each([&](Axis, const CountingCommunicator& c) {
    for (const auto& [name, count] : c.counts())
      messages[name] = {plan.micro_batches * count.calls, plan.micro_batches * count.bytes};
  });

  for (const pipeline::Instr& i : plan.stage.schedule) {
    using pipeline::Op;
    if (i.op == Op::RecvActivation || i.op == Op::RecvGrad)
      ++messages[std::string(message_text(Axis::Pp, Collective::Recv))].calls;
    if (i.op != Op::SendActivation && i.op != Op::SendGrad) continue;
    const pipeline::Placement& placement = plan.stage.placement;
    const bool down = placement.way_of(i.op, i.chunk) == pipeline::Way::Down;
    (down ? calls.down : calls.up).sent_to.insert(placement.peer_of(plan.coord.pp, i.op, i.chunk));
    CommCount& count = messages[std::string(message_text(Axis::Pp, Collective::Send))];
    ++count.calls;
    count.bytes += plan.activations.message_bytes;
  }
  axes.note(calls);
  return messages;
}

void note_evaluation(const model::Model& model, const RunPlan& plan, MeshCalls& calls) {
  const CountingAxes axes(model.shard);
  Stream stream;
  walk_forward(model, plan, plan.activations.pass, {.mode = Mode::Eval, .B = plan.B, .T = plan.T},
               {no_ops(), stream, axes.comms()}, [](i64, model::PassContext&) { return true; });
  axes.note(calls);
}

}  // namespace ds::plan
