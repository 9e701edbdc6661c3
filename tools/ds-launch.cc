// SPDX-License-Identifier: Apache-2.0
// ds-launch: start N ranks of a program on this machine and watch over them.

#include <unistd.h>

#include "common/tool.h"
#include "ds/launch.h"

namespace {

using namespace ds;

constexpr std::size_t kShownLines = 10;

std::vector<std::string> own_environment() {
  std::vector<std::string> strings;
  for (char** variable = environ; *variable != nullptr; ++variable) strings.emplace_back(*variable);
  return strings;
}

// A word as a shell would have to read it.
std::string shell_word(const std::string& word) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("_-./=:,+@%^").find(static_cast<char>(c)) != std::string_view::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
  std::string quoted = "'";
  for (const char c : word) c == '\'' ? quoted += "'\\''" : quoted += c;
  return quoted + "'";
}

std::string command_line(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + shell_word(word);
  return line;
}

void print_plan(const LaunchPlan& plan, const LaunchOptions& options, tools::Output& out) {
  std::vector<std::string> program = options.command;
  program.front() = plan.program;
  if (out.json())
    return out.document({{"mpirun", plan.mpirun},
                         {"mpirun_environment", plan.mpirun_environment},
                         {"command", program},
                         {"environment", plan.environment},
                         {"rank_environment", plan.rank_environment}});
  out.print("mpirun:  {} {}\n", command_line(plan.mpirun_environment), command_line(plan.mpirun));
  out.print("ranks:   {}\n", command_line(program));
  out.print("all:     {}\n", command_line(plan.environment));
  for (std::size_t r = 0; r < plan.rank_environment.size(); ++r)
    out.print("{:<9}{}\n", fmt::format("rank {}:", r), command_line(plan.rank_environment[r]));
}

void print_report(const LaunchReport& report, tools::Output& out) {
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  for (const RankEnd& end : report.ranks) {
    ranks.push_back({{"rank", end.rank},
                     {"host", end.host},
                     {"pid", end.pid},
                     {"status", end.status},
                     {"signal", end.signal},
                     {"stopped", end.stopped},
                     {"run_s", end.seconds},
                     {"last_lines", end.last_lines}});
    if (!out.json())
      out.print("rank {} ({}, pid {}): status {} after {:.3f} s\n", end.rank, end.host, end.pid, end.status,
                end.seconds);
  }
  if (out.json())
    out.document({{"status", report.status}, {"culprit", report.culprit}, {"why", report.why}, {"ranks", ranks}});
}

// The reason, and what the rank that failed first said last: with several ranks it may have scrolled away.
void explain(const LaunchReport& report) {
  if (report.why.empty()) return;
  std::string text = report.why;
  if (report.culprit >= 0 && report.ranks.size() > 1) {
    const std::vector<std::string>& lines = report.ranks[static_cast<std::size_t>(report.culprit)].last_lines;
    if (!lines.empty()) text += "; its last lines:";
    for (std::size_t i = lines.size() - std::min(lines.size(), kShownLines); i < lines.size(); ++i)
      text += "\n  | " + lines[i];
  }
  tools::report_error(text);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]) == "--rank-shim") return run_rank_shim(argv[2], own_environment());

  LaunchOptions options;
  std::string bind = "none";
  bool dry_run = false;
  const tools::ToolInfo tool = {
      .name = "ds-launch",
      .purpose = "start ranks of a program and watch over them",
      .usage = {"[options] PROG [ARG...]"},
      .examples = {{"ds-launch -n 2 ds-train gpt.json", "train on two ranks"},
                   {"ds-launch -n 4 --log-dir logs --tag-output ds-train gpt.json --out run",
                    "with a log per rank and the rank before every line"},
                   {"ds-launch -n 2 --dry-run ds-train gpt.json", "show what would be started"}}};
  return tools::run_main(argc, argv, tool, [&](CLI::App& app) -> tools::Body {
    app.prefix_command();  // what follows PROG belongs to PROG
    tools::add_number(app, "-n,--ranks", options.ranks, 1, 4096,
                      "number of ranks (default 1); more than cores is possible, but slow")
        ->type_name("N");
    app.add_option("--bind", bind, "core: give each rank its own share of the cores (default none)")
        ->type_name("HOW")
        ->check(CLI::IsMember({"none", "core"}));
    app.add_option("--log-dir", options.log_dir, "also append the output of each rank to DIR/rank-00000.log ...")
        ->type_name("DIR");
    app.add_flag("--tag-output", options.tag_output, "put the rank before every line of output");
    app.add_flag("--dry-run", dry_run, "print the mpirun command and the environment, and stop");
    return [&](tools::Output& out) {
      options.command = app.remaining();
      if (!options.command.empty() && options.command.front() == "--") options.command.erase(options.command.begin());
      options.bind = bind == "core" ? LaunchBind::Core : LaunchBind::None;
      options.environment = own_environment();
      options.terminal_columns = tools::terminal_columns();
      options.stdout_columns = tools::stdout_columns();
      if (out.json() && !dry_run && !out.to_file())
        throw Error(Errc::Config, "--json needs --dry-run or --output FILE: stdout belongs to the ranks");
      const LaunchPlan plan = plan_launch(options);
      if (plan.refused != 0) {
        tools::report_error(plan.why);
        return plan.refused;
      }
      if (dry_run) {
        print_plan(plan, options, out);
        return 0;
      }
      const LaunchReport report = run_launch(options, plan);
      if (out.to_file()) print_report(report, out);
      explain(report);
      return report.status;
    };
  });
}
