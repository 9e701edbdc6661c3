// SPDX-License-Identifier: Apache-2.0
#pragma once
// metrics.jsonl read back: what a run was, what each of its ranks was predicted and took, how fast it went. The lines
// are run/run_record's.

#include <string>
#include <vector>

#include "ds/mesh.h"
#include "ds/train.h"

namespace ds::memreport {

struct RankMemory {
  int rank = 0;
  std::vector<TagMemory> tags;  // in the order of Tag; counted is 0 where !counts_known
  bool counts_known = false;
  // By probe/resident.h; 0: not known.
  i64 resident_bytes = 0;   // peak
  i64 momentary_bytes = 0;  // beside it for a moment, as while a checkpoint was written
  i64 base_bytes = 0;       // before the engine took its memory
};

// The speed of the last steps of the last run in the file.
struct StepSpeed {
  i64 steps = 0;  // that it is taken from; 0: all else is 0
  double mean_step_ms = 0, median_step_ms = 0;
  double tokens_per_s = 0;  // all ranks; tokens of those steps over their time
  double mfu = 0;           // the mean over time
  double loss = 0;          // of the last one; NaN if it was not finite
};

struct ExpertLoad {
  std::string layer;
  std::vector<i64> tokens;
};

struct MetricsFile {
  std::string path;  // of the file
  int runs = 0;      // lines of type "run": one for each start; 0: written before there were any

  // Properties of the last run.
  std::string version, device, device_name, backend, host, start;
  int world_size = 0;  // 0: no such line
  MeshShape mesh;
  double peak_flops = 0;    // FLOP/s of a large matrix product, of rank 0
  std::string config_json;  // the resolved configuration, and the model's config.json; empty: no such line
  std::string model_json;
  i64 first_step = 0;  // steps that had been taken when it began
  i64 last_step = 0;   // that it tells of
  bool ended = false;  // its ranks have told what they took

  // The tokens that chose each expert in all its steps, by layer in the order of layers; empty without experts.
  std::vector<ExpertLoad> expert_loads;
  std::vector<RankMemory> ranks;  // by rank. Until the run has ended: predictions, and the counts of rank 0
  StepSpeed speed;
};

// `path`: the file, or a run directory with it. Takes the speed from the last `window` steps. Lines of types that it
// does not know are passed over, and so is a last line that is still being written. Throws Errc::Io, or Errc::Corrupt
// "FILE:LINE: ..." for what is no line of metrics.
MetricsFile read_metrics(const std::string& path, i64 window = 100);

}  // namespace ds::memreport
