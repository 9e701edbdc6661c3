// SPDX-License-Identifier: Apache-2.0
// One training step, top to bottom: the only place that orders work.

#include <algorithm>

#include "engine/engine.h"

namespace ds::engine {

using pipeline::Instr;
using pipeline::LayerCall;
using pipeline::Op;

StepReport Engine::train_step(const StepBatch& batch) {
  DS_ASSERT(plan_.trains());
  const i64 m = plan_.micro_batches;
  StepReport report{.step = progress_.step + 1, .loss_scale = scaler_.scale()};

  count_valid_tokens(batch);
  device_.zero(scalars_, narrow<i64>(results_.size()));
  params_.begin(plan_.train_gathers);
  posted_ = next_receive_ = 0;
  for (size_t i = 0; i < plan_.schedule.size(); ++i) {
    const Instr& instr = plan_.schedule[i];
    switch (instr.op) {
      case Op::Load: load(batch, instr.micro); break;
      case Op::RecvActivation:
      case Op::RecvGrad: post_receives(i + 1); break;
      case Op::SendActivation:
      case Op::SendGrad: send(instr); break;
      case Op::Forward:
      case Op::Backward:
      case Op::BackwardInput:
      case Op::BackwardWeight:
        post_next_receive(i);
        run_layers(instr);
        break;
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
  warm_ = true;
  scaler_.update(!verdict.finite);  // last: it may refuse to go on, and then all counters are right
  return report;
}

// The micro-batch's loss normalisation must be known before its backward pass. "token" needs the whole world's count.
void Engine::count_valid_tokens(const StepBatch& batch) {
  const i64 rows = plan_.B * plan_.sequence_length;
  i64 total = 0;
  for (i64 m = 0; m < plan_.micro_batches; ++m) {
    const auto targets = batch.targets.subspan(static_cast<size_t>(m * rows), static_cast<size_t>(rows));
    valid_tokens_[static_cast<size_t>(m)] = rows - std::count(targets.begin(), targets.end(), -100);
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
  const i64 R = plan_.B * plan_.T;
  const size_t rows = static_cast<size_t>(plan_.B * plan_.sequence_length), at = static_cast<size_t>(micro) * rows;
  upload_tokens(ids_.as<i32>() + micro * R, batch.ids.subspan(at, rows));
  upload_tokens(targets_.as<i32>() + micro * R, batch.targets.subspan(at, rows));
}

// This rank's part of each of B whole sequences.
void Engine::upload_tokens(i32* to, std::span<const i32> sequences) {
  auto at = tokens_.begin();
  for (i64 b = 0; b < plan_.B; ++b) {
    for (const model::TokenRange& range : model_.shard.tokens(plan_.sequence_length))
      at = std::copy_n(sequences.begin() + b * plan_.sequence_length + range.begin, range.count, at);
  }
  device_.upload(to, tokens_.data(), plan_.B * plan_.T * 4);
}

namespace {

template <class T>
T& slot_of(std::vector<T>& slots, i64 micro) {
  return slots[static_cast<size_t>(micro) % slots.size()];
}

}  // namespace

// The receives up to instruction `end` of the schedule, in order. Their slots are free: there is one more than
// micro-batches under way.
void Engine::post_receives(size_t end) {
  for (; posted_ < end; ++posted_) {
    const Instr& instr = plan_.schedule[posted_];
    Chunk& chunk = chunks_[static_cast<size_t>(instr.chunk)];
    if (instr.op == Op::RecvActivation) {
      receive_activation(instr);
    } else if (instr.op == Op::RecvGrad) {
      const TensorView dy = slot_of(chunk.grads_in, instr.micro);
      slot_of(chunk.grads_here, instr.micro) = mesh_.gradients().recv(dy.data, dy.bytes(), next_stage(), "pp.recv");
    }
  }
}

// Before layers run: the receive that comes next is posted, to go on beside them.
void Engine::post_next_receive(size_t at) {
  const auto is_receive = [](const Instr& i) { return i.op == Op::RecvActivation || i.op == Op::RecvGrad; };
  next_receive_ = std::max(next_receive_, at);
  while (next_receive_ < plan_.schedule.size() && !is_receive(plan_.schedule[next_receive_])) ++next_receive_;
  if (next_receive_ < plan_.schedule.size()) post_receives(next_receive_ + 1);
}

void Engine::send(const Instr& instr) {
  Chunk& chunk = chunks_[static_cast<size_t>(instr.chunk)];
  if (instr.op == Op::SendActivation) {
    const TensorView y = acts_of(instr).back().output;
    output_sent(instr) = mesh_.activations().send(y.data, y.bytes(), next_stage(), "pp.send");
  } else {
    const TensorView dx = slot_of(chunk.grads_out, instr.micro);
    slot_of(chunk.grads_sent, instr.micro) = mesh_.gradients().send(dx.data, dx.bytes(), previous_stage(), "pp.send");
  }
}

const std::vector<model::LayerActs>& Engine::acts_of(const Instr& instr) const noexcept {
  const Chunk& chunk = chunks_[static_cast<size_t>(instr.chunk)];
  const bool forward = instr.op == Op::Forward || instr.op == Op::SendActivation;
  return (forward ? chunk.forward : chunk.backward)[chunk.views[static_cast<size_t>(instr.micro)]];
}

Ticket& Engine::output_sent(const Instr& instr) noexcept {
  const i64 slot = plan_.kept.of[static_cast<size_t>(instr.chunk)][static_cast<size_t>(instr.micro)];
  return outputs_sent_[static_cast<size_t>(slot)];
}

// What a chunk's first layer reads; it has come when this returns.
TensorView Engine::input_of(const Instr& instr) {
  Chunk& chunk = chunks_[static_cast<size_t>(instr.chunk)];
  if (chunk.inputs.empty()) return {};
  slot_of(chunk.inputs_here, instr.micro).wait();
  return slot_of(chunk.inputs, instr.micro);
}

void Engine::run_layers(const Instr& instr) {
  const report::ChunkPlan& plan = plan_.chunks[static_cast<size_t>(instr.chunk)];
  Chunk& chunk = chunks_[static_cast<size_t>(instr.chunk)];
  model::PassContext ctx = context(model::Mode::Train);
  const i64 R = plan_.B * plan_.T;
  ctx.ids = TensorView::of(ids_.as<i32>() + instr.micro * R, DType::I32, {R});
  ctx.targets = TensorView::of(targets_.as<i32>() + instr.micro * R, DType::I32, {R});
  ctx.dropout_key = {static_cast<u32>(config_.seed), 0, static_cast<u32>(global_micro(instr.micro))};
  ctx.loss_grad = static_cast<float>(per_token(instr.micro) * scaler_.scale() * (grad_divisor() / num_means()));

  // The memory that this overwrites has been sent.
  if (instr.op == Op::Forward) output_sent(instr).wait();
  if (instr.op == Op::Backward || instr.op == Op::BackwardInput) {
    slot_of(chunk.grads_sent, instr.micro).wait();
    slot_of(chunk.grads_here, instr.micro).wait();
  }
  const auto& calls = instr.op == Op::Forward          ? plan.forward
                      : instr.op == Op::BackwardWeight ? plan.weight
                                                       : plan.backward;
  for (const LayerCall& call : calls) run_call(ctx, instr, call);
}

void Engine::run_call(const model::PassContext& ctx, const Instr& instr, const LayerCall& call) {
  const report::ChunkPlan& plan = plan_.chunks[static_cast<size_t>(instr.chunk)];
  Chunk& chunk = chunks_[static_cast<size_t>(instr.chunk)];
  const model::Layer& layer = *model_.layers[static_cast<size_t>(call.layer)];
  const bool head = call.layer + 1 == std::ssize(model_.layers);
  const size_t at = static_cast<size_t>(call.layer - plan.chunk.begin);
  const auto& layers = acts_of(instr);
  const model::LayerActs& acts = layers[at];
  TensorView x = at > 0 ? layers[at - 1].output : input_of(instr);
  if (at > 0 && layers[at - 1].stash && instr.op != Op::Forward) {
    const model::LayerActs& before = layers[at - 1];
    const bool begins = call.kind == LayerCall::Kind::Forward || call.again;  // the group is computed again
    if (begins) restore(before);
    x = before.restored.rows(0, before.output.dim(0));
  }
  const auto dy = [&] {
    if (head) return TensorView{};
    return at + 1 < layers.size() ? layers[at + 1].input_grad : slot_of(chunk.grads_in, instr.micro);
  };
  const size_t key = ((static_cast<size_t>(instr.micro) * 3 + static_cast<size_t>(call.kind)) * 2 +
                      (instr.op == Op::Forward ? 0 : 1)) *
                         model_.layers.size() +
                     static_cast<size_t>(call.layer);
  switch (call.kind) {
    case LayerCall::Kind::Forward: {
      const zero::ParamLease lease = params_.acquire();
      enqueue_static(key, [&] { layer.forward(ctx, param_views(lease, call.layer), x, acts); });
      if (instr.op == Op::Forward && acts.stash) stash(acts);
      break;
    }
    case LayerCall::Kind::BackwardInput: {
      const zero::ParamLease lease = params_.acquire();
      const auto body = [&] {
        const model::RowViews params = param_views(lease, call.layer);
        if (call.again) layer.recompute(ctx, params, x, acts, plan.chunk.keep_of(call.layer));
        layer.backward_input(ctx, params, x, dy(), acts);
      };
      if (!head) {
        enqueue_static(key, body);
        break;
      }
      body();  // the loss has a scale of its own in every step
      double* loss = micro_losses_ + mesh_.dp().rank() * plan_.micro_batches + instr.micro;
      ops_.sum(TensorView::of(loss, DType::F64, {1}), losses_, per_token(instr.micro), stream_);
      break;
    }
    case LayerCall::Kind::BackwardWeight: {
      const i64 own = report::RunPlan::unit_of(call.layer),
                shared = head ? plan_.head_use() : report::RunPlan::kSharedUnit;
      const bool has_own = !layer.rows().empty(), has_shared = model_.tied() && (head || call.layer == 0);
      const model::RowViews grads{has_own ? grads_->acquire(own) : std::span<const TensorView>(),
                                  has_shared ? grads_->acquire(shared)[0] : TensorView{}};
      enqueue_static(key, [&] { layer.backward_weight(ctx, grads, x, dy(), acts); });
      if (has_own) grads_->commit(own);  // may start the reduction of its bucket
      if (has_shared) grads_->commit(shared);
      break;
    }
  }
}

void Engine::stash(const model::LayerActs& acts) {
  const i64 slice = acts.stash.dim(0), first = plan_.partition_inputs ? plan_.coord.tp * slice : 0;
  const i64 count = std::clamp<i64>(acts.output.dim(0) - first, 0, slice);
  if (count == 0) return;
  const TensorView rows = acts.output.rows(first, count);
  if (plan_.offload_inputs) {
    device_.download(acts.stash.data, rows.data, rows.bytes());
  } else {
    device_.copy(acts.stash.data, rows.data, rows.bytes());
  }
}

void Engine::restore(const model::LayerActs& acts) {
  const i64 slice = acts.stash.dim(0), first = plan_.partition_inputs ? plan_.coord.tp * slice : 0;
  const TensorView rows = acts.restored.rows(first, slice);
  if (plan_.offload_inputs) {
    device_.upload(rows.data, acts.stash.data, rows.bytes());
  } else {
    device_.copy(rows.data, acts.stash.data, rows.bytes());
  }
  if (!plan_.partition_inputs) return;
  const AllGatherSegment all{acts.restored.data, rows.bytes()};
  mesh_.tp().all_gather({&all, 1}, "tp.all_gather").wait();
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
                         .reduce = [&](TensorView x, ReduceOp op) { over_model_ranks(x, op, false); },
                         .zero = [&](TensorView x) { device_.zero(x.data, x.bytes()); },
                         .matrices = t.matrices.get()});
  }
}

}  // namespace ds::engine
