// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether a run fits in the memory of its machine.

#include "device/device.h"
#include "run/plans.h"

namespace ds::run {

// Throws Errc::OutOfMemory, with a line for each tag, if the ranks of this node, or of this rank's GPU, need more
// memory than there is.
void check_memory(const Device& device, Plans& plans, const RankInfo& ranks);

}  // namespace ds::run
