// SPDX-License-Identifier: Apache-2.0
// From any state to the run directory that ranks of a layout would have written, in one process.

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>
#include <unordered_set>

#include "base/clock.h"
#include "base/file.h"
#include "checkpoint/extend_positions.h"
#include "checkpoint/model_state.h"
#include "checkpoint/output_place.h"
#include "checkpoint/reader.h"
#include "checkpoint/shard.h"
#include "checkpoint/step_writer.h"
#include "checkpoint/upcycle.h"
#include "config/model_config.h"
#include "ds/checkpoint.h"
#include "ds/config.h"
#include "formats/hdf5.h"
#include "formats/tensor_io.h"
#include "zero/ownership.h"

namespace ds {
namespace {

// The part of a name up to its first number, which is that of a block: "transformer.h.11" of
// "transformer.h.11.ln_1.bias".
std::string_view block_of(std::string_view name) {
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find_first_of("./", begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (!part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos) return name.substr(0, end);
    begin = end + 1;
  }
  return {};
}

}  // namespace

std::vector<std::vector<model::ParamRow>> units_of(const std::vector<ParamEntry>& params) {
  // Parameters shared by the first and the last layer are a unit of their own.
  std::unordered_set<std::string_view> tied;
  for (const ParamEntry& p : params) tied.insert(p.tied_to);
  const auto is_shared = [&](const ParamEntry& p) { return p.shape.size() > 1 && tied.contains(p.name); };
  std::vector<std::vector<model::ParamRow>> units;
  std::string_view block;
  bool alone = true;
  for (const ParamEntry& p : params) {
    if (!p.tied_to.empty()) continue;
    if (alone || is_shared(p) || block_of(p.name) != block) units.emplace_back();
    alone = is_shared(p);
    block = block_of(p.name);
    units.back().push_back({p.name, p.shape});
  }
  return units;
}

Sharding shard_whole(const std::vector<ParamEntry>& params, const zero::LayoutOptions& options) {
  const auto rows = units_of(params);
  const std::vector<std::span<const model::ParamRow>> units(rows.begin(), rows.end());
  const zero::Layout layout = zero::Layout::make(units, options);
  std::vector<i64> param_of;  // the layout numbers untied parameters
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].tied_to.empty()) param_of.push_back(narrow<i64>(i));
  }
  Sharding sharding{layout.id(), options.stage, {.dp = options.num_ranks}, {}};
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    auto& pieces = sharding.ranks.emplace_back();
    for (const zero::Piece& p : layout.owned_pieces(rank)) pieces.push_back({param_of[p.param], p.begin, p.count});
  }
  return sharding;
}

void write_sharded(StateSource& state, const std::string& dir, Manifest& m, const Sharding& sharding,
                   const CopyProgress& progress) {
  m.id = random_hex64();
  m.meta = state.meta();
  m.meta.world_size = narrow<i64>(sharding.ranks.size());
  m.meta.mesh = sharding.mesh;
  m.meta.zero_stage = sharding.zero_stage;
  m.meta.layout_id = sharding.layout_id;
  m.params = state.params();

  RankContents contents;
  for (const State s : kStates) contents.states[s] = state.has(s);
  i64 total = 0, done = 0;
  for (const auto& pieces : sharding.ranks) {
    for (const PieceRange& p : pieces) {
      for (const State s : kStates) {
        if (state.stores(s, p.param)) total += p.count * dtype_bytes(state.stored_dtype(s, p.param));
      }
    }
  }
  std::vector<char> buffer;
  contents.elements = [&](State s, size_t piece, i64 first, i64 count) -> const void* {
    const PieceRange& p = contents.pieces[piece];
    const DType dtype = state.stored_dtype(s, p.param);
    buffer.resize(count * dtype_bytes(dtype));
    state.read(s, dtype, p.param, p.slice, p.begin + first, count, buffer.data());
    done += narrow<i64>(buffer.size());
    if (progress) progress(done, total);
    return buffer.data();
  };
  if (progress) contents.tick = [&] { progress(done, total); };
  check_room(dir, total);
  prepare_step(dir, m);
  for (size_t rank = 0; rank < sharding.ranks.size(); ++rank) {
    contents.pieces = sharding.ranks[rank];
    m.files.push_back(write_rank_file(dir, m, narrow<i64>(rank), contents));
  }
  commit_step(dir, m, contents.tick);
}

namespace {

// That of most elements: what the run computes in (meta.work_dtype) may be another.
DType dtype_of_weights(const Manifest& m) {
  std::map<DType, i64> elems;
  DType most = m.meta.work_dtype;
  for (size_t i = 0; i < m.params.size(); ++i) {
    if (!m.params[i].tied_to.empty()) continue;
    const DType t = m.stored_dtype(State::Param, narrow<i64>(i));
    elems[t] += *checked_product(m.params[i].shape);
    if (elems[t] > elems[most]) most = t;
  }
  return most;
}

}  // namespace

