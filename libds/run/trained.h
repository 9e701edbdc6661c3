// SPDX-License-Identifier: Apache-2.0
#pragma once
// The object of a run's training, as checkpoints know it: an engine, and the rest of a step beside its states.

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"
#include "engine/param_table.h"
#include "run/request.h"
#include "run/run_data.h"

namespace ds::run {

struct Trained {
  std::unique_ptr<engine::Engine> engine;
  engine::ParamTable table;
  std::string model_json;  // config.json of what is saved
  std::string history;     // CheckpointMeta::history; empty: no server has the states

  // The metadata of the engine's step, without numbers.
  CheckpointMeta meta(const RunData& data) const;
  // Numbers of saved state (SavedState::numbers_key) from all ranks into a step to be saved (collective), and from a
  // step into those of this rank.
  void save_numbers(CheckpointMeta& meta);
  void load_numbers(const CheckpointMeta& meta);

  // Loads a step of this model, made by any layout. check(manifest) throws what the step does not fit in. Collective.
  void load_step(const std::string& dir, const std::function<void(const Manifest&)>& check);

 private:
  // there: the names of all that ranks have of their own in the step.
  void load_rank_local(const std::string& dir, const CheckpointMeta& meta, const std::set<std::string>& there);
};

}  // namespace ds::run
