// SPDX-License-Identifier: Apache-2.0
// One training step, top to bottom: the only place that orders work.

#include <algorithm>

#include "engine/engine.h"

namespace ds::engine {

StepReport Engine::train_step(const StepBatch& batch) {
  DS_ASSERT(plan_.trains());
  const i64 m = plan_.micro_batches;
  StepReport report{.step = progress_.step + 1, .loss_scale = scaler_.scale()};

  count_valid_tokens(batch);
  device_.zero(scalars_, narrow<i64>(results_.size()));
  stage_.begin_step();
  for (size_t i = 0; i < plan_.schedule.size(); ++i) {
    const pipeline::Instr& instr = plan_.schedule[i];
    if (instr.op == pipeline::Op::Load) {
      load(batch, instr.micro);
    } else {
      stage_.run(i, micro_batch(instr.micro), *grads_);
    }
  }
  finish_gradients();  // owned sums are final

  share_losses();
  report.lr = lr_.lr_at(progress_.optimizer_step - 1);
  judge_gradients();
  update_params(report.lr);
  params_.publish();

  device_.download(results_.data(), scalars_, narrow<i64>(results_.size()));  // the one time that the host waits
  mesh_.dp().throw_if_failed();
  const auto* scalars = reinterpret_cast<const report::StepScalars*>(results_.data());
  const GradVerdict& verdict = scalars->verdict;
  report.loss = fold_losses({reinterpret_cast<const double*>(scalars + 1), static_cast<size_t>(m * mesh_.dp().size())});
  report.grad_norm = verdict.norm;
  report.skipped = !verdict.finite;
  report.tokens = plan_.B * plan_.sequence_length * m * mesh_.data_size();
  ++(verdict.finite ? progress_.optimizer_step : progress_.skipped_steps);
  ++progress_.step;
  progress_.consumed_samples += plan_.B * m * mesh_.data_size();
  stage_.end_step();
  scaler_.update(!verdict.finite);  // last: it may refuse to go on, and then all counters are right
  return report;
}

// The micro-batch's loss normalisation must be known before its backward pass. "token" needs the whole world's count.
void Engine::count_valid_tokens(const StepBatch& batch) {
  const i64 rows = plan_.B * plan_.sequence_length;
  i64 total = 0;
  for (i64 m = 0; m < plan_.micro_batches; ++m) {
    const auto targets = batch.targets.subspan(static_cast<size_t>(m * rows), static_cast<size_t>(rows));
    valid_tokens_[static_cast<size_t>(m)] = rows - std::count(targets.begin(), targets.end(), kIgnoredTarget);
    total += valid_tokens_[static_cast<size_t>(m)];
  }
  global_valid_tokens_ = total;
  if (config_.loss_norm == LossNorm::Token) {
    mesh_.world().all_reduce(&global_valid_tokens_, 1, DType::I64, ReduceOp::Sum, "dp.stats").wait();
    global_valid_tokens_ /= config_.ranks_per_replica();  // which have counted the same samples
  }
}

double Engine::num_means() const noexcept { return static_cast<double>(plan_.micro_batches * mesh_.data_size()); }

// "boundary": backward has divided by the micro-batches, as DeepSpeed's does, so that their sum can be sent in 16 bit.
// "micro": each is sent for itself and undivided, and N ranks with m of them do what one rank does with N m.
double Engine::grad_divisor() const noexcept {
  return plan_.grads.reduce_each_micro ? num_means() : static_cast<double>(mesh_.data_size());
}

// "token": the mean over all micro-batches is then the mean over all valid tokens.
double Engine::per_token(i64 micro) const noexcept {
  if (config_.loss_norm == LossNorm::Token)
    return num_means() / static_cast<double>(std::max<i64>(global_valid_tokens_, 1));
  return 1.0 / static_cast<double>(std::max<i64>(valid_tokens_[static_cast<size_t>(micro)], 1));
}

i64 Engine::global_micro(i64 micro) const noexcept {
  return (progress_.step * plan_.micro_batches + micro) * mesh_.data_size() + mesh_.data_rank();
}

void Engine::load(const StepBatch& batch, i64 micro) {
  const size_t rows = static_cast<size_t>(plan_.B * plan_.sequence_length), at = static_cast<size_t>(micro) * rows;
  stage_.load(micro, batch.ids.subspan(at, rows), batch.targets.subspan(at, rows));
}

stage::MicroBatch Engine::micro_batch(i64 micro) const noexcept {
  return {.dropout_key = {static_cast<u32>(config_.seed), 0, static_cast<u32>(global_micro(micro))},
          .loss_grad = static_cast<float>(per_token(micro) * scaler_.scale() * (grad_divisor() / num_means())),
          .per_token = per_token(micro),
          .loss = micro_losses_ + mesh_.dp().rank() * plan_.micro_batches + micro};
}

// All ranks learn all losses: those of dp from each other, the other stages from the last one.
void Engine::share_losses() {
  const i64 row_bytes = plan_.micro_batches * static_cast<i64>(sizeof(double));
  const AllGatherSegment losses{micro_losses_, row_bytes};
  if (plan_.projects()) mesh_.dp().all_gather({&losses, 1}, "dp.stats").wait();
  mesh_.pp().broadcast(micro_losses_, row_bytes * mesh_.dp().size(), plan_.mesh.pp - 1, "pp.stats").wait();
}

// The mean over all micro-batches of all ranks, folded in the order (micro-batch, rank): that of one rank with them
// all. Ranks of sp have parts of the same means.
double Engine::fold_losses(std::span<const double> losses) const {
  const i64 m = plan_.micro_batches, P = mesh_.dp().size();
  double sum = 0;
  for (i64 j = 0; j < m; ++j) {
    for (i64 r = 0; r < P; ++r) sum += losses[static_cast<size_t>(r * m + j)];
  }
  return sum / num_means();
}

// The data-parallel sums, then those of what stands on several ranks beside them: each is a fold in rank order of fp32
// slices that all its ranks cut alike, so copies stay equal bit for bit.
void Engine::finish_gradients() {
  grads_->finish();
  sum_shared();
  for (const ReplicaSum& sum : sums_) sum_replicas(sum);
  grads_->gather(plan_.gathered_grads);
}

// The gradient of tied embeddings: that of the look-up and that of the projection, from two stages or from one.
void Engine::sum_shared() {
  if (!model_.tied()) return;
  const bool embeds = plan_.embeds(), projects = plan_.projects();
  if (!embeds && !projects) return;
  const zero::Layout& layout = plan_.grad_layout;
  const auto slices = [&](i64 unit, auto&& visit) {
    for (const zero::Segment& s : layout.segments_of(unit)) {
      float* const mine = grads_->element(&s - layout.segments().data(), s.slice * mesh_.dp().rank());
      visit(TensorView::of(mine, DType::F32, {s.slice}));
    }
  };
  if (embeds && projects) {
    std::vector<TensorView>& other = shared_slices_;
    other.clear();
    slices(plan_.head_use(), [&](TensorView slice) { other.push_back(slice); });
    size_t i = 0;
    slices(plan_.shared_grads(), [&](TensorView slice) { ops_.fold(slice, {&other[i++], 1}, true, stream_); });
    return;
  }
  const int peer = embeds ? plan_.mesh.pp - 1 : 0;
  slices(plan_.shared_grads(), [&](TensorView slice) {
    plan_.for_each_exchange(slice.numel(), [&](i64 begin, i64 n) {
      const TensorView mine = TensorView::of(slice.as<float>() + begin, DType::F32, {n});
      const TensorView other = TensorView::of(exchange_.data(), DType::F32, {n});
      Ticket sent = mesh_.gradients().send(mine.data, mine.bytes(), peer, "pp.send");
      mesh_.gradients().recv(other.data, other.bytes(), peer, "pp.recv").wait();
      sent.wait();
      ops_.fold(mine, {&other, 1}, true, stream_);
    });
  });
}

void Engine::sum_replicas(const ReplicaSum& sum) {
  Communicator& tp = mesh_.tp();
  const i64 group = sum.copies, first = tp.rank() / group * group;
  const auto part = [&](i64 rank) { return exchange_.as<float>().data() + rank * sum.elems; };
  const bool all = group == tp.size();
  float* at = part(all ? 0 : tp.rank());
  for (const TensorView& piece : sum.pieces) {
    device_.copy(at, piece.data, piece.bytes());
    at += piece.numel();
  }
  if (all) {
    tp.all_reduce(part(0), sum.elems, DType::F32, ReduceOp::Sum, "tp.all_reduce").wait();
  } else {
    const AllGatherSegment parts{part(0), sum.elems * 4};
    tp.all_gather({&parts, 1}, "tp.all_gather").wait();
    std::vector<TensorView>& sources = shared_slices_;
    sources.clear();
    for (i64 r = first; r < first + group; ++r) sources.push_back(TensorView::of(part(r), DType::F32, {sum.elems}));
    ops_.fold(sources.front(), sources, false, stream_);
  }
  at = part(all ? 0 : first);
  for (const TensorView& piece : sum.pieces) {
    device_.copy(piece.data, at, piece.bytes());
    at += piece.numel();
  }
}

// One verdict for the whole world, made where the gradients are. Both reductions are over integers, so the norm does
// not depend on the layout.
void Engine::judge_gradients() {
  const TensorView max_abs = TensorView::of(&scalars_->max_abs, DType::I64, {1}),
                   sum = TensorView::of(&scalars_->sum, DType::I64, {2});
  const auto over_the_world = [&](TensorView x, ReduceOp op) { over_model_ranks(x, op, true); };
  for (const TensorView& g : judged_) ops_.max_abs(max_abs, g, stream_);
  over_the_world(max_abs, ReduceOp::Max);
  for (const TensorView& g : judged_) ops_.sum_squares(sum, g, max_abs, stream_);
  over_the_world(sum, ReduceOp::Sum);
  ops_.judge(&scalars_->verdict, max_abs, sum,
             {.divisor = scaler_.scale() * grad_divisor(), .clip = config_.gradient_clipping}, stream_);
}

// Integers of all ranks that have parts of the same parameters; `stages`: of the other stages, too.
void Engine::over_model_ranks(TensorView x, ReduceOp op, bool stages) {
  for (Communicator* axis : {&mesh_.dp(), &mesh_.tp(), &mesh_.pp()}) {
    if (axis == &mesh_.pp() && !stages) continue;
    if (axis->size() > 1 || axis == &mesh_.dp()) axis->all_reduce(x.data, x.numel(), DType::I64, op, "dp.stats").wait();
  }
}

// Nothing happens on the devices if the verdict says so.
void Engine::update_params(double lr) {
  for (const Trained& t : trained_) {
    t.optimizer->update({.ops = ops_,
                         .stream = stream_,
                         .verdict = &scalars_->verdict,
                         .lr = lr * plan_.groups.groups[t.group].lr_ratio,
                         .step = progress_.optimizer_step + 1,
                         .seed = static_cast<u32>(config_.seed),
                         .reduce = [&](TensorView x, ReduceOp op) { over_model_ranks(x, op, false); },
                         .zero = [&](TensorView x) { device_.zero(x.data, x.bytes()); },
                         .matrices = t.matrices.get()});
  }
}

}  // namespace ds::engine
