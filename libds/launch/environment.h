// SPDX-License-Identifier: Apache-2.0
#pragma once
// Environments of jobs: what is taken out of them, and what goes to other hosts.

#include <map>
#include <string>
#include <vector>

namespace ds::launch {

using Environment = std::map<std::string, std::string>;
// Which signals Open MPI prints a stack trace for, in a handler that may wait for ever for what the interrupted code
// held (malloc's lock, say). Empty for mpirun, so that the signal ends it; ranks do not see that.
inline constexpr const char* kTracedSignals = "OMPI_MCA_opal_signal";
Environment parse_environment(const std::vector<std::string>& strings);
void add(Environment& environment, const std::vector<std::string>& strings);
std::string value_or(const Environment& environment, const std::string& name, std::string fallback);

// Removes what another launcher of MPI programs told this process: it would confuse mpirun.
void forget_other_jobs(Environment& environment);

// What other hosts get of an environment. What describes this machine, this login or this session stays: the host's own
// holds there.
std::vector<std::string> portable_environment(const std::vector<std::string>& environment);

}  // namespace ds::launch
