// SPDX-License-Identifier: Apache-2.0
// Files of prompts: texts, one in each line, or JSON Lines.

#include "ds/prompts.h"
#include "base/file.h"
#include "base/json.h"

namespace ds {
namespace {

constexpr i64 kMostBytes = i64{1} << 30;

Prompt parse_prompt(std::string_view line, const std::string& name, i64 number) {
  const std::string place = fmt::format("{}:{}", name, number);
  const Json root = parse_json(line, place, {.comments = false, .places = false}).root;
  const auto text = root.is_object() ? root.find("prompt") : root.end();
  DS_CHECK(root.is_object() && text != root.end() && text->is_string(), Errc::Config,
           "{}: a prompt is an object with the text \"prompt\"", place);
  return {text->get<std::string>(), root.dump()};
}

}  // namespace

std::vector<Prompt> read_prompts(const std::string& path) {
  const bool dash = path == "-";
  const std::string name = dash ? "standard input" : path;
  std::string text;
  try {
    text = dash ? read_standard_input(kMostBytes) : read_named_text(path, kMostBytes);
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{} {}", name, e.what()));
  }
  std::vector<Prompt> prompts;
  std::string_view rest = text;
  if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);  // a byte-order mark
  const size_t first = rest.find_first_not_of(" \t\r\n");
  const bool json = first != std::string_view::npos && rest[first] == '{';
  for (i64 number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (json && line.find_first_not_of(" \t") == std::string_view::npos) continue;
    prompts.push_back(json ? parse_prompt(line, name, number) : Prompt{std::string(line), {}});
  }
  DS_CHECK(!prompts.empty(), Errc::Config, "{}: there are no prompts in it", name);
  return prompts;
}

}  // namespace ds
