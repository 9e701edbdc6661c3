// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>

#include "base/limits.h"
#include "checkpoint/reader.h"
#include "checkpoint/together.h"
#include "config/trainer_output.h"
#include "ds/log.h"
#include "formats/tensor_io.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

bool is_step_directory(const std::string& dir) { return fs::exists(fmt::format("{}/{}", dir, kManifestName)); }

// The newest step of a run directory, of those before number `before`, whose manifest and file sizes are right; empty
// if there is none. A warning names each newer one that is passed over.
std::string newest_complete_step(const std::string& dir, i64 before) {
  std::vector<i64> steps;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const auto step = parse_step_name(it->path().filename().string());
    if (step && *step < before) steps.push_back(*step);
  }
  DS_CHECK(!error || error == std::errc::no_such_file_or_directory, Errc::Io, "cannot list {}: {}", dir,
           system_reason(error.value()));
  std::sort(steps.begin(), steps.end(), std::greater<>());
  for (i64 step : steps) {
    std::string path = fmt::format("{}/{}", dir, step_name(step));
    try {
      const CheckpointReader reader(path);
      return path;
    } catch (const Error& e) {
      if (e.code() == Errc::Io) throw;  // what the system refuses is no damage
      log_message(LogLevel::Warning, fmt::format("skipping {}: {}", path, e.what()));
    }
  }
  return {};
}

// The problem with DIR/latest; nothing if it names a step, which is stored in `step`.
std::optional<std::string> read_latest(const std::string& dir, std::string& step) {
  const std::string path = fmt::format("{}/{}", dir, kLatestName);
  if (!fs::exists(fs::symlink_status(path))) return fmt::format("{} is missing", path);
  std::string name;
  try {
    name = read_text_file(path, 4096);
  } catch (const Error& e) {
    // Refused by the system, and not for being something else than a file.
    std::error_code unknown;
    if (e.code() == Errc::Io && (fs::is_regular_file(path, unknown) || unknown == std::errc::permission_denied)) throw;
    return e.what();
  }
  if (name.ends_with('\n')) name.pop_back();
  if (!parse_step_name(name)) return fmt::format("{}: names '{}', which is not a step", path, name.substr(0, 64));
  step = dir + "/" + name;
  if (!is_step_directory(step)) return fmt::format("{}: names {}, which does not exist or is not complete", path, name);
  return std::nullopt;
}

std::string latest_step(const std::string& dir) {
  std::string step;
  const std::optional<std::string> problem = read_latest(dir, step);
  if (!problem) return step;
  step = newest_complete_step(dir, std::numeric_limits<i64>::max());
  if (step.empty() && !fs::exists(fmt::format("{}/{}", dir, kLatestName)))
    throw Error(Errc::Io, fmt::format("{}: no checkpoint in this directory{}", dir, trainer_hint(dir)));
  DS_CHECK(!step.empty(), Errc::Corrupt, "{}; there is no other complete step", *problem);
  log_message(LogLevel::Warning, fmt::format("{}; using the newest complete step, {}", *problem, step));
  return step;
}

// Throws unless the checkpoint holds exactly these parameters; the error names the first difference and counts the
// rest. Returns where each of `params` stands in the manifest's table.
std::vector<i64> match_params(const Manifest& m, const std::string& dir, const std::vector<ParamEntry>& params) {
  std::map<std::string_view, i64> stored;
  for (size_t i = 0; i < m.params.size(); ++i) stored[m.params[i].name] = narrow<i64>(i);
  std::vector<i64> index;
  std::vector<std::string> differences;
  for (const ParamEntry& p : params) {
    const auto it = stored.find(p.name);
    if (it == stored.end()) {
      differences.push_back(fmt::format("it does not contain '{}'", p.name));
      continue;
    }
    const ParamEntry& s = m.params[it->second];
    if (s.shape != p.shape) {
      differences.push_back(fmt::format("'{}' has shape [{}] there and [{}] here", p.name, fmt::join(s.shape, ", "),
                                        fmt::join(p.shape, ", ")));
    } else if (s.tied_to != p.tied_to) {
      differences.push_back(fmt::format("'{}' is {} there and {} here", p.name,
                                        s.tied_to.empty() ? "untied" : "tied to '" + s.tied_to + "'",
                                        p.tied_to.empty() ? "untied" : "tied to '" + p.tied_to + "'"));
    }
    index.push_back(it->second);
    stored.erase(it);
  }
  for (const auto& [name, i] : stored)
    differences.push_back(fmt::format("it contains '{}', which this model does not have", name));
  DS_CHECK(differences.empty(), Errc::Mismatch, "{}: a checkpoint of another model: {}{}{}", dir, differences.front(),
           differences.size() == 1 ? "" : fmt::format(" (and {} more differences)", differences.size() - 1),
           m.meta.optimizer_step == 0 ? "; weights without optimizer state can be given to --weights" : "");
  return index;
}

