// SPDX-License-Identifier: Apache-2.0
#pragma once
// Accepts connections of shims. A connection stays here until it has proved, over TCP, that it knows the job's secret,
// and has identified itself. A connection over the socket in the private folder is trusted.

#include <poll.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "launch/handshake.h"
#include "launch/process.h"

namespace ds::launch {

// A connection that has not yet identified itself.
struct Guest {
  std::unique_ptr<Channel> channel;
  bool trusted = false;
  Nonce challenge{};
  i64 since_ns = monotonic_ns();
  i64 clock_ahead_ns = 0;  // the launcher's clock minus theirs
};

class Reception {
 public:
  // expected: the most shims that the job can have.
  Reception(const std::string& socket, std::size_t expected);

  int open_to_hosts(std::string secret);  // also listens on every address; returns the port
  void close_to_hosts() { remote_listener_.reset(); }

  // Called in this order in each turn of the loop: descriptors to poll; input of guests and new connections; frames of
  // guests.
  void poll_for(std::vector<pollfd>& polled) const;
  void pump(std::span<const pollfd> polled);
  void accept(std::span<const pollfd> polled);
  // Calls introduce(guest, frame) for each frame of a trusted guest; introduce() takes the channel for its rank or
  // host.
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
