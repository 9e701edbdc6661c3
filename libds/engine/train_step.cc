// SPDX-License-Identifier: Apache-2.0
// One training step, top to bottom: the only place that orders work.

#include <algorithm>

#include "base/clock.h"
#include "comm/message_tag.h"
#include "config/random_ltd.h"
#include "engine/engine.h"

namespace ds::engine {
namespace {

using Phase = double PhaseTimes::*;

// Which phase an instruction belongs to; messages to that whose result they bring or carry on.
Phase phase_of(pipeline::Op op) noexcept {
  switch (op) {
    case pipeline::Op::Load:
    case pipeline::Op::RecvActivation:
    case pipeline::Op::Forward:
    case pipeline::Op::SendActivation: return &PhaseTimes::forward_ms;
    case pipeline::Op::RecvGrad:
    case pipeline::Op::Backward:
    case pipeline::Op::BackwardInput:
    case pipeline::Op::BackwardWeight:
    case pipeline::Op::SendGrad: break;
  }
  return &PhaseTimes::backward_ms;
}

// Times what lies between borders; nothing where it is not wanted.
class PhaseMeter {
 public:
  PhaseMeter(std::optional<PhaseTimes>& times, bool wanted, Device& device, Trace* trace)
      : times_(times), device_(device), trace_(trace) {
    if (wanted) times_.emplace();
  }
  // The time since the last call belongs to `phase`; `name` is its span in a trace.
  void end(Phase phase, std::string_view name, i64 micro = -1) {
    if (!times_ && trace_ == nullptr) return;
    if (times_) device_.synchronize();
    const Clock::time_point now = Clock::now();
    if (times_) (*times_).*phase += std::chrono::duration<double, std::milli>(now - start_).count();
    if (trace_ != nullptr) trace_->add("step", name, start_, now, micro);
    start_ = now;
  }

