// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a run that trains takes signals.

namespace ds::tools {

// From now on a signal that asks the run to stop is kept for stop_signal(), and a second SIGINT ends the process; one
// that ends a process otherwise does so when what the process has in /dev/shm has lost its names.
void stop_after_a_step();
int stop_signal() noexcept;  // that came last; 0: none

}  // namespace ds::tools
