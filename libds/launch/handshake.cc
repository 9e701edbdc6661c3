// SPDX-License-Identifier: Apache-2.0
#include "launch/handshake.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sodium/crypto_shorthash.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "base/limits.h"
#include "launch/process.h"

namespace ds::launch {
namespace {

constexpr int kConnectMs = 3000;
constexpr int kProofMs = 15'000;           // the launcher may be busy with many hosts
constexpr i64 kPatience = 20'000'000'000;  // ns; a silent address is tried again for so long
constexpr u32 kLongestGreeting = 64;       // bytes
constexpr std::string_view kSilence = "nothing listens there";

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::optional<Address> address_of(const std::string& text, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (::getaddrinfo(text.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return std::nullopt;
  Address address{.storage = {}, .length = found->ai_addrlen};
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  ::freeaddrinfo(found);
  return address;
}

Fd connect_within(const Address& address, int timeout_ms) {
  Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || ::connect(fd.get(), address.generic(), address.length) == 0) return fd;
  pollfd polled{fd.get(), POLLOUT, 0};
  if (errno == EINPROGRESS) errno = ::poll(&polled, 1, timeout_ms) == 1 ? 0 : ETIMEDOUT;
  socklen_t length = sizeof errno;
  if (errno == 0) ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &errno, &length);
  return errno == 0 ? std::move(fd) : Fd();
}

std::optional<Frame> receive_within(Channel& channel, int timeout_ms) {
  const i64 deadline_ns = monotonic_ns() + i64{timeout_ms} * 1'000'000;
  for (;;) {
    if (std::optional<Frame> frame = channel.receive()) return frame;
    const i64 left_ms = (deadline_ns - monotonic_ns()) / 1'000'000;
    if (channel.closed() || left_ms <= 0) return std::nullopt;
    pollfd polled{channel.fd(), channel.events(), 0};
    ::poll(&polled, 1, static_cast<int>(left_ms));
    channel.pump(polled.revents);
  }
}

// "" when the launcher has proved itself.
std::string_view greet(Channel& channel, const Home& home) {
  channel.limit(kLongestGreeting);
  const std::optional<Frame> challenge = receive_within(channel, kConnectMs);
  if (!challenge && !channel.closed()) return kSilence;
  if (!challenge || challenge->type != Message::Challenge) return "no launcher answers there";
  const Nonce theirs = value_of<Nonce>(challenge->payload), ours = random_nonce();
  const AnswerPayload answer{
      .nonce = ours, .proof = proof_of(home.secret, Side::Shim, theirs, ours), .time_ns = monotonic_ns()};
  channel.send(Message::Answer, bytes_of(answer));
  const std::optional<Frame> proof = receive_within(channel, kProofMs);
  if (!proof || proof->type != Message::Proof) return "the launcher of another job answers there";
  if (value_of<u64>(proof->payload) != proof_of(home.secret, Side::Launcher, theirs, ours))
    return "the process that answers there does not know the job's secret";
  channel.limit(~u32{0});
  return "";
}

}  // namespace

u64 siphash(std::string_view key16, std::string_view message) {
  static_assert(crypto_shorthash_KEYBYTES == 16 && crypto_shorthash_BYTES == sizeof(u64));
  DS_ASSERT(key16.size() == crypto_shorthash_KEYBYTES);
  const auto bytes = [](std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  std::array<unsigned char, crypto_shorthash_BYTES> hash{};
  crypto_shorthash(hash.data(), bytes(message), message.size(), bytes(key16));
  return std::bit_cast<u64>(hash);
}

std::vector<std::string> to_fields(const Home& home) {
  std::vector<std::string> fields = {home.secret, std::to_string(home.port), std::to_string(home.timeout_ms),
                                     std::to_string(home.addresses.size())};
  fields.insert(fields.end(), home.addresses.begin(), home.addresses.end());
  return fields;
}

Home home_of(std::span<const std::string>& fields) {
  const auto number = [&](std::size_t i) { return std::strtoll(fields[i].c_str(), nullptr, 10); };
  DS_CHECK(fields.size() >= 4 && std::cmp_greater_equal(fields.size() - 4, number(3)), Errc::Internal,
           "the launcher's message for its shims is incomplete");
  Home home{.secret = fields[0], .port = static_cast<int>(number(1)), .timeout_ms = number(2), .addresses = {}};
  const std::size_t end = 4 + static_cast<std::size_t>(number(3));
  home.addresses.assign(fields.begin() + 4, fields.begin() + static_cast<std::ptrdiff_t>(end));
  fields = fields.subspan(end);
  return home;
}

std::string variable_of(const HostHome& way) {
  return fmt::format("{} {}", way.host, fmt::join(to_fields(way.home), " "));
}

HostHome host_home_of(std::string_view variable) {
  std::vector<std::string> fields;
  while (!variable.empty()) {
    const std::size_t space = std::min(variable.find(' '), variable.size());
    fields.emplace_back(variable.substr(0, space));
    variable.remove_prefix(std::min(space + 1, variable.size()));
  }
  DS_CHECK(!fields.empty(), Errc::Internal, "{} is empty", kHomeVariable);
  std::span<const std::string> rest = std::span(fields).subspan(1);
  return {.host = std::atoi(fields[0].c_str()), .home = home_of(rest)};
}

Nonce random_nonce() {
  Nonce nonce{};
  DS_CHECK(::getrandom(nonce.data(), sizeof nonce, 0) == sizeof nonce, Errc::Io, "no random numbers: {}",
           system_reason(errno));
  return nonce;
}

u64 proof_of(const std::string& secret, Side side, const Nonce& challenge, const Nonce& answer) {
  std::string key;
  for (std::size_t i = 0; i + 1 < secret.size(); i += 2)
    key += static_cast<char>(std::strtoul(secret.substr(i, 2).c_str(), nullptr, 16));
  return siphash(key, std::string(bytes_of(side)) + std::string(bytes_of(challenge)) + std::string(bytes_of(answer)));
}

Fd listen_everywhere(int* port) {
  for (const int family : {AF_INET6, AF_INET}) {  // the first takes IPv4 too, where there is IPv6
    Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) continue;
    const int no = 0;
    if (family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    sockaddr_storage address{};  // any address, any port
    address.ss_family = static_cast<sa_family_t>(family);
    socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::bind(fd.get(), generic, length) != 0 || ::listen(fd.get(), SOMAXCONN) != 0 ||
        ::getsockname(fd.get(), generic, &length) != 0)
      continue;
    *port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                     : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
    return fd;
  }
  throw Error(Errc::Io, fmt::format("cannot listen on a TCP port: {}", system_reason(errno)));
}

std::vector<std::string> own_addresses() {
  ifaddrs* list = nullptr;
  DS_CHECK(::getifaddrs(&list) == 0, Errc::Io, "cannot list network interfaces: {}", system_reason(errno));
  std::vector<std::string> addresses, loopback;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6*>(i->ifa_addr)->sin6_addr)) continue;
    std::array<char, NI_MAXHOST> text{};
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(i->ifa_addr, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) continue;
    ((i->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : addresses).emplace_back(text.data());
  }
  ::freeifaddrs(list);
  addresses.insert(addresses.end(), loopback.begin(), loopback.end());
  return addresses;
}

