// SPDX-License-Identifier: Apache-2.0
#pragma once
// The records that a run writes while it trains: metrics.jsonl, then the monitors. On rank 0; elsewhere nothing is
// written.

#include <functional>
#include <memory>

#include "base/json.h"
#include "ds/train.h"
#include "monitor/monitor.h"
#include "run/run_directory.h"

namespace ds::run {

class Journal {
 public:
  // With save.on_error "continue", a run that cannot write a line trains on, as it does when it cannot save: a full
  // disk causes both. Then the first error is a warning; else errors are thrown.
  explicit Journal(SaveFailure on_error = SaveFailure::Stop) noexcept : on_error_(on_error) {}

  // Lines go to metrics.jsonl in this directory from now on.
  void open(std::unique_ptr<RunDirectory> directory) noexcept { directory_ = std::move(directory); }
  RunDirectory* directory() const noexcept { return directory_.get(); }  // null: lines go nowhere

  void watch(monitor::Monitors monitors) noexcept { monitors_ = std::move(monitors); }
  void end_monitors();

  void append(const Json& line);
  void step(const StepRecord& record);
  void validation(i64 step, double loss);
  // Writes a report of another kind.
  void report(const std::function<void()>& write) { attempt(write, reports_lost_); }

 private:
  // lost: whether an error has been reported already.
  void attempt(const std::function<void()>& write, bool& lost);

  SaveFailure on_error_;
  std::unique_ptr<RunDirectory> directory_;
  monitor::Monitors monitors_;
  bool lines_lost_ = false, reports_lost_ = false;
};

}  // namespace ds::run
