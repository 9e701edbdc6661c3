// SPDX-License-Identifier: Apache-2.0
#include "run/journal.h"

#include <utility>

#include "ds/log.h"
#include "run/run_record.h"

namespace ds::run {

void Journal::attempt(const std::function<void()>& write, bool& lost) {
  try {
    write();
  } catch (const Error& e) {
    if (on_error_ == SaveFailure::Stop) throw;
    if (!std::exchange(lost, true)) log_message(LogLevel::Warning, e.what());
  }
}

void Journal::append(const Json& line) {
  if (!directory_) return;
  directory_->check_ours();
  attempt([&] { directory_->append_metrics(line); }, lines_lost_);
}

void Journal::step(const StepRecord& record) {
  append(step_line(record));
  report([&] { monitors_.step(record); });
}

void Journal::validation(i64 step, double loss) {
  append({{"type", "eval"}, {"step", step}, {"val_loss", loss}});
  report([&] { monitors_.validation(step, loss); });
}

void Journal::end_monitors() {
  report([&] { monitors_.end(); });
  monitors_ = {};
}

}  // namespace ds::run
