// SPDX-License-Identifier: Apache-2.0
#pragma once
// The hosts of a job, read from a file or an option. A hostfile has a host a line, as DeepSpeed and Open MPI write it:
//
//   # name or address      ranks that may run there; 1 if it is left out
//   node-a                 slots=4
//   10.0.0.7               slots=4
//   [2001:db8::7]          slots=4
//
// What is read here ends up in the arguments of ssh, so names are held to what names are: letters, digits, '-', '_' and
// '.', never a '-' first.

#include <string>
#include <string_view>
#include <vector>

#include "ds/launch.h"

namespace ds::launch {

inline constexpr int kMaxSlots = 4096;

// read_hostfile() of a text. A carriage return before a newline is passed over, the last newline may lack; no host
// twice, at least one. Of many mistakes the first twenty are told.
std::vector<LaunchHost> parse_hostfile(std::string_view text, const std::string& file);

}  // namespace ds::launch
