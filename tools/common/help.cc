// SPDX-License-Identifier: Apache-2.0
// --help from the option table.

#include <algorithm>
#include <sstream>

#include "common/internal.h"
#include "common/tool.h"

namespace ds::tools {
namespace {

constexpr std::size_t kColumns = 80;
constexpr std::size_t kIndent = 24;

// `text` in lines of at most kColumns, all but the first indented.
std::string wrap(std::string_view text, std::size_t indent) {
  std::string out;
  std::size_t column = indent;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    if (column > indent && column + 1 + word.size() > kColumns) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    }
    if (column > indent) out += ' ', ++column;
    out += word;
    column += word.size();
  }
  return out;
}

std::string entry(std::string head, std::string_view description) {
  head = "  " + head;
  if (head.size() + 2 > kIndent) {
    head += "\n" + std::string(kIndent, ' ');
  } else {
    head.resize(kIndent, ' ');
  }
  return head + wrap(description, kIndent) + "\n";
}

std::string option_head(const CLI::Option& option) {
  std::string head = option.get_snames().empty() ? "    " : "";
  head += fmt::format("{}", fmt::join(shown_names(option), ", "));
  if (option.get_items_expected_max() > 0) {
    const std::string type = option.get_type_name();
    const std::size_t open = type.find('{');  // a check appends ":{a,b}" or ":INT in [1 - 9]"; only values are shown
    head += " " + (open != std::string::npos ? type.substr(open) : type.substr(0, type.find(':')));
  }
  return head;
}

}  // namespace

std::vector<std::string> shown_names(const CLI::Option& option) {
  std::vector<std::string> names;
  if (option.get_group() == kHidden) return names;
  if (!option.get_snames().empty()) names.push_back("-" + option.get_snames().front());
  if (!option.get_lnames().empty()) names.push_back("--" + option.get_lnames().front());
  return names;
}

std::string help_text(const ToolInfo& tool, const CLI::App& app) {
  const bool top = app.get_parent() == nullptr;
  std::string text;
  if (top) {
    text = fmt::format("{} - {}\n\n", tool.name, tool.purpose);
    for (std::size_t i = 0; i < tool.usage.size(); ++i)
      text += fmt::format("{} {} {}\n", i == 0 ? "Usage:" : "      ", tool.name, tool.usage[i]);
  } else {
    text = fmt::format("{} {} - {}\n", tool.name, app.get_name(), app.get_description());
  }

  std::string arguments;
  for (const CLI::Option* option : app.get_options())
    if (option->get_positional()) arguments += entry(option->get_name(true), option->get_description());
  if (!arguments.empty()) text += "\nArguments:\n" + arguments;

  std::string commands;
  for (const CLI::App* command : app.get_subcommands(nullptr))
    commands += entry(command->get_name(), command->get_description());
  if (!commands.empty()) text += "\nCommands:\n" + commands;

  std::vector<std::string> groups = app.get_groups();  // in order of first use; the common options come last
  if (const auto common = std::find(groups.begin(), groups.end(), "Common"); common != groups.end())
    std::rotate(common, common + 1, groups.end());
  for (const std::string& group : groups) {
    std::string options;
    for (const CLI::Option* option : app.get_options())
      if (option->nonpositional() && option->get_group() == group)
        options += entry(option_head(*option), option->get_description());
    if (group != kHidden && !options.empty()) text += fmt::format("\n{}:\n{}", group, options);
  }

  if (!top) return text + fmt::format("\n'{} --help' lists the options of all commands.\n", tool.name);
  if (!tool.examples.empty()) text += "\nExamples:\n";
  for (const Example& example : tool.examples)
    text += fmt::format("  {}\n      {}\n", example.command, wrap(example.what, 6));
  return text + fmt::format("\nManual: man {}; the suite: man ds\n", tool.name);
}

}  // namespace ds::tools
