// SPDX-License-Identifier: Apache-2.0
#pragma once
// Watches the hosts of a job: which have connected, and whether they are still alive. A host that is silent for too
// long is lost, with its ranks.

#include <poll.h>

#include <filesystem>
#include <functional>
#include <string>

#include "launch/ending.h"
#include "launch/heart.h"
#include "launch/job.h"
#include "launch/mpirun.h"
#include "launch/reception.h"

namespace ds::launch {

class HostWatch {
 public:
  HostWatch(Job& job, Mpirun& mpirun, Ending& ending);  // which outlive it

  // Opens the port for shims on hosts, and writes the files that mpirun and the agents read in `folder`; both know
  // hosts by index.
  void prepare(Reception& reception, const std::filesystem::path& folder);

  i64 beat_ns() const noexcept { return launch::beat_ns(limit_ns()); }
  static pollfd polled_for(const Host& host);
  void serve(Host& host, short revents);   // in each turn of the loop
  void listen(Host& host, short revents);  // reads messages of the host, without checking for silence

  // Messages that arrive at the reception.
  void agent_started(Host& host) { host.called_ns = monotonic_ns(); }
  void agent_ended(const Host& host, const std::string& how);
  void host_up(Host& host, const HostUpPayload& up, Guest& guest);

  void pause(const std::function<void()>& run);  // neither expects nor sends heartbeats during run()
  void tell_of_silent_hosts() const;             // at the end of the job

 private:
  i64 limit_ns() const noexcept { return home_.timeout_ms * 1'000'000; }
  bool is_silent(const Host& host) const { return monotonic_ns() - host.heard_ns > limit_ns(); }
  bool mpirun_is_ending();
  void orted_ended(const Host& host, int wait_status);
  void lose(Host& host, const std::string& how);
  void check_cores(const Host& host);

  Job& job_;
  Mpirun& mpirun_;
  Ending& ending_;
  Home home_;
  Heart heart_;  // destroyed before the channels that it sends to
};

}  // namespace ds::launch
