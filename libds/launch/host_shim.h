// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starts mpirun's daemon on a host, and watches over it there. mpirun calls what it takes for a remote shell; it knows
// hosts by index ("ds-launch-host-0"), never by a name from a user:
//
// run_launch() --- TCP, heartbeat ---------------------------+
//      |                                                     |
//      +--- mpirun --- agent shim --- ssh ---------- host shim --- orted --- rank shims --- ranks
//              fork              or AGENT   network    child         child          child
//
// The command that ssh passes to the shell of the host is always the path of this program and "--host-shim". Everything
// else (the job's secret, where the launcher listens, orted's arguments) goes through standard input.

#include <span>
#include <string>
#include <vector>

#include "launch/handshake.h"

namespace ds::launch {

inline constexpr std::string_view kHostAlias = "ds-launch-host-";
inline constexpr std::string_view kFolderVariable = "DS_LAUNCH_FOLDER";  // the launcher's folder, for shims of agents

// Written by the launcher to its folder for the shims of agents.
struct AgentSettings {
  struct Host {
    std::string name, ranks;
    std::vector<std::string> reached_by;  // as in PlannedHost
  };
  std::string orted;  // path, the same on all hosts
  Home home;
  std::vector<Host> hosts;
};
std::string to_text(const AgentSettings& settings);
AgentSettings agent_settings_of(const std::string& text);

// The words that mpirun passes for a shell on a host: the host's name, orted and orted's arguments, within commands for
// the login shell that mpirun assumes.
struct OrtedCall {
  std::size_t host = 0;  // its index in the job
  std::vector<std::string> arguments;
};
OrtedCall orted_call_of(std::span<const std::string> words);  // throws Errc::Internal

std::vector<std::string> addresses_of(const std::string& host);  // as resolved on this machine; empty: unknown
bool loops_back(const std::string& address);                     // Debian gives a machine's own name 127.0.1.1
// Whether a name or an address is one of this machine, whose addresses are `own`: then no agent is needed.
bool is_this_machine(const std::string& host, const std::vector<std::string>& own);
// The argument array that reaches a host within `timeout_s`; a shell there runs `command`.
std::vector<std::string> agent_command(const std::string& agent, const std::string& host, const std::string& command,
                                       double timeout_s);
// The shim of one rank. socket: the launcher's, unless the environment names a TCP connection.
int run_rank_shim(const std::string& socket, const std::vector<std::string>& environment);

}  // namespace ds::launch
