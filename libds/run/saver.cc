// SPDX-License-Identifier: Apache-2.0
#include "run/saver.h"

#include "checkpoint/step_writer.h"
#include "ds/log.h"

namespace ds::run {

Saver::Saver(engine::Engine& engine, std::string dir, const RunDirectory* directory, std::vector<ParamEntry> params,
             std::function<void(const Json&)> event)
    : engine_(engine),
      dir_(std::move(dir)),
      directory_(directory),
      params_(std::move(params)),
      event_(std::move(event)) {
  if (dir_.empty() || !engine_.config().save.async) return;
  snapshot_.emplace(engine_, engine_.saved_pieces(), engine::HostState::Memory::Copy);
  background_.emplace();
}

void Saver::resumed_from(std::string step_dir, i64 step) {
  newest_ = std::move(step_dir);
  newest_step_ = handed_in_ = step;
  if (directory_ == nullptr) return;
  clear_unfinished(dir_);  // no save may follow
  passed_over_ = list_steps(dir_);
  std::erase_if(passed_over_, [&](i64 s) { return s <= step; });
}

void Saver::save(const CheckpointMeta& meta, When when) {
  if (has(meta.step) && when == When::Now) return;
  finish(when == When::AtTheEnd ? OnFailure::Warn : policy());  // what comes on top makes up for it
  if (has(meta.step)) return;
  handed_in_ = meta.step;
  if (dir_.empty()) return;
  if (directory_ != nullptr) directory_->check_ours();

  started_ = Clock::now();
  if (background_) writer_cpu_before_ = background_->worker().cpu_seconds();
  std::optional<engine::HostState> state;
  if (!snapshot_) state.emplace(engine_, engine_.saved_pieces(), engine::HostState::Memory::InParts);
  engine::HostState& saved = snapshot_ ? *snapshot_ : *state;
  saved.download();
  auto save =
      std::make_unique<StepSave>(dir_, meta, params_, saved.pieces(), engine_.mesh().world(), saved.rank_local());
  const auto stop_clock = [this] { stall_seconds_ = seconds_since(started_); };
  if (background_ && when == When::Now) {
    background_->start(std::move(save));
    stop_clock();
    return;
  }
  if (background_) background_->worker().wait();  // for older steps to be gone
  do {
    save->work();
  } while (save->meet());
  stop_clock();
  settle(*save, when == When::AtTheEnd ? OnFailure::Throw : policy());
}

void Saver::proceed() {
  if (!background_ || !background_->pending()) return;
  if (const auto ended = background_->proceed()) settle(*ended, policy());
}

void Saver::finish() { finish(OnFailure::Warn); }

void Saver::finish(OnFailure on_failure) {
  while (background_ && background_->pending()) {
    const Clock::time_point start = Clock::now();
    const auto ended = background_->proceed();
    stall_seconds_ += seconds_since(start);
    if (ended) settle(*ended, on_failure);
  }
}

void Saver::settle(const StepSave& save, OnFailure on_failure) {
  if (save.error()) {
    handed_in_ = newest_step_;  // a later save of this step is not one too many
    if (on_failure == OnFailure::Throw) throw Error(*save.error());
    if (directory_ != nullptr)
      log_message(LogLevel::Warning, fmt::format("step {} was not saved: {}", save.step(), save.error()->what()));
    event_({{"type", "event"}, {"event", "save_failed"}, {"step", save.step()}, {"error", save.error()->what()}});
    return;
  }
  newest_ = save.step_dir();
  newest_step_ = save.step();
  std::erase(passed_over_, newest_step_);  // what stands there now is ours
  Json saved = {{"type", "event"},
                {"event", "saved"},
                {"step", save.step()},
                {"checkpoint", newest_},
                {"stall_ms", stall_seconds_ * 1e3},
                {"seconds", seconds_since(started_)}};
  if (background_) saved["writer_cpu_s"] = background_->worker().cpu_seconds() - writer_cpu_before_;
  event_(saved);
  if (finite_step_ > newest_step_) prove(finite_step_);
}

void Saver::prove(i64 step) {
  finite_step_ = step;
  if (newest_step_ < step) prove_last();
}

void Saver::prove_last() {
  if (proven_ == newest_) return;
  proven_ = newest_;
  remove_old();
}

void Saver::remove_old() {
  const i64 keep = engine_.config().save.keep;
  if (keep == 0 || directory_ == nullptr) return;
  const auto remove = [dir = dir_, newest = newest_step_, keep, passed_over = passed_over_] {
    remove_old_steps(dir, newest, keep, passed_over);
  };
  if (background_) {
    background_->worker().post(remove);
  } else {
    remove();
  }
}

}  // namespace ds::run
