// SPDX-License-Identifier: Apache-2.0
#include "monitor/phase_log.h"

#include <fmt/format.h>

namespace ds::monitor {
namespace {

class PhaseLog final : public Monitor {
 public:
  PhaseLog(i64 steps_per_print, std::function<void(std::string_view)> tell)
      : every_(steps_per_print), tell_(std::move(tell)) {}

  void step(const StepRecord& record) override {
    if (!record.phases) return;
    ++steps_;
    step_ms_ += record.step_ms;
    for (const auto part :
         {&PhaseTimes::forward_ms, &PhaseTimes::backward_ms, &PhaseTimes::reduce_ms, &PhaseTimes::update_ms})
      sum_.*part += (*record.phases).*part;
    if (record.step % every_ != 0) return;
    const auto n = static_cast<double>(steps_);
    if (tell_)
      tell_(
          fmt::format("step {}: time (ms) | forward: {:.2f} | backward: {:.2f} | reduce: {:.2f} | step: {:.2f} | all: "
                      "{:.2f}",
                      record.step, sum_.forward_ms / n, sum_.backward_ms / n, sum_.reduce_ms / n, sum_.update_ms / n,
                      step_ms_ / n));
    sum_ = {};
    step_ms_ = 0;
    steps_ = 0;
  }

 private:
  const i64 every_;
  const std::function<void(std::string_view)> tell_;
  PhaseTimes sum_;  // since the last line
  double step_ms_ = 0;
  i64 steps_ = 0;
};

}  // namespace

std::unique_ptr<Monitor> make_phase_log(i64 steps_per_print, std::function<void(std::string_view)> tell) {
  return std::make_unique<PhaseLog>(steps_per_print, std::move(tell));
}

}  // namespace ds::monitor
