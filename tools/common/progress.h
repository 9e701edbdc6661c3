// SPDX-License-Identifier: Apache-2.0
#pragma once
// One line on the terminal of stderr, drawn over itself; nothing at all where stderr is not a terminal, or with
// --quiet.

#include <string_view>

namespace ds::tools {

class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // ends the line, if one was drawn
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(std::string_view line);

 private:
  int columns_;
  bool drawn_ = false;
};

}  // namespace ds::tools
