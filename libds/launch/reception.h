// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where shims come in: who has connected stays here until it has proved, over TCP, that it knows the job's secret, and
// has said who it is. A socket in our folder is proof enough.

#include <poll.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "launch/handshake.h"
#include "launch/process.h"

namespace ds::launch {

// Who has connected and not yet said who it is.
struct Guest {
  std::unique_ptr<Channel> channel;
  bool trusted = false;
  Nonce challenge{};
  i64 since_ns = monotonic_ns();
  i64 clock_ahead_ns = 0;  // ours beside theirs
};

class Reception {
 public:
  // expected: how many shims the job has at most.
  Reception(const std::string& socket, std::size_t expected);

  int open_to_hosts(std::string secret);  // listens on every address, too; the port
  void close_to_hosts() { remote_listener_.reset(); }

  // In each turn of the loop: what to poll for, then with the answers what came, then the guests' frames.
  void poll_for(std::vector<pollfd>& polled) const;
  void pump(std::span<const pollfd> polled);
  void accept(std::span<const pollfd> polled);
  // Calls introduce(guest, frame) for each frame of who is trusted; it takes the channel for whom it belongs to.
  template <class Introduce>
  void hear(Introduce&& introduce) {
    for (Guest& guest : guests_) {
      while (guest.channel != nullptr) {
        const std::optional<Frame> frame = guest.channel->receive();
        if (!frame) break;
        if (guest.trusted) {
          introduce(guest, *frame);
        } else {
          examine(guest, *frame);
        }
      }
    }
    forget_those_gone();
  }

 private:
  enum : std::size_t { kListener, kRemoteListener, kFirstGuest };

  void accept_guests(const Fd& listener, bool trusted);
  void make_room();
  void examine(Guest& guest, const Frame& frame);
  bool prove(Guest& guest, const Frame& frame);
  void forget_those_gone();

  Fd listener_, remote_listener_;
  std::vector<Guest> guests_;
  std::string secret_;
  std::size_t expected_;
};

}  // namespace ds::launch
