// SPDX-License-Identifier: Apache-2.0
// One training step, top to bottom: the only place that orders work.

#include <algorithm>
#include <cmath>

#include "engine/engine.h"

namespace ds::engine {

StepReport Engine::train_step(const StepBatch& batch) {
  Communicator& dp = mesh_.dp();
  const i64 m = plan_.micro_batches;
  StepReport report{.step = progress_.step + 1, .loss_scale = scaler_.scale()};

  count_valid_tokens(batch);
  device_.zero(scalars_, sizeof(report::StepScalars));
  params_.begin(plan_.train_gathers);
  for (const pipeline::Instr instr : schedule_) {
    switch (instr.op) {
      case pipeline::Op::Load: {
        const i64 R = plan_.B * plan_.T, at = instr.micro * R;
        device_.upload(ids_.as<i32>() + at, batch.ids.data() + at, R * 4);
        device_.upload(targets_.as<i32>() + at, batch.targets.data() + at, R * 4);
        break;
      }
      case pipeline::Op::Forward:
        forward(instr.micro, (progress_.step * m + instr.micro) * dp.size() + dp.rank());
        break;
      case pipeline::Op::Backward: backward(instr.micro); break;
    }
  }
  grads_.finish();  // owned sums are final

  const AllGatherSegment losses{micro_losses_, m * static_cast<i64>(sizeof(double))};
  dp.all_gather({&losses, 1}, "dp.stats").wait();
  report.lr = lr_.lr_at(progress_.optimizer_step - 1);
  judge_gradients();
  update_params(report.lr);
  params_.publish();

  device_.download(results_.data(), scalars_, narrow<i64>(results_.size()));  // the one time that the host waits
  dp.throw_if_failed();
  const auto* scalars = reinterpret_cast<const report::StepScalars*>(results_.data());
  const GradVerdict& verdict = scalars->verdict;
  report.loss = fold_losses({reinterpret_cast<const double*>(scalars + 1), static_cast<size_t>(m * dp.size())});
  report.grad_norm = verdict.norm;
  report.skipped = !verdict.finite;
  report.tokens = plan_.B * plan_.T * m * dp.size();
  ++(verdict.finite ? progress_.optimizer_step : progress_.skipped_steps);
  ++progress_.step;
  progress_.consumed_samples += plan_.B * m * dp.size();
  warm_ = true;
  scaler_.update(!verdict.finite);  // last: it may refuse to go on, and then all counters are right
  return report;
}

// The micro-batch's loss normalisation must be known before its backward pass. "token" needs the whole world's count.
void Engine::count_valid_tokens(const StepBatch& batch) {
  const i64 R = plan_.B * plan_.T;
  i64 total = 0;
  for (i64 m = 0; m < plan_.micro_batches; ++m) {
    const auto targets = batch.targets.subspan(static_cast<size_t>(m * R), static_cast<size_t>(R));
    valid_tokens_[static_cast<size_t>(m)] = R - std::count(targets.begin(), targets.end(), -100);
    total += valid_tokens_[static_cast<size_t>(m)];
  }
  global_valid_tokens_ = total;
  if (config_.loss_norm == LossNorm::Token) {
    mesh_.world().all_reduce(&global_valid_tokens_, 1, DType::I64, ReduceOp::Sum, "dp.stats").wait();
  }
}

double Engine::num_means() const noexcept { return static_cast<double>(plan_.micro_batches * mesh_.dp().size()); }

// "boundary": backward has divided by the micro-batches, as DeepSpeed's does, so that their sum can be sent in 16 bit.
// "micro": each is sent for itself and undivided, and N ranks with m of them do what one rank does with N m.
double Engine::grad_divisor() const noexcept {
  return plan_.grads.reduce_each_micro ? num_means() : static_cast<double>(mesh_.dp().size());
}

void Engine::forward(i64 micro, i64 global_micro) {
  model::PassContext ctx = context(model::Mode::Train);
  const i64 R = plan_.B * plan_.T;
  ctx.ids = TensorView::of(ids_.as<i32>() + micro * R, DType::I32, {R});
  ctx.targets = TensorView::of(targets_.as<i32>() + micro * R, DType::I32, {R});
  ctx.dropout_key = {static_cast<u32>(config_.seed), 0, static_cast<u32>(global_micro)};
  const i64 valid = valid_tokens_[static_cast<size_t>(micro)];
  // "token": the mean over all micro-batches is then the mean over all valid tokens.
  const double per_token = config_.loss_norm == LossNorm::Token
                               ? num_means() / static_cast<double>(std::max<i64>(global_valid_tokens_, 1))
                               : 1.0 / static_cast<double>(std::max<i64>(valid, 1));
  ctx.loss_grad = static_cast<float>(per_token * scaler_.scale() * (grad_divisor() / num_means()));

  TensorView x{};
  for (size_t l = 0; l < model_.layers.size(); ++l) {
    const zero::ParamLease lease = params_.acquire();
    const auto layer = [&] {
      model_.layers[l]->forward(ctx, param_views(lease, static_cast<i64>(l)), x, train_acts_[l]);
    };
    if (l + 1 < model_.layers.size()) {
      enqueue_static(static_cast<size_t>(2 * micro) * model_.layers.size() + l, layer);
    } else {
      layer();  // the loss has a scale of its own in every step
    }
    x = train_acts_[l].output;
  }
  double* loss = micro_losses_ + mesh_.dp().rank() * plan_.micro_batches + micro;
  ops_.sum(TensorView::of(loss, DType::F64, {1}), losses_, per_token, stream_);
}

void Engine::backward(i64 micro) {
  model::PassContext ctx = context(model::Mode::Train);
  const i64 R = plan_.B * plan_.T;
  ctx.ids = TensorView::of(ids_.as<i32>() + micro * R, DType::I32, {R});
  ctx.dropout_key = {
      static_cast<u32>(config_.seed), 0,
      static_cast<u32>((progress_.step * plan_.micro_batches + micro) * mesh_.dp().size() + mesh_.dp().rank())};
  const TensorView dx = TensorView::of(residual_grad_.data(), plan_.work, {R, model_.hidden});
  for (i64 l = static_cast<i64>(model_.layers.size()); l-- > 0;) {
    const size_t at = static_cast<size_t>(l);
    const zero::ParamLease lease = params_.acquire();
    const model::RowViews grads{grads_.acquire(l)};
    const TensorView x = l > 0 ? train_acts_[at - 1].output : TensorView{};
    enqueue_static(static_cast<size_t>(2 * micro + 1) * model_.layers.size() + at,
                   [&] { model_.layers[at]->backward(ctx, param_views(lease, l), grads, x, dx, dx, train_acts_[at]); });
    grads_.commit(l);  // may start the reduction of its bucket
  }
}

// The mean over all micro-batches of all ranks, folded in the order (micro-batch, rank): that of one rank with them
// all.
double Engine::fold_losses(std::span<const double> losses) const {
  const i64 m = plan_.micro_batches, P = mesh_.dp().size();
  double sum = 0;
  for (i64 j = 0; j < m; ++j) {
    for (i64 r = 0; r < P; ++r) sum += losses[static_cast<size_t>(r * m + j)];
  }
  return sum / num_means();
}

// One verdict for the whole world, made where the gradients are. Both reductions are over integers, so the norm does
// not depend on the layout.
void Engine::judge_gradients() {
  Communicator& dp = mesh_.dp();
  const auto owned_slice = [&](const zero::Segment& s) {
    return TensorView::of(grads_.element(s, s.slice * dp.rank()), DType::F32, {s.slice});
  };
  const TensorView max_abs = TensorView::of(&scalars_->max_abs, DType::I64, {1}),
                   sum = TensorView::of(&scalars_->sum, DType::I64, {2});
  for (const zero::Segment& s : plan_.layout.segments()) ops_.max_abs(max_abs, owned_slice(s), stream_);
  dp.all_reduce(max_abs.data, 1, DType::I64, ReduceOp::Max, "dp.stats").wait();
  for (const zero::Segment& s : plan_.layout.segments()) ops_.sum_squares(sum, owned_slice(s), max_abs, stream_);
  dp.all_reduce(sum.data, 2, DType::I64, ReduceOp::Sum, "dp.stats").wait();
  ops_.judge(&scalars_->verdict, max_abs, sum,
             {.divisor = scaler_.scale() * grad_divisor(), .clip = config_.gradient_clipping}, stream_);
}

// Nothing happens on the devices if the verdict says so.
void Engine::update_params(double lr) {
  const OptimizerConfig& o = config_.optimizer;
  const double t = static_cast<double>(progress_.optimizer_step + 1);
  const AdamWParams p{.beta1 = o.beta1,
                      .beta2 = o.beta2,
                      .lr = static_cast<float>(lr),
                      .eps = o.eps,
                      .bias1 = o.bias_correction ? static_cast<float>(1 - std::pow(o.beta1, t)) : 1.0f,
                      .bias2 = o.bias_correction ? static_cast<float>(1 - std::pow(o.beta2, t)) : 1.0f,
                      .adam_w_mode = o.adam_w_mode};
  ops_.adamw(updated_, &scalars_->verdict, p, stream_);
}

}  // namespace ds::engine
