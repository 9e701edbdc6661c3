// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ops that say what others would reserve as scratch (ds/kernels/ops.h: ScratchMeter). Each stands beside the op that it
// speaks for, and both ask the same function for the size.

#include <cstddef>

#include "ds/kernels/ops.h"

namespace ds::cpu {

// Raises the meter of a stream to what one thread reserves. No inline function: code of an instruction set must not
// leave a copy of one to others.
void note_scratch(Stream& stream, std::size_t bytes) noexcept;
int metered_threads(const Stream& stream) noexcept;

}  // namespace ds::cpu
