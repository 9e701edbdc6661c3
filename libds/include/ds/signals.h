// SPDX-License-Identifier: Apache-2.0
#pragma once
// Signals that end a process, and what has to be done before it ends by one.

#include <vector>

#include "ds/error.h"

namespace ds {

// Those that others send to end or to notify a process, which end it unless it handles them: not SIGKILL, not those of
// its own faults, and neither SIGPIPE nor SIGXFSZ, which tools take as errors of write().
DS_API std::vector<int> ending_signals();
// Those of its own faults, SIGSEGV and the like.
DS_API std::vector<int> fault_signals();

// Removes the names that this process has in /dev/shm. For a handler of a signal that ends the process:
// async-signal-safe, and the files stay usable until then.
DS_API void remove_shared_names() noexcept;

}  // namespace ds
