// SPDX-License-Identifier: Apache-2.0
#pragma once
// The block formats of GGUF: codes of a few bits that share scales.

#include <optional>

#include "base/gguf.h"
#include "ds/kernels/dtype.h"

namespace ds {

inline constexpr i64 kMostBlockElems = 256;

// How elements of a type are read: as they are, or decoded to fp32.
struct GgufReading {
  DType dtype;                                            // of the elements that are shown
  void (*decode)(const u8* block, float* out) = nullptr;  // one block; null: stored as `dtype`
};
// Nothing for a type that cannot be read.
std::optional<GgufReading> gguf_reading(const GgufType& type) noexcept;

}  // namespace ds
