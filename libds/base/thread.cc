// SPDX-License-Identifier: Apache-2.0
#include "base/thread.h"

#include "base/limits.h"

namespace ds {

Error cannot_start(const std::system_error& why, std::string_view remedy) {
  const std::string limit = limit_of_tasks();
  const bool too_large = limit.find("(ulimit -s)") != std::string::npos;  // the stack of each new thread
  return {Errc::Unavailable,
          fmt::format("cannot start {}; {}: {}", why.what(), limit, too_large ? "lower it" : remedy)};
}

}  // namespace ds
