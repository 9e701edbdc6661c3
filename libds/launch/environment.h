// SPDX-License-Identifier: Apache-2.0
#pragma once
// Environments of jobs: which variables are removed, and which are sent to other hosts.

#include <map>
#include <string>
#include <vector>

namespace ds::launch {

using Environment = std::map<std::string, std::string>;
// The signals for which Open MPI prints a stack trace, in a handler that may wait for ever for a lock of the
// interrupted code (malloc's, for example). Set to empty for mpirun, so that the signal ends it; ranks do not get this
// setting.
inline constexpr const char* kTracedSignals = "OMPI_MCA_opal_signal";
Environment parse_environment(const std::vector<std::string>& strings);
void add(Environment& environment, const std::vector<std::string>& strings);
std::string value_or(const Environment& environment, const std::string& name, std::string fallback);

// Removes variables that another MPI launcher has set for this process: they would confuse mpirun.
void forget_other_jobs(Environment& environment);

// The variables that are sent to other hosts. Those that describe this machine, login or session are left out: a host
// uses its own.
std::vector<std::string> portable_environment(const std::vector<std::string>& environment);

}  // namespace ds::launch
