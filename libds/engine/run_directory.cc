// SPDX-License-Identifier: Apache-2.0
#include "engine/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "base/file.h"

namespace ds::engine {
namespace fs = std::filesystem;
namespace {

constexpr const char* kLockName = "lock";

// Nothing but our own lock file: left by a run that failed before its first step.
bool is_empty(const std::string& path) {
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().filename() != kLockName) return false;
  }
  return true;
}

}  // namespace

RunDirectory::RunDirectory(std::string path, bool resuming) : path_(std::move(path)) {
  std::error_code error;
  fs::create_directories(path_, error);
  DS_CHECK(!error, Errc::Io, "cannot create run directory {}: {}", path_, error.message());
  DS_CHECK(fs::is_directory(path_), Errc::Config, "run directory {} is not a directory", path_);
  DS_CHECK(resuming || is_empty(path_), Errc::Config,
           "run directory {} is not empty: continue its run with --resume latest, or choose another directory", path_);
  const std::string lock = path_ + "/" + kLockName;
  lock_fd_ = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  DS_CHECK(lock_fd_ >= 0, Errc::Io, "cannot open {}: {}", lock, std::strerror(errno));
  if (flock(lock_fd_, LOCK_EX | LOCK_NB) != 0) {
    char holder[32] = {};
    const ssize_t n = read(lock_fd_, holder, sizeof holder - 1);
    close(lock_fd_);
    throw Error(Errc::Config, fmt::format("run directory {} is in use by another run (process {})", path_,
                                          n > 0 ? std::string(holder, static_cast<size_t>(n)) : "unknown"));
  }
  const std::string pid = std::to_string(getpid());
  if (ftruncate(lock_fd_, 0) != 0 || pwrite(lock_fd_, pid.data(), pid.size(), 0) < 0) {
    close(lock_fd_);
    throw Error(Errc::Io, fmt::format("cannot write {}: {}", lock, std::strerror(errno)));
  }
}

RunDirectory::~RunDirectory() {
  if (metrics_fd_ >= 0) close(metrics_fd_);
  if (lock_fd_ >= 0) {
    unlink((path_ + "/" + kLockName).c_str());
    close(lock_fd_);
  }
}

void RunDirectory::cut_metrics(i64 step) {
  std::ifstream in(metrics_path());
  if (!in) return;
  std::string kept;
  for (std::string line; std::getline(in, line);) {
    const Json parsed = Json::parse(line, nullptr, false);
    // A torn last line, or one without a step, goes: the resumed run starts with a whole file.
    if (parsed.is_object() && parsed.contains("step") && parsed["step"].is_number_integer() &&
        parsed["step"].get<i64>() <= step) {
      kept += line + "\n";
    }
  }
  replace_text_file(metrics_path(), kept);
}

void RunDirectory::append_metrics(const Json& line) {
  if (metrics_fd_ < 0) {
    metrics_fd_ = open(metrics_path().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    DS_CHECK(metrics_fd_ >= 0, Errc::Io, "cannot open {}: {}", metrics_path(), std::strerror(errno));
  }
  const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  const ssize_t n = write(metrics_fd_, text.data(), text.size());
  DS_CHECK(n == static_cast<ssize_t>(text.size()), Errc::Io, "cannot write {}: {}", metrics_path(),
           n < 0 ? std::strerror(errno) : "short write");
}

}  // namespace ds::engine
