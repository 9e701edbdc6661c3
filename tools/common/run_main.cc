// SPDX-License-Identifier: Apache-2.0
// run_main: options, streams, log sink, exit codes; the one place where a tool's exceptions end.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>

#include "common/internal.h"
#include "common/tool.h"
#include "ds/error.h"
#include "ds/limits.h"
#include "ds/log.h"
#include "ds/nearest.h"
#include "ds/version.h"

namespace ds::tools {
namespace {

// Stops the parser with a text for stdout.
struct Answer {
  std::string text;
};

class HelpFormatter : public CLI::FormatterBase {
 public:
  explicit HelpFormatter(const ToolInfo& tool) : tool_(tool) {}
  std::string make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    return help_text(tool_, *app);
  }

 private:
  const ToolInfo& tool_;
};

struct CommonOptions {
  bool json = false;
  std::string output;
};

void add_common_options(CLI::App& app, const ToolInfo& tool, CommonOptions& common) {
  app.set_help_flag("-h,--help", "print this text and stop")->group("Common");
  app.add_flag_callback(
         "--version", [&] { throw Answer{fmt::format("{} {}\n{}", tool.name, version(), version_text())}; },
         "print version, compiler and features, and stop")
      ->group("Common");
  app.add_flag("--json", common.json, "print the result as JSON")->group("Common");
  app.add_option("--output", common.output, "write the result to FILE, complete or not at all")
      ->type_name("FILE")
      ->group("Common");
  app.add_flag("-q,--quiet", message_options.quiet, "print errors only")->group("Common");
  app.add_flag("-v,--verbose", message_options.verbose, "print more messages")->group("Common");
  app.add_option_function<std::string>(
         "--completion", [&](const std::string& shell) { throw Answer{completion_script(tool, app, shell)}; },
         "print a completion script for SHELL and stop")
      ->type_name("SHELL")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->group("Common");
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    const std::vector<std::string> shown = shown_names(*option);
    names.insert(names.end(), shown.begin(), shown.end());
  }
  for (const CLI::App* command : app.get_subcommands()) {
    const std::vector<std::string> more = option_names(*command);
    names.insert(names.end(), more.begin(), more.end());
  }
  return names;
}

// Describes the user's mistake. An unknown option is reported before a missing one: it is the likelier cause.
std::string describe_misuse(const CLI::App& app, std::string_view reason) {
  for (const std::string& word : app.remaining(true)) {
    const bool is_option = word.size() > 1 && word[0] == '-';
    if (!is_option && app.get_prefix_command()) break;
    const std::string name = word.substr(0, word.find('='));
    std::vector<std::string> candidates;
    if (is_option) {
      candidates = option_names(app);
    } else {
      for (const CLI::App* command : app.get_subcommands(nullptr)) candidates.push_back(command->get_name());
    }
    const std::vector<std::string_view> views(candidates.begin(), candidates.end());
    const std::string_view near = name.size() > 2 ? nearest(name, views) : "";
    return fmt::format("{} '{}'{}", is_option ? "unknown option" : "unexpected argument", name,
                       near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  }
  return std::string(reason);
}

// The message of CLI11 in the style of ours.
std::string reword(const CLI::ParseError& e) {
  std::string text = e.what();
  const std::string name = text.substr(0, text.find(':'));
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e) != nullptr)
    return name + (text.find("missing") != std::string::npos ? " needs a value" : " was given more than once");
  if (dynamic_cast<const CLI::RequiredError*>(&e) != nullptr && text.ends_with(" is required"))
    return text.substr(0, text.size() - std::strlen(" is required")) + " is missing";
  for (const std::string_view word : {"Value", "Could", "File", "Directory", "Path", "Number", "A subcommand"})
    if (const std::size_t at = text.find(word); at != std::string::npos && (at == 0 || text[at - 1] == ' '))
      text[at] = static_cast<char>(text[at] - 'A' + 'a');
  return text;
}

// The option that was given an empty value. No option takes one; a variable of a script is probably unset.
std::string empty_option(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 0) continue;
    for (const std::string& value : option->results())
      if (value.empty()) return option->get_name();
  }
  return "";
}

// The words of the command line; before the program to run, "-name" becomes "--name" if that is an option.
std::vector<std::string> with_two_dashes(const CLI::App& app, std::vector<std::string> words) {
  for (std::size_t i = 0; i < words.size() && words[i].size() > 1 && words[i][0] == '-' && words[i] != "--"; ++i) {
    const auto option_of = [&](const std::string& word) {
      return app.get_option_no_throw(word.substr(0, word.find('=')));
    };
    if (words[i].size() > 2 && words[i][1] != '-' && option_of("-" + words[i]) != nullptr) words[i].insert(0, "-");
    const CLI::Option* option = option_of(words[i]);
    const bool has_value = words[i].find('=') != std::string::npos;
    if (option != nullptr && option->get_items_expected_max() > 0 && !has_value) ++i;
  }
  return words;
}

