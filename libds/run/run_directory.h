// SPDX-License-Identifier: Apache-2.0
#pragma once
// The run directory as rank 0 owns it: one run at a time (a lock that dies with the process), metrics.jsonl,
// config.json.

#include <optional>
#include <string>

#include "base/appended_file.h"
#include "base/json.h"
#include "checkpoint/run_lock.h"
#include "checkpoint/run_names.h"

namespace ds::run {

class RunDirectory {
 public:
  // Throws Errc::Config if a run that goes on from `step_dir` (empty: from the start) cannot have `path` for its own:
  // it is no directory; it holds something, and either is no run's or `resume` is empty; it holds steps that a run from
  // an older one, or from another run's, would mix with its own. Touches nothing.
  static void check(const std::string& path, const std::string& resume, const std::string& step_dir);

  // Creates `path` or takes it over. Throws what check() throws; Errc::Config when another run holds it or it cannot be
  // made; Errc::Io with the system's words.
  RunDirectory(std::string path, const std::string& resume, const std::string& step_dir);
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  // Keeps the lines of metrics.jsonl up to and including `step`: the resumed run writes the later ones anew.
  struct Kept {
    bool evaluated = false;  // `step` was
    i64 last_step = 0;       // that has a line; 0: none
  };
  Kept cut_metrics(i64 step);
  // Appends one line, whole or not at all. Throws Errc::Io; what check_ours() throws.
  void append_metrics(const Json& line);
  // Throws Errc::Io if somebody has removed or replaced the directory: what is there now may be another run's.
  void check_ours() const;

  const std::string& path() const noexcept { return path_; }

 private:
  std::string metrics_path() const { return path_ + "/" + kMetricsName; }
  std::string path_;
  std::optional<RunLock> lock_;
  std::optional<AppendedFile> metrics_;
};

}  // namespace ds::run
