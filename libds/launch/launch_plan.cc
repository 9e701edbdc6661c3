// SPDX-License-Identifier: Apache-2.0
// The plan of a launch, made before anything starts.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <limits>

#include "base/check.h"
#include "ds/launch.h"
#include "ds/launchers.h"
#include "ds/log.h"
#include "launch/host_shim.h"
#include "launch/limits.h"
#include "launch/mpirun.h"
#include "launch/process.h"

namespace ds {

using namespace launch;

namespace {

constexpr int kMaxRanks = 4096;

std::string number(i64 value) { return std::to_string(value); }

int total_slots(const std::vector<LaunchHost>& hosts) {
  i64 slots = 0;
  for (const LaunchHost& host : hosts) slots += host.slots;
  return static_cast<int>(std::min<i64>(slots, std::numeric_limits<int>::max()));
}

bool is_loopback(std::string host) {
  std::transform(host.begin(), host.end(), host.begin(), [](unsigned char c) { return std::tolower(c); });
  return host == "localhost" || host.starts_with("localhost.") || host.starts_with("127.") || host == "::1";
}

int ranks_of(const LaunchOptions& options) {
  if (options.hosts.empty()) return options.ranks == 0 ? 1 : options.ranks;
  const int slots = total_slots(options.hosts), ranks = options.ranks == 0 ? slots : options.ranks;
  DS_CHECK(ranks <= slots, Errc::Config,
           "{} ranks, but the {} host{} given {} {} slot{}: ask for fewer ranks (-n) or give more slots", ranks,
           options.hosts.size(), options.hosts.size() == 1 ? "" : "s", options.hosts.size() == 1 ? "has" : "have",
           slots, slots == 1 ? "" : "s");
  DS_CHECK(ranks <= kMaxRanks, Errc::Config, "{} slots: a job has at most {} ranks; give a number with -n", slots,
           kMaxRanks);
  return ranks;
}

// Hosts are filled in their order; those that are not needed have no part in the job.
std::vector<PlannedHost> place(const LaunchOptions& options, int ranks) {
  std::vector<PlannedHost> hosts;
  const std::vector<std::string> own = own_addresses();
  for (int first = 0; const LaunchHost& host : options.hosts) {
    if (first == ranks) break;
    PlannedHost planned{
        .name = host.name, .first_rank = first, .ranks = std::min(host.slots, ranks - first), .reached_by = {}};
    if (!is_this_machine(host.name, own))
      planned.reached_by = agent_command(
          options.agent, host.name, command_line({own_executable().string(), "--host-shim"}), options.host_timeout_s);
    first += planned.ranks;
    hosts.push_back(std::move(planned));
  }
  for (const PlannedHost& host : hosts)
    DS_CHECK(hosts.size() == 1 || !is_loopback(host.name), Errc::Config,
             "host '{}' means a different machine on each host: give the name by which the others know it", host.name);
  const std::vector<std::string> first =
      hosts[0].reached_by.empty() ? addresses_of(hosts[0].name) : std::vector<std::string>();
  if (hosts.size() > 1 && !first.empty() && std::all_of(first.begin(), first.end(), loops_back))
    log_message(
        LogLevel::Warning,
        fmt::format("host {} is {} to itself: a program that listens at MASTER_ADDR may hear no other host; give "
                    "an address instead",
                    hosts[0].name, first[0]));
  return hosts;
}

// By the name that the shell knows it by: on other hosts a symbolic link on the way may lead elsewhere.
std::string working_directory(const Environment& inherited) {
  std::error_code error;
  const std::string real = std::filesystem::current_path(error).string();
  DS_CHECK(!error, Errc::Config, "the working directory no longer exists or cannot be read: {}; change to another",
           error.message());
  const std::string named = value_or(inherited, "PWD", "");
  return named.starts_with('/') && std::filesystem::equivalent(named, real, error) ? named : real;
}

}  // namespace

LaunchPlan plan_launch(const LaunchOptions& options) {
  const Environment inherited = parse_environment(options.environment);
  const int cpus = static_cast<int>(usable_cpus().size());
  const bool here = options.hosts.empty();
  LaunchPlan plan;
  plan.ranks = ranks_of(options);
  DS_CHECK(!options.command.empty(), Errc::Config, "no program to run");
  DS_CHECK(options.bind == LaunchBind::None || !here || plan.ranks <= cpus, Errc::Config,
           "--bind core needs a core for every rank: {} ranks, {} cores; use fewer ranks or --bind none", plan.ranks,
           cpus);

  plan.folder = working_directory(inherited);
  check_limits(plan.ranks);
  const std::optional<OtherLauncher> other = other_launcher(options.environment, ::isatty(STDIN_FILENO) == 1);
  DS_CHECK(!other || inherited.contains("WORLD_SIZE"), Errc::Config,
           "{} started several copies of ds-launch ({}), and each would start a job of its own: start one copy, which "
           "starts all ranks; if each is to have its own job, set WORLD_SIZE=1",
           other->name, other->variable);
  // mpirun refuses to run where another mpirun has left this.
  DS_CHECK(!inherited.contains("OMPI_UNIVERSE_SIZE"), Errc::Config,
           "this process is a rank of a job: mpirun cannot start a job inside a job");

  const std::string path = value_or(inherited, "PATH", std::string(kDefaultPath));
  const Program program = find_program(options.command.front(), path);
  if (program.status != 0) {
    plan.refused = program.status;
    plan.why = program.why;
    return plan;
  }
  plan.program = program.path;

  const Program mpirun = find_program("mpirun", path);
  DS_CHECK(mpirun.status == 0, Errc::Unavailable, "Open MPI's mpirun is not in PATH (Debian: openmpi-bin)");
  if (!here) {
    DS_CHECK(own_executable().string().find_first_of(" \t:\"'\\") == std::string::npos, Errc::Config,
             "mpirun cannot start programs on hosts if their path contains spaces, colons or quotes: '{}'",
             own_executable().string());
    plan.hosts = place(options, plan.ranks);
    for (const PlannedHost& host : plan.hosts) {
      if (host.reached_by.empty()) continue;
      const Program agent = find_program(host.reached_by[0], path);
      DS_CHECK(agent.status == 0, Errc::Unavailable, "there is no way to reach host {}: {}", host.name, agent.why);
    }
    plan.orted = (std::filesystem::path(mpirun.path).parent_path() / "orted").string();
    DS_CHECK(::access(plan.orted.c_str(), X_OK) == 0, Errc::Unavailable,
             "Open MPI's orted is not in the directory of its mpirun, {}", mpirun.path);
  }
  const i64 folder_bytes = open_mpi_bytes(plan.ranks);
  const std::string folder =
      (private_folder_base(value_or(inherited, "TMPDIR", "/tmp"), folder_bytes) / kPrivatePrefix).string() + "XXXXXX";
  plan.mpirun_program = mpirun.path;
  plan.mpirun = mpirun_command(mpirun.path, plan, plan.ranks > cpus, folder);
  plan.mpirun_environment = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
  if (!here) plan.mpirun_environment.push_back(fmt::format("{}={}", kFolderVariable, folder));

  // With hosts, the port is found on the first of them.
  plan.environment = {"WORLD_SIZE=" + number(plan.ranks), "MASTER_ADDR=" + (here ? "127.0.0.1" : plan.hosts[0].name),
                      "DS_JOB=" + random_hex(16)};
  if (here) plan.environment.push_back("MASTER_PORT=" + number(free_port()));
  const std::vector<PlannedHost> nodes =
      here ? std::vector{PlannedHost{.name = host_name(), .first_rank = 0, .ranks = plan.ranks, .reached_by = {}}}
           : plan.hosts;
  for (std::size_t node = 0; node < nodes.size(); ++node)
    for (int local = 0; local < nodes[node].ranks; ++local)
      plan.rank_environment.push_back({"RANK=" + number(nodes[node].first_rank + local), "LOCAL_RANK=" + number(local),
                                       "LOCAL_WORLD_SIZE=" + number(nodes[node].ranks),
                                       "NODE_RANK=" + number(static_cast<i64>(node))});
  for (const auto& [name, columns] :
       {std::pair{"DS_COLUMNS=", options.terminal_columns}, {"DS_STDOUT_COLUMNS=", options.stdout_columns}}) {
    if (columns > 0) plan.rank_environment[0].push_back(name + number(columns));
  }
  return plan;
}

}  // namespace ds
