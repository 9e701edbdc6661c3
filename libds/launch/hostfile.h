// SPDX-License-Identifier: Apache-2.0
#pragma once
// The hosts of a job, read from a file or an option. A host file has one host per line, as in DeepSpeed and Open MPI:
//
//   # name or address      ranks that may run there; the default is 1
//   node-a                 slots=4
//   10.0.0.7               slots=4
//   [2001:db8::7]          slots=4
//
// Names become arguments of ssh, so they may contain only letters, digits, '-', '_' and '.', and may not begin with
// '-'.

#include <string>
#include <string_view>
#include <vector>

#include "ds/launch.h"

namespace ds::launch {

inline constexpr int kMaxSlots = 4096;

// read_hostfile() of a text. A carriage return before a newline is ignored, and the last newline may be missing. There
// must be at least one host, and none twice. Reports at most twenty mistakes.
std::vector<LaunchHost> parse_hostfile(std::string_view text, const std::string& file);

}  // namespace ds::launch
