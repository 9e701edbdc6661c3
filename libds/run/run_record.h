// SPDX-License-Identifier: Apache-2.0
#pragma once
// The lines of metrics.jsonl, which man/ds-train.1 describes and memreport/metrics_file reads, and the counters that
// each rank shows while it trains.

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
std::vector<TagMemory> memory_table(const plan::TagBytes& predicted, const plan::TagBytes& counted,
                                    const plan::TagBounds& bounds = {});

// In the form in which the manifest stores a document, so that it reads back equal.
std::string compact_json(const std::string& text);

// The sparse attention and the documents of a run, as checkpoints store them; empty if it has neither.
std::string attention_identity(const Config& config);

// For a configuration that is saved, since it may be read from another working directory.
Config with_absolute_paths(Config config);

// A line of metrics.jsonl. `recovered`: of a step whose line was lost, with the fields that a server of states keeps.
Json step_line(const StepRecord& record, bool recovered = false);

// One rank's record of one run. Create it after ranks are connected and data is open, just before the engine takes its
// memory: the resident memory of the run counts from there. Mesh and device outlive it.
class RunRecord {
 public:
  // peak_flops: the measured rate of the device, which is what mfu is relative to; 0 for a run that does not train.
  RunRecord(const Mesh& mesh, Device& device, double peak_flops) noexcept
      : mesh_(mesh), device_(device), peak_flops_(peak_flops), staging_at_first_(mesh.staging_bytes()) {}
  double peak_flops() const noexcept { return peak_flops_; }

  // Peaks of this rank, including memory of kernels and communicators. Requires: no operation is pending.
  plan::TagBytes counted(const MemoryLedger& ledger) const;

  // The same, predicted; and how the counts after `step` steps are bounded by it.
  const plan::TagBytes& predicted(const engine::Engine& engine);
  plan::TagBounds bounds(const engine::Engine& engine, i64 step) const;

  // Shows this rank's counters from now on; `step` steps have been taken. directory: of the run; empty: none.
  void show(const engine::Engine& engine, const std::string& job, const std::string& directory, i64 step);
  // Call this after a step. peak: counted(). Allocates nothing.
  void show_step(const engine::Engine& engine, const StepRecord& step, const plan::TagBytes& peak);

  // Learns the predicted memory of every stage: for each tag the largest of its ranks, marked as a bound where they
  // differ. Collective.
  void gather_stages(const engine::Engine& engine);

  // The first line of a start, after `step` steps. model_json: the config.json of what is saved. Requires:
  // gather_stages().
  Json run_line(const engine::Engine& engine, i64 step, const std::string& model_json) const;
  // The last line of a start: the memory that each rank was predicted to take and took. Collective; the same on all
  // ranks.
  Json memory_line(const engine::Engine& engine, i64 step);

 private:
  // Resident bytes of the process before the run allocated any, without those of communicators.
  i64 base_bytes() const noexcept { return resident_.base_bytes() - staging_at_first_; }
  void add_own(plan::TagBytes& bytes) const;
  LiveRecord live_record(const engine::Engine& engine, const StepRecord& step, const plan::TagBytes& peak);

  const Mesh& mesh_;
  Device& device_;
  const double peak_flops_;
  const i64 staging_at_first_;
  probe::ResidentMeter resident_;
  Json stages_ = Json::array();
  i64 first_step_ = 0;
  std::optional<plan::TagBytes> predicted_;  // once it has been asked for
  std::optional<LiveCounters> counters_;
};

}  // namespace ds::run