// True if the options were understood; false: the reason has been reported, and the exit status is 2.
bool parse(CLI::App& app, int argc, char** argv, const ToolInfo& tool) {
  std::string mistake;
  try {
    std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
    if (tool.one_dash) words = with_two_dashes(app, std::move(words));
    std::reverse(words.begin(), words.end());  // the order in which CLI11 takes them
    app.parse(std::move(words));
    const std::vector<std::string> rest = app.remaining();
    const bool good = !app.get_prefix_command() || rest.empty() || rest[0] == "--" || !rest[0].starts_with('-');
    const std::string empty = empty_option(app);
    if (good && empty.empty()) return true;
    mistake = describe_misuse(app, empty + " is empty");
  } catch (const CLI::CallForHelp&) {
    throw Answer{app.help()};
  } catch (const CLI::ParseError& e) {
    mistake = describe_misuse(app, reword(e));
  }
  report_error(mistake);
  report_hint(fmt::format("'{} --help' lists the options", tool.name));
  return false;
}

void install_log_sink(const ToolInfo& tool) {
  const bool info = tool.show_info && rank() == 0;
  set_log_sink([info](LogLevel level, std::string_view message) {
    if (level == LogLevel::Warning) {
      report_warning(message);
    } else if (verbose() || (info && level == LogLevel::Info)) {
      report_note(message);
    }
  });
}

int run(int argc, char** argv, const ToolInfo& tool, const Setup& setup) {
  CLI::App app{std::string(tool.purpose), std::string(tool.name)};
  CommonOptions common;
  app.fallthrough();
  app.formatter(std::make_shared<HelpFormatter>(tool));
  add_common_options(app, tool, common);
  const Body body = setup(app);
  if (!parse(app, argc, argv, tool)) return exit_code(Errc::Config);
  install_log_sink(tool);
  Output output(tool, common.output, common.json);
  check_report(app, output);
  const int status = body(output);
  output.commit();
  return status;
}

}  // namespace

void check_report(const CLI::App& app, const Output& output) {
  std::error_code ignored;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_name() == output.option()) continue;
    const bool is_file = option->check_lname("output") || option->get_type_name() == "FILE";  // which need not exist
    for (const std::string& value : option->results())
      if ((is_file || std::filesystem::exists(value, ignored)) && output.replaces(value))
        throw Error(Errc::Config, fmt::format("{} {}: is also {}", output.option(), output.file(), option->get_name()));
  }
  for (const CLI::App* command : app.get_subcommands()) check_report(*command, output);
}

namespace {

// If memory runs out where nothing may be thrown, in a kernel or at the start of a thread, the tool ends with the same
// message and status as elsewhere. Every other exception that arrives here is a bug, and leaves a core.
[[noreturn]] void end_without_memory() noexcept {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    report_error(system_reason(ENOMEM));
    std::_Exit(exit_code(Errc::OutOfMemory));
  } catch (const std::exception& e) {
    report_error(fmt::format("internal error: {}", e.what()));
  } catch (...) {
  }
  std::abort();
}

}  // namespace

int run_main(int argc, char** argv, const ToolInfo& tool, const Setup& setup) {
  // A closed stream must not be reused for another file, nor silently lose output.
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  message_options = {.tool = tool.name};
  std::set_terminate(end_without_memory);
  // A closed reader and a limit of the file size are errors of write(), so that destructors run and a message says why.
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
  int status = 1;
  try {
    try {
      check_process_limits();  // first, since everything else needs stack
      status = run(argc, argv, tool, setup);
    } catch (const Answer& answer) {
      write_all(STDOUT_FILENO, answer.text, "to stdout");
      status = 0;
    }
  } catch (const BrokenPipe&) {
    std::signal(SIGPIPE, SIG_DFL);
    std::raise(SIGPIPE);
  } catch (const StoppedBySignal& stopped) {
    std::signal(stopped.signal, SIG_DFL);
    std::raise(stopped.signal);
  } catch (const Error& e) {
    report_error(e.what());
    status = exit_code(e.code());
  } catch (const std::filesystem::filesystem_error& e) {
    report_error(fmt::format("{}: {}", e.path1().string(), e.code().message()));
    status = exit_code(Errc::Io);
  } catch (const std::bad_alloc&) {
    report_error(system_reason(ENOMEM));
    status = exit_code(Errc::OutOfMemory);
  } catch (const std::exception& e) {
    report_error(fmt::format("internal error: {}", e.what()));
    status = exit_code(Errc::Internal);
  }
  set_log_sink(nullptr);
  return status;
}

}  // namespace ds::tools
