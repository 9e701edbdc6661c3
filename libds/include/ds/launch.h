// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starts N ranks of a program on this node, or on several, and watches over them. Open MPI's mpirun starts N shims
// (this very program in a hidden mode); a shim connects back over a socket, gets the rank's command and environment
// from here, runs the rank as its child and relays output, input, signals and the way it ended:
//
// run_launch() --- socket ---+--- shim 0 --- rank 0
//      |                     +--- shim 1 --- rank 1
//      +--- mpirun (starts the shims; ranks find its environment, so MPI programs work)
//
// Every process watches its parent (PR_SET_PDEATHSIG) and the two ends of the socket watch each other: whoever is
// killed, however, nothing survives. On other hosts the socket is TCP, both ends prove that they know the job's secret
// (launch/handshake.h), and a shim of the host stands above all others there, with a heartbeat (launch/host_shim.h):
// whatever is cut or frozen, a host that hears nothing from here ends its part.

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
  std::string name;  // or address; IPv6 without brackets
  int slots = 1;
};

// A hostfile, "NAME slots=N" a line, and a list, "a:4,b:4". Throw Errc::Config with all mistakes, each named by where
// it stands; `option`: what the list was given to.
DS_API std::vector<LaunchHost> read_hostfile(const std::string& file);
DS_API std::vector<LaunchHost> parse_host_list(std::string_view text, const std::string& option);

struct LaunchOptions {
  int ranks = 0;                  // 0: a rank for every slot; without hosts, one
  std::vector<LaunchHost> hosts;  // none: this machine, any number of ranks
  std::string agent;              // program that reaches a host, called as AGENT HOST COMMAND; "": ssh
  double host_timeout_s = 20;     // a host that is silent for so long is lost
  LaunchBind bind = LaunchBind::None;
  std::string log_dir;  // "": none; else every rank's output is appended to log_dir/rank-00000.log as well
  bool tag_output = false;
  int terminal_columns = 0;              // of the terminal that shows stderr; told to rank 0 as DS_COLUMNS
  int stdout_columns = 0;                // the same of stdout, as DS_STDOUT_COLUMNS
  std::vector<std::string> command;      // PROG ARG...
  std::vector<std::string> environment;  // "NAME=value": what the ranks inherit
};

struct PlannedHost {
  std::string name;
  int first_rank = 0, ranks = 0;
  std::vector<std::string> reached_by;  // argument array, unless it is this machine
};

struct LaunchPlan {
  int refused = 0;  // 126: PROG cannot be executed, 127: not found; then nothing else is filled
  std::string why;  // the reason
  std::string program;
  int ranks = 0;
  std::vector<PlannedHost> hosts;  // that get ranks, in blocks: host 0 has the first ones. None: this machine
  std::string orted;               // what mpirun runs on hosts
  std::string folder;              // where ranks run
  std::string mpirun_program;
  std::vector<std::string> mpirun;                         // command line
  std::vector<std::string> mpirun_environment;             // "NAME=value" added to the inherited for mpirun
  std::vector<std::string> environment;                    // added for every rank
  std::vector<std::vector<std::string>> rank_environment;  // added for one rank
};

// How one rank ended.
struct RankEnd {
  int rank = 0;
  std::string host;
  int pid = 0;
  int status = 0;                       // its exit status, or 128 + signal
  int signal = 0;                       // 0: it exited
  bool stopped = false;                 // we ended it, because of another rank or because we were told to
  bool lost = false;                    // nobody knows how it ended: its host is gone
  double seconds = 0;                   // since the start of the job
  std::vector<std::string> last_lines;  // of its stderr
};

struct LaunchReport {
  int status = 0;    // what the launcher should return; see run_launch()
  std::string why;   // "": fine, or ended as asked; else the reason
  int culprit = -1;  // the rank that failed first, if one did
  std::vector<RankEnd> ranks;
};

// What run_launch() will do. Throws Errc::Config for options that contradict each other or this machine,
// Errc::Unavailable without mpirun. Changes nothing.
DS_API LaunchPlan plan_launch(const LaunchOptions& options);

// Runs the job to its end, with this process's stdin (to rank 0), stdout and stderr; lines of different ranks are never
// mixed. Until it returns it owns the process: it takes all ending_signals() (ds/signals.h) and SIGTSTP that were
// not ignored and passes them to the ranks; before all ranks have started they end the job. The second of them, but for
// SIGUSR1 and SIGUSR2, ends the ranks by force. It reaps every child. Status: 0 if all ranks returned 0; 75 if some
// returned 75 and the others 0; else that of the rank that failed first in time (128 + signal if it was killed); 128 +
// signal if we were told to stop and the ranks did.
DS_API LaunchReport run_launch(const LaunchOptions& options, const LaunchPlan& plan);

// The hidden modes: what plan.mpirun starts here and on hosts. Their exit status; nothing if the arguments (without the
// program's name) are none of theirs. environment: of the process.
DS_API std::optional<int> run_as_shim(const std::vector<std::string>& arguments,
                                      const std::vector<std::string>& environment);

// Words as a shell would have to read them.
DS_API std::string command_line(const std::vector<std::string>& words);

}  // namespace ds
