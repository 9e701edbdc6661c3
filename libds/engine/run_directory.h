// SPDX-License-Identifier: Apache-2.0
#pragma once
// The run directory as rank 0 owns it: one run at a time (a lock that dies with the process), metrics.jsonl,
// config.json.

#include <string>

#include "base/json.h"

namespace ds::engine {

class RunDirectory {
 public:
  // Creates `path` or takes it over for a resumed run. Throws Errc::Config when another run holds it, or when it is not
  // empty and `resuming` is false; Errc::Io with the system's words.
  RunDirectory(std::string path, bool resuming);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  // Keeps the lines of metrics.jsonl up to and including `step`: the resumed run writes the later ones anew.
  void cut_metrics(i64 step);
  // Appends one line, whole, at once.
  void append_metrics(const Json& line);

  const std::string& path() const noexcept { return path_; }

 private:
  std::string metrics_path() const { return path_ + "/metrics.jsonl"; }
  std::string path_;
  int lock_fd_ = -1;
  int metrics_fd_ = -1;
};

}  // namespace ds::engine
