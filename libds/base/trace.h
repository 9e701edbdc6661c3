// SPDX-License-Identifier: Apache-2.0
#pragma once
// Records the activity of a rank's threads over time, while tracing is on.

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "ds/kernels/dtype.h"

namespace ds {

class Trace {
 public:
  struct Span {
    std::string track;  // spans of one track are disjoint or nested
    std::string name;
    i64 begin_ns, end_ns;  // since 1970, by this host's clock
    i64 number;            // -1: none
    std::string of;        // the meaning of `number`
  };

  // Thread-safe. Has no effect before start() and after stop().
  void add(std::string_view track, std::string_view name, Clock::time_point begin, Clock::time_point end,
           i64 number = -1, std::string_view of = "number");
  bool is_on() const noexcept { return on_.load(std::memory_order_relaxed); }
  void start() noexcept { on_.store(true, std::memory_order_relaxed); }
  void stop() noexcept { on_.store(false, std::memory_order_relaxed); }
  std::vector<Span> spans() const;

 private:
  // Difference between the calendar's clock and the clock for durations.
  const i64 offset_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::system_clock::now().time_since_epoch() - Clock::now().time_since_epoch())
                             .count();
  std::atomic<bool> on_ = false;
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

// A span from construction until end() or destruction. Does nothing without a trace.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, std::string_view track, std::string_view name, i64 number = -1)
      : trace_(trace != nullptr && trace->is_on() ? trace : nullptr), track_(track), name_(name), number_(number) {}
  ~TraceSpan() { end(); }
  void end() {
    if (Trace* trace = std::exchange(trace_, nullptr)) trace->add(track_, name_, begin_, Clock::now(), number_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* trace_;
  const std::string_view track_, name_;
  const i64 number_;
  const Clock::time_point begin_ = Clock::now();
};

}  // namespace ds
