// SPDX-License-Identifier: Apache-2.0
// Commands that tests/net/hosts needs and shells do not have:
//
//   net_helper serve SOCKET           a door to a host: runs the commands of `call` there, as sshd would
//   net_helper call SOCKET COMMAND    runs COMMAND in a shell at the host, with our three streams and its exit status.
//                                     It is no descendant of ours: signals to us do not reach it
//   net_helper link NS1 IF1 NS2 IF2 DELAY_MS MBIT
//                                     a link between two network namespaces which is slow in both directions: two TAP
//                                     devices, and frames that wait their time (kernels without netem)

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& what) {
  std::perror(("net_helper: " + what).c_str());
  std::exit(255);
}

// ---- the door
// ---------------------------------------------------------------------------------------------------------

sockaddr_un address_of(const char* path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  return address;
}

// A command and three descriptors, in one message.
constexpr std::size_t kLongestCommand = 16 * 1024;
struct Letter {
  std::array<char, kLongestCommand> command{};
  iovec vector{.iov_base = command.data(), .iov_len = command.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(3 * sizeof(int))> control{};
  msghdr header{};
  Letter() {
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
};

void run_for(int peer) {
  Letter letter;
  const ssize_t n = ::recvmsg(peer, &letter.header, MSG_CMSG_CLOEXEC);
  const cmsghdr* control = CMSG_FIRSTHDR(&letter.header);
  if (n <= 0 || control == nullptr) ::_exit(255);
  std::array<int, 3> streams{};
  std::memcpy(streams.data(), CMSG_DATA(control), sizeof streams);
  const std::string command(letter.command.data(), static_cast<std::size_t>(n));
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (int fd = 0; fd < 3; ++fd) ::dup2(streams[static_cast<std::size_t>(fd)], fd);
    ::setsid();
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    ::_exit(127);
  }
  for (const int fd : streams) ::close(fd);
  int status = 0;
  ::waitpid(pid, &status, 0);
  const unsigned char code =
      static_cast<unsigned char>(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  [[maybe_unused]] const ssize_t told = ::send(peer, &code, 1, MSG_NOSIGNAL);
}

int serve(const char* path) {
  const sockaddr_un address = address_of(path);
  const int listener = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 || ::listen(listener, 64) != 0)
    fail(path);
  std::signal(SIGCHLD, SIG_IGN);
  for (int peer; (peer = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)) >= 0 || errno == EINTR; ::close(peer)) {
    if (::fork() != 0) continue;
    std::signal(SIGCHLD, SIG_DFL);
    run_for(peer);
    ::_exit(0);
  }
  fail("accept");
}

