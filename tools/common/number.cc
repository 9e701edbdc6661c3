// SPDX-License-Identifier: Apache-2.0
// Numbers on the command line: strict decimals within bounds, refused in words that a person can read.

#include <algorithm>
#include <charconv>

#include "common/tool.h"

namespace ds::tools {
namespace {

template <class T>
T parse(const std::string& name, std::string_view kind, const std::string& text, T low, T high) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (whole && value >= low && value <= high) return value;  // false for NaN
  constexpr std::size_t kShown = 40;
  throw CLI::ValidationError(name, fmt::format("must be {}, {} to {}, not {}", kind, low, high,
                                               text.size() > kShown ? text.substr(0, kShown) + "..." : text));
}

}  // namespace

std::string main_name(const std::string& names) {
  const std::size_t begin = std::min(names.find("--"), names.size());
  const std::size_t end = std::min(names.find(',', begin), names.size());
  return begin < names.size() ? names.substr(begin, end - begin) : names.substr(0, names.find(','));
}

i64 parse_integer(const std::string& name, const std::string& text, i64 low, i64 high) {
  return parse(name, "an integer", text, low, high);
}

double parse_number(const std::string& name, const std::string& text, double low, double high) {
  return parse(name, "a number", text, low, high);
}

}  // namespace ds::tools
