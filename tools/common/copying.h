// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared by the tools that copy models: a progress line, a clean stop by a signal, and models on standard output.

#include <chrono>
#include <functional>

#include "common/progress.h"
#include "common/tool.h"

namespace ds::tools {

// While a CopyLine exists, SIGINT, SIGTERM, SIGHUP and SIGQUIT end the work at the next call of the hook: unfinished
// output is removed, and the process ends by that signal.
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

// For a model on standard output: throws Errc::Config if that is a terminal, or if the report would go there too. If
// the reader closes it, the process ends, like cat(1).
void claim_stdout(const Output& out);

// "5GB" (10^9), "5GiB" (2^30), "5G" (10^9), "1000000". Throws Errc::Config naming the option.
i64 parse_bytes(std::string_view option, std::string_view text);

}  // namespace ds::tools