 private:
  std::optional<PhaseTimes>& times_;
  Device& device_;
  Trace* const trace_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

StepRecord Engine::train_step(const StepBatch& batch) {
  DS_ASSERT(plan_.trains());
  const i64 kept = config_.random_ltd.on() ? random_ltd_kept(config_.random_ltd, progress_.step + 1) : 0;
  shape_to({step_length_, kept});
  StepRecord report{.step = progress_.step + 1, .loss_scale = scaler_.scale()};
  if (config_.random_ltd.on()) report.layer_tokens = std::min(kept, step_length_);
  PhaseMeter meter(report.phases, times_phases_, device_, trace_);

  count_valid_tokens(batch);
  const i64 update_number = progress_.optimizer_step + 1;
  update_->begin(update_number, scaler_.scale());
  results_.begin();
  stage_.begin_step(loss_grad(1));
  for (i64 micro = 0; micro < plan_.micro_batches && stage_.has_documents(); ++micro)
    stage_.load_documents(micro, part_of(batch.documents, micro));
  for (size_t i = 0; i < plan_.stage.schedule.size(); ++i) {
    const pipeline::Instr& instr = plan_.stage.schedule[i];
    if (instr.op == pipeline::Op::Load) {
      stage_.load(instr.micro, part_of(batch.ids, instr.micro), part_of(batch.targets, instr.micro));
    } else {
      stage_.run(i, micro_batch(instr.micro));
    }
    meter.end(phase_of(instr.op), pipeline::op_name(instr.op), instr.micro);
  }
  update_->finish_gradients();
  meter.end(&PhaseTimes::reduce_ms, "finish gradients");

  share_losses();
  report.lr = lr_.lr_at(progress_.optimizer_step - 1);
  ending_ = &report;
  const double ranks = config_.gradient_reduce == GradientReduce::Sum ? mesh_.shape().dp : 1;
  update_->judge(results_.scalars(),
                 {.divisor = scaler_.scale() * grad_divisor() / ranks, .clip = config_.gradient_clipping});
  meter.end(&PhaseTimes::update_ms, "judge");
  update_->update_params({.lr = report.lr,
                          .number = update_number,
                          .seed = static_cast<u32>(config_.seed),
                          .betas = lr_.betas_at(progress_.optimizer_step - 1)},
                         results_);
  meter.end(&PhaseTimes::update_ms, "update");
  const bool met = update_->outer_step(report.step);
  if (met) meter.end(&PhaseTimes::update_ms, "meet");
  zero::publish_update(shards_);
  meter.end(&PhaseTimes::update_ms, "publish");

  const GradVerdict& verdict = results_.resolve();  // the one time that the host waits
  meter.end(&PhaseTimes::update_ms, "verdict");
  fill_in(report, verdict);
  compression_ = verdict.finite ? update_->compression_norms(update_number) : update::Update::NamedNorms();
  if (met) report.outer_grad_norm = update_->outer_gradient_norm(report.step);
  progress_ = progress_after(verdict);
  stage_.end_step();
  scaler_.update(!verdict.finite);  // last: it may refuse to go on, and then all counters are right
  return report;
}

void Engine::fill_in(StepRecord& report, const GradVerdict& verdict) const {
  mesh_.dp().throw_if_failed();
  report.loss = fold_losses();
  if (plan_.aux_losses > 0) report.aux_loss = fold_aux_losses();
  report.grad_norm = update_->grad_norm(verdict);
  report.skipped = !verdict.finite;
  report.tokens = plan_.B * step_length_ * plan_.micro_batches * mesh_.data_size();
}

Progress Engine::progress_after(const GradVerdict& verdict) const noexcept {
  Progress next = progress_;
  ++(verdict.finite ? next.optimizer_step : next.skipped_steps);
  ++next.step;
  next.consumed_samples += plan_.B * plan_.micro_batches * mesh_.data_size();
  return next;
}

// A server's record of the step that ends.
offload::ServedRecord Engine::served_outcome(const GradVerdict& verdict) const {
  StepRecord& report = *ending_;
  fill_in(report, verdict);
  LossScaler scaler = scaler_;
  try {
    scaler.update(!verdict.finite);
  } catch (const Error&) {  // it refuses to go on, as it will when the step has ended
  }
  offload::ServedRecord record = served_record(progress_after(verdict), scaler);
  record.loss = report.loss, record.grad_norm = report.grad_norm, record.lr = report.lr;
  record.loss_scale = report.loss_scale, record.tokens = report.tokens, record.skipped = report.skipped;
  return record;
}

// The micro-batch's loss normalisation must be known before its backward pass. "token" needs the count of all ranks of
// the worker that see other samples: it goes by the memory of the step's numbers, which are nothing yet.
void Engine::count_valid_tokens(const StepBatch& batch) {
  const i64 rows = plan_.B * step_length_;
  i64 total = 0;
  for (i64 m = 0; m < plan_.micro_batches; ++m) {
    const auto targets = batch.targets.subspan(m * rows, rows);
    valid_tokens_[m] = rows - std::count(targets.begin(), targets.end(), kIgnoredTarget);
    total += valid_tokens_[m];
  }
  global_valid_tokens_ = total;
  if (config_.loss.norm == LossNorm::Token) {
    i64* const on_device = &results_.scalars().max_abs;
    device_.upload(on_device, &global_valid_tokens_, sizeof *on_device);
    mesh_.dp().all_reduce(on_device, 1, DType::I64, ReduceOp::Sum, kStatsText).wait();
    device_.download(&global_valid_tokens_, on_device, sizeof *on_device);
    global_valid_tokens_ /= mesh_.shape().sp;  // which have counted the same samples
  }
}

double Engine::num_means() const noexcept { return static_cast<double>(plan_.micro_batches * mesh_.shape().dp); }

// "boundary": backward has divided by the micro-batches, as DeepSpeed's does, so that their sum can be sent in 16 bit.
// "micro": each is sent for itself and undivided, and N ranks with m of them do what one rank does with N m.
double Engine::grad_divisor() const noexcept {
  return plan_.reduce_each_micro ? num_means() : static_cast<double>(mesh_.shape().dp);
}

// "token": the mean over all micro-batches is then the mean over all valid tokens.
double Engine::per_token(i64 micro) const noexcept {
  if (config_.loss.norm == LossNorm::Token)
    return num_means() / static_cast<double>(std::max<i64>(global_valid_tokens_, 1));
  return 1.0 / static_cast<double>(std::max<i64>(valid_tokens_[micro], 1));
}

i64 Engine::global_micro(i64 micro) const noexcept {
  const MeshShape& mesh = mesh_.shape();
  const i64 worker = progress_.step * mesh.workers + mesh_.coord().worker;
  return (worker * plan_.micro_batches + micro) * mesh.dp + mesh_.coord().dp;
}

std::span<const i32> Engine::part_of(std::span<const i32> tokens, i64 micro) const noexcept {
  const size_t rows = static_cast<size_t>(plan_.B * step_length_);
  return tokens.subspan(static_cast<size_t>(micro) * rows, rows);
}

float Engine::loss_grad(double weight) const noexcept {
  return static_cast<float>(weight * scaler_.scale() * (grad_divisor() / num_means()));
}

stage::MicroBatch Engine::micro_batch(i64 micro) const noexcept {
  const i64 of_all = mesh_.dp().rank() * plan_.micro_batches + micro;
  return {.dropout_key = {static_cast<u32>(config_.seed), 0, static_cast<u32>(global_micro(micro))},
          .loss_grad = loss_grad(per_token(micro)),
          .per_token = per_token(micro),
          .loss = results_.losses() + of_all,
          .aux_losses = results_.aux_losses() + of_all * plan_.aux_losses};
}

// All ranks learn all losses: those of dp from each other, the other stages from that of the head. Each stage has those
// that its own layers add, and zeros for the others': as integers, their sum over stages is the numbers.
void Engine::share_losses() {
  const i64 row_bytes = plan_.micro_batches * static_cast<i64>(sizeof(double));
  const AllGatherSegment losses{results_.losses(), row_bytes};
  if (plan_.projects) mesh_.dp().all_gather({&losses, 1}, kStatsText).wait();
  mesh_.pp()
      .broadcast(results_.losses(), row_bytes * mesh_.dp().size(), plan_.last_stage,
                 message_text(Axis::Pp, Collective::Stats))
      .wait();
  if (plan_.aux_losses == 0) return;
  const AllGatherSegment aux{results_.aux_losses(), row_bytes * plan_.aux_losses};
  mesh_.dp().all_gather({&aux, 1}, kStatsText).wait();
  mesh_.pp()
      .all_reduce(results_.aux_losses(), plan_.loss_counts().aux(), DType::I64, ReduceOp::Sum,
                  message_text(Axis::Pp, Collective::Stats))
      .wait();
}

// The mean over all micro-batches of all ranks, folded in the order (micro-batch, rank): that of one rank with them
// all. Ranks of sp have parts of the same means.
double Engine::fold_losses() const {
  const std::span<const double> losses = results_.resolved_losses();
  const i64 m = plan_.micro_batches, P = mesh_.dp().size();
  double sum = 0;
  for (i64 j = 0; j < m; ++j) {
    for (i64 r = 0; r < P; ++r) sum += losses[r * m + j];
  }
  return sum / num_means();
}

// Likewise; within a micro-batch in the order of layers.
double Engine::fold_aux_losses() const {
  const std::span<const double> losses = results_.resolved_aux_losses();
  const i64 m = plan_.micro_batches, P = mesh_.dp().size(), L = plan_.aux_losses;
  double sum = 0;
  for (i64 j = 0; j < m; ++j) {
    for (i64 r = 0; r < P; ++r) {
      double of_micro = 0;
      for (i64 l = 0; l < L; ++l) of_micro += losses[(r * m + j) * L + l];
      sum += of_micro;
    }
  }
  return sum / num_means();
}

}  // namespace ds::engine
