// SPDX-License-Identifier: Apache-2.0
#pragma once
// DS_CHECK for errors that users or the environment can cause, DS_ASSERT for our own bugs; checked integers.

#include <fmt/format.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>

#include "ds/error.h"
#include "ds/integers.h"
#include "ds/kernels/dtype.h"

// DS_CHECK(condition, Errc::X, "format", args...): throws ds::Error with the place of the check.
#define DS_CHECK(condition, code, ...)                   \
  do {                                                   \
    if (!(condition)) [[unlikely]]                       \
      throw ::ds::Error(code, fmt::format(__VA_ARGS__)); \
  } while (false)

#define DS_ASSERT(condition)                                                                           \
  do {                                                                                                 \
    if (!(condition)) [[unlikely]]                                                                     \
      throw ::ds::Error(::ds::Errc::Internal, fmt::format("internal error: {} is false", #condition)); \
  } while (false)

namespace ds {

// Integer conversion that throws Errc::Internal when the value does not fit.
template <class To, class From>
constexpr To narrow(From x) {
  if (!std::in_range<To>(x)) throw Error(Errc::Internal, fmt::format("integer {} does not fit", x));
  return static_cast<To>(x);
}

// For sizes from a configuration, an option or a file: empty if the result does not fit an i64.
constexpr std::optional<i64> checked_mul(std::initializer_list<i64> factors) noexcept {
  i64 product = 1;
  bool fits = true;
  for (const i64 f : factors) fits = fits && !__builtin_mul_overflow(product, f, &product);
  return fits ? std::optional(product) : std::nullopt;
}
constexpr std::optional<i64> checked_add(i64 a, i64 b) noexcept {
  i64 sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::nullopt : std::optional(sum);
}

// a / b; throws Errc::Internal unless b divides a.
constexpr i64 div_exact(i64 a, i64 b) {
  if (b == 0 || a % b != 0) throw Error(Errc::Internal, fmt::format("{} is not a multiple of {}", a, b));
  return a / b;
}

}  // namespace ds
