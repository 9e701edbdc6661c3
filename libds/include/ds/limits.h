// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ds/error.h"

namespace ds {

// Call this at the start of a program. Throws Errc::Unavailable if the stack limit of this process, which applies to
// each of its threads, is below the need of libds, so that a signal would end the process.
DS_API void check_process_limits();

// Words an errno for a message: the text of strerror(3), followed by the limit of this process if the error is about
// one: "Too many open files: the limit of open files (ulimit -n) is 32".
DS_API std::string system_reason(int error);

}  // namespace ds
