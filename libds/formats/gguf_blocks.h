// SPDX-License-Identifier: Apache-2.0
#pragma once
// The block formats of GGUF: codes of a few bits that share scales.

#include <array>
#include <cstdint>
#include <optional>

#include "base/gguf.h"
#include "ds/kernels/codes.h"

namespace ds {

inline constexpr i64 kMostBlockElems = 256;

// A block of codes: element i is codes[i] * scales[g] or, of a type with offsets, codes[i] * scales[g] + offsets[g], in
// group g = i / group.
struct GgufBlock {
  std::array<std::int8_t, kMostBlockElems> codes;
  std::array<float, kMostBlockElems / 16> scales, offsets;
};

// How elements of a type are read: as they are, or unpacked and decoded to fp32.
struct GgufReading {
  DType dtype = DType::F32;                                  // of the elements that are shown
  void (*unpack)(const u8* block, GgufBlock& to) = nullptr;  // null: stored as `dtype`
  i64 group = 0;                                             // elements
  bool four_bits = false;                                    // codes from -8 to 7, or with offsets from 0 to 15
  bool offsets = false;
  DType scales = DType::F16;  // whose numbers scales are
};
// Nothing for a type that cannot be read.
std::optional<GgufReading> gguf_reading(const GgufType& type) noexcept;

// The elements of a block, of which there are `elems`.
void decode_block(const GgufReading& reading, i64 elems, const GgufBlock& block, float* out) noexcept;

// The form of blocks: Int4 if their codes have 4 bits and every block fits, else Int8. A code of Int4 is 8 less than
// one from 0 to 15, and the offset for that may be no fp32 number: then the block does not fit.
CodedForm form_of(const GgufReading& reading, bool four_bits) noexcept;
bool fits_four_bits(const GgufReading& reading, i64 elems, const GgufBlock& block) noexcept;
// Writes the groups of a block in a form of these, and returns their end.
u8* put_block(const GgufReading& reading, i64 elems, const GgufBlock& block, const CodedForm& form, u8* out) noexcept;

}  // namespace ds
