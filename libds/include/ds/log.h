// SPDX-License-Identifier: Apache-2.0
#pragma once
// libds never prints: it passes messages to the sink that the program installs. Without a sink they are dropped.

#include <functional>
#include <string_view>

#include "ds/error.h"

namespace ds {

enum class LogLevel { Verbose, Info, Warning };

using LogSink = std::function<void(LogLevel, std::string_view message)>;

// Replaces the sink of the process; may be called from any thread. The sink must be thread-safe.
DS_API void set_log_sink(LogSink sink);
DS_API void log_message(LogLevel level, std::string_view message) noexcept;

}  // namespace ds
