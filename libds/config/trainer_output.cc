// SPDX-License-Identifier: Apache-2.0
#include "config/trainer_output.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <span>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds {

std::string trainer_checkpoints(const std::string& dir) {
  namespace fs = std::filesystem;
  constexpr std::string_view kPrefix = "checkpoint-";
  std::vector<i64> steps;
  std::error_code error, ignored;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    i64 step = 0;
    if (!name.starts_with(kPrefix) || !it->is_directory(ignored)) continue;
    const char* const last = name.data() + name.size();
    const auto [stop, failed] = std::from_chars(name.data() + kPrefix.size(), last, step);
    if (failed == std::errc() && stop == last && step >= 0) steps.push_back(step);
  }
  std::ranges::sort(steps);
  constexpr std::ptrdiff_t kMost = 5;
  const std::ptrdiff_t left_out = std::max<std::ptrdiff_t>(std::ssize(steps) - kMost, 0);
  std::vector<std::string> names;
  for (const i64 step : std::span(steps).subspan(static_cast<size_t>(left_out)))
    names.push_back(fmt::format("{}{}", kPrefix, step));
  return fmt::format("{}{}", left_out > 0 ? "..., " : "", fmt::join(names, ", "));
}

std::string trainer_hint(const std::string& dir) {
  const std::string names = trainer_checkpoints(dir);
  return names.empty() ? "" : fmt::format("; Hugging Face's Trainer has saved {} in it: name one of them", names);
}

}  // namespace ds
