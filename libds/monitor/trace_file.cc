// SPDX-License-Identifier: Apache-2.0
#include "monitor/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>

#include "base/json.h"

namespace ds::monitor {

std::string spans_text(std::span<const Trace::Span> spans) {
  Json all = Json::array();
  for (const Trace::Span& s : spans) all.push_back({s.track, s.name, s.begin_ns, s.end_ns, s.number, s.of});
  return all.dump();
}

std::string trace_text(std::span<const std::string> of_ranks) {
  std::vector<Json> ranks;
  i64 first = std::numeric_limits<i64>::max();
  for (const std::string& text : of_ranks) {
    for (const Json& span : ranks.emplace_back(Json::parse(text))) first = std::min(first, span[2].get<i64>());
  }
  // Perfetto takes what has the same `tid` for one thread where a `pid` is 0, and the thread whose `tid` is its `pid`
  // for the first of a process: so all of them are other numbers, and none is 0.
  size_t next_thread = ranks.size() + 1;
  Json events = Json::array();
  const auto name = [&](const char* what, size_t rank, size_t thread, const std::string& text) {
    events.push_back({{"ph", "M"}, {"name", what}, {"pid", rank + 1}, {"tid", thread}, {"args", {{"name", text}}}});
  };
  const auto microseconds = [](i64 ns) { return static_cast<double>(ns) / 1e3; };
  // Perfetto multiplies by 1000 and cuts off, and drops a span that overlaps another's end by 1 ns. With a quarter of a
  // nanosecond on top it finds the very nanosecond.
  constexpr double kQuarter = 0.25e-3;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    name("process_name", rank, next_thread, fmt::format("rank {}", rank));
    std::map<std::string, size_t> threads;  // by track
    for (const Json& span : ranks[rank]) {
      const auto [thread, is_new] = threads.try_emplace(span[0].get<std::string>(), next_thread);
      if (is_new) name("thread_name", rank, next_thread++, thread->first);
      const i64 begin = span[2].get<i64>(), end = span[3].get<i64>(), number = span[4].get<i64>();
      Json event = {{"ph", "X"},
                    {"name", span[1]},
                    {"pid", rank + 1},
                    {"tid", thread->second},
                    {"ts", microseconds(begin - first) + kQuarter},
                    {"dur", microseconds(end - begin)}};
      if (number >= 0) event["args"] = {{span[5].get<std::string>(), number}};
      events.push_back(std::move(event));
    }
  }
  return Json({{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}).dump() + "\n";
}

}  // namespace ds::monitor
