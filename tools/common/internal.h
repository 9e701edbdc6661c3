// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared by the sources of tools/common only.

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ds::tools {

// A signal ends the process, after destructors have cleaned up.
struct StoppedBySignal {
  int signal;
};
struct BrokenPipe {};  // thrown when the reader of stdout closed it; run_main then ends by SIGPIPE, without a message

// All of `bytes` to fd; throws ds::Error naming `what`, or BrokenPipe.
void write_all(int fd, std::string_view bytes, std::string_view what);

// Erases the progress line, if there is one, so that other text does not follow it on its line.
void clear_progress() noexcept;

// The names to show, with dashes: the first short and the first long one; empty for a hidden option.
std::vector<std::string> shown_names(const CLI::Option& option);

struct MessageOptions {
  std::string_view tool;
  bool quiet = false;
  bool verbose = false;
};
extern MessageOptions message_options;  // set once by run_main before anything else runs

}  // namespace ds::tools
