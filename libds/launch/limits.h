// SPDX-License-Identifier: Apache-2.0
#pragma once
// The limits of this process that Open MPI needs: below them it crashes or hangs, without a helpful message.

namespace ds::launch {

// Throws Errc::Unavailable, naming a limit, its value and the value needed, if mpirun or orted could not start `ranks`
// ranks on this machine.
void check_limits(int ranks);

}  // namespace ds::launch
