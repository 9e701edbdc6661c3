// SPDX-License-Identifier: Apache-2.0
#include "common/progress.h"

#include <atomic>
#include <cstdio>
#include <type_traits>
#include <variant>

#include "common/internal.h"
#include "common/tool.h"
#include "ds/printable.h"

namespace ds::tools {
namespace {

std::atomic<bool> drawn = false;

}  // namespace

void clear_progress() noexcept {
  if (drawn.exchange(false)) std::fputs("\r\x1b[K", stderr);
}

ProgressLine::ProgressLine() : columns_(quiet() ? 0 : terminal_columns()) {}

ProgressLine::~ProgressLine() {
  if (drawn.exchange(false)) std::fputs("\n", stderr);
}

void ProgressLine::show(std::string_view line) {
  if (columns_ <= 1) return;
  fmt::print(stderr, "\r{:.{}}\x1b[K", printable(line), columns_ - 1);
  std::fflush(stderr);
  drawn = true;
}

bool ProgressLine::is_due() {
  const auto now = std::chrono::steady_clock::now();
  if (now - was_due_ < std::chrono::milliseconds(200)) return false;
  was_due_ = now;
  return true;
}

std::function<void(std::string_view)> ProgressLine::hook() {
  return [this](std::string_view line) {
    if (is_due()) show(line);
  };
}

std::string duration(double seconds) {
  const auto t = static_cast<i64>(seconds);
  return t >= 3600 ? fmt::format("{}h{:02}m", t / 3600, t / 60 % 60) : fmt::format("{}m{:02}s", t / 60, t % 60);
}

std::string StepText::operator()(const StepRecord& r, i64 total) {
  mean_ms_ = mean_ms_ == 0 ? r.step_ms : 0.9 * mean_ms_ + 0.1 * r.step_ms;
  return fmt::format("step {}/{}  ETA {}  loss {:.4f}{}  {:.0f} tok/s  lr {:.3g}  norm {:.3g}", r.step, total,
                     duration(static_cast<double>(total - r.step) * mean_ms_ / 1e3), r.loss,
                     r.skipped ? "  skipped" : "", static_cast<double>(r.tokens) / mean_ms_ * 1e3, r.lr, r.grad_norm);
}

nlohmann::ordered_json step_document(const StepRecord& step) {
  nlohmann::ordered_json document = {{"type", "step"}};
  for (const StepField& f : step_fields()) {
    if (!f.progress) continue;
    std::visit(
        [&](const auto& x) {
          if constexpr (std::is_arithmetic_v<std::decay_t<decltype(x)>>) document[f.name] = x;
        },
        f.value(step));
  }
  return document;
}

}  // namespace ds::tools