ShardResult shard_checkpoint(const std::string& source, const std::string& dir, const ShardOptions& options) {
  const Clock::time_point start = Clock::now();
  const MeshShape& mesh = options.mesh;
  constexpr i64 kMostRanks = 99999;  // names of their files have five digits
  const std::optional<i64> ranks = checked_product(std::vector<i64>{mesh.dp, mesh.pp, mesh.tp, mesh.sp});
  DS_CHECK(std::min({mesh.dp, mesh.pp, mesh.tp, mesh.sp}) >= 1 && ranks && *ranks <= kMostRanks, Errc::Config,
           "--dp {} x --pp {} x --tp {} x --sp {} are more than {} ranks", mesh.dp, mesh.pp, mesh.tp, mesh.sp,
           kMostRanks);
  const bool by_names = mesh.tp == 1 && mesh.pp == 1;
  const bool is_changed = options.positions != 0 || options.upcycling.wanted();
  DS_CHECK(options.config.empty() || !by_names || is_changed, Errc::Config,
           "--config needs --tp, --pp, --positions or --upcycle");
  DS_CHECK(options.positions == 0 || !options.upcycling.wanted(), Errc::Config,
           "--positions and --upcycle exclude each other: no family has both learned positions and experts");
  DS_CHECK(!options.model || !options.upcycling.wanted(), Errc::Config, "--upcycle: the model is a program's own");
  DS_CHECK(options.partition == ShardOptions().partition || mesh.pp > 1, Errc::Config, "--partition needs --pp");
  DS_CHECK(options.stage >= 0 && options.stage <= 3, Errc::Config, "ZeRO stage {}", options.stage);
  check_place(dir);
  PendingDirectory target(dir);
  std::unique_ptr<StateSource> state = open_state(source, options.tag);
  state->check();
  check_readable(*state);
  state = under_model_names(std::move(state), options.config);
  if (options.positions != 0) state = extend_positions(std::move(state), options.positions, options.config);
  if (options.upcycling.wanted()) state = upcycle(std::move(state), options.upcycling, options.config);
  std::vector<std::string_view> names;
  for (const ParamEntry& p : state->params()) names.push_back(p.name);
  check_hdf5_names(names, state->path());
  const ZeroConfig defaults;
  Manifest m;
  const zero::LayoutOptions layout{.num_ranks = zero::num_shards(mesh),
                                   .stage = options.stage,
                                   .persistence_threshold = defaults.param_persistence_threshold,
                                   .model_persistence_threshold = defaults.model_persistence_threshold};
  if (const std::string& saved = state->meta().model_config_json; options.model && !saved.empty())
    check_same_model(Json::parse(saved), *options.model, state->path());
  const std::string named = is_changed ? "" : options.config;  // a changed state knows its own
  Sharding sharding = by_names ? shard_whole(state->params(), layout)
                               : shard_model(*state, options.model ? *options.model : model_to_cut(*state, named), mesh,
                                             options.partition, layout);
  sharding.mesh = mesh;
  write_sharded(*state, target.path(), m, sharding, options.progress);
  target.commit();
  warn_of_overflow({state.get()}, dir);

  ShardResult result{.source = state->path(),
                     .step_dir = fmt::format("{}/{}", dir, step_name(m.meta.step)),
                     .step = m.meta.step,
                     .mesh = mesh,
                     .stage = options.stage,
                     .dtype = dtype_of_weights(m),
                     .optimizer = state->has_optimizer_state()};
  for (const ParamEntry& p : m.params) {
    if (!p.tied_to.empty()) continue;
    ++result.num_tensors;
    result.num_parameters += *checked_product(p.shape);
  }
  for (const FileRecord& f : m.files) result.bytes += f.bytes;
  result.seconds = seconds_since(start);
  return result;
}

CheckpointSummary describe_checkpoint(const std::string& dir, const std::string& tag) {
  const CheckpointReader reader(tag.empty() ? find_checkpoint(dir) : find_checkpoint(dir, tag));
  const Manifest& m = reader.manifest();
  CheckpointSummary summary{.step_dir = reader.path(),
                            .layout = m.meta.layout_id,
                            .isa = m.meta.isa,
                            .step = m.meta.step,
                            .consumed_samples = m.meta.consumed_samples,
                            .optimizer_step = m.meta.optimizer_step,
                            .world_size = m.meta.world_size,
                            .mesh = m.meta.mesh,
                            .stage = m.meta.zero_stage,
                            .dtype = dtype_of_weights(m),
                            .ranks = {},
                            .params = {}};
  for (size_t i = 0; i < m.params.size(); ++i) {
    const ParamEntry& p = m.params[i];
    summary.params.push_back({p.name, m.stored_dtype(State::Param, narrow<i64>(i)), p.shape, p.tied_to, {}});
  }
  for (size_t f = 0; f < m.files.size(); ++f) {
    CheckpointSummary::Rank rank{.file_bytes = m.files[f].bytes};
    for (const PieceRecord& p : m.files[f].pieces) {
      rank.elems += p.count;
      for (const State s : kStates) {
        if (p.states[s]) rank.state_bytes[s] += p.count * dtype_bytes(m.stored_dtype(s, p.param));
      }
      auto& param = summary.params[p.param];
      param.owners.push_back(
          {narrow<i64>(f), p.begin, p.count, slice_text(p.slice, param.shape), p.slice.dim, p.slice.ranges});
    }
    summary.ranks.push_back(rank);
  }
  for (auto& p : summary.params) {
    std::sort(p.owners.begin(), p.owners.end(), [](const auto& a, const auto& b) {
      return std::tie(a.slice_ranges, a.begin) < std::tie(b.slice_ranges, b.begin);
    });
  }
  return summary;
}

}  // namespace ds
