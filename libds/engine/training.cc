// SPDX-License-Identifier: Apache-2.0
// The loop over steps: what happens between them, and when a run is given up.

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "base/clock.h"
#include "base/file.h"
#include "checkpoint/together.h"
#include "config/curriculum.h"
#include "ds/log.h"
#include "engine/run_state.h"
#include "monitor/trace_file.h"
#include "update/meetings.h"

namespace ds {
namespace {

constexpr i64 kTracedSteps = 5;  // of a start, at most
constexpr i64 kLostSteps = 10;   // in a row with a loss that is not finite, before a run is given up

}  // namespace

std::optional<double> TrainingRun::State::evaluate(const std::function<int()>& stop_signal) {
  // In batches of train_batch_size: the same samples whatever the number of ranks.
  const i64 all = validation_data->num_sequential_batches(), wanted = config.eval.batches,
            m = config.batch.accumulation;
  const i64 batches = wanted > 0 && wanted <= all / m ? wanted * m : all;
  const i64 at_once = engine->batches_at_once();  // between them, ranks are not at the same one
  return engine->evaluate(batches, [&](i64 batch, std::span<i32> ids, std::span<i32> targets) {
    if (stop_signal && batch % at_once == 0 && agree(stop_signal()) != 0) return false;
    validation_data->load_sequential(batch, mesh->data_rank(), ids, targets);
    return true;
  });
}

// The first line of a start, and the last one.
void TrainingRun::State::begin_record(const TrainHooks& hooks) {
  const i64 step = engine->progress().step;
  // First what may be refused: then nothing has been written.
  together(mesh->world(), [&] {
    if (!is_root()) return;
    monitors = {config,
                {.directory = options.out_dir,
                 .world_size = ranks.world_size,
                 .step = step,
                 .num_params = engine->model().num_params(),
                 .work = [this] { return report::tally_step(engine->stage().model(), engine->stage().plan()); },
                 .tell = hooks.on_report}};
  });
  record->show(*engine, ranks.job, options.out_dir, step);
  if (directory) append(record->run_line(*engine, stages, step, backend, model_json, peak_flops));
}

void TrainingRun::State::end_record() {
  append(record->memory_line(*engine, engine->progress().step));
  tell([this] { monitors.end(); }, monitors_lost);
  monitors = {};
}

void TrainingRun::State::write_trace() {
  if (!trace || !trace->is_on()) return;
  trace->stop();
  engine->trace_to(nullptr);
  const std::vector<std::string> ranks_spans = gather_text(mesh->world(), monitor::spans_text(trace->spans()));
  if (is_root())
    tell([&] { replace_text_file(follow_links(options.trace), monitor::trace_text(ranks_spans)); }, monitors_lost);
}

// Tokens of the samples of a step.
i64 TrainingRun::State::length_of_step(i64 step) const {
  const i64 whole = engine->plan().sequence_length;
  return config.curriculum.enabled ? std::min(whole, curriculum_length(config.curriculum, step)) : whole;
}

StepRecord TrainingRun::State::take_step(std::vector<i32>& ids, std::vector<i32>& targets) {
  const auto start = Clock::now();
  TraceSpan whole(trace.get(), "steps", "step", engine->progress().step + 1);
  const report::RunPlan& plan = engine->plan();
  const size_t R = static_cast<size_t>(plan.B * plan.sequence_length);
  mesh->reset_counts();
  for (i64 j = 0; j < plan.micro_batches; ++j) {
    const size_t at = static_cast<size_t>(j) * R;
    train_data->load(engine->progress().consumed_samples, j, mesh->data_rank(), std::span(ids).subspan(at, R),
                     std::span(targets).subspan(at, R));
  }
  const i64 step_samples = plan.B * plan.micro_batches * mesh->data_size();
  if (engine->progress().step + 1 < config.steps)
    read_ahead->expect(engine->progress().consumed_samples + step_samples);
  const i64 length = length_of_step(engine->progress().step + 1);
  engine->train_at(length);
  const i64 samples = plan.micro_batches * plan.B;
  for (std::vector<i32>* tokens : {&ids, &targets}) {  // the first of each sample
    for (i64 i = 1; i < samples && length < plan.sequence_length; ++i)
      std::copy_n(tokens->begin() + i * plan.sequence_length, length, tokens->begin() + i * length);
  }
  const std::span<const i32> all_ids = std::span(ids).first(static_cast<size_t>(samples * length)),
                             all_targets = std::span(targets).first(all_ids.size());
  engine->offload().begin_step();
  engine->time_phases(monitor::Monitors::wants_phases(config, engine->progress().step + 1));
  const engine::StepReport r = engine->train_step({all_ids, all_targets});
  const double s = seconds_since(start);
  whole.end();
  StepRecord taken{.step = r.step,
                   .loss = r.loss,
                   .grad_norm = r.grad_norm,
                   .lr = r.lr,
                   .loss_scale = r.loss_scale,
                   .skipped = r.skipped,
                   .tokens = r.tokens,
                   .samples = engine->progress().consumed_samples,
                   .step_ms = s * 1e3,
                   .tokens_per_s = static_cast<double>(r.tokens) / s,
                   .phases = r.phases};
  taken.layer_tokens = r.layer_tokens;
  for (const auto& [name, norm] : r.compression) {
    if (!name.empty()) taken.compression.emplace(name, norm);
  }
  taken.outer_grad_norm = r.outer_norm;
  if (config.curriculum.enabled) taken.seq_length = length;
  const double flops =
      engine->stage().model().flops_per_token(length) * static_cast<double>(r.tokens) / mesh->world_size();
  taken.mfu = flops / s / peak_flops;
  const report::TagBytes counted = record->counted(ledger);
  for (const TagMemory& row : engine::memory_table(plan.memory, counted)) taken.memory_bytes[row.tag] = row.counted;
  for (const auto& [name, count] : mesh->counts()) {
    taken.comm_bytes[name] = count.bytes;
    if (!config.monitors.comms_logger.enabled) continue;
    taken.comm_calls[name] = count.calls;
    if (count.seconds > 0) taken.comm_ms[name] = count.seconds * 1e3;
  }
  if (engine->offload().moves()) {
    const offload::FileCounts moved = engine->offload().of_step();
    taken.offload = {.read_bytes = moved.read_bytes,
                     .written_bytes = moved.written_bytes,
                     .wait_ms = moved.waited_s * 1e3,
                     .busy_ms = moved.busy_s * 1e3};
    if (engine->offload().is_apart()) {
      const offload::HostCopies copies = engine->offload().copies_of_step();
      taken.offload->to_host_bytes = copies.to_host, taken.offload->to_device_bytes = copies.to_device;
    }
  }
  record->show_step(*engine, taken, counted);
  return taken;
}

namespace {

// One call of TrainingRun::train().
class Training {
 public:
  Training(TrainingRun::State& run, const TrainHooks& hooks)
      : s_(run), config_(run.config), saver_(*run.saver), hooks_(hooks) {
    result_.step = step();
    result_.first_step = step() + 1;
    result_.loss = result_.val_loss = std::numeric_limits<double>::quiet_NaN();
  }

