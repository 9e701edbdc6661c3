// SPDX-License-Identifier: Apache-2.0
#include "run/trained.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <optional>

#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/together.h"
#include "comm/message_tag.h"
#include "ds/log.h"
#include "engine/host_state.h"
#include "run/gpu_kernels.h"
#include "run/run_record.h"

namespace ds::run {

void Trained::load_step(const std::string& dir, const std::function<void(const Manifest&)>& check) {
  Mesh& mesh = engine->mesh();
  engine::HostState state(*engine, engine->held_pieces(), engine::HostState::Memory::InParts);
  std::set<std::string> rank_local;
  const CheckpointMeta meta = load_checkpoint(dir, engine->plan().work, table.params, state.pieces(), mesh.world(),
                                              table.optimizers, [&](const Manifest& there) {
                                                check(there);
                                                rank_local = there.rank_local_names();
                                              });
  state.upload();
  engine->publish_params();
  engine::Progress& progress = engine->progress();
  progress = {meta.step, meta.optimizer_step, meta.skipped_steps, meta.consumed_samples};
  const LossScalerState& s = meta.loss_scaler;
  if (meta.work_dtype == engine->plan().work)
    engine->scaler().restore({s.scale, s.iteration, s.last_overflow, s.hysteresis});
  load_numbers(meta);
  engine->begin_outer();
  load_rank_local(dir, meta, rank_local);
  if (mesh.rank() == 0) {
    const std::string isa = computed_by(engine->device());
    if (meta.isa != isa && !meta.isa.empty()) {
      log_message(
          LogLevel::Warning,
          fmt::format("{} was made with {}, this machine runs {}: results agree, bits may not", dir, meta.isa, isa));
    }
    if (engine->plan().dp().layout.options().block > 1 && meta.mesh && meta.mesh->tp != mesh.shape().tp)
      log_message(LogLevel::Warning,
                  fmt::format("{} was made with tensor_parallel.tp_size {}, this run has {}: the blocks of codes "
                              "are others, and are encoded again",
                              dir, meta.mesh->tp, mesh.shape().tp));
  }
}

// A stage of a pipeline has the numbers of its own layers alone: the maximum over all ranks is what some rank has,
// since bits of numbers that are not negative are in their order.
void Trained::save_numbers(CheckpointMeta& meta) {
  for (zero::SavedState* const state : engine->saved_states()) {
    if (state->numbers_key().empty()) continue;
    const std::vector<std::span<double>> own = state->numbers();
    std::vector<i64> bits;
    for (size_t p = 0; p < own.size(); ++p) {
      for (i64 i = 0; i < state->num_numbers(narrow<i64>(p)); ++i)
        bits.push_back(own[p].empty() ? 0 : std::bit_cast<i64>(own[p][i]));
    }
    engine->mesh().world().all_reduce(bits.data(), std::ssize(bits), DType::I64, ReduceOp::Max, kStatsText).wait();
    auto& named = meta.numbers[std::string(state->numbers_key())];
    size_t at = 0;
    for (size_t p = 0; p < own.size(); ++p) {
      for (i64 i = 0; i < state->num_numbers(narrow<i64>(p)); ++i)
        named[table.params[p].name].push_back(std::bit_cast<double>(bits[at++]));
    }
  }
}

void Trained::load_numbers(const CheckpointMeta& meta) {
  if (meta.optimizer_step == 0) return;
  for (zero::SavedState* const state : engine->saved_states()) {
    const std::vector<std::span<double>> own = state->numbers();
    for (size_t p = 0; p < own.size(); ++p) {
      const std::string key(state->numbers_key()), &name = table.params[p].name;
      const i64 wanted = state->num_numbers(narrow<i64>(p)), there = meta.num_numbers(key, name);
      DS_CHECK(wanted == 0 || there == wanted, Errc::Mismatch, "the step holds {} {} of '{}', not {}", there, key, name,
               wanted);
      if (!own[p].empty()) std::ranges::copy(meta.numbers.at(key).at(name), own[p].begin());
    }
  }
}

namespace {

// Words for a warning about arrays of ranks, whose kinds are known by their names in a step.
std::string named_for_people(const std::set<std::string>& names) {
  bool errors = false, steps = false, workers = false;
  for (const std::string& name : names) {
    const bool of_errors = name.find("_error") != name.npos, of_group = name.find('@') != name.npos;
    (of_errors ? errors : of_group ? steps : workers) = true;
  }
  std::vector<std::string_view> what;
  if (errors) what.push_back("compression had lost");
  if (steps) what.push_back("ranks' own steps had made");
  if (workers) what.push_back("workers of diloco had of their own");
  return fmt::format("{}", fmt::join(what, " and "));
}

}  // namespace

// Loads this rank's arrays of saved state, if the step was made with the same layout; else the run begins without them,
// with a warning, which also names arrays that this run has no use for. there: names of the arrays of all ranks.
void Trained::load_rank_local(const std::string& dir, const CheckpointMeta& meta, const std::set<std::string>& there) {
  Mesh& mesh = engine->mesh();
  if (!engine->plan().trains() || (!engine->has_rank_local() && there.empty())) return;
  const auto wanted = engine->has_rank_local() ? engine->rank_local() : std::vector<zero::SavedArray>();
  std::optional<CheckpointReader> reader;
  i64 fits = meta.layout_id == engine->plan().dp().layout.id() && meta.mesh == mesh.shape() ? 1 : 0;
  together(mesh.world(), [&] {
    reader.emplace(dir);
    const auto is_there = [&](const zero::SavedArray& array) {
      return reader->has_rank_local(mesh.rank(), array.name, array.values.numel());
    };
    if (fits == 1 && !std::ranges::all_of(wanted, is_there)) fits = 0;
  });
  mesh.world().all_reduce(&fits, 1, DType::I64, ReduceOp::Min, kStatsText).wait();
  i64 lost = fits == 0 ? 1 : 0;
  if (fits == 1) {
    together(mesh.world(), [&] {
      std::vector<float> copy;
      for (const auto& [name, view] : wanted) {
        copy.resize(static_cast<size_t>(view.numel()));
        reader->read_rank_local(mesh.rank(), name, copy);
        engine->device().upload(view.data, copy.data(), view.bytes());
      }
    });
    if (engine->has_rank_local()) engine->rank_local_was_set();
    const auto is_wanted = [&](const RankLocalRecord& r) {
      return std::ranges::any_of(wanted, [&](const zero::SavedArray& w) { return w.name == r.name; });
    };
    lost = !std::ranges::all_of(reader->manifest().files[static_cast<size_t>(mesh.rank())].rank_local, is_wanted);
    mesh.world().all_reduce(&lost, 1, DType::I64, ReduceOp::Max, kStatsText).wait();
  }
  if (lost == 0 || mesh.rank() != 0) return;
  if (!there.empty())
    return log_message(
        LogLevel::Warning,
        fmt::format("{} was made by another layout of ranks, or with another optimizer or joined_products, or other "
                    "intervals or groups of it: what {} there is lost",
                    dir, named_for_people(there)));
  std::set<std::string> names;
  for (const auto& [name, view] : engine->rank_local()) names.insert(name);
  if (engine->config().optimizer.diloco.workers > 1) names.insert("worker");
  log_message(LogLevel::Warning,
              fmt::format("{} holds nothing that {}: the run begins without", dir, named_for_people(names)));
}

CheckpointMeta Trained::meta(const RunData& data) const {
  const Config& config = engine->config();
  const engine::Progress& progress = engine->progress();
  const LossScaler::State& s = engine->scaler().state();
  CheckpointMeta meta;
  meta.step = progress.step;
  meta.work_dtype = engine->plan().work;
  meta.layout_id = engine->plan().dp().layout.id();
  meta.zero_stage = narrow<int>(config.zero.stage);
  meta.mesh = engine->mesh().shape();
  meta.consumed_samples = progress.consumed_samples;
  meta.seed = static_cast<u32>(config.seed);
  meta.loss_scaler = {s.scale, s.iteration, s.last_overflow, s.hysteresis};
  meta.skipped_steps = progress.skipped_steps;
  meta.optimizer_step = progress.optimizer_step;
  meta.optimizer = table.optimizer;
  meta.history = history;
  meta.isa = computed_by(engine->device());
  meta.attention_json = attention_identity(config);
  meta.config_json = compact_json(resolved_json(with_absolute_paths(config)));
  meta.model_config_json = model_json;
  meta.data_json = data.identity_json();
  return meta;
}

}  // namespace ds::run