// States of one optimizer mean nothing to another. index: for each entry of the run, its entry in the manifest.
void check_optimizers(const Manifest& m, const std::string& dir, std::span<const i64> index,
                      std::span<const ParamOptimizer> optimizers) {
  if (m.meta.optimizer_step == 0) return;
  const auto described = [](std::string_view name, const StateSet& states) {
    std::vector<std::string_view> names;
    for (const State s : kOptimizerStates) {
      if (states[s]) names.push_back(state_name(s));
    }
    return fmt::format("{} ({})", name, names.empty() ? "no state" : fmt::format("{}", fmt::join(names, ", ")));
  };
  StateSet any;
  for (const State s : kOptimizerStates) any[s] = m.has(s);
  std::string first;
  i64 others = 0;
  for (size_t i = 0; i < optimizers.size(); ++i) {
    const ParamEntry& entry = m.params[index[i]];
    const ParamOptimizer& here = optimizers[i];
    if (!here.trains) continue;
    StateSet there;
    for (const State s : kOptimizerStates) there[s] = any[s] && entry.may_have(s);
    const std::string& name = entry.optimizer.empty() ? m.meta.optimizer : entry.optimizer;
    if (there == here.states && (there == StateSet{} || name == here.name)) continue;
    if (first.empty()) {
      first = there == StateSet{} && name == here.name
                  ? fmt::format("'{}' has no state there (it was frozen, or {} kept none), and is updated by {} here",
                                entry.name, name, described(here.name, here.states))
                  : fmt::format("'{}' has the state of {} there, and is updated by {} here", entry.name,
                                described(name, there), described(here.name, here.states));
    } else {
      ++others;
    }
  }
  for (size_t i = 0; i < optimizers.size() && first.empty(); ++i) {
    const std::string& name = m.params[index[i]].name;
    if (!optimizers[i].trains || optimizers[i].numbers == 0) continue;
    const i64 there = m.meta.num_numbers(kOptimizerNumbers, name);
    DS_CHECK(there == optimizers[i].numbers, Errc::Mismatch, "{}: holds {} {} of '{}', and {} has {}", dir, there,
             kOptimizerNumbers, name, optimizers[i].name, optimizers[i].numbers);
  }
  DS_CHECK(first.empty(), Errc::Mismatch,
           "{}: {}{}; set the optimizer to what it was, or start from the weights: --weights {}", dir, first,
           others == 0 ? "" : fmt::format(" (and {} more parameters)", others), dir);
}

const model::ParamSlice& slice_of(const StatePiece& p) noexcept {
  static const model::ParamSlice whole;
  return p.slice == nullptr ? whole : *p.slice;
}

// Refuses what the checkpoint cannot give: checked before anything is filled.
void check_request(const Manifest& m, const std::string& dir, std::span<const StatePiece> pieces) {
  for (const StatePiece& p : pieces) {
    DS_ASSERT(p.param >= 0 && p.param < narrow<i64>(m.params.size()));
    const ParamEntry& entry = m.params[p.param];
    DS_ASSERT(entry.tied_to.empty() && p.begin >= 0 && p.count >= 0 &&
              p.begin <= model::SliceMap(slice_of(p), entry.shape).numel() - p.count);
    for (const State s : kOptimizerStates) {
      DS_CHECK(!p.has(s) || (m.has(s) && entry.may_have(s)) || m.meta.optimizer_step == 0, Errc::Mismatch,
               "{}: contains no {}{}; it was saved without that optimizer state", dir, state_name(s),
               m.has(s) ? fmt::format(" of '{}'", entry.name) : "");
    }
  }
}

