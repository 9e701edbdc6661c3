// SPDX-License-Identifier: Apache-2.0
#pragma once
// Signals that end a process, and the cleanup that has to happen before.

#include <vector>

#include "ds/error.h"

namespace ds {

// Signals sent from outside to end or notify a process, which end it by default. Excludes SIGKILL, fault signals, and
// SIGPIPE and SIGXFSZ, which tools handle as errors of write().
DS_API std::vector<int> ending_signals();
// Signals for faults of the process itself, such as SIGSEGV.
DS_API std::vector<int> fault_signals();

// Removes this process's names from /dev/shm. Async-signal-safe, for a handler of a signal that ends the process; open
// mappings stay usable.
DS_API void remove_shared_names() noexcept;

}  // namespace ds
