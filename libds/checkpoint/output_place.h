// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checks of the place of an output.

#include <string>

#include "base/check.h"

namespace ds {

// Throws Errc::Io, before any work, unless the file system of `dir` reports room for `bytes`.
void check_room(const std::string& dir, i64 bytes);

}  // namespace ds
