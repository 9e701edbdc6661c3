// SPDX-License-Identifier: Apache-2.0
#include "launch/heart.h"

#include <sys/socket.h>

#include <chrono>

#include "base/thread.h"

namespace ds::launch {

void Heart::start(i64 beat_ns) {
  thread_ = start_thread("the thread of the heartbeat", [this, beat_ns](const std::stop_token& stop) {
    const std::string frame = to_bytes(Message::Heartbeat);
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      // The frame is whole or not there: a socket that has no room for it has thousands that nobody has read.
      for (const int fd : hosts_) ::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      wake_.wait_for(lock, stop, std::chrono::nanoseconds(beat_ns), [] { return false; });
    }
  });
}

void Heart::beat_for(const Channel& host) {
  const std::lock_guard lock(mutex_);
  hosts_.insert(host.fd());
}

void Heart::forget(const Channel& host) {
  const std::lock_guard lock(mutex_);
  hosts_.erase(host.fd());
}

}  // namespace ds::launch
