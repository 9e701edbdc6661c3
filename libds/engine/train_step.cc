// SPDX-License-Identifier: Apache-2.0
// One training step, top to bottom: the only place that orders work.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/clock.h"
#include "comm/message_tag.h"
#include "config/random_ltd.h"
#include "ds/kernels/ops.h"
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
    case pipeline::Op::SendGrad:
    case pipeline::Op::Validate: break;
  }
  return &PhaseTimes::backward_ms;
}

}  // namespace

// Times what lies between borders; of a step only where that is wanted.
class Engine::PhaseMeter {
 public:
  PhaseMeter(Device& device, Trace* trace) : device_(device), trace_(trace) {}
  // The time since the last call belongs to `phase` of the step; `name` is its span in a trace.
  void end(Step& step, Phase phase, std::string_view name, i64 micro = -1) {
    std::optional<PhaseTimes>& times = step.record.phases;
    if (!times && trace_ == nullptr) return;
    if (times) device_.synchronize();
    const Clock::time_point now = Clock::now();
    if (times) (*times).*phase += std::chrono::duration<double, std::milli>(now - start_).count();
    if (trace_ != nullptr) trace_->add("step", name, start_, now, micro);
    start_ = now;
  }

 private:
  Device& device_;
  Trace* const trace_;
  Clock::time_point start_ = Clock::now();
};

StepRecord Engine::train_step(const StepBatch& batch) {
  StepRecord record;
  const auto keep = [&](const StepRecord& r) { record = r; };
  take_step(batch, keep);
  finish_step(keep);
  return record;
}

void Engine::take_step(const StepBatch& batch, Done done) {
  DS_ASSERT(plan_.trains());
  PhaseMeter meter(device_, trace_);
  Step step = begin_step(batch);
  const size_t validate = pipeline::before_gradients(plan_.stage.schedule), end = plan_.stage.schedule.size();
  run_passes(step, batch, 0, validate, meter);
  if (!finish_step(done, meter)) {  // the passes so far have seen parameters that are undone
    stage_.begin_again();
    step.results->forget_expert_tokens();
    run_passes(step, batch, 0, validate, meter);
  }
  begin_gradients(step);
  run_passes(step, batch, validate, end, meter);
  update_->finish_gradients();
  share_expert_tokens(*step.results);
  meter.end(step, &PhaseTimes::reduce_ms, "finish gradients");
  stage_.end_step();
  step.record.expert_rounds = stage_.take_expert_rounds();
  mesh_.use_links();
  open_ = std::move(step);
  if (plan_.validates_later()) return update_ahead(meter);
  close_step(done, meter);
}

void Engine::finish_step(Done done) {
  PhaseMeter meter(device_, trace_);
  finish_step(done, meter);
}

bool Engine::finish_step(Done done, PhaseMeter& meter) {
  if (!open_) return true;
  if (before_verdict_) before_verdict_();
  return close_step(done, meter);
}

// Needs nothing of the step before, which may be open.
Engine::Step Engine::begin_step(const StepBatch& batch) {
  const i64 number = progress_.step + (open_ ? 2 : 1);
  const i64 kept = config_.random_ltd.on() ? random_ltd_kept(config_.random_ltd, number) : 0;
  shape_to({step_length_, kept});
  Step step{.record = {.step = number}, .results = open_ && open_->results == &results_ ? &*other_results_ : &results_};
  if (config_.random_ltd.on()) step.record.layer_tokens = std::min(kept, step_length_);
  step.record.tokens = plan_.B * step_length_ * plan_.micro_batches * mesh_.data_size();
  if (times_phases_) step.record.phases.emplace();
  count_valid_tokens(batch, &step.results->scalars().max_abs);
  step.results->begin();
  stage_.begin_step();
  for (i64 micro = 0; micro < plan_.micro_batches && stage_.has_documents(); ++micro)
    stage_.load_documents(micro, part_of(batch.documents, micro));
  return step;
}

// The step before has its verdict: the loss scale and the number of the update are known.
void Engine::begin_gradients(Step& step) {
  const i64 number = progress_.optimizer_step + 1;
  step.record.loss_scale = scaler_.scale();
  step.record.lr = lr_.lr_at(progress_.optimizer_step - 1);
  step.update = {.lr = step.record.lr,
                 .number = number,
                 .seed = static_cast<u32>(config_.seed),
                 .betas = lr_.betas_at(progress_.optimizer_step - 1),
                 .expert_tokens = step.results->expert_tokens()};
  const double ranks = config_.gradient_reduce == GradientReduce::Sum ? mesh_.shape().dp : 1;
  step.judge = {.divisor = scaler_.scale() * grad_divisor() / ranks, .clip = config_.gradient_clipping};
  update_->begin(number, scaler_.scale());
  stage_.begin_gradients(loss_grad(1));
}

