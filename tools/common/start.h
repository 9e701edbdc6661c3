// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tool of several ranks that starts itself.

#include <string>
#include <vector>

namespace ds::tools {

// This process becomes ds-launch, from beside this program or from PATH, with `ranks` ranks of the same command line;
// they see in their environment (WORLD_SIZE) that they are started. `options`: more of ds-launch's.
[[noreturn]] void start_ranks(int ranks, const std::vector<std::string>& options,
                              const std::vector<std::string>& command);

}  // namespace ds::tools
