// SPDX-License-Identifier: Apache-2.0
// What a launch will do, decided before anything starts.

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "ds/launch.h"
#include "ds/log.h"
#include "launch/process.h"

namespace ds {

using namespace launch;

namespace {

// What Open MPI 4.1 puts into its folder: 8 MiB of PMIx's in steps of 4 MiB, and 4 MiB of messages for every rank.
constexpr i64 kOpenMpiBytes = i64{16} << 20;
constexpr i64 kOpenMpiRankBytes = i64{4} << 20;

std::string number(i64 value) { return std::to_string(value); }

// Open MPI's own settings: one node, no binding, everything it writes inside our private folder, and time between its
// SIGTERM and its SIGKILL: how a job ends is our affair.
std::vector<std::string> mpirun_command(const std::string& mpirun, const LaunchOptions& options, bool oversubscribed,
                                        const std::string& folder) {
  std::vector<std::string> command = {mpirun, "-n", number(options.ranks), "--oversubscribe", "--bind-to", "none"};
  const auto setting = [&](const char* name, const std::string& value) {
    command.insert(command.end(), {"--mca", name, value});
  };
  setting("plm", "isolated");
  setting("ras", "^slurm,tm,loadleveler,gridengine,lsf,alps");
  setting("orte_tmpdir_base", folder);
  setting("btl_vader_backing_directory", folder);
  setting("odls_base_sigkill_timeout", "20");
  if (oversubscribed) setting("mpi_yield_when_idle", "1");
  command.insert(command.end(), {own_executable().string(), "--rank-shim", folder + "/socket"});
  return command;
}

}  // namespace

LaunchPlan plan_launch(const LaunchOptions& options) {
  const Environment inherited = parse_environment(options.environment);
  const int cpus = static_cast<int>(usable_cpus().size());
  DS_CHECK(options.ranks >= 1, Errc::Config, "{} ranks: at least 1 is needed", options.ranks);
  DS_CHECK(!options.command.empty(), Errc::Config, "no program to run");
  DS_CHECK(options.bind == LaunchBind::None || options.ranks <= cpus, Errc::Config,
           "--bind core needs a core for every rank: {} ranks, {} cores; use fewer ranks or --bind none", options.ranks,
           cpus);

  std::error_code error;
  const std::filesystem::path here = std::filesystem::current_path(error);
  DS_CHECK(!error, Errc::Config, "the working directory is gone or cannot be read: {}; change to another",
           error.message());
  // With fewer mpirun waits for ever.
  rlimit files{};
  const rlim_t needed = 24 + 4 * static_cast<rlim_t>(options.ranks);
  DS_CHECK(::getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= needed, Errc::Unavailable,
           "a limit of {} open files is too low to start {} ranks: raise it (ulimit -n)", files.rlim_cur,
           options.ranks);
  // mpirun refuses to run where another mpirun has left this.
  DS_CHECK(!inherited.contains("OMPI_UNIVERSE_SIZE"), Errc::Config,
           "this is a rank of a job already: mpirun starts no job inside a job");

  LaunchPlan plan;
  const std::string path = value_or(inherited, "PATH", "/usr/local/bin:/usr/bin:/bin");
  const Program program = find_program(options.command.front(), path);
  if (program.status != 0) {
    plan.refused = program.status;
    plan.why = program.why;
    return plan;
  }
  plan.program = program.path;

  const Program mpirun = find_program("mpirun", path);
  DS_CHECK(mpirun.status == 0, Errc::Unavailable, "Open MPI's mpirun is not in PATH (Debian: openmpi-bin)");
  const i64 folder_bytes = kOpenMpiBytes + options.ranks * kOpenMpiRankBytes;
  const std::string folder =
      (private_folder_base(value_or(inherited, "TMPDIR", "/tmp"), folder_bytes) / kPrivatePrefix).string() + "XXXXXX";
  plan.mpirun = mpirun_command(mpirun.path, options, options.ranks > cpus, folder);
  plan.mpirun_environment = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};

  plan.environment = {"WORLD_SIZE=" + number(options.ranks),
                      "LOCAL_WORLD_SIZE=" + number(options.ranks),
                      "NODE_RANK=0",
                      "MASTER_ADDR=127.0.0.1",
                      "MASTER_PORT=" + number(free_port()),
                      "DS_JOB=" + random_hex(16)};
  if (!inherited.contains("OMP_NUM_THREADS"))
    plan.environment.push_back("OMP_NUM_THREADS=" + number(std::max(1, cpus / options.ranks)));
  for (int rank = 0; rank < options.ranks; ++rank)
    plan.rank_environment.push_back({"RANK=" + number(rank), "LOCAL_RANK=" + number(rank)});
  for (const auto& [name, columns] :
       {std::pair{"DS_COLUMNS=", options.terminal_columns}, {"DS_STDOUT_COLUMNS=", options.stdout_columns}}) {
    if (columns > 0) plan.rank_environment[0].push_back(name + number(columns));
  }
  return plan;
}

}  // namespace ds
