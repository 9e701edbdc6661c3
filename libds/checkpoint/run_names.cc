// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/run_names.h"

#include <fmt/format.h>

namespace ds {

std::string step_name(i64 step) { return fmt::format("{}{:08d}", kStepPrefix, step); }

std::optional<i64> parse_step_name(std::string_view name) {
  if (!name.starts_with(kStepPrefix) || name.size() < 13 || name.size() > 23) return std::nullopt;
  i64 step = 0;
  for (char c : name.substr(std::string_view(kStepPrefix).size())) {
    if (c < '0' || c > '9') return std::nullopt;
    step = step * 10 + (c - '0');
  }
  return step_name(step) == name ? std::optional(step) : std::nullopt;
}

}  // namespace ds
