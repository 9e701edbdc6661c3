// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ds/error.h"

namespace ds {

// For a program to call before it works: throws Errc::Unavailable if the limit of this process's stack, which is that
// of each of its threads, is less than libds needs and would end it by a signal.
DS_API void check_process_limits();

// Why the system refused, for messages: the words of strerror(3) for an errno, followed by the limit of this process
// where the error speaks of one: "Too many open files: the limit of open files (ulimit -n) is 32".
DS_API std::string system_reason(int error);

}  // namespace ds
