// SPDX-License-Identifier: Apache-2.0
#pragma once
// The run directory, which rank 0 owns: a lock that ends with the process admits one run at a time.

#include <optional>
#include <string>

#include "base/appended_file.h"
#include "base/json.h"
#include "checkpoint/run_lock.h"
#include "checkpoint/run_names.h"

namespace ds::run {

class RunDirectory {
 public:
  // Throws Errc::Config if a run that resumes from `step_dir` (empty: a new run) cannot use `path`: if it is not a
  // directory; if it is not empty and either contains no run or `resume` is empty; if it contains steps that would be
  // mixed with those of a run that resumes from an older step or from another run. Touches nothing.
  static void check(const std::string& path, const std::string& resume, const std::string& step_dir);

  // Creates `path` or takes it over. Throws what check() throws; Errc::Config if another run holds it or it cannot be
  // created; Errc::Io with the system's message.
  RunDirectory(std::string path, const std::string& resume, const std::string& step_dir);
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  // Keeps the lines of metrics.jsonl up to and including `step`: the resumed run writes later ones again.
  struct Kept {
    bool evaluated = false;  // `step` has an evaluation
    i64 last_step = 0;       // the last step with a line; 0: none
  };
  Kept cut_metrics(i64 step);
  // Appends one line, completely or not at all. Throws Errc::Io; what check_ours() throws.
  void append_metrics(const Json& line);
  // Throws Errc::Io if the directory was removed or replaced: it may now belong to another run.
  void check_ours() const;

  const std::string& path() const noexcept { return path_; }

 private:
  std::string metrics_path() const { return path_ + "/" + kMetricsName; }
  std::string path_;
  std::optional<RunLock> lock_;
  std::optional<AppendedFile> metrics_;
};

}  // namespace ds::run