// Reads a piece's state into its memory.
void fill_piece(CheckpointReader& reader, DType param_dtype, const StatePiece& p) {
  constexpr i64 kTile = 1 << 16;  // whole blocks of codes
  std::vector<float> tile;
  for (const State s : kStates) {
    if (p.data[s] == nullptr) continue;
    if (is_optimizer_state(s) && p.kept[s].dtype != DType::F32) {
      tile.assign(static_cast<size_t>(std::min(kTile, p.count)), 0.0f);
      for (i64 first = 0; first < p.count; first += kTile) {
        const i64 n = std::min(kTile, p.count - first);
        if (reader.stores(s, p.param))
          reader.read(s, DType::F32, p.param, slice_of(p), p.begin + first, n, tile.data());
        encode_state(p.state(s), tile.data(), first, n);
      }
      continue;
    }
    const DType dtype = s == State::Param ? param_dtype : DType::F32;
    if (is_optimizer_state(s) && !reader.stores(s, p.param)) {  // before the first update they are zero
      std::memset(p.data[s], 0, static_cast<size_t>(p.count * dtype_bytes(dtype)));
    } else {
      reader.read(s, dtype, p.param, slice_of(p), p.begin, p.count, p.data[s]);
    }
  }
}

}  // namespace

std::string find_checkpoint(const std::string& dir, std::string_view which) {
  if (which != "latest") {
    const std::string name(which);
    if (parse_step_name(name) && is_step_directory(dir + "/" + name)) return dir + "/" + name;
    DS_CHECK(fs::is_directory(name), Errc::Io, "{}: no such checkpoint, neither a directory nor a step of {}", name,
             dir);
    return find_checkpoint(name);
  }
  DS_CHECK(fs::is_directory(dir), Errc::Io, "{}: {}", dir,
           fs::exists(dir) ? "not a directory; a checkpoint is one" : "no such directory");
  return is_step_directory(dir) ? dir : latest_step(dir);
}

std::string step_before(const std::string& dir, const std::string& step_dir) {
  const std::optional<i64> step = parse_step_name(fs::path(step_dir).filename().string());
  return step ? newest_complete_step(dir, *step) : std::string();
}

CheckpointMeta check_checkpoint(const std::string& step_dir, const std::vector<ParamEntry>& params,
                                std::span<const ParamOptimizer> optimizers,
                                const std::function<void(const Manifest&)>& accept) {
  CheckpointReader reader(step_dir);
  const Manifest& m = reader.manifest();
  if (accept) accept(m);
  check_optimizers(m, step_dir, match_params(m, step_dir, params), optimizers);
  for (i64 f = 0; f < narrow<i64>(m.files.size()); ++f) reader.check_structure(f);
  return m.meta;
}

CheckpointMeta load_checkpoint(const std::string& step_dir, DType work_dtype, const std::vector<ParamEntry>& params,
                               std::span<const StatePiece> pieces, Communicator& comm,
                               std::span<const ParamOptimizer> optimizers,
                               const std::function<void(const Manifest&)>& accept) {
  std::optional<CheckpointReader> reader;
  std::vector<StatePiece> wanted(pieces.begin(), pieces.end());
  std::vector<DType> dtypes;
  for (const StatePiece& p : wanted) dtypes.push_back(params[static_cast<size_t>(p.param)].dtype.value_or(work_dtype));
  together(comm, [&] { reader.emplace(step_dir); });
  if (accept) accept(reader->manifest());
  together(comm, [&] {
    const Manifest& m = reader->manifest();
    const std::vector<i64> index = match_params(m, step_dir, params);
    check_optimizers(m, step_dir, index, optimizers);
    for (StatePiece& p : wanted) {
      DS_ASSERT(p.param >= 0 && p.param < narrow<i64>(index.size()));
      p.param = index[p.param];
    }
    check_request(m, step_dir, wanted);
    // The ranks share the files among them.
    for (i64 f = comm.rank(); f < narrow<i64>(m.files.size()); f += comm.size()) reader->check_structure(f);
  });
  together(comm, [&] {
    for (size_t i = 0; i < wanted.size(); ++i) {
      const StatePiece& p = wanted[i];
      if (!p.open) {
        fill_piece(*reader, dtypes[i], p);
        continue;
      }
      for (i64 first = 0; first < p.count; first += StatePiece::kMostOpen) {
        StatePiece here = p.open(first, std::min(StatePiece::kMostOpen, p.count - first), true);
        here.param = p.param;  // of the manifest
        fill_piece(*reader, dtypes[i], here);
      }
    }
  });
  return reader->manifest().meta;
}

}  // namespace ds
