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
struct BrokenPipe {};  // thrown when the reader of stdout went away; run_main then dies of SIGPIPE, quietly

// All of `bytes` to fd; throws ds::Error naming `what`, or BrokenPipe.
void write_all(int fd, std::string_view bytes, std::string_view what);

// Takes the progress line away, if one is drawn, so that other text does not end up behind it.
void clear_progress() noexcept;

// With dashes: of an option that is shown the first short and the first long one, of another none.
std::vector<std::string> shown_names(const CLI::Option& option);

struct MessageOptions {
  std::string_view tool;
  bool quiet = false;
  bool verbose = false;
};
extern MessageOptions message_options;  // set once by run_main before anything else runs

}  // namespace ds::tools
