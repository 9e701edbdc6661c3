// SPDX-License-Identifier: Apache-2.0
#include "ds/log.h"

#include <mutex>
#include <utility>

namespace ds {
namespace {

std::mutex& sink_mutex() {
  static std::mutex m;
  return m;
}
LogSink& sink() {
  static LogSink s;
  return s;
}

}  // namespace

void set_log_sink(LogSink new_sink) {
  const std::lock_guard lock(sink_mutex());
  sink() = std::move(new_sink);
}

void log_message(LogLevel level, std::string_view message) noexcept {
  try {
    const std::lock_guard lock(sink_mutex());
    if (sink()) sink()(level, message);
  } catch (...) {  // a message that cannot be shown must not stop training
  }
}

}  // namespace ds