void tune_socket(int fd) {
  const auto set = [&](int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
}

void leave_out(const std::vector<std::string>& own, Home& home) {
  std::vector<std::string> others;
  for (const std::string& address : home.addresses)
    if (std::find(own.begin(), own.end(), address) == own.end()) others.push_back(address);
  if (!others.empty()) home.addresses = std::move(others);
}

Channel call_home(Home& home) {
  const i64 deadline_ns = monotonic_ns() + kPatience;
  std::string tried;
  for (bool again = true; again;) {
    again = false;
    tried.clear();
    for (std::string& address : home.addresses) {
      std::string why = "is not an address";
      if (const std::optional<Address> there = address_of(address, home.port)) {
        Fd fd = connect_within(*there, kConnectMs);
        why = system_reason(errno);
        if (fd) {
          tune_socket(fd.get());
          Channel channel(std::move(fd));
          why = greet(channel, home);
          if (why.empty()) {
            std::swap(home.addresses[0], address);
            return channel;
          }
          again |= why == kSilence && monotonic_ns() < deadline_ns;
        }
      }
      tried += fmt::format("{}{} ({})", tried.empty() ? "" : ", ", address, why);
    }
  }
  throw Error(Errc::Comm, fmt::format("cannot reach ds-launch at port {} of {}", home.port, tried));
}

}  // namespace ds::launch
