// SPDX-License-Identifier: Apache-2.0
#pragma once
// Traces of ranks as one file in Chrome's trace event format, which Perfetto and chrome://tracing show.

#include <span>
#include <string>

#include "base/trace.h"

namespace ds::monitor {

// The spans of one rank, as a text to be sent to another.
std::string spans_text(std::span<const Trace::Span> spans);
// The file: a process for each rank, in their order, a thread for each track; times from the first span on.
std::string trace_text(std::span<const std::string> of_ranks);

}  // namespace ds::monitor
