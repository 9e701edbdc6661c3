// SPDX-License-Identifier: Apache-2.0
#include "launch/reception.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "ds/log.h"

namespace ds::launch {
namespace {

constexpr i64 kIntroduction = 20 * kSecond;  // for a connection from another host to prove what it is
constexpr std::size_t kStrangers = 64;       // unproven connections at once, above those of our own shims
constexpr u32 kLongestIntroduction = 1024;   // bytes

}  // namespace

Reception::Reception(const std::string& socket, std::size_t expected)
    : listener_(listen_at(socket)), expected_(expected) {}

int Reception::open_to_hosts(std::string secret) {
  secret_ = std::move(secret);
  int port = 0;
  remote_listener_ = listen_everywhere(&port);
  return port;
}

void Reception::poll_for(std::vector<pollfd>& polled) const {
  polled.push_back({listener_.get(), POLLIN, 0});
  polled.push_back({remote_listener_.get(), POLLIN, 0});
  for (const Guest& guest : guests_) polled.push_back({guest.channel->fd(), guest.channel->events(), 0});
}

void Reception::pump(std::span<const pollfd> polled) {
  for (std::size_t i = 0; i < guests_.size(); ++i) guests_[i].channel->pump(polled[kFirstGuest + i].revents);
}

void Reception::accept(std::span<const pollfd> polled) {
  if (polled[kListener].revents != 0) accept_guests(listener_, true);
  if (polled[kRemoteListener].revents != 0) accept_guests(remote_listener_, false);
}

void Reception::accept_guests(const Fd& listener, bool trusted) {
  for (Fd fd; (fd = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));) {
    Guest guest{.channel = std::make_unique<Channel>(std::move(fd)), .trusted = trusted};
    if (!trusted) {
      make_room();
      tune_socket(guest.channel->fd());
      guest.channel->limit(kLongestIntroduction);
      guest.challenge = random_nonce();
      guest.channel->send(Message::Challenge, bytes_of(guest.challenge));
    }
    guests_.push_back(std::move(guest));
  }
}

// If there are too many unproved connections, closes the oldest: strangers cannot keep our own shims out.
void Reception::make_room() {
  const auto stranger = [](const Guest& guest) { return !guest.trusted; };
  if (std::cmp_less(std::count_if(guests_.begin(), guests_.end(), stranger), expected_ + kStrangers)) return;
  guests_.erase(std::find_if(guests_.begin(), guests_.end(), stranger));
}

void Reception::examine(Guest& guest, const Frame& frame) {
  if (prove(guest, frame)) return;
  log_message(LogLevel::Verbose, "a connection was refused: it did not know the job's secret");
  guest.channel.reset();
}

bool Reception::prove(Guest& guest, const Frame& frame) {
  const AnswerPayload answer = value_of<AnswerPayload>(frame.payload);
  if (frame.type != Message::Answer || frame.payload.size() != sizeof answer ||
      answer.proof != proof_of(secret_, Side::Shim, guest.challenge, answer.nonce))
    return false;
  guest.trusted = true;
  guest.clock_ahead_ns = (guest.since_ns + monotonic_ns()) / 2 - answer.time_ns;
  guest.channel->send(Message::Proof, bytes_of(proof_of(secret_, Side::Launcher, guest.challenge, answer.nonce)));
  return true;
}

void Reception::forget_those_gone() {
  const i64 now = monotonic_ns();
  std::erase_if(guests_, [&](const Guest& guest) {
    return guest.channel == nullptr || guest.channel->closed() ||
           (!guest.trusted && now - guest.since_ns > kIntroduction);
  });
}

}  // namespace ds::launch
