// SPDX-License-Identifier: Apache-2.0
// ds-launch: starts N ranks of a program, on this machine or on several hosts, and watches over them.

#include <filesystem>
#include <span>

#include "common/foreign.h"
#include "common/ranks.h"
#include "common/tool.h"
#include "ds/launch.h"

namespace {

using namespace ds;

constexpr std::size_t kShownLines = 10, kShownBytes = 500;

void print_plan(const LaunchPlan& plan, const LaunchOptions& options, tools::Output& out) {
  std::vector<std::string> program = options.command, mpirun = plan.mpirun;
  program.front() = plan.program;
  mpirun.front() = plan.mpirun_program;
  nlohmann::ordered_json hosts = nlohmann::ordered_json::array();
  for (const PlannedHost& host : plan.hosts)
    hosts.push_back(
        {{"name", host.name}, {"first_rank", host.first_rank}, {"ranks", host.ranks}, {"reached_by", host.reached_by}});
  if (out.json())
    return out.document({{"mpirun", mpirun},
                         {"mpirun_environment", plan.mpirun_environment},
                         {"hosts", hosts},
                         {"command", program},
                         {"environment", plan.environment},
                         {"rank_environment", plan.rank_environment}});
  out.print("mpirun:  {} {}\n", command_line(plan.mpirun_environment), command_line(mpirun));
  out.print("ranks:   {}\n", command_line(program));
  out.print("all:     {}\n", command_line(plan.environment));
  for (const PlannedHost& host : plan.hosts)
    out.print("host {}: {}\n", host.name, host.reached_by.empty() ? "this machine" : command_line(host.reached_by));
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
                     {"lost", end.lost},
                     {"run_s", end.seconds},
                     {"last_lines", end.last_lines}});
    if (!out.json())
      out.print("rank {} ({}, pid {}): status {} after {:.3f} s\n", end.rank, end.host, end.pid, end.status,
                end.seconds);
  }
  if (out.json())
    out.document({{"status", report.status}, {"culprit", report.culprit}, {"why", report.why}, {"ranks", ranks}});
}

// The reason, and the last lines of the rank that failed first unless they have just been printed.
void explain(const LaunchReport& report) {
  if (report.why.empty()) return;
  std::string text = report.why;
  if (report.culprit >= 0 && !report.culprit_wrote_last) {
    const std::vector<std::string>& lines = report.ranks[static_cast<std::size_t>(report.culprit)].last_lines;
    if (!lines.empty()) text += "; its last lines:";
    for (std::size_t i = lines.size() - std::min(lines.size(), kShownLines); i < lines.size(); ++i)
      text += quoted_lines(shortened(lines[i], kShownBytes));
  }
  tools::report_error(text);
}

// The report replaces no file that the program's command line names: the program, an argument, or the part of one after
// an '='.
void check_inputs(const std::string& program, std::span<const std::string> words, const tools::Output& out) {
  std::vector<std::string> names = {program};
  for (const std::string& word : words) {
    names.push_back(word);
    for (size_t at = word.find('='); at != std::string::npos; at = word.find('=', at + 1))
      names.push_back(word.substr(at + 1));
  }
  std::error_code ignored;
  for (const std::string& name : names) {
    if (std::filesystem::is_regular_file(name, ignored) && out.replaces(name))
      throw Error(Errc::Config, fmt::format("--output {}: the program's command line names this file", out.file()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::optional<int> status = run_as_shim({argv + 1, argv + argc}, tools::own_environment())) return *status;

  LaunchOptions options;
  std::string bind = "none", hostfile, hosts;
  tools::RanksPerNode per_node;
  bool dry_run = false;
  const tools::ToolInfo tool = {
      .name = "ds-launch",
      .purpose = "start the ranks of a program and watch over them",
      .usage = {"[options] PROG [ARG...]"},
      .examples = {{"ds-launch -n 2 ds-train gpt.json", "train on two ranks"},
                   {"ds-launch -n 4 --log-dir logs --tag-output ds-train gpt.json --out run",
                    "keep a log for each rank, and print the rank before every line"},
                   {"ds-launch --host node-a:4,node-b:4 ds-train gpt.json --out run",
                    "train on two nodes with eight ranks"},
                   {"ds-launch -n 2 --dry-run ds-train gpt.json", "print what would be started"}},
      .one_dash = true};
  return tools::run_main(argc, argv, tool, [&](CLI::App& app) -> tools::Body {
    app.prefix_command();  // what follows PROG belongs to PROG
    tools::add_number(
        app, "-n,--ranks,--np,--num-processes,--num_processes", options.ranks, 1, 4096,
        "number of ranks (default 1, with hosts the number of slots); more than cores is possible, but slow")
        ->type_name("N");
    tools::add_ranks_per_node(app, per_node);
    CLI::Option* file = app.add_option("--hostfile,--machinefile", hostfile,
                                       "run on the hosts in FILE, one line 'NAME slots=N' for each")
                            ->type_name("FILE")
                            ->group("Hosts");
    app.add_option("--host", hosts, "run on these hosts: NAME:SLOTS,...")
        ->type_name("LIST")
        ->group("Hosts")
        ->excludes(file);
    app.add_option("--agent", options.agent, "reach a host with 'PROG HOST COMMAND' (default ssh)")
        ->type_name("PROG")
        ->group("Hosts");
    tools::add_number(app, "--host-timeout", options.host_timeout_s, 1, 86400,
                      "a host that is silent for S seconds is lost (default 20)")
        ->type_name("S")
        ->group("Hosts");
    app.add_option("--bind", bind, "core: give each rank its own share of the cores (default none)")
        ->type_name("HOW")
        ->check(CLI::IsMember({"none", "core"}));
    app.add_flag_callback(tools::both_spellings("--bind-cores-to-rank"), [&] { bind = "core"; })->group(tools::kHidden);
    app.add_option(tools::both_spellings("--log-dir,--enable-each-rank-log"), options.log_dir,
                   "also append the output of each rank to DIR/rank-00000.log ...")
        ->type_name("DIR");
    app.add_flag("--tag-output", options.tag_output, "put the rank before every line of output");
    app.add_flag("--dry-run", dry_run, "print the mpirun command and the environment, and stop");
    tools::add_foreign(app, tools::options_of_launchers());
    return [&](tools::Output& out) {
      options.command = app.remaining();
      if (!options.command.empty() && options.command.front() == "--") options.command.erase(options.command.begin());
      if (app.count("--hostfile") > 0) options.hosts = read_hostfile(hostfile);
      if (app.count("--host") > 0) options.hosts = parse_host_list(hosts, "--host");
      tools::apply(per_node, options);
      for (const char* option : {"--agent", "--host-timeout"})
        if (options.hosts.empty() && app.count(option) > 0)
          throw Error(Errc::Config, fmt::format("{} applies to other hosts: give --hostfile or --host", option));
      options.bind = bind == "core" ? LaunchBind::Core : LaunchBind::None;
      options.environment = tools::own_environment();
      options.terminal_columns = tools::terminal_columns();
      options.stdout_columns = tools::stdout_columns();
      if (out.json() && !dry_run && !out.to_file())
        throw Error(Errc::Config, "--json needs --dry-run or --output FILE: stdout belongs to the ranks");
      const LaunchPlan plan = plan_launch(options);
      if (plan.refused != 0) {
        tools::report_error(plan.why);
        return plan.refused;
      }
      check_inputs(plan.program, options.command, out);
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
