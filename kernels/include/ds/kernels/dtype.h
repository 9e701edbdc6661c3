// SPDX-License-Identifier: Apache-2.0
#pragma once
// Element types, and the two 16-bit floats as plain value types with IEEE round-to-nearest-even
// conversions. `to_float`/`from_float` are exact on every backend; SIMD code must agree bit for bit.

#include <bit>
#include <cstdint>
#include <string_view>

namespace ds {

using i64 = std::int64_t;
using i32 = std::int32_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// I8 and the types after it are only stored and copied: no op computes with them.
enum class DType : u8 { F32, BF16, F16, F64, I32, I64, U16, U8, I8, I16, U32, U64, Bool, F8E4M3, F8E5M2 };

constexpr i64 dtype_bytes(DType t) noexcept {
  switch (t) {
    case DType::F64:
    case DType::I64:
    case DType::U64: return 8;
    case DType::F32:
    case DType::I32:
    case DType::U32: return 4;
    case DType::BF16:
    case DType::F16:
    case DType::I16:
    case DType::U16: return 2;
    case DType::I8:
    case DType::U8:
    case DType::Bool:
    case DType::F8E4M3:
    case DType::F8E5M2: return 1;
  }
  return 0;
}

constexpr bool is_float(DType t) noexcept { return t <= DType::F64 || t == DType::F8E4M3 || t == DType::F8E5M2; }

// The names used in configurations and tables.
constexpr std::string_view dtype_name(DType t) noexcept {
  switch (t) {
    case DType::F32: return "fp32";
    case DType::BF16: return "bf16";
    case DType::F16: return "fp16";
    case DType::F64: return "fp64";
    case DType::I32: return "int32";
    case DType::I64: return "int64";
    case DType::U16: return "uint16";
    case DType::U8: return "uint8";
    case DType::I8: return "int8";
    case DType::I16: return "int16";
    case DType::U32: return "uint32";
    case DType::U64: return "uint64";
    case DType::Bool: return "bool";
    case DType::F8E4M3: return "fp8_e4m3";
    case DType::F8E5M2: return "fp8_e5m2";
  }
  return "?";
}

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};

constexpr float to_float(float x) noexcept { return x; }
constexpr float to_float(bf16 x) noexcept { return std::bit_cast<float>(static_cast<u32>(x.bits) << 16); }

constexpr float to_float(f16 x) noexcept {
  const u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16;
  const u32 exponent = (x.bits >> 10) & 0x1Fu;
  const u32 mantissa = x.bits & 0x3FFu;
  if (exponent == 0x1F) {  // NaN becomes quiet, as in the hardware's conversion
    return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
  }
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24, exact in fp32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(std::bit_cast<u32>(magnitude) | sign);
}

// Round to nearest even. NaN stays NaN (quiet), overflow goes to infinity.
constexpr bf16 to_bf16(float x) noexcept {
  u32 u = std::bit_cast<u32>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<u16>((u >> 16) | 0x40u)};
  u += 0x7FFFu + ((u >> 16) & 1u);
  return {static_cast<u16>(u >> 16)};
}

constexpr f16 to_f16(float x) noexcept {
  const u32 u = std::bit_cast<u32>(x);
  const u16 sign = static_cast<u16>((u >> 16) & 0x8000u);
  const u32 a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return {static_cast<u16>(sign | 0x7E00u | ((a >> 13) & 0x3FFu))};
  if (a >= 0x477FF000u) return {static_cast<u16>(sign | 0x7C00u)};  // would round to 65536 or more
  if (a < 0x38800000u) {
    // Subnormal or zero: adding 0.5 aligns the mantissa so that the hardware rounds at 2^-24.
    const float shifted = std::bit_cast<float>(a) + 0.5f;
    return {static_cast<u16>(sign | (std::bit_cast<u32>(shifted) - 0x3F000000u))};
  }
  const u32 rounded = a + 0xFFFu + ((a >> 13) & 1u);
  return {static_cast<u16>(sign | ((rounded - 0x38000000u) >> 13))};
}

template <class T>
constexpr T from_float(float x) noexcept;
template <>
constexpr float from_float<float>(float x) noexcept {
  return x;
}
template <>
constexpr bf16 from_float<bf16>(float x) noexcept {
  return to_bf16(x);
}
template <>
constexpr f16 from_float<f16>(float x) noexcept {
  return to_f16(x);
}

template <class T>
inline constexpr DType dtype_of = DType::U8;
template <>
inline constexpr DType dtype_of<float> = DType::F32;
template <>
inline constexpr DType dtype_of<double> = DType::F64;
template <>
inline constexpr DType dtype_of<bf16> = DType::BF16;
template <>
inline constexpr DType dtype_of<f16> = DType::F16;
template <>
inline constexpr DType dtype_of<i32> = DType::I32;
template <>
inline constexpr DType dtype_of<i64> = DType::I64;
template <>
inline constexpr DType dtype_of<u16> = DType::U16;

}  // namespace ds
