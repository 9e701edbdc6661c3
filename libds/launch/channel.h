// SPDX-License-Identifier: Apache-2.0
#pragma once
// Framed messages between launcher and shim over a stream socket that never blocks: a byte of type, four of length, the
// payload. Strings in payloads end with NUL.

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds::launch {

// Owner of a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  void reset() noexcept;
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

enum class Message : u8 {
  // over TCP, before anything else (launch/handshake.h)
  Challenge,  // Nonce
  Answer,     // AnswerPayload
  Proof,      // u64
  // from the shim of a rank to the launcher
  Hello,       // rank, pid of the shim, host, index of the host in the job
  Started,     // pid
  Stdout,      // bytes
  Stderr,      // bytes
  StdinTaken,  // the last Stdin has been written: send more
  Aborted,     // mpirun wants the job to end
  Ended,       // EndedPayload, after the last byte of output
  // from the shim of a host, or of its agent, to the launcher
  HostUp,        // HostUpPayload
  OrtedEnded,    // wait status
  AgentStarted,  // index of the host
  AgentEnded,    // index of the host, how the agent ended
  // between the launcher and the shim of a host, both ways
  Heartbeat,
  // from the launcher to the shim of a host
  Pause,  // expect no heartbeat until the next message: the launcher is being suspended
  // from the launcher to the shim of a rank
  Variables,  // NAME=value strings
  Bind,       // the rank's share of the cores: index, number of shares
  Start,      // working directory, path of the program, argv
  Stdin,      // bytes; none: end of file
  Signal,     // SignalPayload
  Bye,        // all ranks have ended (also to shims of hosts)
};

struct EndedPayload {
  i64 time_ns;      // CLOCK_MONOTONIC of the rank's host
  i32 wait_status;  // as of waitpid
  i32 stopped;      // by the launcher, or because it or mpirun has ended
};

struct SignalPayload {
  i32 signal;
  i32 stop;  // the launcher ends the job; 0: it only passes the signal on
};

struct HostUpPayload {
  i32 host;  // its index in the job
  i32 cores;
  i32 port;  // was free a moment ago
};

struct Frame {
  Message type;
  std::string payload;
};

class Channel {
 public:
  explicit Channel(Fd socket);

  int fd() const noexcept { return socket_.get(); }
  short events() const noexcept;   // to poll for
  void pump(short revents);        // reads and writes as much as possible
  std::optional<Frame> receive();  // the next complete frame
  void send(Message type, std::string_view payload = {});
  void limit(u32 payload_bytes) noexcept { limit_ = payload_bytes; }  // a longer frame closes the channel
  std::size_t queued() const noexcept { return out_.size() - sent_; }
  bool closed() const noexcept { return closed_; }  // the other end has closed; frames already received stay available

 private:
  void flush();

  Fd socket_;
  std::string in_, out_;
  std::size_t parsed_ = 0, sent_ = 0;
  u32 limit_ = ~u32{0};
  bool closed_ = false;
};

std::string to_bytes(Message type, std::string_view payload = {});  // the bytes of a frame
std::string pack(const std::vector<std::string>& strings);
std::vector<std::string> unpack(std::string_view payload);

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <class T>
T value_of(std::string_view payload) {
  T value{};
  payload.copy(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

}  // namespace ds::launch