int call(const char* path, std::string_view command) {
  const sockaddr_un address = address_of(path);
  const int door = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (::connect(door, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail(path);
  Letter letter;
  letter.vector.iov_len = command.copy(letter.command.data(), letter.command.size());
  cmsghdr* control = CMSG_FIRSTHDR(&letter.header);
  const std::array<int, 3> streams = {0, 1, 2};
  *control = {.cmsg_len = CMSG_LEN(sizeof streams), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
  std::memcpy(CMSG_DATA(control), streams.data(), sizeof streams);
  if (::sendmsg(door, &letter.header, 0) < 0) fail("sendmsg");
  for (int fd = 0; fd < 3; ++fd) ::close(fd);
  unsigned char code = 255;
  return ::recv(door, &code, 1, 0) == 1 ? code : 255;
}

// ---- the link
// ---------------------------------------------------------------------------------------------------------

// A TAP device in a network namespace, up.
int tap_in(const std::string& space, const char* name) {
  const int ns = ::open(("/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC);
  if (ns < 0 || ::setns(ns, CLONE_NEWNET) != 0) fail("network namespace " + space);
  ::close(ns);
  const int tap = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  if (tap < 0 || ::ioctl(tap, TUNSETIFF, &request) != 0) fail("/dev/net/tun");
  const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (::ioctl(socket, SIOCGIFFLAGS, &request) != 0) fail(name);
  request.ifr_flags |= IFF_UP;
  if (::ioctl(socket, SIOCSIFFLAGS, &request) != 0) fail(name);
  ::close(socket);
  return tap;
}

// One direction. Frames leave in order, each `delay` after it came and not before those ahead of it have had their time
// on the wire; a queue that is full drops what comes, as switches do.
class Lane {
 public:
  Lane(int from, int to, std::chrono::nanoseconds delay, double bits_per_ns)
      : from_(from), to_(to), delay_(delay), bits_per_ns_(bits_per_ns) {}

  int source() const { return from_; }

  void take() {
    std::array<char, 65536> buffer;
    for (ssize_t n; (n = ::read(from_, buffer.data(), buffer.size())) > 0;) {
      if (queued_bytes_ > kQueueBytes) continue;
      const auto wire = std::chrono::nanoseconds(static_cast<long>(static_cast<double>(n) * 8 / bits_per_ns_));
      free_ = std::max(free_, Clock::now()) + wire;
      queue_.push_back({free_ + delay_, std::string(buffer.data(), static_cast<std::size_t>(n))});
      queued_bytes_ += static_cast<std::size_t>(n);
    }
  }

  void give() {
    for (; !queue_.empty() && queue_.front().due <= Clock::now(); queue_.pop_front()) {
      const std::string& frame = queue_.front().bytes;
      queued_bytes_ -= frame.size();
      [[maybe_unused]] const ssize_t n = ::write(to_, frame.data(), frame.size());
    }
  }

  Clock::time_point due() const { return queue_.empty() ? Clock::time_point::max() : queue_.front().due; }

 private:
  static constexpr std::size_t kQueueBytes = 4 << 20;
  struct Frame {
    Clock::time_point due;
    std::string bytes;
  };
  int from_, to_;
  std::chrono::nanoseconds delay_;
  double bits_per_ns_;
  Clock::time_point free_{};
  std::deque<Frame> queue_;
  std::size_t queued_bytes_ = 0;
};

int link(char** words) {
  const int first = tap_in(words[0], words[1]), second = tap_in(words[2], words[3]);
  const auto delay = std::chrono::nanoseconds(static_cast<long>(std::atof(words[4]) * 1e6));
  const double bits_per_ns = std::atof(words[5]) / 1000;
  if (bits_per_ns <= 0) fail("MBIT");
  std::array<Lane, 2> lanes = {Lane(first, second, delay, bits_per_ns), Lane(second, first, delay, bits_per_ns)};
  std::puts("ready");
  std::fflush(stdout);
  for (;;) {
    const Clock::time_point due = std::min(lanes[0].due(), lanes[1].due());
    std::array<pollfd, 2> polled = {{{lanes[0].source(), POLLIN, 0}, {lanes[1].source(), POLLIN, 0}}};
    const auto wait = std::max(due - Clock::now(), Clock::duration::zero());
    const auto seconds =
        std::chrono::duration_cast<std::chrono::seconds>(std::min<Clock::duration>(wait, std::chrono::seconds(1)));
    const auto rest = std::min<Clock::duration>(wait, std::chrono::seconds(1)) - seconds;
    const timespec limit{.tv_sec = seconds.count(), .tv_nsec = std::chrono::nanoseconds(rest).count()};
    ::ppoll(polled.data(), polled.size(), &limit, nullptr);
    for (Lane& lane : lanes) {
      lane.take();
      lane.give();
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "serve" && argc == 3) return serve(argv[2]);
  if (mode == "call" && argc == 4) return call(argv[2], argv[3]);
  if (mode == "link" && argc == 8) return link(argv + 2);
  std::fputs("usage: net_helper serve SOCKET | call SOCKET COMMAND | link NS1 IF1 NS2 IF2 DELAY_MS MBIT\n", stderr);
  return 2;
}