void Engine::run_passes(Step& step, const StepBatch& batch, size_t begin, size_t end, PhaseMeter& meter) {
  for (size_t i = begin; i < end; ++i) {
    const pipeline::Instr& instr = plan_.stage.schedule[i];
    if (instr.op == pipeline::Op::Load) {
      stage_.load(instr.micro, part_of(batch.ids, instr.micro), part_of(batch.targets, instr.micro));
    } else {
      stage_.run(i, micro_batch(step, instr.micro));
    }
    if (i + 1 == plan_.stage.use_complete_after) update_->send_use();
    meter.end(step, phase_of(instr.op), pipeline::op_name(instr.op), instr.micro);
  }
}

// The update of an open step, as if its gradients were finite and not to be clipped.
void Engine::update_ahead(PhaseMeter& meter) {
  assumed_->begin();
  update_->assume(assumed_->scalars(), open_->judge);
  update_->keep();
  update(*open_, *assumed_, meter);
}

bool Engine::is_as_assumed(const Step& step) const {
  const GradVerdict& verdict = step.results->resolve();
  const GradVerdict assumed = judge_gradients(0, {}, {.divisor = step.judge.divisor});
  return verdict.finite != 0 && verdict.grad_scale == assumed.grad_scale;
}

// Makes the verdict. False: an update was made ahead of it, and parameters are other ones now.
bool Engine::close_step(Done done, PhaseMeter& meter) {
  Step step = *std::exchange(open_, std::nullopt);
  share_losses(*step.results);
  ending_ = &step;
  update_->judge(step.results->scalars(), step.judge);
  meter.end(step, &PhaseTimes::update_ms, "judge");
  const bool ahead = plan_.validates_later(), stays = ahead && is_as_assumed(step);
  bool met = false;
  if (!stays) {
    if (ahead) update_->undo();
    met = update(step, *step.results, meter);
  }
  const GradVerdict& verdict = step.results->resolve();  // the one time that the host waits
  meter.end(step, &PhaseTimes::update_ms, "verdict");
  fill_in(step, verdict);
  compression_ = verdict.finite ? update_->compression_norms(step.update.number) : update::Update::NamedNorms();
  if (met) step.record.outer_grad_norm = update_->outer_gradient_norm(step.record.step);
  progress_ = progress_after(verdict);
  scaler_.update(!verdict.finite);  // last: it may refuse to go on, and then all counters are right
  done(step.record);
  return stays || !ahead;
}

// Optimizers, DiLoCo's meetings, publication. Whether any fragment has met.
bool Engine::update(Step& step, zero::VerdictHandle& verdict, PhaseMeter& meter) {
  update_->update_params(step.update, verdict);
  meter.end(step, &PhaseTimes::update_ms, "update");
  const bool met = update_->outer_step(step.record.step);
  if (met) meter.end(step, &PhaseTimes::update_ms, "meet");
  zero::publish_update(shards_);
  meter.end(step, &PhaseTimes::update_ms, "publish");
  return met;
}

void Engine::fill_in(Step& step, const GradVerdict& verdict) const {
  mesh_.dp().throw_if_failed();
  step.record.loss = fold_losses(*step.results);
  if (plan_.aux_losses > 0) step.record.aux_loss = fold_aux_losses(*step.results);
  fill_in_experts(step);
  step.record.grad_norm = update_->grad_norm(verdict);
  step.record.skipped = !verdict.finite;
}

