// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <exception>
#include <new>

#include "ds/error.h"
#include "ds/limits.h"

namespace ds {

// Converts an exception to one of ours. Other exceptions mean that memory ran out, or a bug.
inline Error as_error(const std::exception& e) {
  if (const auto* own = dynamic_cast<const Error*>(&e)) return *own;
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr) return {Errc::OutOfMemory, system_reason(ENOMEM)};
  return {Errc::Internal, e.what()};
}

}  // namespace ds
