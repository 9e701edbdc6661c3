// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/output_place.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/file.h"
#include "checkpoint/deepspeed.h"
#include "checkpoint/manifest.h"
#include "checkpoint/run_names.h"
#include "ds/checkpoint.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

// Files that runs, and those of DeepSpeed, keep next to their steps.
constexpr std::array<std::string_view, 4> kOwnNames = {kLatestName, kLatestUniversalName, kMetricsName, kLockName};

// A saved step, or what a save that was cut off left of one; a tag of DeepSpeed's.
bool is_step(const fs::path& dir) {
  const auto has = [&](std::string_view name) {
    std::error_code ignored;
    return fs::exists(dir / name, ignored);
  };
  return has(kManifestName) ||
         (parse_step_name(dir.filename().string()) && (has(kViewName) || has(rank_file_name(0)))) ||
         has("mp_rank_00_model_states.pt") || has("zero_pp_rank_0_mp_rank_00_model_states.pt");
}

// Whether something in `dir`, other than `name`, says that it is a run's.
bool is_run(const fs::path& dir, const fs::path& name) {
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const fs::path entry = it->path().filename();
    if (entry == name) continue;
    if (entry == kLatestName || entry == kLatestUniversalName || parse_step_name(entry.string())) return true;
  }
  return false;
}

}  // namespace

void check_place(const std::string& path) {
  const fs::path target = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();  // "dir/"
  const std::string parent = parent_directory(target.string());
  std::error_code error;
  DS_CHECK(fs::is_directory(parent, error), Errc::Config, "{}: there is no directory {}", path, parent);
  const fs::path folder = fs::canonical(parent, error);
  if (error) return;  // a way there that we may not look at
  for (fs::path dir = folder; dir != dir.root_path(); dir = dir.parent_path()) {
    DS_CHECK(!is_step(dir), Errc::Config, "{}: is inside a checkpoint step, which must not be changed", path);
  }
  const fs::path name = target.filename();
  const bool is_own = parse_step_name(name.string()) || std::ranges::find(kOwnNames, name.string()) != kOwnNames.end();
  DS_CHECK(!is_own || !(is_run(folder, name) || is_deepspeed(folder)), Errc::Config,
           "{}: is a name that runs use themselves; choose another", path);
}

void check_room(const std::string& dir, i64 bytes) {
  struct statvfs fs = {};
  if (::statvfs(dir.c_str(), &fs) != 0 || fs.f_blocks == 0) return;  // one that does not say: writing will tell
  const double room = static_cast<double>(fs.f_bavail) * static_cast<double>(fs.f_frsize);
  DS_CHECK(static_cast<double>(bytes) <= room, Errc::Io, "{}: the output has {} bytes, but only {:.0f} are free", dir,
           bytes, room);
}

}  // namespace ds
