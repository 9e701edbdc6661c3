// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads and writes one element of a tensor as a double, whatever its dtype: the oracle's loads and stores. F64 tensors
// are supported for every operand of an op, so gradients can be checked by finite differences without rounding noise.

#include "ds/kernels/tensor.h"

namespace ds::ref {

// `i` counts elements from the start of the data.
inline double get(const TensorView& v, i64 i) noexcept {
  switch (v.dtype) {
    case DType::F64: return v.as<double>()[i];
    case DType::F32: return static_cast<double>(v.as<float>()[i]);
    case DType::BF16: return static_cast<double>(to_float(v.as<bf16>()[i]));
    case DType::F16: return static_cast<double>(to_float(v.as<f16>()[i]));
    case DType::I32: return v.as<i32>()[i];
    case DType::I64: return static_cast<double>(v.as<i64>()[i]);
    case DType::U16: return v.as<u16>()[i];
    case DType::U8: return v.as<u8>()[i];
    default: return 0;
  }
}

// Floats only. A 16-bit store rounds to odd in fp32 first, so that only the second rounding counts.
inline float round_to_odd(double x) noexcept {
  const float near = static_cast<float>(x);
  const u32 bits = std::bit_cast<u32>(near);
  if (static_cast<double>(near) == x || (bits & 1u) != 0 || (bits & 0x7FFFFFFFu) >= 0x7F800000u) return near;
  const bool away = (near > 0) == (static_cast<double>(near) > x);  // rounded away from zero: the odd one is below
  return std::bit_cast<float>(near == 0 ? (x > 0 ? 1u : 0x80000001u) : away ? bits - 1 : bits + 1);
}
inline void put(const TensorView& v, i64 i, double x) noexcept {
  switch (v.dtype) {
    case DType::F64: v.as<double>()[i] = x; break;
    case DType::F32: v.as<float>()[i] = static_cast<float>(x); break;
    case DType::BF16: v.as<bf16>()[i] = to_bf16(round_to_odd(x)); break;
    case DType::F16: v.as<f16>()[i] = to_f16(round_to_odd(x)); break;
    default: break;
  }
}

// The place of element (r, c) of a matrix, whose rows may be strided, or in panels.
inline i64 place(const TensorView& v, i64 r, i64 c) noexcept {
  return v.panels ? v.panels.place(v.dim(0), v.dim(1), r, c) : r * v.stride[0] + c;
}

// Element (r, c) of a matrix, which may be of codes.
inline double element(const TensorView& v, i64 r, i64 c) noexcept {
  if (!v.codes) return get(v, place(v, r, c));
  const float x = v.codes.element(v.data, v.panels, v.dim(0), v.dim(1), r, c);
  if (v.dtype == DType::BF16) return static_cast<double>(to_float(to_bf16(x)));
  if (v.dtype == DType::F16) return static_cast<double>(to_float(to_f16(x)));
  return static_cast<double>(x);
}

// The place of element i, in row-major order, of a tensor whose rows [R,C] may be strided.
inline i64 place(const TensorView& v, i64 i) noexcept {
  return v.rank == 2 ? i / v.dim(1) * v.stride[0] + i % v.dim(1) : i;
}

}  // namespace ds::ref
