// SPDX-License-Identifier: Apache-2.0
#include "common/progress.h"

#include <cstdio>

#include "common/tool.h"

namespace ds::tools {

ProgressLine::ProgressLine() : columns_(quiet() ? 0 : terminal_columns()) {}

ProgressLine::~ProgressLine() {
  if (drawn_) fmt::print(stderr, "\n");
}

void ProgressLine::show(std::string_view line) {
  if (columns_ <= 1) return;
  fmt::print(stderr, "\r{:.{}}\x1b[K", line, columns_ - 1);
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace ds::tools
