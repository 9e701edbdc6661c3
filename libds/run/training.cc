// SPDX-License-Identifier: Apache-2.0
// The loop over steps: what happens between them, and when a run is given up.

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/file.h"
#include "checkpoint/together.h"
#include "comm/message_tag.h"
#include "data/read_ahead.h"
#include "ds/communicator.h"
#include "ds/log.h"
#include "monitor/trace_file.h"
#include "plan/step_lengths.h"
#include "run/run_state.h"
#include "update/meetings.h"

namespace ds {
namespace {

constexpr i64 kTracedSteps = 5;  // of a start, at most
constexpr i64 kLostSteps = 10;   // in a row with a loss that is not finite, before a run is given up

using Sent = std::map<std::string, CommCount>;  // messages by "axis.collective"

// a + factor * b
Sent sum_of(Sent a, const Sent& b, int factor) {
  for (const auto& [name, count] : b) {
    CommCount& sum = a[name];
    sum.calls += factor * count.calls;
    sum.bytes += factor * count.bytes;
    sum.seconds += factor * count.seconds;
    if (factor < 0 && sum.calls == 0) a.erase(name);
  }
  return a;
}

OffloadTraffic sum_of(const OffloadTraffic& a, const OffloadTraffic& b, int factor) {
  const auto sum = [&](const auto& of_a, const auto& of_b) {
    return of_a || of_b ? std::optional(of_a.value_or(0) + factor * of_b.value_or(0)) : std::nullopt;
  };
  return {.read_bytes = a.read_bytes + factor * b.read_bytes,
          .written_bytes = a.written_bytes + factor * b.written_bytes,
          .to_host_bytes = sum(a.to_host_bytes, b.to_host_bytes),
          .to_device_bytes = sum(a.to_device_bytes, b.to_device_bytes),
          .wait_ms = a.wait_ms + factor * b.wait_ms,
          .busy_ms = a.busy_ms + factor * b.busy_ms};
}

}  // namespace

std::optional<double> TrainingRun::State::evaluate(const std::function<int()>& stop_signal) {
  const Config& config = request.config;
  // In batches of train_batch_size: the same samples whatever the number of ranks.
  const i64 all = data.validation->num_sequential_batches(), wanted = config.eval.batches,
            m = config.batch.accumulation;
  const i64 batches = wanted > 0 && wanted <= all / m ? wanted * m : all;
  const i64 at_once = engine().batches_at_once();  // between them, ranks are not at the same one
  return engine().evaluate(batches,
                           [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32> documents) {
                             if (stop_signal && batch % at_once == 0 && agree(stop_signal()) != 0) return false;
                             data.validation->load_sequential(batch, mesh->data_rank(), ids, targets, documents);
                             return true;
                           });
}

i64 TrainingRun::State::agree(i64 mine) {
  i64 both[] = {mine, saver && saver->busy()};
  mesh->world().all_reduce(both, 2, DType::I64, ReduceOp::Max, kStatsText).wait();
  if (saver && both[1] == 0) saver->proceed();
  return both[0];
}

namespace {

// One call of TrainingRun::train().
class Training {
 public:
  Training(TrainingRun::State& run, const TrainHooks& hooks)
      : s_(run), config_(run.request.config), engine_(run.engine()), saver_(*run.saver), hooks_(hooks) {
    result_.step = step();
    result_.first_step = step() + 1;
    result_.loss = result_.val_loss = std::numeric_limits<double>::quiet_NaN();
  }

  TrainResult run();

 private:
  i64 step() const noexcept { return engine_.progress().step; }
  // Steps that were taken, the open one included.
  i64 taken() const noexcept { return step() + (engine_.has_open_step() ? 1 : 0); }
  int stop_signal() const { return hooks_.stop_signal ? hooks_.stop_signal() : 0; }
  bool evaluation_is_due(i64 step) const {
    return step >= config_.steps || (config_.eval.every > 0 && step > 0 && step % config_.eval.every == 0);
  }
  bool evaluation_is_due() const { return evaluation_is_due(step()); }
  bool save_is_due(i64 step) const { return config_.save.every > 0 && step % config_.save.every == 0; }
  void begin();
  void save_what_was_due();
  void pass_step();
  void next_step();
  void take_step();
  // A step whose passes have ended, before its verdict.
  struct Passed {
    Clock::time_point start{};
    i64 length = 0;
    double flops_per_token = 0;
    Sent sent{};
    OffloadTraffic moved{};
  };
  double flops_per_token() const;
  OffloadTraffic offload_traffic();
  void complete(StepRecord r);
  void record(const StepRecord& r);
  void end();
  void begin_record();
  void end_records();
  void write_trace();
  void evaluate();
  void save(run::Saver::When when);
  void check_divergence(bool diverged, std::string_view what, i64 since);
  bool all_meet() const;
  void tell_of_skipping(const StepRecord& r);

