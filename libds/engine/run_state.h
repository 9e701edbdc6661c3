// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a run is made of: run.cc opens it, resume.cc has what it goes on from, training.cc trains and evaluates,
// generate.cc writes text.

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/as_error.h"
#include "base/json.h"
#include "base/trace.h"
#include "checkpoint/checkpoint.h"
#include "comm/message_tag.h"
#include "data/objective.h"
#include "data/read_ahead.h"
#include "ds/train.h"
#include "engine/engine.h"
#include "engine/param_table.h"
#include "engine/plans.h"
#include "engine/run_directory.h"
#include "engine/run_record.h"
#include "engine/saver.h"
#include "monitor/monitor.h"

namespace ds {

struct TrainingRun::State {
  Config config;
  RankInfo ranks;
  RunOptions options;
  MemoryLedger ledger;
  std::unique_ptr<Trace> trace;    // of the first steps, if it is asked for; outlives who adds to it
  std::unique_ptr<Device> device;  // outlives what has memory of it
  std::unique_ptr<Mesh> mesh;
  Json stages;                         // what those of the mesh were predicted to take, of a run that writes
  std::optional<engine::Plans> plans;  // until the run begins
  std::unique_ptr<engine::RunDirectory> directory;  // rank 0 of a run that writes
  std::unique_ptr<BatchLoader> train_data, validation_data;
  std::unique_ptr<ReadAhead> read_ahead;  // of train_data, while the run trains
  std::unique_ptr<engine::Engine> engine;
  engine::ParamTable table;
  std::unique_ptr<engine::Saver> saver;
  std::unique_ptr<engine::RunRecord> record;
  std::string backend;
  std::string step_dir;           // to go on from; empty: from the start
  std::string history;            // CheckpointMeta::history; empty: no server has the states
  std::string from;               // what the run goes on from: that, or a server; empty: from the start
  std::string weights;            // to start from; empty: random ones
  std::string model_json;         // config.json of what is saved
  bool evaluated_before = false;  // the step that we go on from; on rank 0
  monitor::Monitors monitors;     // rank 0 of a run that trains
  bool lines_lost = false;        // of the metrics; said
  bool monitors_lost = false;     // likewise
  double peak_flops = 0;          // of this rank, measured

  bool is_root() const { return ranks.rank == 0; }
  bool is_from_server() const { return !from.empty() && from != step_dir; }
  bool writes() const { return !options.out_dir.empty() && !options.read_only; }

  void abort(const Error& e) {
    if (!mesh) return;
    mesh->abort(e);
  }

  // An error of one rank must not leave the others waiting.
  template <class F>
  auto collective(F&& body) {
    try {
      return body();
    } catch (const std::exception& e) {
      abort(as_error(e));
      throw;
    }
  }

  void open();
  void open_data(i64 num_ranks);
  void warn_of_uneven_targets() const;
  void check_same_files();
  std::string find_resumed() const;
  std::string find_weights() const;
  void load();
  monitor::Places places() const;
  // there: the names of all that ranks have of their own in the step.
  void load_rank_local(const std::string& dir, const CheckpointMeta& meta, const std::set<std::string>& there);
  void load_step(const std::string& dir);
  bool load_from_server(offload::ServerLink& server);
  void publish_to_server(offload::ServerLink& server);
  void write_lost_line(i64 last_step);
  void from_newest(FunctionRef<void()> load);
  void check_same_run(const CheckpointMeta& meta, const std::string& source) const;
  void take_directory();
  CheckpointMeta meta() const;
  // Numbers of saved state (SavedState::numbers_key) from all ranks into a step to be saved (collective), and from a
  // step into those of this rank.
  void save_numbers(CheckpointMeta& meta);
  void load_numbers(const CheckpointMeta& meta);
  // Nothing if any rank asks to stop.
  std::optional<double> evaluate(const std::function<int()>& stop_signal);
  void begin_record(const TrainHooks& hooks);
  void end_record();
  // Rank 0 writes what all ranks have traced, once. Collective.
  void write_trace();
  i64 length_of_step(i64 step) const;
  StepRecord take_step(std::vector<i32>& ids, std::vector<i32>& targets);
  void append(const Json& line);
  // A step's or an evaluation's line, and what the monitors make of it.
  void record_step(const StepRecord& taken);
  void record_validation(i64 step, double loss);
  // Writes what the run tells of itself. What fails is thrown or, if the run goes on without it, said once.
  void tell(const std::function<void()>& write, bool& said);
  // The largest of all ranks' numbers. On the way a pending save goes on, when no rank is busy with its part of it.
  i64 agree(i64 mine) {
    i64 both[] = {mine, saver && saver->busy()};
    mesh->world().all_reduce(both, 2, DType::I64, ReduceOp::Max, kStatsText).wait();
    if (saver && both[1] == 0) saver->proceed();
    return both[0];
  }
};

}  // namespace ds
