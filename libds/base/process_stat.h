// SPDX-License-Identifier: Apache-2.0
#pragma once
// Processes as others know them, for what they leave behind: numbers of processes come again, and mean other processes
// in other namespaces.

#include "ds/kernels/dtype.h"

namespace ds {

struct ProcessStat {
  char state = 0;        // as in ps(1); 0: no such process
  bool exiting = false;  // its end has begun, and others may see what it has closed; it may not be waited for yet
  u64 start = 0;         // clock ticks since boot
};
ProcessStat process_stat(i32 pid);

// Whether the process that began at `start` has ended, by what is known of its number now.
bool has_ended(const ProcessStat& now, u64 start) noexcept;

// In which this process has its number; 0: unknown.
u64 pid_namespace() noexcept;

}  // namespace ds