// Each rank of sp has counted all tokens of its sequences.
void Engine::fill_in_experts(Step& step) const {
  const std::span<const float> all = step.results->resolved_expert_tokens();
  for (i64 l = 0, first = 0; l < std::ssize(model_.layers); ++l) {
    const i64 n = model_.layers[static_cast<size_t>(l)]->num_counts();
    if (n == 0) continue;
    ExpertTokens& layer = step.record.experts.emplace_back();
    layer.layer = model_.layers[static_cast<size_t>(l)]->name();
    const auto count = [&](i64 i) { return std::llround(all[static_cast<size_t>(first + i)]) / mesh_.shape().sp; };
    const i64 experts = n - RouterStats::kReport;
    for (i64 e = 0; e < experts; ++e) layer.tokens.push_back(count(e));
    const i64 tokens =
        std::reduce(layer.tokens.begin(), layer.tokens.end()) / std::max<i64>(config_.model.experts.per_token, 1);
    if (!std::isfinite(all[static_cast<size_t>(first + experts)])) {  // probabilities are not
      layer.entropy = std::numeric_limits<double>::quiet_NaN();
    } else if (tokens > 0) {
      const i64 entropies = count(experts) * RouterStats::kFraction + count(experts + 1);
      layer.entropy = static_cast<double>(entropies) / static_cast<double>(RouterStats::kFraction * tokens);
    }
    layer.dropped = count(experts + 2);
    first += n;
  }
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
  fill_in(*ending_, verdict);
  const StepRecord& report = ending_->record;
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
void Engine::count_valid_tokens(const StepBatch& batch, i64* on_device) {
  const i64 rows = plan_.B * step_length_;
  i64 total = 0;
  for (i64 m = 0; m < plan_.micro_batches; ++m) {
    const auto targets = batch.targets.subspan(m * rows, rows);
    valid_tokens_[m] = rows - std::count(targets.begin(), targets.end(), kIgnoredTarget);
    total += valid_tokens_[m];
  }
  global_valid_tokens_ = total;
  if (config_.loss.norm == LossNorm::Token) {
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

i64 Engine::global_micro(i64 step, i64 micro) const noexcept {
  const MeshShape& mesh = mesh_.shape();
  const i64 worker = (step - 1) * mesh.workers + mesh_.coord().worker;
  return (worker * plan_.micro_batches + micro) * mesh.dp + mesh_.coord().dp;
}

std::span<const i32> Engine::part_of(std::span<const i32> tokens, i64 micro) const noexcept {
  const size_t rows = static_cast<size_t>(plan_.B * step_length_);
  return tokens.subspan(static_cast<size_t>(micro) * rows, rows);
}

float Engine::loss_grad(double weight) const noexcept {
  return static_cast<float>(weight * scaler_.scale() * (grad_divisor() / num_means()));
}

stage::MicroBatch Engine::micro_batch(const Step& step, i64 micro) const noexcept {
  const i64 of_all = mesh_.dp().rank() * plan_.micro_batches + micro;
  return {.dropout_key = {static_cast<u32>(config_.seed), 0, static_cast<u32>(global_micro(step.record.step, micro))},
          .loss_grad = loss_grad(per_token(micro)),
          .per_token = per_token(micro),
          .loss = step.results->losses() + of_all,
          .aux_losses = step.results->aux_losses() + of_all * plan_.aux_losses,
          .expert_tokens = step.results->expert_tokens()};
}

// The tokens that all ranks of dp have counted, before an update that goes by them. Other stages count other experts.
void Engine::share_expert_tokens(const update::StepResults& results) {
  if (plan_.expert_counts == 0) return;
  mesh_.dp()
      .all_reduce(results.expert_tokens(), plan_.expert_counts, DType::F32, ReduceOp::Sum,
                  message_text(Axis::Dp, Collective::Stats))
      .wait();
}

// All ranks learn all losses: those of dp from each other, the other stages from that of the head. Each stage has those
// that its own layers add, and zeros for the others': as integers, their sum over stages is the numbers.
void Engine::share_losses(const update::StepResults& results) {
  const i64 row_bytes = plan_.micro_batches * static_cast<i64>(sizeof(double));
  const AllGatherSegment losses{results.losses(), row_bytes};
  if (plan_.projects) mesh_.dp().all_gather({&losses, 1}, kStatsText).wait();
  mesh_.pp()
      .broadcast(results.losses(), row_bytes * mesh_.dp().size(), plan_.last_stage,
                 message_text(Axis::Pp, Collective::Stats))
      .wait();
  if (plan_.expert_counts > 0) {
    mesh_.pp()
        .all_reduce(results.expert_tokens(), plan_.expert_counts, DType::F32, ReduceOp::Sum,
                    message_text(Axis::Pp, Collective::Stats))
        .wait();
  }
  if (plan_.aux_losses == 0) return;
  const AllGatherSegment aux{results.aux_losses(), row_bytes * plan_.aux_losses};
  mesh_.dp().all_gather({&aux, 1}, kStatsText).wait();
  mesh_.pp()
      .all_reduce(results.aux_losses(), plan_.loss_counts().aux(), DType::I64, ReduceOp::Sum,
                  message_text(Axis::Pp, Collective::Stats))
      .wait();
}

// The mean over all micro-batches of all ranks, folded in the order (micro-batch, rank): that of one rank with them
// all. Ranks of sp have parts of the same means.
double Engine::fold_losses(const update::StepResults& results) const {
  const std::span<const double> losses = results.resolved_losses();
  const i64 m = plan_.micro_batches, P = mesh_.dp().size();
  double sum = 0;
  for (i64 j = 0; j < m; ++j) {
    for (i64 r = 0; r < P; ++r) sum += losses[r * m + j];
  }
  return sum / num_means();
}

// Likewise; within a micro-batch in the order of layers.
double Engine::fold_aux_losses(const update::StepResults& results) const {
  const std::span<const double> losses = results.resolved_aux_losses();
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
