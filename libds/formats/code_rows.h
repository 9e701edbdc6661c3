// SPDX-License-Identifier: Apache-2.0
#pragma once
// Writes the groups of a row in the rows form of a CodedForm (ds/kernels/codes.h).

#include <algorithm>
#include <bit>
#include <cstring>

#include "ds/kernels/codes.h"

namespace ds {

// Writes a group to `out` and returns its end. codes: those of the form, a byte each; for Int4, the value + 8.
inline u8* put_group(const CodedForm& form, u8* out, float scale, float offset, const u8* codes) noexcept {
  if (form.scales == DType::F32) {
    std::memcpy(out, &scale, sizeof scale);
  } else {
    const u16 bits = form.scales == DType::BF16 ? std::bit_cast<u16>(from_float<bf16>(scale))
                                                : std::bit_cast<u16>(from_float<f16>(scale));
    std::memcpy(out, &bits, sizeof bits);
  }
  out += dtype_bytes(form.scales);
  if (form.offsets) {
    std::memcpy(out, &offset, sizeof offset);
    out += sizeof offset;
  }
  if (form.kind != CodeKind::Int4) return std::copy_n(codes, form.group, out);
  for (i64 i = 0; i < form.group; i += 2) *out++ = static_cast<u8>(codes[i] | codes[i + 1] << 4);
  return out;
}

}  // namespace ds
