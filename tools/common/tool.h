// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared by all tools: run_main() owns the option parser, --help --version --json --output --quiet --verbose
// --completion, the streams, the log sink and the exit codes. A tool is an option table, one libds call and the
// printing of its result:
//
//   int main(int argc, char** argv) {
//     std::string file;
//     int ranks = 1;
//     return ds::tools::run_main(
//         argc, argv,
//         {.name = "ds-count", .purpose = "count tensors", .usage = {"[options] FILE"},
//          .examples = {{"ds-count -n 2 model.safetensors", "count with two ranks"}}},
//         [&](CLI::App& app) -> ds::tools::Body {
//           app.add_option("FILE", file, "what to read")->required()->type_name("FILE");
//           app.add_option("-n,--ranks", ranks, "number of ranks (default 1)")->type_name("N")->group("Running");
//           return [&](ds::tools::Output& out) {
//             const auto result = ds::count(file, ranks);  // a thrown ds::Error becomes a message and an exit code
//             out.json() ? out.document({{"tensors", result.tensors}}) : out.print("{} tensors\n", result.tensors);
//             return 0;
//           };
//         });
//   }
//
// Help shows the first short and the first long name of an option; further ones are spellings of other tools.
// type_name drives the completion: FILE and DIR complete as such, CLI::IsMember({...}) completes its values.
// Groups order the help; an option without one stands under "Options". Subcommands work (app.add_subcommand).

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <concepts>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "ds/kernels/dtype.h"
#include "ds/printable.h"

namespace ds::tools {

struct Example {
  std::string_view command;
  std::string_view what;
};

struct ToolInfo {
  std::string_view name;
  std::string_view purpose;             // one line, as in the man page's NAME
  std::vector<std::string_view> usage;  // after the name, one entry per form
  std::vector<Example> examples;
  int schema = 1;          // "schema": "<name>/<schema>" of --json
  bool one_dash = false;   // long options may begin with one dash, as mpirun's -np does
  bool show_info = false;  // LogLevel::Info appears without --verbose
};

// Writes the result of rank 0 to stdout or to --output FILE. The file appears complete, after the body has returned, or
// not at all.
class Output {
 public:
  // `option`: the option that named the file.
  Output(const ToolInfo& tool, std::string file, bool json, std::string_view option = "--output");

  bool json() const noexcept { return json_; }
  bool to_file() const noexcept { return !file_.empty(); }
  const std::string& file() const noexcept { return file_; }
  const std::string& option() const noexcept { return option_; }
  // Whether the report will replace `path`, which need not exist; false if it goes to a descriptor, a device or a pipe.
  bool replaces(const std::string& path) const;
  // The file that it will replace, which need not exist; empty: the result goes to stdout, a device or a pipe.
  std::string replaced() const;
  const ToolInfo& tool() const noexcept { return tool_; }
  // Whether the result goes to a terminal, directly or through ds-launch (DS_STDOUT_COLUMNS), and its properties;
  // without a terminal there is no colour, and there are 80 columns.
  bool to_terminal() const noexcept;
  bool colour() const noexcept;
  int columns() const noexcept;
  // Text for people, made printable since it contains names of files and tensors.
  void write(std::string_view text);
  // The same; newlines in text arguments are escaped.
  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    write(fmt::format(fmt::runtime(format), in_line(std::forward<Args>(args))...));
  }
  // Bytes, unchanged: data for programs, and text with colours.
  void data(std::string_view bytes);
  // One JSON document: `fields` with "schema" put first. Compact: on one line, for JSON Lines.
  // members: JSON text of members to write first, "" or `"a": 1, "b": 2`.
  void document(const nlohmann::ordered_json& fields, bool compact = false, std::string_view members = {});
  // The text of such a document on one line, with its end.
  std::string line(const nlohmann::ordered_json& fields, std::string_view members = {}) const;
  void commit();  // called by run_main

 private:
  std::string text_of(const nlohmann::ordered_json& fields, bool compact, std::string_view members) const;
  template <class T>
  static decltype(auto) in_line(T&& value) {
    if constexpr (std::convertible_to<T, std::string_view>) {
      return printable(std::string_view(value));
    } else {
      return std::forward<T>(value);
    }
  }

  const ToolInfo& tool_;
  std::string file_, option_;
  std::string pending_;  // contents of file_
  bool json_;
};

// Throws if the report would replace a file that another option names, such as the configuration or the weights.
void check_report(const CLI::App& app, const Output& output);

using Body = std::function<int(Output&)>;          // returns the exit status
using Setup = std::function<Body(CLI::App& app)>;  // declares options; the body runs after parsing
int run_main(int argc, char** argv, const ToolInfo& tool, const Setup& setup);

// The name of an option in messages: the first long one of "-n,--ranks,--np".
std::string main_name(const std::string& names);

// For add_number: the value of `text`; throws CLI::ValidationError with the name of the option and the bounds.
i64 parse_integer(const std::string& name, const std::string& text, i64 low, i64 high);
double parse_number(const std::string& name, const std::string& text, double low, double high);

// An option whose value is a decimal of [low, high] and nothing else: no overflow, no NaN, no unit.
template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& names, T& target, std::type_identity_t<T> low,
                        std::type_identity_t<T> high, const std::string& description) {
  const auto store = [name = main_name(names), &target, low, high](const std::string& text) {
    if constexpr (std::integral<T>) {
      target = static_cast<T>(parse_integer(name, text, low, high));
    } else {
      target = parse_number(name, text, low, high);
    }
  };
  return app.add_option_function<std::string>(names, store, description);
}

// The group of options that help and completion leave out. (With CLI11's own, "", messages do not name the option.)
inline constexpr const char* kHidden = "Hidden";

int rank() noexcept;  // RANK of the environment, else 0

// Messages on stderr, "ds-x: error: ..." ("ds-x[3]: ..." on rank 3), each in one write. --quiet drops all but errors.
// They may contain text from elsewhere unchanged: it is made printable and bounded, and only a newline before two
// blanks begins a line.
void report_error(std::string_view message);
void report_warning(std::string_view message);
void report_new_warning(std::string_view message);  // unless it has been said
void report_note(std::string_view message);
void report_hint(std::string_view message);  // after an error, also with --quiet
bool quiet() noexcept;
bool verbose() noexcept;

// Columns of the terminal that shows stderr, directly or through ds-launch (DS_COLUMNS); 0: there is no terminal, or it
// has no escapes, so there is no progress line.
int terminal_columns() noexcept;
// The same for stdout (DS_STDOUT_COLUMNS).
int stdout_columns() noexcept;

// Internal to tools/common: the texts made from the option table.
std::string help_text(const ToolInfo& tool, const CLI::App& app);
std::string completion_script(const ToolInfo& tool, const CLI::App& app, std::string_view shell);

}  // namespace ds::tools
