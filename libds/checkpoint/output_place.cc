// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/output_place.h"

#include <sys/statvfs.h>

#include <filesystem>

#include "base/file.h"
#include "checkpoint/manifest.h"
#include "ds/checkpoint.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

// A saved step, or what a save that was cut off left of one; a tag of DeepSpeed's.
bool is_step(const fs::path& dir) {
  const auto has = [&](std::string_view name) { return fs::exists(dir / name); };
  return parse_step_name(dir.filename().string()) || (has(kManifestName) && has(kViewName)) ||
         has("mp_rank_00_model_states.pt") || has("zero_pp_rank_0_mp_rank_00_model_states.pt");
}

bool is_run(const fs::path& dir) {
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().filename() == "latest" || parse_step_name(entry.path().filename().string())) return true;
  }
  return false;
}

}  // namespace

void check_place(const std::string& path) {
  const fs::path target = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();  // "dir/"
  const std::string parent = parent_directory(target.string());
  std::error_code error;
  DS_CHECK(fs::is_directory(parent, error), Errc::Config, "{}: there is no directory {}", path, parent);
  const fs::path folder = fs::canonical(parent);
  for (fs::path dir = folder; dir != dir.root_path(); dir = dir.parent_path()) {
    DS_CHECK(!is_step(dir), Errc::Config, "{}: lies inside a checkpoint step, which must stay as it was saved", path);
  }
  for (const std::string_view part : {"latest", "metrics.jsonl", "lock"}) {
    DS_CHECK(target.filename() != part || !is_run(folder), Errc::Config,
             "{}: is the run's own file; choose another name", path);
  }
}

void check_room(const std::string& dir, i64 bytes) {
  struct statvfs fs = {};
  if (::statvfs(dir.c_str(), &fs) != 0 || fs.f_blocks == 0) return;  // one that does not say: writing will tell
  const double room = static_cast<double>(fs.f_bavail) * static_cast<double>(fs.f_frsize);
  DS_CHECK(static_cast<double>(bytes) <= room, Errc::Io, "{}: the output has {} bytes, and there is room for {:.0f}",
           dir, bytes, room);
}

}  // namespace ds
