// SPDX-License-Identifier: Apache-2.0
#pragma once
// The job that is running: its ranks, and the hosts that they are on.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ds/launch.h"
#include "launch/process.h"
#include "launch/streams.h"
#include "launch/verdict.h"

namespace ds::launch {

// A host that was given; without hosts there is none.
struct Host {
  explicit Host(const PlannedHost& host) : planned(host) {}

  const PlannedHost& planned;
  std::unique_ptr<Channel> channel;  // to its shim
  HostUpPayload up{};
  i64 clock_ahead_ns = 0;  // ours beside its
  i64 called_ns = 0;       // when its agent started
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
  // Opens the logs of ranks. What is given outlives us.
  Job(const LaunchOptions& options, const LaunchPlan& plan, Sink& out, Sink& err);
  Job(Job&&) = delete;  // ranks know their hosts

  const LaunchOptions& options;
  const LaunchPlan& plan;
  const i64 start_ns = monotonic_ns();
  std::vector<Host> hosts;
  std::vector<Rank> ranks;

  std::span<Rank> ranks_of(const Host& host);
  bool all_ended() const;
  bool any_started() const;
  bool all_started() const;

  void start(Rank& rank);              // its shim has come
  void signal(int signal, bool stop);  // to all ranks; stop: we end the job
  void dismiss();                      // every shim may leave
  // The rank has ended; `stopped`: as it was told to.
  void finish(Rank& rank, int status, i64 time_ns, bool stopped);
};

}  // namespace ds::launch
