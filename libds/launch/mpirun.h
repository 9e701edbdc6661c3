// SPDX-License-Identifier: Apache-2.0
#pragma once
// mpirun: its command line and environment, and its process, which starts the shims.

#include <sys/types.h>

#include <string>
#include <vector>

#include "ds/launch.h"
#include "launch/channel.h"

namespace ds::launch {

// Open MPI's own settings: no binding, everything it writes inside our private folder, and time between its SIGTERM and
// its SIGKILL: how a job ends is our affair. With hosts, one daemon for each, started from here by our own agent.
std::vector<std::string> mpirun_command(const std::string& mpirun, const LaunchPlan& plan, bool oversubscribed,
                                        const std::string& folder);

class Mpirun {
 public:
  explicit Mpirun(const LaunchPlan& plan) : plan_(plan) {}  // which outlives us

  // Throws Errc::Unavailable if it cannot be executed. inherited, added: "NAME=value".
  void start(const std::vector<std::string>& command, const std::vector<std::string>& inherited,
             const std::vector<std::string>& added);
  void kill();
  void ended(int wait_status);  // its process was waited for

  pid_t pid() const noexcept { return pid_; }
  bool is_running() const noexcept { return pid_ > 0; }
  bool is_exiting() const;                              // it runs still, and others can see that it ends
  bool was_killed() const noexcept { return killed_; }  // by us
  int wait_status() const noexcept { return end_; }     // once it has ended

  // What it says itself; of interest only if it fails or somebody wants to know.
  int chatter_fd() const noexcept { return chatter_.get(); }  // to poll for; -1: it has closed its end
  bool read_chatter();                                        // false: nothing came
  bool gave_up() const noexcept { return gave_up_; }          // it said that it has aborted the job
  std::string quoted() const;  // what it said last, as the end of a message, with hosts by the names that we were given

 private:
  const LaunchPlan& plan_;
  Fd chatter_;
  std::string said_;
  pid_t pid_ = -1;
  int end_ = 0;
  bool killed_ = false, gave_up_ = false;
};

}  // namespace ds::launch
