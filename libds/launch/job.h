// SPDX-License-Identifier: Apache-2.0
#pragma once
// The running job: its ranks and their hosts.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ds/launch.h"
#include "launch/process.h"
#include "launch/streams.h"
#include "launch/verdict.h"

namespace ds::launch {

// A host given by the user; without --host and --hostfile there is none.
struct Host {
  explicit Host(const PlannedHost& host) : planned(host) {}

  const PlannedHost& planned;
  std::unique_ptr<Channel> channel;  // to its shim
  HostUpPayload up{};
  i64 clock_ahead_ns = 0;  // the launcher's clock minus the host's
  i64 called_ns = 0;       // time at which its agent started
  i64 heard_ns = 0;
  bool orted_ended = false, lost = false;

  bool connected() const noexcept { return channel != nullptr && !channel->closed(); }
  std::string text() const;  // for messages: its name and its ranks
};

struct Rank : RankCourse {
  Host* host = nullptr;
  std::unique_ptr<Channel> channel;  // to its shim
  std::unique_ptr<LineStream> out, err;
  Fd log;
};

class Job {
 public:
  // Opens the logs of ranks. The arguments must outlive the job.
  Job(const LaunchOptions& options, const LaunchPlan& plan, Sink& out, Sink& err);
  Job(Job&&) = delete;  // ranks point to their hosts

  const LaunchOptions& options;
  const LaunchPlan& plan;
  const i64 start_ns = monotonic_ns();
  std::vector<Host> hosts;
  std::vector<Rank> ranks;

  std::span<Rank> ranks_of(const Host& host);
  bool all_ended() const;
  bool any_started() const;
  bool all_started() const;

  void start(Rank& rank);              // its shim has connected
  void signal(int signal, bool stop);  // to all ranks; stop: the launcher ends the job
  void dismiss();                      // lets every shim exit
  // The rank has ended; `stopped`: because it was told to.
  void finish(Rank& rank, int status, i64 time_ns, bool stopped);
};

}  // namespace ds::launch
