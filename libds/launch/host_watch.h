// SPDX-License-Identifier: Apache-2.0
#pragma once
// Watches the hosts of a job: which of them come, and whether they are still there. A host that is silent for too long
// is lost, and with it what runs there.

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
  HostWatch(Job& job, Mpirun& mpirun, Ending& ending);  // which outlive us

  // The way home for shims on hosts, and what mpirun and our agents read in `folder`: both know hosts by place.
  void prepare(Reception& reception, const std::filesystem::path& folder);

  i64 beat_ns() const noexcept { return launch::beat_ns(limit_ns()); }
  static pollfd polled_for(const Host& host);
  void serve(Host& host, short revents);   // in each turn of the loop
  void listen(Host& host, short revents);  // hears what the host says, and does not judge its silence

  // What is said at the reception.
  void agent_started(Host& host) { host.called_ns = monotonic_ns(); }
  void agent_ended(const Host& host, const std::string& how);
  void host_up(Host& host, const HostUpPayload& up, Guest& guest);

  void pause(const std::function<void()>& run);  // expects and sends nothing while it runs
  void tell_of_silent_hosts() const;             // at the end

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
  Heart heart_;  // stops before the channels that it beats for are gone
};

}  // namespace ds::launch
