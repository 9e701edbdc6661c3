// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this build of libds is and can do.

#include <string>
#include <string_view>

#include "ds/error.h"

namespace ds {

DS_API std::string_view version() noexcept;  // "0.1.0"

// What `--version` prints below the name: compiler, features, instruction set in use; one per line, ends with '\n'.
DS_API std::string version_text();

}  // namespace ds
