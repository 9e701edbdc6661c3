// SPDX-License-Identifier: Apache-2.0
#pragma once
// One line on the terminal of stderr, drawn over itself; nothing at all where stderr is not a terminal, or with
// --quiet. Messages and results take it away before they are written.

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
  // For work that could show a line at any moment: true five times a second at most, and not at once.
  bool is_due();
  // Shows what it is given when that is due. The line must outlive it.
  std::function<void(std::string_view)> hook();

 private:
  int columns_;
  std::chrono::steady_clock::time_point was_due_ = std::chrono::steady_clock::now();
};

// "2m05s", "3h20m".
std::string duration(double seconds);

// What one step looks like to a person; a narrow terminal cuts the end off.
class StepText {
 public:
  std::string operator()(const StepRecord& step, i64 total_steps);

 private:
  double mean_ms_ = 0;
};

// A line of ds-train --json.
nlohmann::ordered_json step_document(const StepRecord& step);

}  // namespace ds::tools
