// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where an output may go.

#include <string>

#include "base/check.h"

namespace ds {

// Throws Errc::Config unless `path`, a file or directory to be, has a directory to stand in, lies in no checkpoint step
// and is none of the files that a run keeps for itself.
void check_place(const std::string& path);

// Throws Errc::Io unless the file system of `dir` says that it has room for `bytes`: a refusal before the work.
void check_room(const std::string& dir, i64 bytes);

}  // namespace ds
