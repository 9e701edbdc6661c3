// SPDX-License-Identifier: Apache-2.0
#pragma once
// The checkpoints of a run while it trains: written at once or in the background, one at a time. Decides what a failed
// save means for the run, and when a checkpoint is proved, so that older ones may be removed.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "checkpoint/async_save.h"
#include "engine/host_state.h"
#include "run/run_directory.h"

namespace ds::run {

class Saver {
 public:
  // dir: empty: nothing is saved. directory: on rank 0 of a run that writes, else null. event: appends a line to the
  // run's metrics. With save.async, takes the memory of a snapshot (Tag::Host) and a thread, and the destructor
  // abandons a pending save.
  Saver(engine::Engine& engine, std::string dir, const RunDirectory* directory, std::vector<ParamEntry> params,
        std::function<void(const Json&)> event);
  // The engine's state is that of this checkpoint.
  void resumed_from(std::string step_dir, i64 step);

  // Saves the engine's state, unless it is saved already: with save.async in the background, but AtTheEnd it is on the
  // disk when this returns. Waits for the previous save. Collective. Throws if the save fails, on all ranks alike:
  // always AtTheEnd, else unless save.on_error is "continue".
  enum class When { Now, AtTheEnd };
  void save(const CheckpointMeta& meta, When when);

  // Whether this rank is still writing its part of a pending save. When no rank is, all call proceed(), which is
  // collective and throws as save() does.
  bool busy() const { return background_ && background_->busy(); }
  void proceed();
  // Waits for a pending save; a failure is a warning. Collective.
  void finish();

  // The loss of this step is finite: this proves a checkpoint from before it, and older ones are removed (save.keep).
  void prove(i64 step);
  // No step follows the newest checkpoint, which counts as proved.
  void prove_last();

  bool has(i64 step) const noexcept { return handed_in_ == step; }  // saved, or being saved
  const std::string& newest() const noexcept { return newest_; }    // committed, or resumed from; empty: none
  const std::string& proven() const noexcept { return proven_; }

 private:
  enum class OnFailure { Throw, Warn };
  void finish(OnFailure on_failure);
  void settle(const StepSave& save, OnFailure on_failure);
  OnFailure policy() const noexcept {
    return engine_.config().save.on_error == SaveFailure::Continue ? OnFailure::Warn : OnFailure::Throw;
  }
  void remove_old();

  engine::Engine& engine_;
  std::string dir_;
  const RunDirectory* directory_;
  std::vector<ParamEntry> params_;
  std::function<void(const Json&)> event_;
  std::string newest_, proven_;
  i64 newest_step_ = -1, handed_in_ = -1, finite_step_ = -1;
  std::vector<i64> passed_over_;  // steps in the directory after the one that the run resumed from
  Clock::time_point started_;     // of the save that was handed in last
  double stall_seconds_ = 0;      // during which it has kept training waiting
  double writer_cpu_before_ = 0;
  std::optional<engine::HostState> snapshot_;
  std::optional<AsyncSave> background_;  // after what it reads
};

}  // namespace ds::run
