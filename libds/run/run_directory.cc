// SPDX-License-Identifier: Apache-2.0
#include "run/run_directory.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/limits.h"

namespace ds::run {
namespace fs = std::filesystem;
namespace {

bool is_step_name(const std::string& name) { return name.starts_with(kStepPrefix); }

struct Contents {
  bool empty = true;   // but for our own lock file, left by a run that was killed before its first step
  bool a_run = false;  // metrics or checkpoints
  std::string newest;  // step directory
};
Contents contents_of(const std::string& path) {
  Contents c;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    if (name == kLockName) continue;
    c.empty = false;
    c.a_run |= name == kMetricsName || name == kLatestName || is_step_name(name);
    if (is_step_name(name)) c.newest = std::max(c.newest, name);  // numbers of one width
  }
  DS_CHECK(!error, Errc::Config, "cannot read the run directory {}: {}", path, error.message());
  return c;
}

// The directories that must be made for `path`, outermost first. Links are followed, also one that leads to nothing
// yet.
std::vector<fs::path> missing_directories(const std::string& path) {
  std::vector<fs::path> missing;
  std::error_code error;
  try {
    for (fs::path dir = fs::absolute(path).lexically_normal(); !fs::exists(dir, error); dir = dir.parent_path())
      missing.insert(missing.begin(), dir = follow_links(dir.string()));
  } catch (const Error& e) {
    throw Error(Errc::Config, fmt::format("cannot create run directory {}: {}", path, e.what()));
  }
  return missing;
}

}  // namespace

void RunDirectory::check(const std::string& path, const std::string& resume, const std::string& step_dir) {
  std::error_code error;
  // Nothing is missing where another run makes it just now.
  if (const std::vector<fs::path> missing = missing_directories(path); !missing.empty()) {
    const fs::path above = missing.front().parent_path();
    DS_CHECK(fs::is_directory(above, error) && access(above.c_str(), W_OK | X_OK) == 0, Errc::Config,
             "cannot create run directory {}: {}", path,
             system_reason(fs::is_directory(above, error) ? errno : ENOTDIR));
    return;
  }
  DS_CHECK(fs::is_directory(path, error), Errc::Config, "run directory {} is not a directory", path);
  const Contents found = contents_of(path);
  if (found.empty) return;
  DS_CHECK(!resume.empty(), Errc::Config,
           "run directory {} is not empty: continue its run with --resume latest, or choose another directory", path);
  DS_CHECK(found.a_run, Errc::Config, "{} holds files, but no run: choose another directory", path);
  if (resume == "latest") return;
  const fs::path step(step_dir);
  DS_CHECK(fs::equivalent(step.parent_path().empty() ? "." : step.parent_path(), path, error), Errc::Config,
           "run directory {} holds another run than {}: choose another directory", path, step_dir);
  DS_CHECK(step.filename() == found.newest, Errc::Config,
           "run directory {} holds {}, which is newer than {}: remove it, or choose another directory", path,
           found.newest, step_dir);
}

RunDirectory::RunDirectory(std::string path, const std::string& resume, const std::string& step_dir)
    : path_(std::move(path)) {
  check(path_, resume, step_dir);
  std::vector<fs::path> created;
  std::error_code error;
  try {
    for (const fs::path& dir : missing_directories(path_)) {
      if (fs::create_directory(dir, error)) created.push_back(dir);
      DS_CHECK(!error, Errc::Config, "cannot create run directory {}: {}", path_, error.message());
      sync_directory(dir.parent_path());
    }
    lock_.emplace(path_);
    check(path_, resume, step_dir);  // another run may have ended while we came to the lock
  } catch (...) {
    lock_.reset();
    for (; !created.empty(); created.pop_back()) fs::remove(created.back(), error);
    throw;
  }
}

void RunDirectory::check_ours() const {
  DS_CHECK(lock_->is_held(), Errc::Io, "run directory {} was removed or replaced while this run used it", path_);
}

RunDirectory::Kept RunDirectory::cut_metrics(i64 step) {
  std::error_code error;
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;  // what a run left that was killed right here
    if (it->path().filename().string().starts_with(fmt::format(".{}.tmp-", kMetricsName)))
      fs::remove(it->path(), ignored);
  }
  if (!fs::exists(metrics_path(), error)) return {};
  DS_CHECK(fs::is_regular_file(metrics_path(), error), Errc::Io, "{} is not a regular file", metrics_path());
  constexpr i64 kMaxLine = i64{64} << 20;
  PendingFile kept(metrics_path());
  DirectWriter writer(kept.file());
  i64 bytes = 0;
  Kept result;
  for_each_line(File::open_read(metrics_path()), kMaxLine, [&](std::string_view line, bool) {
    const Json parsed = Json::parse(line, nullptr, false);
    // A torn last line, or one without a step, goes: the resumed run starts with a whole file.
    if (parsed.is_object() && parsed.contains("step") && parsed["step"].is_number_integer() &&
        parsed["step"].get<i64>() <= step) {
      const std::string text = std::string(line) + "\n";
      writer.write(bytes, text.data(), std::ssize(text));
      bytes += std::ssize(text);
      if (!parsed.contains("type")) return;
      result.evaluated |= parsed["type"] == "eval" && parsed["step"] == step;
      if (parsed["type"] == "step") result.last_step = parsed["step"].get<i64>();
    }
  });
  writer.flush();
  kept.commit();
  return result;
}

void RunDirectory::append_metrics(const Json& line) {
  check_ours();
  if (!metrics_) metrics_.emplace(metrics_path());
  metrics_->append(line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace ds::run
