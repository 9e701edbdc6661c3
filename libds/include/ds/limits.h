// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ds/error.h"

namespace ds {

// For a program to call before it works: throws Errc::Unavailable if the limit of this process's stack, which is that
// of each of its threads, is less than libds needs and would end it by a signal.
DS_API void check_process_limits();

}  // namespace ds