  TrainResult run();

 private:
  i64 step() const noexcept { return s_.engine->progress().step; }
  int stop_signal() const { return hooks_.stop_signal ? hooks_.stop_signal() : 0; }
  bool evaluation_is_due() const {
    return step() >= config_.steps || (config_.eval.every > 0 && step() > 0 && step() % config_.eval.every == 0);
  }
  void begin();
  void save_what_was_due();
  void take_step(std::vector<i32>& ids, std::vector<i32>& targets);
  void end();
  void end_records();
  void evaluate();
  void save(engine::Saver::When when);
  void check_divergence(bool diverged, std::string_view what, i64 since);
  StepRecord next_step(std::vector<i32>& ids, std::vector<i32>& targets);
  bool all_meet() const;
  void tell_of_skipping(const StepRecord& r);

  TrainingRun::State& s_;
  const Config& config_;
  engine::Saver& saver_;
  const TrainHooks& hooks_;
  TrainResult result_;
  bool has_work_ = false;
  i64 signal_ = 0;       // what all ranks agreed to stop for
  i64 evaluated_ = -1;   // the step that was evaluated last
  i64 lost_ = 0;         // steps in a row whose loss is not finite
  i64 lost_by_any_ = 0;  // the same, of the worker that has most, when all met last
  i64 skipped_ = 0;      // steps in a row
};

void Training::evaluate() {
  if (!s_.validation_data || evaluated_ == step()) return;
  const TraceSpan span(s_.trace.get(), "steps", "evaluate", step());
  const std::optional<double> loss = s_.evaluate([this] { return stop_signal(); });
  if (!loss) return;  // a resumed run makes up for it
  result_.val_loss = *loss;
  evaluated_ = step();
  s_.record_validation(step(), result_.val_loss);
  if (!std::isfinite(result_.val_loss) && s_.is_root())
    log_message(LogLevel::Warning, fmt::format("the validation loss of step {} is not finite", step()));
  if (hooks_.on_eval && s_.is_root()) hooks_.on_eval(step(), result_.val_loss);
}

// Weights or activations beyond the range of numbers: no smaller loss scale heals that. Such a state is not saved, so
// that the last checkpoint is from before it. A checkpoint, saved or resumed from, has proved itself when the next
// step's loss is finite; until then the older ones stay.
void Training::check_divergence(bool diverged, std::string_view what, i64 since) {
  if (!diverged) return;
  saver_.finish();
  std::string rescue = "no checkpoint is from before that";
  if (!saver_.proven().empty()) rescue = fmt::format("go on from {}", saver_.proven());
  if (saver_.proven() != saver_.newest()) rescue += fmt::format(", for {} is already lost", saver_.newest());
  throw Error(Errc::Numeric,
              fmt::format("the run has diverged: {} not finite since step {}; {}; lower the learning rate or the "
                          "gradient_clipping",
                          what, since, rescue));
}

void Training::save(engine::Saver::When when) {
  const TraceSpan span(s_.trace.get(), "steps", "save", step());
  if (!saver_.has(step())) {
    check_divergence(lost_by_any_ > 0, "the loss is", step() - lost_by_any_ + 1);
    check_divergence(!s_.engine->is_finite(), "weights or moments are", step());
  }
  CheckpointMeta meta = s_.meta();
  meta.optimizer_numbers = s_.optimizer_numbers();
  saver_.save(meta, when);
}

// Whether all ranks take part in something behind this step. Workers go on by themselves until then.
bool Training::all_meet() const {
  const DilocoConfig& d = config_.optimizer.diloco;
  if (d.workers == 1 || step() == config_.steps || evaluation_is_due()) return true;
  if (config_.save.every > 0 && step() % config_.save.every == 0) return true;
  return update::lands(d, step());
}

void Training::tell_of_skipping(const StepRecord& r) {
  skipped_ = r.skipped ? skipped_ + 1 : 0;
  if (r.skipped)
    s_.append({{"type", "event"},
               {"event", "skipped"},
               {"step", r.step},
               {"loss_scale", r.loss_scale},
               {"next_loss_scale", s_.engine->scaler().scale()},
               {"skipped_steps", s_.engine->progress().skipped_steps}});
  if (skipped_ != kLostSteps || !config_.fp16.enabled || config_.fp16.loss_scale <= 0 || !s_.is_root()) return;
  log_message(LogLevel::Warning,
              fmt::format("{} steps in a row were skipped: gradients overflow fp16 at fp16.loss_scale {}", skipped_,
                          config_.fp16.loss_scale));
}

// A run whose states a server has may have been ended between a step and its checkpoint.
void Training::save_what_was_due() {
  if (!s_.is_from_server() || step() == 0) return;
  if (step() == config_.steps) {
    save(engine::Saver::When::AtTheEnd);
  } else if (config_.save.every > 0 && step() % config_.save.every == 0) {
    save(engine::Saver::When::Now);
  }
}

void Training::begin() {
  // A run that was stopped at a step that wanted an evaluation left it to us.
  const bool evaluate_first = !s_.from.empty() && evaluation_is_due() && s_.validation_data &&
                              s_.agree(s_.directory && !s_.evaluated_before) != 0;
  has_work_ = step() < config_.steps || evaluate_first;
  if (has_work_) s_.begin_record(hooks_);
  save_what_was_due();
  if (!s_.from.empty()) {
    if (has_work_) s_.append({{"type", "event"}, {"event", "resumed"}, {"step", step()}, {"from", s_.from}});
    if (evaluate_first) {
      evaluate();
    } else if (evaluation_is_due()) {
      evaluated_ = step();
    }
    signal_ = s_.agree(stop_signal());
  }
  if (step() >= config_.steps && s_.is_root())
    log_message(LogLevel::Warning,
                fmt::format("{} is at step {} of {}: nothing to train", s_.from, step(), config_.steps));
}

// A loss scale at its floor ends the run with an error, when the step has been counted.
StepRecord Training::next_step(std::vector<i32>& ids, std::vector<i32>& targets) {
  const i64 skipped_before = s_.engine->progress().skipped_steps;
  try {
    return s_.take_step(ids, targets);
  } catch (const Error& e) {
    const engine::Progress& p = s_.engine->progress();
    if (e.code() == Errc::Numeric && p.skipped_steps > skipped_before)
      s_.append({{"type", "event"},
                 {"event", "loss_scale_floor"},
                 {"step", p.step},
                 {"loss_scale", s_.engine->scaler().scale()},
                 {"skipped_steps", p.skipped_steps}});
    throw;
  }
}

void Training::take_step(std::vector<i32>& ids, std::vector<i32>& targets) {
  const StepRecord r = next_step(ids, targets);
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
  s_.record_step(r);
  if (hooks_.on_step && s_.is_root()) hooks_.on_step(r, config_.steps);
  tell_of_skipping(r);
  lost_ = std::isfinite(r.loss) ? 0 : lost_ + 1;
  if (!all_meet()) return;
  lost_by_any_ = config_.optimizer.diloco.workers > 1 ? s_.agree(lost_) : lost_;
  signal_ = s_.agree(stop_signal());
  if (lost_by_any_ == 0) saver_.prove(step());  // before the next one is saved
  check_divergence(lost_by_any_ > kLostSteps, "the loss is", step() - lost_by_any_ + 1);
  // Saved before it is evaluated: an error in the validation data loses no work.
  if (step() == config_.steps) {
    save(engine::Saver::When::AtTheEnd);
  } else if (config_.save.every > 0 && step() % config_.save.every == 0 && lost_by_any_ == 0) {
    save(engine::Saver::When::Now);
  }
  if (signal_ == 0 && evaluation_is_due()) {
    evaluate();
    signal_ = s_.agree(stop_signal());
  }
}

void Training::end() {
  if (signal_ == 0 && step() >= result_.first_step) saver_.prove_last();
  const bool complete = step() >= config_.steps && (!s_.validation_data || evaluated_ == step());
  if (signal_ != 0 && !complete) {
    save(engine::Saver::When::AtTheEnd);
    s_.append({{"type", "event"}, {"event", "stopped"}, {"step", step()}});
    result_.stop_signal = narrow<int>(signal_);
  }
  s_.engine->finish_updates();
  s_.engine->offload().begin_step();
  const offload::FileCounts last = s_.engine->offload().of_step();  // by an update behind the last step
  result_.offload.read_bytes += last.read_bytes;
  result_.offload.written_bytes += last.written_bytes;
  end_records();
  result_.step = step();
  result_.skipped_steps = s_.engine->progress().skipped_steps;
  result_.checkpoint = s_.writes() ? saver_.newest() : "";
  result_.memory = engine::memory_table(s_.record->predicted(*s_.engine), s_.record->counted(s_.ledger),
                                        s_.record->bounds(*s_.engine, step()));
  const offload::Offload& offload = s_.engine->offload();
  report::TagBytes in_files{};
  for (size_t t = 0; t < in_files.size(); ++t) in_files[t] = offload.files().current(static_cast<Tag>(t));
  result_.files = engine::memory_table(s_.engine->plan().files, in_files);
  result_.offload_method = offload.method();
}

void Training::end_records() {
  s_.write_trace();
  if (has_work_) s_.end_record();
}

TrainResult Training::run() {
  DS_CHECK(s_.train_data != nullptr, Errc::Config, "data.train: there is nothing to train on");
  DS_CHECK(s_.writes() || config_.save.every == 0, Errc::Config,
           "save.every is {} but there is no run directory: give --out DIR", config_.save.every);
  const report::RunPlan& plan = s_.engine->plan();
  std::vector<i32> ids(static_cast<size_t>(plan.micro_batches * plan.B * plan.sequence_length)), targets(ids.size());
  begin();
  s_.read_ahead = std::make_unique<ReadAhead>(*s_.train_data, plan.micro_batches, s_.mesh->data_rank());
  if (s_.trace) s_.trace->start();
  s_.engine->trace_to(s_.trace.get());
  try {
    while (signal_ == 0 && step() < config_.steps) {
      take_step(ids, targets);
      if (step() - result_.first_step + 1 == kTracedSteps) s_.write_trace();
    }
  } catch (const Error& e) {
    // Losses and scales are those of all ranks, and so is this end: what it leaves is whole. Who is ready waits, since
    // a launcher ends the others when one has ended.
    if (e.code() == Errc::Numeric) {
      end_records();
      (void)s_.agree(0);
    }
    throw;
  }
  s_.read_ahead.reset();
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
    DS_CHECK(s.validation_data != nullptr, Errc::Config,
             "there is no validation data: set data.validation or data.split");
    const double loss = s.evaluate({}).value();
    DS_CHECK(std::isfinite(loss), Errc::Numeric, "the validation loss is not finite");
    return loss;
  });
}

}  // namespace ds
