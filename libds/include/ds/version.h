// SPDX-License-Identifier: Apache-2.0
#pragma once
// The version and features of this build of libds.

#include <string>
#include <string_view>

#include "ds/error.h"

namespace ds {

DS_API std::string_view version() noexcept;  // "0.1.0"

// The lines that `--version` prints after the name: compiler, features, instruction set in use. Ends with '\n'.
DS_API std::string version_text();

}  // namespace ds
