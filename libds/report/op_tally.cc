// SPDX-License-Identifier: Apache-2.0
#include "report/op_tally.h"

#include <algorithm>

namespace ds::report {
namespace {

// What stands for memory; masters of 16-bit parameters are other memory than these.
float there = 0, elsewhere = 0;

TensorView view(DType dtype, i64 n, void* data = &there) { return TensorView::of(data, dtype, {n}); }

void tally_layers(StepWork& work, const model::Model& model, const RunPlan& plan) {
  CountingCommunicator tp(plan.coord.tp, plan.mesh.tp), sp(plan.coord.sp, plan.mesh.sp);
  Stream stream;
  PassWork* pass = nullptr;
  const auto take_messages = [&] {
    for (CountingCommunicator* axis : {&tp, &sp}) {
      if (axis->size() == 1 || pass == nullptr) continue;
      for (const auto& [name, count] : axis->counts()) {
        pass->messages[name].calls += count.calls;
        pass->messages[name].bytes += count.bytes;
      }
      axis->reset_counts();
    }
  };
  const auto enter = [&](size_t chunk, Pass which) {
    take_messages();
    pass = &work.chunks[chunk].passes[static_cast<size_t>(which)];
    stream.native = &pass->ops;
  };
  walk_layers(model, plan, {counting_ops(), stream, tp, sp}, enter);
  take_messages();
}

// The chunk whose backward pass commits the gradients of a unit.
size_t chunk_of(const RunPlan& plan, i64 unit) {
  if (unit == plan.head_use()) return plan.chunks.size() - 1;
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    if (unit < RunPlan::unit_of(plan.chunks[c].chunk.end)) return c;
  }
  return 0;
}

// What `call` counts on a stream, `times` times.
void tally(OpTally& tally, i64 times, auto&& call) {
  OpTally once;
  Stream stream{.native = &once};
  call(stream);
  if (times > 0) tally.add(once, times);
}

// GradStore::commit of all micro-batches.
void tally_gradients(StepWork& work, const RunPlan& plan, const zero::ShardsPlan& shards, const OpTable& ops) {
  const zero::GradOptions& o = shards.grads;
  const i64 m = plan.micro_batches;
  for (const std::vector<i64>& pass : o.passes) {
    for (const i64 unit : pass) {
      OpTally& gradients = work.chunks[chunk_of(plan, unit)].gradients;
      const zero::UnitPlace& place = shards.grad_layout.units()[static_cast<size_t>(unit)];
      const TensorView fresh = view(plan.wire, place.padded), sum = view(DType::F32, place.padded);
      for (const zero::Segment& s : shards.grad_layout.segments_of(unit)) {
        const auto cast = [&](Stream& at) { ops.cast(view(plan.wire, s.numel), view(DType::F32, s.numel), at); };
        if (o.staged()) tally(gradients, m, cast);
      }
      if (!o.accumulates_locally() || place.num_segments == 0) continue;
      tally(gradients, 1, [&](Stream& at) { ops.fold(sum, {&fresh, 1}, false, at); });
      tally(gradients, m - 1, [&](Stream& at) { ops.fold(sum, {&fresh, 1}, true, at); });
      tally(gradients, 1, [&](Stream& at) { ops.cast(fresh, sum, at); });
    }
  }
}

void tally_losses(StepWork& work, const RunPlan& plan, const OpTable& ops) {
  if (!plan.projects()) return;
  tally(work.chunks.back().gradients, plan.micro_batches,
        [&](Stream& at) { ops.sum(view(DType::F64, 1), view(DType::F32, plan.B * plan.T), 1, at); });
}

// A fold of one view for each rank, of which there may be a million: they are alike.
void tally_reductions(StepWork& work, const RunPlan& plan, const zero::ShardsPlan& shards) {
  const i64 times = plan.reduce_each_micro ? plan.micro_batches : 1, ranks = shards.grad_layout.num_ranks();
  for (const zero::Bucket& bucket : shards.buckets) {
    for (const i64 unit : bucket.units) {
      for (const zero::Segment& s : shards.grad_layout.segments_of(unit)) {
        const TensorView source = view(plan.wire, s.slice), sum = view(DType::F32, s.slice);
        work.reductions.add(fold_of(sum, source, ranks, false));
        if (times > 1) work.reductions.add(fold_of(sum, source, ranks, true), times - 1);
      }
    }
  }
}

// The tied matrix's two gradients, those of which ranks of tp have parts, those with a divisor of their own.
void tally_combined(const model::Model& model, const RunPlan& plan, const OpTable& ops, Stream& stream) {
  if (model.tied() && (plan.embeds() || plan.projects())) {
    for (const zero::Segment& s : plan.dp().grad_layout.segments_of(plan.shared_grads())) {
      const bool here = plan.embeds() && plan.projects();  // both: nothing is exchanged
      const auto fold = [&](i64, i64 n) {
        const TensorView other = view(DType::F32, n);
        ops.fold(other, {&other, 1}, true, stream);
      };
      here ? fold(0, s.slice) : RunPlan::for_each_exchange(s.slice, fold);
    }
  }
  for (const CombinePlan::Exchange& e : plan.combine.exchanges) {
    if (e.width == plan.mesh.tp) continue;  // all of the group: its communicator sums them
    const TensorView sum = view(DType::F32, e.elems);
    ops.fold(sum, std::vector<TensorView>(static_cast<size_t>(e.width), sum), false, stream);
  }
  for (const CombinePlan::Scaled& s : plan.combine.scaled) {
    const TensorView gradient = view(DType::F32, s.piece.count);
    ops.scaled_sum(gradient, gradient, s.factor, 0, nullptr, stream);
  }
}

// Passes over pieces that have no memory.
class CountedStates final : public optim::GroupStates {
 public:
  CountedStates(const RunPlan& plan, const GroupPieces& pieces, const OpTable& ops, Stream& stream)
      : plan_(plan), pieces_(pieces), ops_(ops), stream_(stream) {}
  void update(const UpdateSpec& spec) override {
    for (const GroupPieces::Tiles& tiles : pieces_.of) {
      if (tiles.held.empty()) continue;
      zero::run_pass(
          ops_, stream_, tiles.held, spec, nullptr, [&](const zero::Piece& piece) { return tensor(piece); }, scratch_);
    }
  }
  void for_each_counted(FunctionRef<void(i64, TensorView, TensorView)> visit) override {
    for (const GroupPieces::Tiles& tiles : pieces_.of) {
      for (const zero::TilePiece& p : tiles.counted)
        visit(p.index, view(DType::F32, p.piece.count), view(DType::F32, p.piece.count));
    }
  }

