// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a run is arranged, as the keys of a configuration say it: what a search varies, and reads each time as a run
// would.

#include <string>
#include <string_view>
#include <vector>

#include "ds/memreport.h"

namespace ds::memreport {

using Keys = std::vector<std::string>;  // overrides: "key=value"

struct Schedule {
  PipelineSchedule kind = PipelineSchedule::OneFOneB;
  i64 chunks = 1;
  double memory_limit = 1;
  bool operator==(const Schedule&) const = default;
};

// A mesh, a stage of ZeRO, whether rows between matrices are cut, and the order of passes.
struct Frame {
  i64 tp = 1, pp = 1, sp = 1;
  int stage = 0;
  bool sequence_parallel = false;
  Schedule schedule = {};
  Offloaded offloaded = Offloaded::AsItIs;
  i64 ep = 1;
};
Frame frame_of(const Arrangement& a);

// How many times a step's batch is cut.
struct Cut {
  i64 batch = 1, micro = 1, accumulation = 1;
};

// A key that says how a run is arranged. `follows`: no setting of its own, but what another one needs.
struct Setting {
  std::string key;
  bool follows = false;
  bool is_cut = false;  // of the batch
};
inline constexpr std::string_view kTrain = "train_batch_size", kMicro = "train_micro_batch_size_per_gpu",
                                  kAccumulation = "gradient_accumulation_steps";

// All of them: where `source` says more about one of them than is meant here, that too. disk: where files are.
std::vector<Setting> settings_of(const Config& source, const Frame& f, const Cut& cut, CheckpointGranularity recompute,
                                 const std::string& disk);
Keys keys_of(const std::vector<Setting>& settings);

ConfigResult read_arranged(const Source& source, const Keys& keys, int ranks);
// On one rank that is all there is.
ConfigResult read_unarranged(const Source& source);
// Whether the source gives a value for this key of the first level.
bool says(const Source& source, std::string_view key);
// Samples of a step. Throws Errc::Config where nothing says how many.
i64 batch_of(const Source& source);

}  // namespace ds::memreport
