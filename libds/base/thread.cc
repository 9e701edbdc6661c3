// SPDX-License-Identifier: Apache-2.0
#include "base/thread.h"

#include "base/limits.h"

namespace ds {

Error cannot_start(const std::system_error& why, std::string_view remedy) {
  return {Errc::Unavailable, fmt::format("cannot start {}; {}: {}", why.what(), limit_of_tasks(), remedy)};
}

}  // namespace ds
