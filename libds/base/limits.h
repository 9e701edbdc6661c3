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

// Nothing: there is none.
std::optional<u64> limit_of(__rlimit_resource resource) noexcept;

// Throws Errc::Unavailable, with the limit's name and value, if the process may have less than `needed` of the
// resource, which must be one of FSIZE, STACK, NOFILE, AS and DATA. `needed_for`: "starting 2 ranks".
void require_limit(__rlimit_resource resource, u64 needed, std::string_view needed_for);

// The same of the stacks of so many threads, which a limit of data may be too small for, and a limit of the stack too
// large: each thread has a stack of that size.
void require_stacks(int threads, std::string_view needed_for);

// The same of processes and threads, of which `needed` more than there are must fit. Found by starting so many threads
// that do nothing: all limits have their say, whoever set them.
void require_tasks(int needed, std::string_view needed_for);

// What keeps a process or thread from being started, as far as that can be seen: "the limit of ... (ulimit -u) is 5".
std::string limit_of_tasks();

// That this process has; 0: unknown. Safe between fork and exec. Data: what a limit of data counts, stacks too.
u64 address_space_bytes() noexcept;
u64 data_bytes() noexcept;

// Of the stack of a thread that is started without asking for one.
u64 thread_stack_bytes() noexcept;

}  // namespace ds
