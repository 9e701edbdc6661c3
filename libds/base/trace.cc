// SPDX-License-Identifier: Apache-2.0
#include "base/trace.h"

namespace ds {

void Trace::add(std::string_view track, std::string_view name, Clock::time_point begin, Clock::time_point end,
                i64 number, std::string_view of) {
  if (!is_on()) return;
  const auto calendar = [this](Clock::time_point t) {
    return offset_ns_ + std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
  };
  const std::lock_guard lock(mutex_);
  spans_.push_back({std::string(track), std::string(name), calendar(begin), calendar(end), number, std::string(of)});
}

std::vector<Trace::Span> Trace::spans() const {
  const std::lock_guard lock(mutex_);
  return spans_;
}

}  // namespace ds
