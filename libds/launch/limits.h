// SPDX-License-Identifier: Apache-2.0
#pragma once
// What Open MPI needs of this process's limits: with less it crashes or waits for ever, and says nothing that helps.

namespace ds::launch {

// Throws Errc::Unavailable, with the name of a limit, its value and the one needed, if mpirun, or orted, could not
// start `ranks` ranks on this machine.
void check_limits(int ranks);

}  // namespace ds::launch
