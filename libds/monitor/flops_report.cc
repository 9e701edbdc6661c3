// SPDX-License-Identifier: Apache-2.0
#include "monitor/flops_report.h"

#include <fmt/format.h>

#include "base/file.h"
#include "ds/log.h"
#include "ds/units.h"

namespace ds::monitor {
namespace {

using plan::OpTally;
using plan::OpTotal;
using plan::Pass;

class FlopsReport final : public Monitor {
 public:
  FlopsReport(const Config& config, const Run& run) : config_(config.monitors.flops_profiler), run_(run) {
    if (config_.profile_step <= run.step)
      log_message(LogLevel::Warning,
                  fmt::format("flops_profiler.profile_step: step {} was taken before this start: it is not reported",
                              config_.profile_step));
    if (!config_.output_file.empty()) const PendingFile tried(follow_links(config_.output_file));
  }

  void step(const StepRecord& record) override {
    if (record.step != config_.profile_step) return;
    const std::string text = flops_text(record, run_.work(), run_.num_params, run_.world_size, config_.detailed);
    if (!config_.output_file.empty()) {
      replace_text_file(follow_links(config_.output_file), text);
    } else if (run_.tell) {
      run_.tell(std::string_view(text).substr(0, text.size() - 1));
    }
  }

 private:
  const FlopsProfilerConfig config_;
  const Run run_;
};

std::string flops_number(double flops) {
  for (const auto& [unit, size] : {std::pair("TFLOP", 1e12), {"GFLOP", 1e9}, {"MFLOP", 1e6}})
    if (flops >= size) return fmt::format("{:.3f} {}", flops / size, unit);
  return fmt::format("{:.3f} kFLOP", flops / 1e3);
}

std::string flops_line(std::string_view what, const OpTotal& t) {
  return fmt::format("  {:<26} {:>10} {:>16} {:>14}", what, t.calls, t.flops > 0 ? flops_number(t.flops) : "-",
                     bytes_text(static_cast<i64>(t.bytes)));
}

}  // namespace

std::string flops_text(const StepRecord& r, const plan::StepWork& work, i64 num_params, int world_size, bool detailed) {
  OpTally backward = work.total(Pass::BackwardInput);
  backward.add(work.total(Pass::BackwardWeight));
  const OpTally forward = work.total(Pass::Forward), recomputed = work.total(Pass::Recompute), all = work.total();
  OpTally gathers, gradients;
  for (const plan::ChunkWork& chunk : work.chunks) {
    gathers.add(chunk.gathers);
    gradients.add(chunk.gradients);
  }
  const struct {
    const char* name;
    const OpTally& ops;
    double ms;
  } parts[] = {{"gathers", gathers, 0},           {"forward", forward, r.phases ? r.phases->forward_ms : 0},
               {"computed again", recomputed, 0}, {"backward", backward, r.phases ? r.phases->backward_ms : 0},
               {"gradients", gradients, 0},       {"update", work.optimizer, r.phases ? r.phases->update_ms : 0}};
  std::string text =
      fmt::format("work of rank 0 of {} in step {}: {} parameters in the model, {} tokens of all ranks\n", world_size,
                  r.step, num_params, r.tokens);
  text += fmt::format("  {:<26} {:>10} {:>16} {:>14} {:>12}\n", "", "calls", "products", "memory", "ms");
  for (const auto& part : parts) {
    const OpTotal total = part.ops.total();
    if (total.calls == 0) continue;
    text += flops_line(part.name, total) + (part.ms > 0 ? fmt::format(" {:>12.2f}\n", part.ms) : "\n");
  }
  text += flops_line("all", all.total()) + fmt::format(" {:>12.2f}\n", r.step_ms);
  text += fmt::format("  {}/s in products; model FLOP/s utilization {:.1f} %\n",
                      flops_number(all.total().flops / (r.step_ms / 1e3)), 100 * r.mfu);
  if (!detailed) return text;
  for (const auto& part : parts) {
    if (part.ops.calls().empty()) continue;
    text += fmt::format("  {}:\n", part.name);
    for (const auto& [op, total] : part.ops.by_op()) text += flops_line(fmt::format("  {}", op), total) + "\n";
  }
  return text;
}

std::unique_ptr<Monitor> make_flops_report(const Config& config, const Run& run) {
  return std::make_unique<FlopsReport>(config, run);
}

}  // namespace ds::monitor
