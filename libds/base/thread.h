// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only way to start a thread, and the error for a thread or process that the system refuses to start.

#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"

namespace ds {

// Errc::Unavailable with the thing that could not be started, the system's reason, the limit that prevents it, and the
// remedy. The text of `why` contains the first two.
Error cannot_start(const std::system_error& why, std::string_view remedy = "raise it");

// A thread that runs `body`. Throws cannot_start() with the name `what`. The owner joins its threads when it unwinds,
// so the bodies of threads that were started before must end then.
template <class F>
std::jthread start_thread(const std::string& what, F&& body) {
  try {
    return std::jthread(std::forward<F>(body));
  } catch (const std::system_error& e) {
    throw cannot_start({e.code(), what});
  }
}

}  // namespace ds
