// SPDX-License-Identifier: Apache-2.0
#pragma once
// Matrices that are stored as codes of a few bits. Element (n, k) of such a matrix [N,K] is
//
//     fma(value of its code, scale, offset)     or, in a form without offsets,     value of its code * scale
//
// in fp32, rounded once to the work dtype. `group` consecutive elements of a row share a scale and an offset. So
// products of a matrix of codes have the bits of products of the decoded matrix, unless the form asks for sums of
// integers (OpTable::matmul).

#include <bit>
#include <cmath>
#include <cstring>

#include "ds/kernels/dtype.h"
#include "ds/kernels/fp8.h"

namespace ds {

// The form of a matrix [N,K] that some backends multiply fastest, in the memory of the matrix (OpTable::pack_matrix):
// panels of `rows` of its rows one after the other, the last of fewer if N is no multiple. In a panel k ascends, and
// for each k all rows of the panel follow each other; with depth 2, for each two k, as pairs, and a last k without a
// partner by itself. A range of whole panels is a matrix of its own in this form.
struct Panels {
  u8 rows = 0;  // 0: the matrix is in rows
  u8 depth = 1;

  explicit constexpr operator bool() const noexcept { return rows != 0; }
  // The place of element (n, k) of such a matrix.
  constexpr i64 place(i64 N, i64 K, i64 n, i64 k) const noexcept {
    const i64 first = n - n % rows, width = N - first < rows ? N - first : rows, inner = k % depth, outer = k - inner;
    return first * K + outer * width + (n - first) * (K - outer < depth ? 1 : depth) + inner;
  }
};

// Int8: two's complement, -128 to 127. Int4: code - 8 for a code of 0 to 15. E4M3: F8E4M3 (fp8.h); NaN is allowed.
enum class CodeKind : u8 { None, Int8, Int4, E4M3 };

// A panel of W rows, which is one row for a matrix in rows, has its groups one after the other; each has
//
//     scales [W]   offsets [W] fp32, if there are any   codes
//
// without gaps or alignment. Codes go in steps of D = Panels::depth elements of each row (1 for a matrix in rows). 8
// bits: a step has D codes of the first row, D of the second, and so on. 4 bits: two steps share bytes, the even one in
// the low halves. So panels of R rows have the bytes of their rows, and K and the alignment of a whole matrix follow
// from nothing else.
struct CodedForm {
  CodeKind kind = CodeKind::None;
  DType scales = DType::BF16;  // or F16, F32
  bool offsets = false;
  // Products sum integers: matmul codes groups of its other operand, too. Int8 and Int4; at most 131072 in a group.
  bool integer = false;
  i32 group = 0;  // elements; divides K; a multiple of 16

  DS_HOST_DEVICE explicit constexpr operator bool() const noexcept { return kind != CodeKind::None; }
  bool operator==(const CodedForm&) const = default;

  DS_HOST_DEVICE constexpr i64 code_bytes() const noexcept {
    return kind == CodeKind::Int4 ? group / 2 : group;
  }  // of a row's group
  DS_HOST_DEVICE constexpr i64 group_bytes() const noexcept {
    return dtype_bytes(scales) + (offsets ? 4 : 0) + code_bytes();
  }
  DS_HOST_DEVICE constexpr i64 row_bytes(i64 K) const noexcept { return K / group * group_bytes(); }

  // Places in a matrix [N,K], in bytes. Panels without rows: the matrix is in rows.
  struct Place {
    i64 scale, offset, code;
    int shift;  // of a code of 4 bits, in its byte
  };
  DS_HOST_DEVICE constexpr Place place(Panels p, i64 N, i64 K, i64 n, i64 k) const noexcept {
    const i64 rows = p ? p.rows : 1, depth = p ? p.depth : 1;
    const i64 first = n - n % rows, width = N - first < rows ? N - first : rows, row = n - first;
    const i64 base = first * row_bytes(K) + k / group * group_bytes() * width, in_group = k % group;
    const i64 scale = dtype_bytes(scales), codes = base + (scale + (offsets ? 4 : 0)) * width;
    const i64 step = in_group / depth, inner = in_group % depth, half = kind == CodeKind::Int4 ? 2 : 1;
    return {base + row * scale, base + width * scale + row * 4, codes + (step / half * width + row) * depth + inner,
            half == 2 && step % 2 == 1 ? 4 : 0};
  }

  DS_HOST_DEVICE static float scale_at(DType scales, const u8* p) noexcept {
    if (scales == DType::F32) {
      float x;
      std::memcpy(&x, p, sizeof x);
      return x;
    }
    u16 bits;
    std::memcpy(&bits, p, sizeof bits);
    return scales == DType::BF16 ? to_float(std::bit_cast<bf16>(bits)) : to_float(std::bit_cast<f16>(bits));
  }
  // The value of a code in its byte, before scale and offset.
  DS_HOST_DEVICE float value(u8 byte, int shift) const noexcept {
    if (kind == CodeKind::Int4) return static_cast<float>(((byte >> shift) & 15) - 8);
    if (kind == CodeKind::Int8) return static_cast<float>(static_cast<std::int8_t>(byte));
    return from_fp8(byte, fp8_format(DType::F8E4M3));
  }
  // Element (n, k) of a matrix [N,K] at `data`, before it is rounded to a work dtype.
  DS_HOST_DEVICE float element(const void* data, Panels p, i64 N, i64 K, i64 n, i64 k) const noexcept {
    const u8* const bytes = static_cast<const u8*>(data);
    const Place at = place(p, N, K, n, k);
    const float x = value(bytes[at.code], at.shift), scale = scale_at(scales, bytes + at.scale);
    return offsets ? std::fma(x, scale, scale_at(DType::F32, bytes + at.offset)) : x * scale;
  }
};

}  // namespace ds
