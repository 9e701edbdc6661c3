// SPDX-License-Identifier: Apache-2.0
#pragma once
// Identifies processes by more than their number, for files that they leave behind: process numbers are reused, and
// differ between namespaces.

#include "ds/kernels/dtype.h"

namespace ds {

struct ProcessStat {
  char state = 0;        // as in ps(1); 0: no such process
  bool exiting = false;  // it is exiting: others may see its closed files, but cannot wait for it yet
  u64 start = 0;         // clock ticks since boot
};
ProcessStat process_stat(i32 pid);

// True if the process that started at `start` has ended, given the current owner of its number.
bool has_ended(const ProcessStat& now, u64 start) noexcept;

// The namespace of this process's number; 0: unknown.
u64 pid_namespace() noexcept;

}  // namespace ds
