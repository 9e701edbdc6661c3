// SPDX-License-Identifier: Apache-2.0
#pragma once
// The one way to start a thread, and the words for a thread or a process that the system refuses.

#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"

namespace ds {

// Errc::Unavailable: what could not be started, the system's reason, the limit that stands in the way, what to do about
// it. `why` has what it is and the reason in its text.
Error cannot_start(const std::system_error& why, std::string_view remedy = "raise it");

// A thread that runs `body`. Throws cannot_start(), by the name of `what`: the bodies of threads that were started
// before must end when their owner unwinds, for it joins them.
template <class F>
std::jthread start_thread(const std::string& what, F&& body) {
  try {
    return std::jthread(std::forward<F>(body));
  } catch (const std::system_error& e) {
    throw cannot_start({e.code(), what});
  }
}

}  // namespace ds
