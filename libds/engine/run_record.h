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
#include "engine/live_counters.h"
#include "engine/plans.h"
#include "probe/resident.h"

namespace ds::engine {

// The tags that are predicted or counted.
std::vector<TagMemory> memory_table(const plan::TagBytes& predicted, const plan::TagBytes& counted,
                                    const plan::TagBounds& bounds = {});

// As the manifest keeps a document, so that it reads back equal.
std::string compact_json(const std::string& text);

// What the attention of a run hides beside the masks of its model, as checkpoints keep it; empty where it hides
// nothing.
std::string attention_identity(const Config& config);

// What is saved is read from other working directories.
Config with_absolute_paths(Config config);

Json step_line(const StepRecord& record);

// One rank's record of one run. Made when ranks are connected and data is open, just before the engine takes its
// memory: there the run's resident memory begins. Mesh and device outlive it.
class RunRecord {
 public:
  RunRecord(const Mesh& mesh, Device& device) noexcept
      : mesh_(mesh), device_(device), staging_at_first_(mesh.staging_bytes()) {}

  // Peaks of this rank, with what kernels and communicators took for themselves. No operation is pending.
  plan::TagBytes counted(const MemoryLedger& ledger) const;

  // The same, predicted; and what the counts are to that when so many steps have been taken.
  const plan::TagBytes& predicted(const Engine& engine);
  plan::TagBounds bounds(const Engine& engine, i64 step) const;

  // Shows this rank's counters from now on, `step` steps being taken. `directory`: of the run; empty: it keeps nothing.
  void show(const Engine& engine, const std::string& job, const std::string& directory, i64 step);
  // After a step; peak: what counted() says. Allocates nothing.
  void show_step(const Engine& engine, const StepRecord& step, const plan::TagBytes& peak);

  // The predicted memory of each stage: for each tag the most of its ranks, marked as a bound where they differ.
  // Collective.
  Json stages_json(const Engine& engine);

  // What a start is about, its first line: `step` steps had been taken. model_json: the config.json of what is saved.
  // `stages`: stages_json().
  Json run_line(const Engine& engine, const Json& stages, i64 step, std::string_view backend,
                const std::string& model_json, double peak_flops) const;
  // What each rank was predicted to take and took: the last line of a start. Collective; the same on all ranks.
  Json memory_line(const Engine& engine, i64 step);

 private:
  // Of the process before the run took anything: what communicators have taken already is counted.
  i64 base_bytes() const noexcept { return resident_.base_bytes() - staging_at_first_; }
  void add_own(plan::TagBytes& bytes) const;
  LiveRecord live_record(const Engine& engine, const StepRecord& step, const plan::TagBytes& peak);

  const Mesh& mesh_;
  Device& device_;
  const i64 staging_at_first_;
  probe::ResidentMeter resident_;
  i64 first_step_ = 0;
  std::optional<plan::TagBytes> predicted_;  // once it has been asked for
  std::optional<LiveCounters> counters_;
};

}  // namespace ds::engine
