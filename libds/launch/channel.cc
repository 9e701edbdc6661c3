// SPDX-License-Identifier: Apache-2.0
#include "launch/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace ds::launch {
namespace {

constexpr std::size_t kHeader = 1 + sizeof(u32);

}  // namespace

void Fd::reset() noexcept {
  if (const int fd = std::exchange(fd_, -1); fd >= 0) ::close(fd);
}

Channel::Channel(Fd socket) : socket_(std::move(socket)) {
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
}

short Channel::events() const noexcept { return static_cast<short>(POLLIN | (queued() > 0 ? POLLOUT : 0)); }

void Channel::send(Message type, std::string_view payload) {
  out_ += to_bytes(type, payload);
  flush();
}

void Channel::flush() {
  while (!closed_ && queued() > 0) {
    const ssize_t n = ::send(fd(), out_.data() + sent_, queued(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      // The reading side finds the end of file, after what was still sent to us.
      if (errno != EAGAIN) out_.clear(), sent_ = 0;
      return;
    }
    sent_ += static_cast<std::size_t>(n);
  }
  out_.clear();
  sent_ = 0;
}

void Channel::pump(short revents) {
  flush();
  if ((revents & (POLLIN | POLLHUP | POLLERR)) == 0) return;
  in_.erase(0, std::exchange(parsed_, 0));
  char buffer[64 * 1024];
  const ssize_t n = ::recv(fd(), buffer, sizeof buffer, 0);
  if (n > 0) {
    in_.append(buffer, static_cast<std::size_t>(n));
  } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
    closed_ = true;
  }
}

std::optional<Frame> Channel::receive() {
  const std::string_view rest = std::string_view(in_).substr(parsed_);
  if (rest.size() < kHeader) return std::nullopt;
  const u32 length = value_of<u32>(rest.substr(1));
  if (length > limit_) closed_ = true;
  if (length > limit_) return std::nullopt;
  if (rest.size() < kHeader + length) return std::nullopt;
  parsed_ += kHeader + length;
  return Frame{static_cast<Message>(rest[0]), std::string(rest.substr(kHeader, length))};
}

std::string to_bytes(Message type, std::string_view payload) {
  std::string bytes(1, static_cast<char>(type));
  bytes += bytes_of(static_cast<u32>(payload.size()));
  bytes += payload;
  return bytes;
}

std::string pack(const std::vector<std::string>& strings) {
  std::string payload;
  for (const std::string& s : strings) (payload += s) += '\0';
  return payload;
}

std::vector<std::string> unpack(std::string_view payload) {
  std::vector<std::string> strings;
  while (!payload.empty()) {
    const std::size_t end = payload.find('\0');
    strings.emplace_back(payload.substr(0, end));
    payload.remove_prefix(end == std::string_view::npos ? payload.size() : end + 1);
  }
  return strings;
}

}  // namespace ds::launch
