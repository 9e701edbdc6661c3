// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a run tells of itself: the lines of metrics.jsonl, which man/ds-train.1 describes and memreport/metrics_file
// reads, and the counters that each rank shows while it trains.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "ds/train.h"
#include "engine/engine.h"
#include "probe/resident.h"
#include "run/live_counters.h"
#include "run/plans.h"

namespace ds::run {

// The tags that are predicted or counted.
std::vector<TagMemory> memory_table(const report::TagBytes& predicted, const report::TagBytes& counted,
                                    const report::TagBounds& bounds = {});

// As the manifest keeps a document, so that it reads back equal.
std::string compact_json(const std::string& text);

// What the attention of a run hides beside the masks of its model, as checkpoints keep it; empty where it hides
// nothing.
std::string attention_identity(const Config& config);

// What is saved is read from other working directories.
Config with_absolute_paths(Config config);

// A line of metrics.jsonl. `recovered`: of a step whose line was lost, with the fields that a server of states keeps.
Json step_line(const StepRecord& record, bool recovered = false);

// One rank's record of one run. Made when ranks are connected and data is open, just before the engine takes its
// memory: there the run's resident memory begins. Mesh and device outlive it.
class RunRecord {
 public:
  // peak_flops: the measured rate of the device, which is what mfu is relative to; 0 for a run that does not train.
  RunRecord(const Mesh& mesh, Device& device, double peak_flops) noexcept
      : mesh_(mesh), device_(device), peak_flops_(peak_flops), staging_at_first_(mesh.staging_bytes()) {}
  double peak_flops() const noexcept { return peak_flops_; }

  // Peaks of this rank, with what kernels and communicators took for themselves. No operation is pending.
  report::TagBytes counted(const MemoryLedger& ledger) const;

  // The same, predicted; and what the counts are to that when so many steps have been taken.
  const report::TagBytes& predicted(const engine::Engine& engine);
  report::TagBounds bounds(const engine::Engine& engine, i64 step) const;

  // Shows this rank's counters from now on, `step` steps being taken. `directory`: of the run; empty: it keeps nothing.
  void show(const engine::Engine& engine, const std::string& job, const std::string& directory, i64 step);
  // After a step; peak: what counted() says. Allocates nothing.
  void show_step(const engine::Engine& engine, const StepRecord& step, const report::TagBytes& peak);

  // Learns the predicted memory of every stage: for each tag the largest of its ranks, marked as a bound where they
  // differ. Collective.
  void gather_stages(const engine::Engine& engine);

  // The first line of a start, after `step` steps. model_json: the config.json of what is saved. Requires:
  // gather_stages().
  Json run_line(const engine::Engine& engine, i64 step, const std::string& model_json) const;
  // What each rank was predicted to take and took: the last line of a start. Collective; the same on all ranks.
  Json memory_line(const engine::Engine& engine, i64 step);

 private:
  // Of the process before the run took anything: what communicators have taken already is counted.
  i64 base_bytes() const noexcept { return resident_.base_bytes() - staging_at_first_; }
  void add_own(report::TagBytes& bytes) const;
  LiveRecord live_record(const engine::Engine& engine, const StepRecord& step, const report::TagBytes& peak);

  const Mesh& mesh_;
  Device& device_;
  const double peak_flops_;
  const i64 staging_at_first_;
  probe::ResidentMeter resident_;
  Json stages_ = Json::array();
  i64 first_step_ = 0;
  std::optional<report::TagBytes> predicted_;  // once it has been asked for
  std::optional<LiveCounters> counters_;
};

}  // namespace ds::run
