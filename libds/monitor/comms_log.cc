// SPDX-License-Identifier: Apache-2.0
#include "monitor/comms_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "ds/log.h"
#include "ds/units.h"

namespace ds::monitor {
namespace {

struct Total {
  i64 calls = 0, bytes = 0;
  std::optional<double> ms{};
};
using Totals = std::map<std::string, Total>;

class CommsLog final : public Monitor {
 public:
  CommsLog(const CommsLoggerConfig& config, i64 steps_per_print, std::function<void(std::string_view)> tell)
      : config_(config), every_(steps_per_print), tell_(std::move(tell)) {}

  void step(const StepRecord& record) override {
    if (steps_++ == 0) first_ = record.step;
    add(record, all_);
    if (!config_.verbose) return;
    if (recent_steps_++ == 0) recent_first_ = record.step;
    add(record, recent_);
    if (record.step % every_ != 0) return;
    tell_table(recent_, recent_first_, record.step);
    recent_.clear();
    recent_steps_ = 0;
  }

  void end() override {
    if (steps_ == 0) return;
    tell_table(all_, first_, first_ + steps_ - 1);
    for (const std::string& name : config_.prof_ops) {
      if (!config_.prof_all && !found_.contains(name))
        log_message(LogLevel::Warning, fmt::format("comms_logger.prof_ops: rank 0 had no operation '{}'", name));
    }
  }

 private:
  bool is_wanted(const std::string& name) {
    if (config_.prof_all) return true;
    const std::string collective = name.substr(name.find('.') + 1);
    bool wanted = false;
    for (const std::string& op : config_.prof_ops) {
      if (op != name && op != collective) continue;
      found_.insert(op);
      wanted = true;
    }
    return wanted;
  }

  void add(const StepRecord& record, Totals& totals) {
    for (const auto& [name, calls] : record.comm_calls) {
      if (!is_wanted(name)) continue;
      Total& t = totals[name];
      t.calls += calls;
      if (const auto bytes = record.comm_bytes.find(name); bytes != record.comm_bytes.end()) t.bytes += bytes->second;
      if (const auto ms = record.comm_ms.find(name); ms != record.comm_ms.end()) t.ms = t.ms.value_or(0) + ms->second;
    }
  }

  void tell_table(const Totals& totals, i64 first, i64 last) const {
    std::string text = fmt::format("communication of rank 0 in steps {} to {}\n  {:<24} {:>10} {:>14} {:>12} {:>12}",
                                   first, last, "operation", "calls", "sent", "ms in all", "ms a call");
    for (const auto& [name, t] : totals) {
      text += fmt::format("\n  {:<24} {:>10} {:>14} ", name, t.calls, bytes_text(t.bytes));
      text += t.ms ? fmt::format("{:>12.2f} {:>12.4f}", *t.ms, *t.ms / static_cast<double>(t.calls))
                   : fmt::format("{:>12} {:>12}", "-", "-");
    }
    if (totals.empty()) text += "\n  none";
    if (tell_) tell_(text);
  }

  const CommsLoggerConfig config_;
  const i64 every_;
  const std::function<void(std::string_view)> tell_;
  Totals all_, recent_;  // of this start; since the last table
  i64 steps_ = 0, first_ = 0, recent_steps_ = 0, recent_first_ = 0;
  std::set<std::string> found_;  // of prof_ops
};

}  // namespace

std::unique_ptr<Monitor> make_comms_log(const CommsLoggerConfig& config, i64 steps_per_print,
                                        std::function<void(std::string_view)> tell) {
  return std::make_unique<CommsLog>(config, steps_per_print, std::move(tell));
}

}  // namespace ds::monitor
