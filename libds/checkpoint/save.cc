// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/file.h"
#include "checkpoint/step_writer.h"
#include "checkpoint/together.h"
#include "ds/log.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

const void* state_data(const StatePiece& p, State s) noexcept {
  switch (s) {
    case State::Param: return p.param_data;
    case State::Master: return p.master;
    case State::ExpAvg: return p.exp_avg;
    case State::ExpAvgSq: return p.exp_avg_sq;
  }
  return nullptr;
}

}  // namespace

std::string save_checkpoint(const std::string& dir, CheckpointMeta meta, const std::vector<ParamEntry>& params,
                            std::span<const StatePiece> pieces, Communicator& comm) {
  const bool lead = comm.rank() == 0;
  Manifest m;
  m.id = random_hex64();
  comm.broadcast(m.id.data(), narrow<i64>(m.id.size()), 0, "checkpoint").wait();
  m.meta = std::move(meta);
  m.meta.world_size = comm.size();
  m.params = params;
  std::string step_dir = fmt::format("{}/{}", dir, step_name(m.meta.step));
  try {
    together(comm, [&] {
      if (lead) prepare_step(dir, m.meta.step);
    });
    FileRecord mine;
    together(comm, [&] {
      std::vector<PieceRange> ranges;
      RankContents contents;
      for (const StatePiece& p : pieces) {
        ranges.push_back({p.param, p.begin, p.count});
        for (State s : kStates) contents.states[static_cast<size_t>(s)] |= state_data(p, s) != nullptr;
      }
      contents.pieces = ranges;
      contents.elements = [&](State s, size_t piece, i64 first, i64) {
        const StatePiece& p = pieces[piece];
        return static_cast<const char*>(state_data(p, s)) + first * dtype_bytes(m.stored_dtype(s, p.param));
      };
      mine = write_rank_file(dir, m, comm.rank(), contents);
    });
    const std::vector<std::string> records = gather_text(comm, format_file_record(mine));
    together(comm, [&] {
      if (!lead) return;
      for (const std::string& text : records) m.files.push_back(parse_file_record(text));
      commit_step(dir, m);
    });
  } catch (...) {
    if (lead) abandon_step(dir, m.meta.step);
    throw;
  }
  return step_dir;
}

void remove_old_steps(const std::string& dir, i64 newest, i64 keep) {
  std::vector<i64> steps;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::optional<i64> step = parse_step_name(it->path().filename().string());
    if (step && *step < newest) steps.push_back(*step);
  }
  if (error) log_message(LogLevel::Warning, fmt::format("cannot list old checkpoints in {}: {}", dir, error.message()));
  std::sort(steps.rbegin(), steps.rend());
  for (size_t i = static_cast<size_t>(keep - 1); i < steps.size(); ++i) {
    // Renamed first: a step is there whole or not at all.
    const std::string path = fmt::format("{}/{}", dir, step_name(steps[i]));
    const std::string doomed = fmt::format("{}/.tmp-{}", dir, step_name(steps[i]));
    fs::remove_all(doomed, error);
    if (!error) fs::rename(path, doomed, error);
    if (!error) fs::remove_all(doomed, error);
    if (error) {
      log_message(LogLevel::Warning, fmt::format("cannot remove the old checkpoint {}: {}", path, error.message()));
    }
  }
}

}  // namespace ds
