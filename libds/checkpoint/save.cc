// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "checkpoint/step_save.h"
#include "ds/log.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string save_checkpoint(const std::string& dir, CheckpointMeta meta, const std::vector<ParamEntry>& params,
                            std::span<const StatePiece> pieces, Communicator& comm) {
  StepSave save(dir, std::move(meta), params, pieces, comm);
  do {
    save.work();
  } while (save.meet());
  if (save.error()) throw Error(*save.error());
  return save.step_dir();
}

std::vector<i64> list_steps(const std::string& dir) {
  std::vector<i64> steps;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::optional<i64> step = parse_step_name(it->path().filename().string());
    if (step) steps.push_back(*step);
  }
  if (error) log_message(LogLevel::Warning, fmt::format("cannot list old checkpoints in {}: {}", dir, error.message()));
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

void remove_old_steps(const std::string& dir, i64 newest, i64 keep, std::span<const i64> passed_over) {
  std::error_code error;
  std::vector<i64> steps = list_steps(dir);
  std::erase_if(steps, [&](i64 s) { return s >= newest || std::ranges::find(passed_over, s) != passed_over.end(); });
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
