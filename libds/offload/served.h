// SPDX-License-Identifier: Apache-2.0
#pragma once
// The protocol between a run and a server of states (libds/serve), over a Unix socket in the server's directory. Bulk
// data is not sent: it is in segments that both have mapped.
//
//   rank    -> Hello: its identity, and how its states are cut into chunks   all ranks:  <- Attached: the server's
//   state rank    -> Read, Write: parts of states, through its window              <- Done rank    -> Publish: the
//   state of this step is complete                   all ranks:  <- Done rank    -> Run: a pass, now (of optimizers of
//   several passes)            <- Done rank    -> Commit: the step is committed; the passes still to be run     all
//   ranks:  <- Done, after the passes
//
// A connection that ends is a rank that has ended. Both ends belong to one user, one machine and one version of libds.

#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "ds/kernels/ops.h"
#include "ds/state.h"

namespace ds::offload {

// The state of a run at the end of a step, from which it resumes. Plain data.
struct ServedRecord {
  i64 step = 0, optimizer_step = 0, skipped_steps = 0, consumed_samples = 0;
  double scale = 1;  // of the loss, for the next step
  i64 scaler_iteration = 0, last_overflow = -1, hysteresis = 1;
  // Results of the step, in case its line of the metrics is lost.
  double loss = 0, grad_norm = 0, lr = 0, loss_scale = 1;
  i64 tokens = 0, skipped = 0;
};

// A part of a piece of a rank within one chunk of the rank. Offsets are bytes.
struct ServedPart {
  i64 param = 0, begin = 0, count = 0, chunk = 0;
  // Offsets of its gradient and parameter in the set's segments; -1: it is not trained. The server then keeps its
  // master, from which a run restores the parameter, and never updates it.
  i64 gradient = 0, work = 0;
  PerState<i64> offsets = {}, scales{};  // from the start of the chunk
  PerState<i64> dtypes = {};             // -1: there is no such state
  bool is_trained() const noexcept { return gradient >= 0 || work >= 0; }
};

// A piece of a tile (zero::TilePiece).
struct ServedPiece {
  i64 param = 0, begin = 0, count = 0, index = 0;
  float weight_decay = 0;
  u32 site = 0;
};

// The states of a rank in one group of reduction.
struct ServedSet {
  DType work = DType::F32;
  i64 elems = 0;              // of the largest lease; in its places, scales follow so many elements of 4 bytes
  PerState<i64> places = {};  // of a lease, in the window; -1: there is no such state
  std::vector<i64> chunk_bytes{};
  std::vector<ServedPart> parts{};  // chunk after chunk
  std::string window{};  // paths of segments: places of a lease, then parameters, and gradients if they have no segment
  i64 window_bytes = 0;
  std::string gradients{};  // empty: they are in the window
  i64 gradient_bytes = 0;
};

// A pass over a tile.
struct ServedRun {
  i64 set = 0, tile = 0;
  UpdateParams params{};
  GradVerdict verdict{};
  i64 decay = 1;
  std::vector<float> factors{};
};

enum class Message : u32 {
  // From ranks.
  Hello,
  Clear,
  Read,
  Write,
  Publish,
  Tile,
  Run,
  Commit,
  // From tools.
  Status,
  Hold,
  Stop,
  // From the server.
  Attached,
  Done,
  Failed,
};

inline constexpr u32 kServedVersion = 1;

// A sequence of values.
class Packer {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void put(const T& x) { text_.append(reinterpret_cast<const char*>(&x), sizeof x); }
  void put(std::string_view x) {
    put(std::ssize(x));
    text_.append(x);
  }
  void put(const std::string& x) { put(std::string_view(x)); }
  template <class T>
  void put(const std::vector<T>& x) {
    put(std::ssize(x));
    if constexpr (std::is_trivially_copyable_v<T>) {
      if (!x.empty()) text_.append(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(T));
    } else {
      for (const T& each : x) put(each);
    }
  }
  void put(const ServedSet& s);
  void put(const ServedRun& r);
  const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

// Throws Errc::Corrupt if there are fewer bytes than requested.
class Unpacker {
 public:
  explicit Unpacker(std::string_view text) : rest_(text) {}
  template <class T>
  T get() {
    T x{};
    get(x);
    return x;
  }
  template <class T>
  void get(T& x) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(static_cast<void*>(&x), take(sizeof x).data(), sizeof x);
  }
  void get(std::string& x) { x = take(get<i64>()); }
  template <class T>
  void get(std::vector<T>& x) {
    const i64 n = get<i64>();
    DS_CHECK(n >= 0 && n <= std::ssize(rest_), Errc::Corrupt, "a message announces {} values", n);
    if constexpr (std::is_trivially_copyable_v<T>) {
      DS_CHECK(n <= std::ssize(rest_) / static_cast<i64>(sizeof(T)), Errc::Corrupt, "a message announces {} values", n);
      x.resize(static_cast<size_t>(n));
      const std::string_view bytes = take(n * static_cast<i64>(sizeof(T)));
      if (n > 0) std::memcpy(static_cast<void*>(x.data()), bytes.data(), bytes.size());
    } else {
      x.clear();
      for (i64 i = 0; i < n; ++i) get(x.emplace_back());
    }
  }
  void get(ServedSet& s);
  void get(ServedRun& r);

 private:
  std::string_view take(i64 bytes) {
    DS_CHECK(bytes >= 0 && bytes <= std::ssize(rest_), Errc::Corrupt, "a message ends after {} bytes of {}",
             rest_.size(), bytes);
    const std::string_view taken = rest_.substr(0, static_cast<size_t>(bytes));
    rest_.remove_prefix(taken.size());
    return taken;
  }
  std::string_view rest_;
};

// The directory of this user's servers, which nobody else can open, with a subdirectory for each server by name.
struct ServerPlace {
  // Throws Errc::Config if this cannot be the name of a server.
  explicit ServerPlace(std::string_view name);
  static std::string root();
  std::string name, directory;
  std::string socket() const { return directory + "/socket"; }
};
// Throws Errc::Io unless it is a directory of this user that nobody else can open.
void check_private(const std::string& directory);

// An end of a connection. Move-only.
class Connection {
 public:
  // Connects to the server of this place; nothing if there is none. Throws Errc::Io.
  static std::optional<Connection> find(const ServerPlace& place);
  // The same; throws Errc::Unavailable if there is none.
  static Connection to(const ServerPlace& place);
  explicit Connection(int fd) noexcept : fd_(fd) {}
  Connection(Connection&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Connection& operator=(Connection&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Connection();

  // These throw Errc::Comm if the other end has closed.
  void send(Message kind, std::string_view payload) const;
  struct Received {
    Message kind;
    std::string payload;
  };
  Received receive() const;
  // From now on receive() throws Errc::Timeout if nothing arrives for so long.
  void limit_waiting(int seconds) const;
  // Whether the other end has closed, as far as can be known without waiting.
  bool has_ended() const noexcept;
  int descriptor() const noexcept { return fd_; }

  struct Header {
    Message kind;
    u32 bytes;
  };

 private:
  int fd_;
};

}  // namespace ds::offload
