// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers for people.

#include <string>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

// "1.250 GiB", "63.300 MiB", "0.500 KiB": bytes in the largest unit, of these three, that they fill.
DS_API std::string bytes_text(i64 bytes);

}  // namespace ds
