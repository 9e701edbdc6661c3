// SPDX-License-Identifier: Apache-2.0
#pragma once
// Limits of the process and its user (ulimit, cgroups), and how errors name them.

#include <sys/resource.h>

#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"
#include "ds/limits.h"

namespace ds {

// Empty: unlimited.
std::optional<u64> limit_of(__rlimit_resource resource) noexcept;

// Throws Errc::Unavailable, with the limit's name and value, if the limit of the resource is below `needed`. The
// resource must be FSIZE, STACK, NOFILE, AS or DATA. `needed_for`: "starting 2 ranks".
void require_limit(__rlimit_resource resource, u64 needed, std::string_view needed_for);

// The same for the stacks of that many threads. The data limit may be too small for them, or the stack limit too large,
// since each thread gets a stack of that size.
void require_stacks(int threads, std::string_view needed_for);

// The same for `needed` more processes or threads. Tests this by starting that many idle threads, so that all limits
// apply, whoever set them.
void require_tasks(int needed, std::string_view needed_for);

// The limit that most likely prevents a process or thread from starting: "the limit of ... (ulimit -u) is 5".
std::string limit_of_tasks();

// Memory of this process; 0: unknown. Safe between fork and exec. Data is the amount that the data limit counts, which
// includes stacks.
u64 address_space_bytes() noexcept;
u64 data_bytes() noexcept;

// Stack size of a thread that is started without stating one.
u64 thread_stack_bytes() noexcept;

}  // namespace ds
