// SPDX-License-Identifier: Apache-2.0
#pragma once
// A progress line on the terminal of stderr, redrawn in place; nothing if stderr is not a terminal, or with --quiet.
// Messages and results erase it before they are written.

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "ds/train.h"

namespace ds::tools {

class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // ends the line, if one was drawn
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(std::string_view line);
  // True at most five times a second, and not at once, for work that could show a line at any moment.
  bool is_due();
  // Shows a text when it is due. The line must outlive it.
  std::function<void(std::string_view)> hook();

 private:
  int columns_;
  std::chrono::steady_clock::time_point was_due_ = std::chrono::steady_clock::now();
};

// "2m05s", "3h20m".
std::string duration(double seconds);

// The text of one step; a narrow terminal cuts its end off.
class StepText {
 public:
  std::string operator()(const StepRecord& step, i64 total_steps);

 private:
  double mean_ms_ = 0;
};

// A line of ds-train --json.
nlohmann::ordered_json step_document(const StepRecord& step);

}  // namespace ds::tools
