// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ops that report the scratch that others would reserve (ds/kernels/ops.h: ScratchMeter). Each is defined next to its
// op, and both get the size from the same function.

#include <cstddef>

#include "ds/kernels/ops.h"

namespace ds::cpu {

// Raises the meter of a stream to the reservation of one thread. Not inline, since code for one instruction set must
// not provide a copy to others.
void note_scratch(Stream& stream, std::size_t bytes) noexcept;
int metered_threads(const Stream& stream) noexcept;

}  // namespace ds::cpu
