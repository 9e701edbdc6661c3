// SPDX-License-Identifier: Apache-2.0
#pragma once
// mpirun: its command line and environment, and its process, which starts the shims.

#include <sys/types.h>

#include <string>
#include <vector>

#include "ds/launch.h"
#include "launch/channel.h"

namespace ds::launch {

// The settings of Open MPI: no binding; all its files inside the private folder; and a long time between its SIGTERM
// and its SIGKILL, because the launcher ends jobs itself. With hosts, one daemon for each, started from this machine by
// our own agent.
std::vector<std::string> mpirun_command(const std::string& mpirun, const LaunchPlan& plan, bool oversubscribed,
                                        const std::string& folder);

class Mpirun {
 public:
  explicit Mpirun(const LaunchPlan& plan) : plan_(plan) {}  // which outlives it

  // Throws Errc::Unavailable if it cannot be executed. inherited, added: "NAME=value".
  void start(const std::vector<std::string>& command, const std::vector<std::string>& inherited,
             const std::vector<std::string>& added);
  void kill();
  void ended(int wait_status);  // its process was waited for

  pid_t pid() const noexcept { return pid_; }
  bool is_running() const noexcept { return pid_ > 0; }
  bool is_exiting() const;                              // it still runs, but has begun to exit
  bool was_killed() const noexcept { return killed_; }  // by the launcher
  int wait_status() const noexcept { return end_; }     // once it has ended

  // Its own output, shown only if it fails or with --verbose.
  int chatter_fd() const noexcept { return chatter_.get(); }  // for poll(); -1: it has closed its end
  bool read_chatter();                                        // false: there was nothing to read
  bool gave_up() const noexcept { return gave_up_; }          // it printed that it has aborted the job
  std::string quoted() const;  // its last output, for the end of a message, with hosts by the names that the user gave

 private:
  const LaunchPlan& plan_;
  Fd chatter_;
  std::string said_;
  pid_t pid_ = -1;
  int end_ = 0;
  bool killed_ = false, gave_up_ = false;
};

}  // namespace ds::launch
