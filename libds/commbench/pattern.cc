// SPDX-License-Identifier: Apache-2.0
#include "commbench/pattern.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"

namespace ds::commbench {
namespace {

constexpr int kMostActive = 64;    // ranks with a value at an index
constexpr i64 kLargest = 1 << 20;  // a value of a wide type
constexpr std::array kScales = {0x1p-4, 0x1p-3, 0x1p-2, 0x1p-1, 0x1p0, 0x1p1, 0x1p2, 0x1p3};

constexpr u64 mix(u64 x) noexcept {  // Steele, Lea, Flood: SplitMix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr int significand_bits(DType t) {
  switch (t) {
    case DType::BF16: return 8;
    case DType::F16: return 11;
    case DType::F32: return 24;
    case DType::F64: return 53;
    case DType::I32: return 31;
    case DType::I64: return 62;
    default: throw Error(Errc::Internal, fmt::format("{} is not reduced", dtype_name(t)));
  }
}

template <class T>
void put(std::byte* to, T x) {
  std::memcpy(to, &x, sizeof x);
}

void put_value(std::byte* to, double x, DType t) {
  switch (t) {
    case DType::BF16: return put(to, to_bf16(static_cast<float>(x)));
    case DType::F16: return put(to, to_f16(static_cast<float>(x)));
    case DType::F32: return put(to, static_cast<float>(x));
    case DType::F64: return put(to, x);
    case DType::I32: return put(to, static_cast<i32>(x));
    case DType::I64: return put(to, static_cast<i64>(x));
    default: throw Error(Errc::Internal, fmt::format("{} is not reduced", dtype_name(t)));
  }
}

template <class F>
void for_each_element(std::span<std::byte> out, DType t, F&& f) {
  const i64 bytes = dtype_bytes(t);
  for (i64 i = 0; i < std::ssize(out) / bytes; ++i) f(out.data() + i * bytes, i);
}

}  // namespace

double Pattern::value(int rank, i64 index) const noexcept {
  const u64 shared = mix(salt * 0x100000001B3u + static_cast<u64>(index));
  const int stride = (ranks + kMostActive - 1) / kMostActive;
  if (stride > 1 && (rank + static_cast<int>(shared >> 48)) % stride != 0) return 0;
  const i64 most = std::min(kLargest, (i64{1} << significand_bits(dtype)) / ((ranks + stride - 1) / stride));
  const u64 own = mix(shared + static_cast<u64>(rank) * 0xD1342543DE82EF95u) >> 32;
  const auto integer = static_cast<double>(static_cast<i64>(own * static_cast<u64>(2 * most + 1) >> 32) - most);
  return is_float(dtype) ? integer * kScales[shared % kScales.size()] : integer;
}

void Pattern::send(int rank, i64 first, std::span<std::byte> out) const {
  const auto bytes = static_cast<size_t>(dtype_bytes(dtype));
  for_each_element(out, dtype, [&](std::byte* to, i64 i) {
    if (reduced) return put_value(to, value(rank, first + i), dtype);
    const u64 bits = mix(mix(salt + static_cast<u64>(rank) * 0xD1342543DE82EF95u) + static_cast<u64>(first + i));
    std::memcpy(to, &bits, bytes);
  });
}

void Pattern::reduce(i64 first, DType out_type, std::span<std::byte> out) const {
  for_each_element(out, out_type, [&](std::byte* to, i64 i) {
    double x = value(0, first + i);
    for (int q = 1; q < ranks; ++q) {
      const double y = value(q, first + i);
      x = op == ReduceOp::Sum ? x + y : op == ReduceOp::Max ? std::max(x, y) : std::min(x, y);
    }
    put_value(to, x, out_type);
  });
}

std::string element_text(const void* element, DType t, bool reduced) {
  u64 bits = 0;
  std::memcpy(&bits, element, static_cast<size_t>(dtype_bytes(t)));
  const auto as = [&]<class T>(T x) {
    std::memcpy(&x, element, sizeof x);
    return x;
  };
  if (reduced && t == DType::F32) return fmt::format("{}", as(0.0f));
  if (reduced && t == DType::F64) return fmt::format("{}", as(0.0));
  if (reduced && t == DType::BF16) return fmt::format("{}", to_float(as(bf16{})));
  if (reduced && t == DType::F16) return fmt::format("{}", to_float(as(f16{})));
  if (reduced && t == DType::I32) return fmt::format("{}", as(i32{}));
  if (reduced && t == DType::I64) return fmt::format("{}", as(i64{}));
  return fmt::format("0x{:0{}x}", bits, 2 * dtype_bytes(t));
}

}  // namespace ds::commbench
