// SPDX-License-Identifier: Apache-2.0
// --completion: scripts for bash, zsh and fish made from the option table, so that they cannot lag behind it.

#include <algorithm>

#include "common/internal.h"
#include "common/tool.h"

namespace ds::tools {
namespace {

enum class Kind { Flag, Any, File, Folder, Choice };

struct Row {
  std::vector<std::string> names;  // with dashes
  std::string description;
  std::string type;
  Kind kind;
  std::vector<std::string> choices;
};

Row make_row(const CLI::Option& option) {
  Row row{.names = shown_names(option),
          .description = option.get_description(),
          .type = option.get_type_name(),
          .kind = Kind::Any,
          .choices = {}};
  if (const std::size_t open = row.type.find('{'); open != std::string::npos) {
    row.kind = Kind::Choice;
    row.choices = CLI::detail::split(row.type.substr(open + 1, row.type.find('}') - open - 1), ',');
  } else if (option.nonpositional() && option.get_items_expected_max() == 0) {
    row.kind = Kind::Flag;
  }
  row.type = row.type.substr(0, row.type.find(':'));  // a check appends its own words
  if (row.kind == Kind::Any && row.type == "FILE") row.kind = Kind::File;
  if (row.kind == Kind::Any && row.type == "DIR") row.kind = Kind::Folder;
  return row;
}

struct Table {
  std::string_view tool;
  std::string function;  // name of the shell function
  std::vector<Row> options;
  std::vector<std::string> commands;
  bool runs_program;  // what follows the options is a command line
};

// Options of the tool and of all its commands: more offered than strictly valid, nothing valid missing.
void collect(const CLI::App& app, Table& table) {
  for (const CLI::Option* option : app.get_options())
    if (option->nonpositional() && option->get_group() != kHidden) table.options.push_back(make_row(*option));
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    table.commands.push_back(command->get_name());
    collect(*command, table);
  }
}

std::string join(const std::vector<std::string>& words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words, separator));
}

// For use inside single quotes of sh; zsh's own specials are escaped as well where asked.
std::string single_quoted(std::string_view text, std::string_view special = "") {
  std::string out;
  for (const char c : text) {
    if (special.find(c) != std::string_view::npos) out += '\\';
    if (c == '\'') {
      out += "'\\''";
    } else {
      out += c;
    }
  }
  return out;
}

std::string bash_candidates(const Row& row) {
  switch (row.kind) {
    case Kind::Folder: return "-d";
    case Kind::File: return "-f";
    case Kind::Choice: return "-W '" + join(row.choices, " ") + "'";
    case Kind::Flag:
    case Kind::Any: break;
  }
  return "";
}

std::string bash_script(const Table& table) {
  std::vector<std::string> names;
  std::string cases;
  for (const Row& row : table.options) {
    names.insert(names.end(), row.names.begin(), row.names.end());
    if (row.kind == Kind::Flag) continue;
    const std::string candidates = bash_candidates(row);
    cases += fmt::format(
        "    {}) {}return ;;\n", join(row.names, "|"),
        candidates.empty() ? "" : fmt::format("mapfile -t COMPREPLY < <(compgen {} -- \"$cur\"); ", candidates));
  }
  std::string words = table.runs_program ? "-f -c" : "-f";
  if (!table.commands.empty()) words += fmt::format(" -W '{}'", join(table.commands, " "));
  return fmt::format(
      R"(# bash completion for {0}
{1}() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  COMPREPLY=()
  case $prev in
{2}  esac
  case $cur in
    -*) mapfile -t COMPREPLY < <(compgen -W '{3}' -- "$cur") ;;
    *) mapfile -t COMPREPLY < <(compgen {4} -- "$cur") ;;
  esac
}}
complete -o filenames -o bashdefault -F {1} {0}
)",
      table.tool, table.function, cases, join(names, " "), words);
}

std::string zsh_action(const Row& row) {
  switch (row.kind) {
    case Kind::File: return "_files";
    case Kind::Folder: return "_files -/";
    case Kind::Choice: return "(" + join(row.choices, " ") + ")";
    case Kind::Flag:
    case Kind::Any: break;
  }
  return " ";
}

std::string zsh_script(const Table& table) {
  std::string specs;
  for (const Row& row : table.options) {
    const std::string value = row.kind == Kind::Flag
                                  ? ""
                                  : fmt::format(":{}:{}", single_quoted(row.type, ":"), single_quoted(zsh_action(row)));
    for (const std::string& name : row.names)
      specs += fmt::format(" \\\n    '({}){}[{}]{}'", join(row.names, " "), name,
                           single_quoted(row.description, "[]\\"), value);
  }
  if (!table.commands.empty()) specs += fmt::format(" \\\n    '1:command:({})'", join(table.commands, " "));
  specs +=
      table.runs_program ? " \\\n    '1:program:_command_names -e' '*::arguments:_normal'" : " \\\n    '*:file:_files'";
  return fmt::format(
      R"(#compdef {0}
{1}() {{
  _arguments -s{2}
}}
if [[ $funcstack[1] == {1} ]]; then {1} "$@"; else compdef {1} {0}; fi
)",
      table.tool, table.function, specs);
}

std::string fish_script(const Table& table) {
  const std::string_view tool = table.tool;
  std::string script = fmt::format("# fish completion for {}\n", tool);
  for (const Row& row : table.options) {
    script += fmt::format("complete -c {}", tool);
    for (const std::string& name : row.names)
      script += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    if (row.kind == Kind::Choice) script += fmt::format(" -x -a '{}'", join(row.choices, " "));
    if (row.kind == Kind::Folder) script += " -x -a '(__fish_complete_directories)'";
    if (row.kind == Kind::File) script += " -r";
    if (row.kind == Kind::Any) script += " -x";
    script += fmt::format(" -d '{}'\n", single_quoted(row.description, "\\"));
  }
  if (!table.commands.empty())
    script += fmt::format("complete -c {} -n __fish_use_subcommand -a '{}'\n", tool, join(table.commands, " "));
  if (table.runs_program) script += fmt::format("complete -c {} -x -a '(__fish_complete_subcommand)'\n", tool);
  return script;
}

}  // namespace

std::string completion_script(const ToolInfo& tool, const CLI::App& app, std::string_view shell) {
  Table table{.tool = tool.name,
              .function = "_" + std::string(tool.name),
              .options = {},
              .commands = {},
              .runs_program = app.get_prefix_command()};
  std::replace(table.function.begin(), table.function.end(), '-', '_');
  collect(app, table);
  if (shell == "bash") return bash_script(table);
  if (shell == "zsh") return zsh_script(table);
  return fish_script(table);
}

}  // namespace ds::tools
