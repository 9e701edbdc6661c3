// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where an output may go.

#include <string>

#include "base/check.h"

namespace ds {

// Throws Errc::Io unless the file system of `dir` says that it has room for `bytes`: a refusal before the work.
void check_room(const std::string& dir, i64 bytes);

}  // namespace ds
