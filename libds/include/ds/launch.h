// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starts the ranks of a program on this node, or on several, and supervises them. Open MPI's mpirun starts one shim for
// each rank (this program in a hidden mode). A shim connects back over a socket, receives the rank's command and
// environment, runs the rank as its child, and relays its output, input, signals and exit status:
//
//   run_launch() --- socket ---+--- shim 0 --- rank 0
//        |                     +--- shim 1 --- rank 1
//        +--- mpirun (starts the shims; ranks inherit its environment, so MPI programs work)
//
// Every process watches its parent (PR_SET_PDEATHSIG), and the two ends of a socket watch each other, so no process
// outlives the job, whichever one is killed. On other hosts the socket is TCP. Both ends then prove that they know the
// job's secret (launch/handshake.h), and one more shim per host, with a heartbeat, stands above the others there
// (launch/host_shim.h): a host that no longer hears from the launcher ends its part of the job.

#include <optional>
#include <string>
#include <vector>

#include "ds/error.h"

namespace ds {

enum class LaunchBind {
  None,  // the kernel decides
  Core,  // each rank gets an equal share of the cores, neighbours together
};

struct LaunchHost {
  std::string name;  // name or address; IPv6 without brackets
  int slots = 1;
};

// Parse a hostfile (one "NAME slots=N" per line) and a list ("a:4,b:4"). Throw Errc::Config, which lists all mistakes
// with their places; `option` is the option that the list was given to.
DS_API std::vector<LaunchHost> read_hostfile(const std::string& file);
DS_API std::vector<LaunchHost> parse_host_list(std::string_view text, const std::string& option);

struct LaunchOptions {
  int ranks = 0;                  // 0: one rank per slot; without hosts, one
  std::vector<LaunchHost> hosts;  // empty: this machine, with any number of ranks
  std::string agent;              // program that reaches a host, called as AGENT HOST COMMAND; empty: ssh
  double host_timeout_s = 20;     // a host that is silent for this long is lost
  LaunchBind bind = LaunchBind::None;
  std::string log_dir;  // empty: none; else every rank's output is also appended to log_dir/rank-00000.log
  bool tag_output = false;
  int terminal_columns = 0;              // of the terminal that shows stderr; passed to rank 0 as DS_COLUMNS
  int stdout_columns = 0;                // of the terminal that shows stdout; passed as DS_STDOUT_COLUMNS
  std::vector<std::string> command;      // PROG ARG...
  std::vector<std::string> environment;  // "NAME=value": inherited by the ranks
};

struct PlannedHost {
  std::string name;
  int first_rank = 0, ranks = 0;
  std::vector<std::string> reached_by;  // command and arguments; empty for this machine
};

struct LaunchPlan {
  int refused = 0;  // 126: PROG cannot be executed, 127: not found; then only `why` is set
  std::string why;  // the reason of `refused`
  std::string program;
  int ranks = 0;
  std::vector<PlannedHost> hosts;  // hosts with ranks, in blocks: host 0 has the first ones; empty: this machine
  std::string orted;               // the program that mpirun runs on hosts
  std::string folder;              // working directory of the ranks
  std::string mpirun_program;
  std::vector<std::string> mpirun;                         // command line
  std::vector<std::string> mpirun_environment;             // "NAME=value", added to the inherited environment of mpirun
  std::vector<std::string> environment;                    // added for every rank
  std::vector<std::vector<std::string>> rank_environment;  // added for one rank
};

// How one rank ended.
struct RankEnd {
  int rank = 0;
  std::string host;
  int pid = 0;
  int status = 0;                       // exit status, or 128 + signal
  int signal = 0;                       // 0: it exited
  bool stopped = false;                 // the launcher ended it, because of another rank or because it was told to
  bool lost = false;                    // its host is gone, so how it ended is unknown
  double seconds = 0;                   // from the start of the job to the end of the rank
  std::vector<std::string> last_lines;  // of its stderr
};

struct LaunchReport {
  int status = 0;                   // status that the launcher should return; see run_launch()
  std::string why;                  // the reason; empty if the job succeeded or ended as requested
  int culprit = -1;                 // the rank that failed first; -1: none
  bool culprit_wrote_last = false;  // no other rank wrote to stderr after it
  std::vector<RankEnd> ranks;
};

// Plans run_launch() and changes nothing. Throws Errc::Config for options that contradict each other or this machine,
// Errc::Unavailable without mpirun.
DS_API LaunchPlan plan_launch(const LaunchOptions& options);

// Runs the job to its end, with this process's stdin (to rank 0), stdout and stderr; lines of different ranks are never
// mixed. Until it returns, it owns the process: it catches all ending_signals() (ds/signals.h) and SIGTSTP, except
// those that were ignored, and it reaps every child. Signals are passed to the ranks; before all ranks have started,
// they end the job. A second signal, except SIGUSR1 and SIGUSR2, ends the ranks by force.
// The status is 0 if all ranks returned 0; 75 if some returned 75 and the others 0; 128 + signal if the launcher was
// told to stop and the ranks did; else the status of the rank that failed first (128 + signal if it was killed).
DS_API LaunchReport run_launch(const LaunchOptions& options, const LaunchPlan& plan);

// Runs the hidden modes, which plan.mpirun starts here and on other hosts, and returns their exit status. Returns
// nothing if `arguments` (without the program's name) select none of them. `environment` is that of the process.
DS_API std::optional<int> run_as_shim(const std::vector<std::string>& arguments,
                                      const std::vector<std::string>& environment);

// Quotes and joins words for a shell.
DS_API std::string command_line(const std::vector<std::string>& words);

}  // namespace ds
