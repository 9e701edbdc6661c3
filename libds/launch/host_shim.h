// SPDX-License-Identifier: Apache-2.0
#pragma once
// How mpirun's daemon gets to a host, and what watches over it there. mpirun believes to talk to a remote shell; it
// knows hosts by place ("ds-launch-host-0"), never by a name that somebody wrote:
//
// run_launch() --- TCP, heartbeat ---------------------------+
//      |                                                     |
//      +--- mpirun --- agent shim --- ssh ---------- host shim --- orted --- rank shims --- ranks
//              fork              or AGENT   network    child         child          child
//
// The command that ssh passes to a shell over there is always the same: our own path and "--host-shim". All else (the
// job's secret, where the launcher listens, orted's arguments) goes through standard input.

#include <span>
#include <string>
#include <vector>

#include "launch/handshake.h"

namespace ds::launch {

inline constexpr std::string_view kHostAlias = "ds-launch-host-";
inline constexpr std::string_view kFolderVariable = "DS_LAUNCH_FOLDER";  // of the launcher, for shims of agents

// What the launcher leaves in its folder for the shims of agents.
struct AgentSettings {
  struct Host {
    std::string name, ranks;
    std::vector<std::string> reached_by;  // as PlannedHost's
  };
  std::string orted;  // path, the same on all hosts
  Home home;
  std::vector<Host> hosts;
};
std::string to_text(const AgentSettings& settings);
AgentSettings agent_settings_of(const std::string& text);

// What mpirun hands over for a shell on a host: words of its own for that shell, by what it takes the login shell here
// for, around the host's name, orted and orted's arguments.
struct OrtedCall {
  std::size_t host = 0;  // its place in the job
  std::vector<std::string> arguments;
};
OrtedCall orted_call_of(std::span<const std::string> words);  // throws Errc::Internal

std::vector<std::string> addresses_of(const std::string& host);  // as it is known here; none: it is not
bool loops_back(const std::string& address);                     // Debian gives a machine's own name 127.0.1.1
// Whether a name or an address is one of this machine, which has the addresses `own`: then no agent is needed.
bool is_this_machine(const std::string& host, const std::vector<std::string>& own);
// What reaches a host within `timeout_s`: the argument array, as it will be executed; `command` is for a shell there.
std::vector<std::string> agent_command(const std::string& agent, const std::string& host, const std::string& command,
                                       double timeout_s);
// The shim of one rank. socket: where the launcher is if nothing in the environment names another way.
int run_rank_shim(const std::string& socket, const std::vector<std::string>& environment);

}  // namespace ds::launch