 private:
  UpdateTensor tensor(const zero::Piece& piece) const {
    const TensorView exact = view(DType::F32, piece.count);
    UpdateTensor t{.param = view(plan_.work, piece.count),
                   .master = plan_.work == DType::F32 ? exact : view(DType::F32, piece.count, &elsewhere),
                   .states = {},
                   .grad = exact};
    size_t i = 0;
    const zero::StateLayout& states = plan_.shards_of(piece.param).states;
    for (const State s : kOptimizerStates) {
      if (states.has(s, piece.param)) t.states[i++] = view(states.dtype(s, piece.param), piece.count);
    }
    return t;
  }

  const RunPlan& plan_;
  const GroupPieces& pieces_;
  const OpTable& ops_;
  Stream& stream_;
  std::vector<UpdateTensor> scratch_;
};

// Those that this rank looks at.
class CountedMatrices final : public optim::WholeMatrices {
 public:
  CountedMatrices(const RunPlan& plan, size_t group) : plan_(plan), group_(group) {}
  void for_each(FunctionRef<void(TensorView)> body) override {
    for (const zero::MatrixPlace& m : plan_.matrices[group_]) {
      if (m.owner < 0 || m.owner == plan_.dp_rank()) body(TensorView::of(nullptr, DType::F32, {m.rows, m.cols}));
    }
  }

 private:
  const RunPlan& plan_;
  size_t group_;
};

void tally_optimizer(StepWork& work, const model::Model& model, const RunPlan& plan, const OpTable& ops) {
  Stream stream{.native = &work.optimizer};
  tally_combined(model, plan, ops, stream);
  const TensorView result = view(DType::I64, 2);
  for (const zero::Piece& p : plan.combine.judged) {
    ops.max_abs(result, view(DType::F32, p.count), stream);
    ops.sum_squares(result, view(DType::F32, p.count), result, stream);
  }
  ops.judge(nullptr, result, result, {}, stream);
  walk_updates(plan, ops, stream);
}

}  // namespace

void walk_updates(const RunPlan& plan, const OpTable& ops, Stream& stream) {
  for (size_t g = 0; g < plan.groups.groups.size(); ++g) {
    const optim::Group& group = plan.groups.groups[g];
    if (group.frozen) continue;
    const GroupPieces pieces = plan.pieces_of(g);
    if (pieces.size.num_params == 0) continue;
    CountedStates states(plan, pieces, ops, stream);
    CountedMatrices matrices(plan, g);
    optim::make_optimizer(group, pieces.size, nullptr)
        ->update({.ops = ops,
                  .stream = stream,
                  .lr = 0,
                  .step = 1,
                  .seed = 0,
                  .reduce = [](TensorView, ReduceOp) {},
                  .zero = [](TensorView) {},
                  .states = states,
                  .matrices = &matrices});
  }
}

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
  for (const ChunkWork& chunk : chunks) {
    for (const PassWork& pass : chunk.passes) all.add(pass.ops, micro_batches);
    all.add(chunk.gradients);
  }
  return all;
}

OpTally StepWork::total(Pass pass) const {
  OpTally all;
  for (const ChunkWork& chunk : chunks) all.add(chunk.of(pass).ops, micro_batches);
  return all;
}

StepWork tally_step(const model::Model& model, const RunPlan& plan) {
  StepWork work;
  work.micro_batches = plan.micro_batches;
  work.chunks.resize(plan.chunks.size());
  const OpTable& ops = counting_ops();
  tally_layers(work, model, plan);
  for (const zero::ShardsPlan& shards : plan.shards) {
    tally_gradients(work, plan, shards, ops);
    tally_reductions(work, plan, shards);
  }
  tally_losses(work, plan, ops);
  tally_optimizer(work, model, plan, ops);
  return work;
}

}  // namespace ds::report
