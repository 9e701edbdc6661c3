// SPDX-License-Identifier: Apache-2.0
#include "offload/served.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/limits.h"

namespace ds::offload {

void Packer::put(const ServedSet& s) {
  put(s.work);
  put(s.elems);
  put(s.places);
  put(s.chunk_bytes);
  put(s.parts);
  put(s.window);
  put(s.window_bytes);
  put(s.gradients);
  put(s.gradient_bytes);
}

void Unpacker::get(ServedSet& s) {
  get(s.work);
  get(s.elems);
  get(s.places);
  get(s.chunk_bytes);
  get(s.parts);
  get(s.window);
  get(s.window_bytes);
  get(s.gradients);
  get(s.gradient_bytes);
}

void Packer::put(const ServedRun& r) {
  put(r.set);
  put(r.tile);
  put(r.params);
  put(r.verdict);
  put(r.decay);
  put(r.factors);
}

void Unpacker::get(ServedRun& r) {
  get(r.set);
  get(r.tile);
  get(r.params);
  get(r.verdict);
  get(r.decay);
  get(r.factors);
}

std::string ServerPlace::root() { return fmt::format("/dev/shm/ds-offload.{}", geteuid()); }

ServerPlace::ServerPlace(std::string_view n) : name(n) {
  constexpr size_t kMost = 40;  // so that a socket's path has room
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  };
  DS_CHECK(!n.empty() && n.size() <= kMost && n.front() != '.' && std::ranges::all_of(n, fits), Errc::Config,
           "'{}' cannot be the name of a server: use up to {} letters, digits, '-', '_' and '.'", n.substr(0, 100),
           kMost);
  directory = fmt::format("{}/{}", root(), name);
}

void check_private(const std::string& directory) {
  struct stat st {};
  DS_CHECK(::lstat(directory.c_str(), &st) == 0, Errc::Io, "{}: {}", directory, system_reason(errno));
  DS_CHECK(S_ISDIR(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 077) == 0, Errc::Io,
           "{} is refused: it is not a directory, belongs to another user, or others can open it", directory);
}

std::optional<Connection> Connection::find(const ServerPlace& place) {
  struct stat st {};
  if (::lstat(place.directory.c_str(), &st) != 0 && errno == ENOENT) return std::nullopt;
  check_private(ServerPlace::root());
  check_private(place.directory);
  Connection c(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const std::string path = place.socket();
  DS_ASSERT(path.size() < sizeof address.sun_path);
  path.copy(address.sun_path, path.size());
  int failed = -1;
  do {
    failed = ::connect(c.fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0 && (errno == ENOENT || errno == ECONNREFUSED)) return std::nullopt;
  DS_CHECK(failed == 0, Errc::Io, "{}: {}", path, system_reason(errno));
  return c;
}

Connection Connection::to(const ServerPlace& place) {
  std::optional<Connection> c = find(place);
  DS_CHECK(c.has_value(), Errc::Unavailable, "there is no server '{}': start it with ds-offload serve {}", place.name,
           place.name);
  return std::move(*c);
}

Connection::~Connection() {
  if (fd_ >= 0) ::close(fd_);
}

namespace {

void send_all(int fd, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::send(fd, data, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    DS_CHECK(n > 0, Errc::Comm, "the connection of an offload server: {}", system_reason(n == 0 ? EPIPE : errno));
    data += n;
    bytes -= static_cast<size_t>(n);
  }
}

void receive_all(int fd, char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::recv(fd, data, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    DS_CHECK(n >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK), Errc::Timeout,
             "the server does not answer: it is busy with a long step, or stopped");
    DS_CHECK(n > 0, Errc::Comm, "the connection of an offload server: {}",
             n == 0 ? std::string("the other end has closed it") : system_reason(errno));
    data += n;
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace

void Connection::send(Message kind, std::string_view payload) const {
  const Header header{kind, narrow<u32>(payload.size())};
  send_all(fd_, reinterpret_cast<const char*>(&header), sizeof header);
  send_all(fd_, payload.data(), payload.size());
}

void Connection::limit_waiting(int seconds) const {
  const timeval limit{.tv_sec = seconds, .tv_usec = 0};
  (void)::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

bool Connection::has_ended() const noexcept {
  char ignored = 0;
  const ssize_t n = ::recv(fd_, &ignored, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

Connection::Received Connection::receive() const {
  Header header{};
  receive_all(fd_, reinterpret_cast<char*>(&header), sizeof header);
  Received r{header.kind, std::string(header.bytes, '\0')};
  receive_all(fd_, r.payload.data(), r.payload.size());
  return r;
}

}  // namespace ds::offload
