// SPDX-License-Identifier: Apache-2.0
#pragma once
// The launcher's heartbeat, in a thread of its own: a file system that blocks output delays the launcher and the ranks
// that write, but must not make hosts end their ranks.

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "launch/channel.h"

namespace ds::launch {

class Heart {
 public:
  void start(i64 beat_ns);
  void beat_for(const Channel& host);  // the channel must outlive it, or forget() is called
  void forget(const Channel& host);

  // Calls run() while no heartbeat is being sent.
  template <class Run>
  void between_beats(Run&& run) {
    const std::lock_guard lock(mutex_);
    run();
  }

 private:
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::set<int> hosts_;  // sockets
  std::jthread thread_;  // the last member: it uses the others
};

}  // namespace ds::launch
