// SPDX-License-Identifier: Apache-2.0
#pragma once
// A save of a step by all ranks, cut into parts at the points where they must meet. Between two meetings a rank does
// not communicate, so its work can run in another thread:
//
//   work: rank 0 makes the unfinished step     meet
//   work: every rank writes its file           meet: the files' records go to rank 0
//   work: rank 0 commits                       meet: all learn the result
//
// A rank that fails still comes to the meeting; there the save fails on all ranks, and rank 0 removes the unfinished
// step, to which no rank writes any more.

#include <atomic>

#include "checkpoint/step_writer.h"
#include "ds/communicator.h"

namespace ds {

class StepSave {
 public:
  // `pieces` and their data must not change until the save has ended. The communicator outlives it.
  StepSave(std::string dir, CheckpointMeta meta, const std::vector<ParamEntry>& params,
           std::span<const StatePiece> pieces, Communicator& comm, std::vector<RankLocal> rank_local = {});
  // Abandons a save that has not ended. No thread may be in work().
  ~StepSave();
  StepSave(const StepSave&) = delete;
  StepSave& operator=(const StepSave&) = delete;

  // Does this rank's part up to the next meeting.
  void work() noexcept;
  // Collective, after work() has returned on all ranks. False: the save has ended. Throws what the communicator throws.
  bool meet();
  // Makes work() fail soon; thread-safe.
  void cancel() noexcept { cancelled_ = true; }

  i64 step() const noexcept { return manifest_.meta.step; }
  // After the end: the error of the lowest failing rank; nothing if the step is committed.
  const std::optional<Error>& error() const noexcept { return error_; }
  std::string step_dir() const { return fmt::format("{}/{}", dir_, step_name(step())); }

 private:
  enum class Phase { Prepare, Write, Commit, Ended };
  void prepare();
  void write();
  void commit();

  std::string dir_;
  Manifest manifest_;
  std::vector<StatePiece> pieces_;
  std::vector<RankLocal> rank_local_;
  Communicator& comm_;
  Phase phase_ = Phase::Prepare;
  std::atomic<bool> cancelled_ = false;
  FileRecord mine_;
  std::vector<std::string> records_;  // of all ranks
  std::optional<Error> error_;        // before the end: of this rank's work
};

}  // namespace ds
