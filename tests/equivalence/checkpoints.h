// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints of the engines of tests.

#include <fstream>

#include "ds/checkpoint.h"
#include "engine/param_table.h"
#include "equivalence/layouts.h"
#include "temp_directory.h"

namespace ds::testing {

inline std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Saves what the engine holds as a step of the directory.
inline std::string save_step(engine::Engine& engine, const std::string& dir) {
  const engine::ParamTable table = engine::make_param_table(engine.config(), engine.model(), engine.plan());
  engine::HostState state(engine, engine.saved_pieces(), engine::HostState::Memory::InParts);
  state.download();
  const engine::Progress& progress = engine.progress();
  CheckpointMeta meta;
  meta.step = progress.step;
  meta.optimizer_step = progress.optimizer_step;
  meta.consumed_samples = progress.consumed_samples;
  meta.work_dtype = engine.plan().work;
  meta.layout_id = engine.plan().dp().layout.id();
  meta.mesh = engine.mesh().shape();
  meta.zero_stage = narrow<int>(engine.config().zero.stage);
  meta.optimizer = table.optimizer;
  return save_checkpoint(dir, meta, table.params, state.pieces(), engine.mesh().world());
}

inline void load_step(engine::Engine& engine, const std::string& step) {
  const engine::ParamTable table = engine::make_param_table(engine.config(), engine.model(), engine.plan());
  engine::HostState state(engine, engine.held_pieces(), engine::HostState::Memory::InParts);
  const CheckpointMeta meta =
      load_checkpoint(step, engine.plan().work, table.params, state.pieces(), engine.mesh().world(), table.optimizers);
  state.upload();
  engine.publish_params();
  engine.progress() = {meta.step, meta.optimizer_step, meta.skipped_steps, meta.consumed_samples};
}

struct Saved {
  std::string step;
  Trace trace;
};

// Trains, and saves the last step as a checkpoint.
inline Saved train_and_save(const Config& c, const Layout& l, i64 steps, const std::string& dir, Hooks hooks = {}) {
  Saved saved;
  hooks.at_end = [&](engine::Engine& engine) {
    const std::string step = save_step(engine, dir);
    if (engine.mesh().rank() == 0) saved.step = step;
  };
  saved.trace = train_threads(c, l.ranks(), steps, 1, hooks);
  return saved;
}

inline Trace resume(const Config& c, const Layout& l, i64 steps, const std::string& step, Hooks hooks = {}) {
  hooks.start = [&](engine::Engine& engine) { load_step(engine, step); };
  return train_threads(c, l.ranks(), steps, 1, hooks);
}

}  // namespace ds::testing