  TrainingRun::State& s_;
  const Config& config_;
  engine::Engine& engine_;
  run::Saver& saver_;
  const TrainHooks& hooks_;
  TrainResult result_;
  std::vector<i32> ids_, targets_, documents_;  // of a step; documents_: if they are kept apart
  std::optional<ReadAhead> ahead_;
  Passed passed_;  // of the last step
  // Messages since the last call began: before the verdict over the step before, and from then until its record has
  // been written.
  Sent before_verdict_, between_passes_;
  OffloadTraffic moved_before_verdict_, moved_between_passes_;  // likewise, by tiers
  Clock::time_point completed_{};                               // when the last step was
  i64 completed_step_ = 0;                                      // its number
  bool has_work_ = false;
  i64 signal_ = 0;       // what all ranks agreed to stop for
  i64 evaluated_ = -1;   // the step that was evaluated last
  i64 lost_ = 0;         // steps in a row whose loss is not finite
  i64 lost_by_any_ = 0;  // the same, of the worker that has most, when all met last
  i64 skipped_ = 0;      // steps in a row
};

// The first line of a start.
void Training::begin_record() {
  // First what may be refused: then nothing has been written.
  together(s_.mesh->world(), [&] {
    if (!s_.request.is_root()) return;
    s_.journal.watch({config_,
                      {.directory = s_.request.options.out_dir,
                       .world_size = s_.request.ranks.world_size,
                       .step = step(),
                       .num_params = engine_.model().num_params(),
                       .work = [this] { return plan::tally_step(engine_.stage().model(), engine_.stage().plan()); },
                       .tell = hooks_.on_report}});
  });
  s_.record->show(engine_, s_.request.ranks.job, s_.request.options.out_dir, step());
  if (s_.journal.directory() != nullptr) s_.journal.append(s_.record->run_line(engine_, step(), s_.trained.model_json));
}

// Rank 0 writes what all ranks have traced, once. Collective.
void Training::write_trace() {
  Trace* const trace = s_.trace.get();
  if (trace == nullptr || !trace->is_on()) return;
  trace->stop();
  engine_.trace_to(nullptr);
  const std::vector<std::string> of_ranks = gather_text(s_.mesh->world(), monitor::spans_text(trace->spans()));
  if (!s_.request.is_root()) return;
  s_.journal.report([&] { replace_text_file(follow_links(s_.request.options.trace), monitor::trace_text(of_ranks)); });
}

// The passes of the next step, and the verdict over it; or over the one before, if steps are post-validated.
void Training::pass_step() {
  const i64 number = taken() + 1;
  const plan::RunPlan& plan = engine_.plan();
  const i64 samples = plan.micro_batches * plan.B, rank = s_.mesh->data_rank();
  const i64 consumed = engine_.progress().consumed_samples + (taken() - step()) * samples * s_.mesh->data_size();
  const i64 length = plan::lengths_of_step(config_, number).sequence;
  const auto start = Clock::now();
  const TraceSpan whole(s_.trace.get(), "steps", "step", number);
  s_.mesh->reset_counts();
  s_.data.train->load_step(consumed, plan.micro_batches, rank, length, ids_, targets_, documents_);
  if (number < config_.steps) ahead_->expect(consumed + samples * s_.mesh->data_size());
  engine_.train_at(length);
  engine_.offload().begin_step();
  engine_.time_phases(monitor::Monitors::wants_phases(config_, number));
  before_verdict_.clear(), between_passes_.clear();
  moved_before_verdict_ = moved_between_passes_ = {};
  const bool is_open = engine_.has_open_step();
  if (!is_open) passed_ = {.start = start, .length = length};
  const auto n = static_cast<size_t>(samples * length);
  engine_.take_step(
      {std::span(ids_).first(n), std::span(targets_).first(n), std::span(documents_).first(documents_.empty() ? 0 : n)},
      [&](const StepRecord& r) {
        if (!is_open) passed_.flops_per_token = flops_per_token();  // of the step whose record it is
        complete(r);
      });
  if (!engine_.has_open_step()) return;
  passed_ = {.start = start, .length = length};
  passed_.flops_per_token = flops_per_token();
  passed_.sent = sum_of(s_.mesh->counts(), between_passes_, -1);
  passed_.moved = sum_of(offload_traffic(), moved_between_passes_, -1);
}

double Training::flops_per_token() const { return engine_.stage().model().flops_per_token(passed_.length); }

// Since the last call of pass_step began.
OffloadTraffic Training::offload_traffic() {
  const offload::FileCounts moved = engine_.offload().of_step();
  OffloadTraffic traffic{.read_bytes = moved.read_bytes,
                         .written_bytes = moved.written_bytes,
                         .wait_ms = moved.waited_s * 1e3,
                         .busy_ms = moved.busy_s * 1e3};
  if (engine_.offload().is_apart()) {
    const offload::HostCopies copies = engine_.offload().copies_of_step();
    traffic.to_host_bytes = copies.to_host, traffic.to_device_bytes = copies.to_device;
  }
  return traffic;
}

// A step has its verdict. The messages of the verdict are those since it began.
void Training::complete(StepRecord r) {
  const Clock::time_point now = Clock::now();
  const double s = std::chrono::duration<double>(now - std::max(passed_.start, completed_)).count();
  completed_ = now, completed_step_ = r.step;
  const Sent of_verdict = sum_of(s_.mesh->counts(), before_verdict_, -1);
  r.samples = engine_.progress().consumed_samples;
  r.step_ms = s * 1e3;
  r.tokens_per_s = static_cast<double>(r.tokens) / s;
  for (const auto& [name, norm] : engine_.compression()) {
    if (!name.empty()) r.compression.emplace(name, norm);
  }
  if (config_.curriculum.enabled) r.seq_length = passed_.length;
  const double flops = passed_.flops_per_token * static_cast<double>(r.tokens) / s_.mesh->world_size();
  r.mfu = flops / s / s_.record->peak_flops();
  const plan::TagBytes counted = s_.record->counted(s_.ledger);
  for (const TagMemory& row : run::memory_table(engine_.plan().memory.by_tag, counted))
    r.memory_bytes[row.tag] = row.counted;
  for (const auto& [name, count] : sum_of(passed_.sent, of_verdict, 1)) {
    r.comm_bytes[name] = count.bytes;
    if (!config_.monitors.comms_logger.enabled) continue;
    r.comm_calls[name] = count.calls;
    if (count.seconds > 0) r.comm_ms[name] = count.seconds * 1e3;
  }
  const OffloadTraffic moved_by_verdict = sum_of(offload_traffic(), moved_before_verdict_, -1);
  if (engine_.offload().moves()) r.offload = sum_of(passed_.moved, moved_by_verdict, 1);
  s_.record->show_step(engine_, r, counted);
  record(r);
  between_passes_ = sum_of(s_.mesh->counts(), before_verdict_, -1);
  moved_between_passes_ = sum_of(offload_traffic(), moved_before_verdict_, -1);
}

void Training::evaluate() {
  if (!s_.data.validation || evaluated_ == step()) return;
  const TraceSpan span(s_.trace.get(), "steps", "evaluate", step());
  const std::optional<double> loss = s_.evaluate([this] { return stop_signal(); });
  if (!loss) return;  // a resumed run makes up for it
  result_.val_loss = *loss;
  evaluated_ = step();
  s_.journal.validation(step(), result_.val_loss);
  if (!std::isfinite(result_.val_loss) && s_.request.is_root())
    log_message(LogLevel::Warning, fmt::format("the validation loss of step {} is not finite", step()));
  if (hooks_.on_eval && s_.request.is_root()) hooks_.on_eval(step(), result_.val_loss);
}

// Weights or activations beyond the range of numbers: no smaller loss scale heals that. Such a state is not saved, so
// that the last checkpoint is from before it. A checkpoint, saved or resumed from, has proved itself when the next
// step's loss is finite; until then the older ones stay.
void Training::check_divergence(bool diverged, std::string_view what, i64 since) {
  if (!diverged) return;
  saver_.finish();
  std::string rescue = "no checkpoint is from before that";
  if (!saver_.proven().empty()) rescue = fmt::format("resume from {}", saver_.proven());
  if (saver_.proven() != saver_.newest()) rescue += fmt::format(", for {} is already lost", saver_.newest());
  throw Error(Errc::Numeric,
              fmt::format("the run has diverged: {} not finite since step {}; {}; lower the learning rate or the "
                          "gradient_clipping",
                          what, since, rescue));
}

void Training::save(run::Saver::When when) {
  const TraceSpan span(s_.trace.get(), "steps", "save", step());
  if (!saver_.has(step())) {
    check_divergence(lost_by_any_ > 0, "the loss is", step() - lost_by_any_ + 1);
    check_divergence(!engine_.is_finite(), "weights or moments are", step());
  }
  CheckpointMeta meta = s_.trained.meta(s_.data);
  s_.trained.save_numbers(meta);
  saver_.save(meta, when);
}

// Whether all ranks take part in something behind this step. Workers go on by themselves until then.
bool Training::all_meet() const {
  const DilocoConfig& d = config_.optimizer.diloco;
  if (d.workers == 1 || step() == config_.steps || evaluation_is_due()) return true;
  if (save_is_due(step())) return true;
  return update::lands(d, step());
}

void Training::tell_of_skipping(const StepRecord& r) {
  skipped_ = r.skipped ? skipped_ + 1 : 0;
  if (r.skipped)
    s_.journal.append({{"type", "event"},
                       {"event", "skipped"},
                       {"step", r.step},
                       {"loss_scale", r.loss_scale},
                       {"next_loss_scale", engine_.scaler().scale()},
                       {"skipped_steps", engine_.progress().skipped_steps}});
  if (skipped_ != kLostSteps || !config_.fp16.enabled || config_.fp16.loss_scale <= 0 || !s_.request.is_root()) return;
  log_message(LogLevel::Warning,
              fmt::format("{} steps in a row were skipped: gradients overflow fp16 at fp16.loss_scale {}", skipped_,
                          config_.fp16.loss_scale));
}

// A run whose states a server has may have been ended between a step and its checkpoint.
void Training::save_what_was_due() {
  if (!s_.start.is_from_server() || step() == 0) return;
  if (step() == config_.steps) {
    save(run::Saver::When::AtTheEnd);
  } else if (save_is_due(step())) {
    save(run::Saver::When::Now);
  }
}

void Training::begin() {
  // A run that was stopped at a step that wanted an evaluation left it to us.
  const bool evaluate_first = !s_.start.from.empty() && evaluation_is_due() && s_.data.validation &&
                              s_.agree(s_.journal.directory() != nullptr && !s_.start.evaluated_before) != 0;
  has_work_ = step() < config_.steps || evaluate_first;
  if (has_work_) begin_record();
  save_what_was_due();
  if (!s_.start.from.empty()) {
    if (has_work_)
      s_.journal.append({{"type", "event"}, {"event", "resumed"}, {"step", step()}, {"from", s_.start.from}});
    if (evaluate_first) {
      evaluate();
    } else if (evaluation_is_due()) {
      evaluated_ = step();
    }
    signal_ = s_.agree(stop_signal());
  }
  if (step() >= config_.steps && s_.request.is_root())
    log_message(LogLevel::Warning,
                fmt::format("{} is at step {} of {}: nothing to train", s_.start.from, step(), config_.steps));
}

// A loss scale at its floor ends the run with an error, when the step has been counted.
void Training::next_step() {
  const i64 skipped_before = engine_.progress().skipped_steps;
  try {
    pass_step();
    // Others look at the states of an open step, or end the run.
    if (engine_.has_open_step() && (signal_ != 0 || save_is_due(taken()) || evaluation_is_due(taken())))
      engine_.finish_step([this](const StepRecord& r) { complete(r); });
  } catch (const Error& e) {
    const engine::Progress& p = engine_.progress();
    if (e.code() == Errc::Numeric && p.skipped_steps > skipped_before && p.step > completed_step_)
      s_.journal.append({{"type", "event"},
                         {"event", "loss_scale_floor"},
                         {"step", p.step},
                         {"loss_scale", engine_.scaler().scale()},
                         {"skipped_steps", p.skipped_steps}});
    throw;
  }
}

void Training::record(const StepRecord& r) {
  result_.loss = r.loss;
  result_.tokens += r.tokens;
  result_.seconds += r.step_ms / 1e3;
  if (r.offload) {
    result_.offload.read_bytes += r.offload->read_bytes;
    result_.offload.written_bytes += r.offload->written_bytes;
    result_.offload.wait_ms += r.offload->wait_ms;
    result_.offload.busy_ms += r.offload->busy_ms;
    const auto add = [](std::optional<i64>& sum, const std::optional<i64>& more) {
      if (more) sum = sum.value_or(0) + *more;
    };
    add(result_.offload.to_host_bytes, r.offload->to_host_bytes);
    add(result_.offload.to_device_bytes, r.offload->to_device_bytes);
  }
  s_.journal.step(r);
  if (hooks_.on_step && s_.request.is_root()) hooks_.on_step(r, config_.steps);
  tell_of_skipping(r);
  lost_ = std::isfinite(r.loss) ? 0 : lost_ + 1;
  if (!all_meet()) return;
  lost_by_any_ = config_.optimizer.diloco.workers > 1 ? s_.agree(lost_) : lost_;
  signal_ = s_.agree(stop_signal());
  if (lost_by_any_ == 0) saver_.prove(step());  // before the next one is saved
  check_divergence(lost_by_any_ > kLostSteps, "the loss is", step() - lost_by_any_ + 1);
}

void Training::take_step() {
  next_step();
  if (engine_.has_open_step() || !all_meet()) return;
  // Saved before it is evaluated: an error in the validation data loses no work.
  if (step() == config_.steps) {
    save(run::Saver::When::AtTheEnd);
  } else if (save_is_due(step()) && lost_by_any_ == 0) {
    save(run::Saver::When::Now);
  }
  if (signal_ == 0 && evaluation_is_due()) {
    evaluate();
    signal_ = s_.agree(stop_signal());
  }
}

void Training::end() {
  if (signal_ == 0 && step() >= result_.first_step) saver_.prove_last();
  const bool complete = step() >= config_.steps && (!s_.data.validation || evaluated_ == step());
  if (signal_ != 0 && !complete) {
    save(run::Saver::When::AtTheEnd);
    s_.journal.append({{"type", "event"}, {"event", "stopped"}, {"step", step()}});
    result_.stop_signal = narrow<int>(signal_);
  }
  engine_.finish_updates();
  engine_.offload().begin_step();
  const offload::FileCounts last = engine_.offload().of_step();  // by an update behind the last step
  result_.offload.read_bytes += last.read_bytes;
  result_.offload.written_bytes += last.written_bytes;
  end_records();
  result_.step = step();
  result_.skipped_steps = engine_.progress().skipped_steps;
  result_.checkpoint = s_.request.writes() ? saver_.newest() : "";
  result_.memory = run::memory_table(s_.record->predicted(engine_), s_.record->counted(s_.ledger),
                                     s_.record->bounds(engine_, step()));
  const offload::Offload& offload = engine_.offload();
  plan::TagBytes in_files{};
  for (size_t t = 0; t < in_files.size(); ++t) in_files[t] = offload.files().current(static_cast<Tag>(t));
  result_.files = run::memory_table(engine_.plan().memory.files, in_files);
  result_.offload_method = offload.method();
}

void Training::end_records() {
  write_trace();
  if (!has_work_) return;
  s_.journal.append(s_.record->memory_line(engine_, step()));
  s_.journal.end_monitors();
}

TrainResult Training::run() {
  DS_CHECK(s_.data.train != nullptr, Errc::Config, "data.train: there is nothing to train on");
  DS_CHECK(s_.request.writes() || config_.save.every == 0, Errc::Config,
           "save.every is {} but there is no run directory: give --out DIR", config_.save.every);
  const plan::RunPlan& plan = engine_.plan();
  ids_.resize(static_cast<size_t>(plan.micro_batches * plan.B * plan.sequence_length));
  targets_.resize(ids_.size());
  if (config_.data.separate_documents) documents_.resize(ids_.size());
  engine_.before_verdict([this] {
    before_verdict_ = s_.mesh->counts();
    moved_before_verdict_ = offload_traffic();
  });
  begin();
  ahead_.emplace(*s_.data.train, plan.micro_batches, s_.mesh->data_rank());
  if (s_.trace) s_.trace->start();
  engine_.trace_to(s_.trace.get());
  try {
    while (signal_ == 0 && taken() < config_.steps) {
      take_step();
      if (taken() - result_.first_step + 1 == kTracedSteps) write_trace();
    }
  } catch (const Error& e) {
    // Losses and scales are those of all ranks, and so is this end: its files are whole. A rank that is ready waits,
    // since a launcher ends the others when one has ended.
    if (e.code() == Errc::Numeric) {
      end_records();
      (void)s_.agree(0);
    }
    throw;
  }
  ahead_.reset();
  end();
  return std::move(result_);
}

}  // namespace

TrainResult TrainingRun::train(const TrainHooks& hooks) {
  return state_->collective([&] { return Training(*state_, hooks).run(); });
}

double TrainingRun::evaluate() {
  State& s = *state_;
  return s.collective([&] {
    DS_CHECK(s.data.validation != nullptr, Errc::Config,
             "there is no validation data: set data.validation or data.split");
    const double loss = s.evaluate({}).value();
    DS_CHECK(std::isfinite(loss), Errc::Numeric, "the validation loss is not finite");
    return loss;
  });
}

}  // namespace ds
