// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the tools that copy models share: a progress line, stopping by a signal without leaving anything behind, and
// standard output as the place where a model goes.

#include <chrono>
#include <functional>

#include "common/progress.h"
#include "common/tool.h"

namespace ds::tools {

// While it lives, SIGINT, SIGTERM, SIGHUP and SIGQUIT end the work at the next call of the hook: what is half-written
// goes, and the process ends by that signal.
class CopyLine {
 public:
  CopyLine();
  ~CopyLine();
  CopyLine(const CopyLine&) = delete;
  CopyLine& operator=(const CopyLine&) = delete;

  std::function<void(i64 done, i64 total)> hook();

 private:
  ProgressLine line_;
  std::chrono::steady_clock::time_point start_;
};

// Throws Errc::Config if the report (--output) and the model (--out) would be the same file.
void check_outputs_differ(const Output& out, const std::string& model);

// The model goes to standard output: throws Errc::Config if that is a terminal, or if the report would go there too. A
// reader that goes away ends the process, as it does cat(1).
void claim_stdout(const Output& out);

// "5GB" (10^9), "5GiB" (2^30), "5G" (10^9), "1000000". Throws Errc::Config naming the option.
i64 parse_bytes(std::string_view option, std::string_view text);

}  // namespace ds::tools
