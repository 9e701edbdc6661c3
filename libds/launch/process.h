// SPDX-License-Identifier: Apache-2.0
#pragma once
// What launcher and shim need from the operating system.

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/channel.h"
#include "launch/environment.h"

namespace ds::launch {

inline constexpr i64 kSecond = 1'000'000'000;
i64 monotonic_ns() noexcept;
std::string host_name();
std::string signal_name(int signal);  // "SIGKILL"
int exit_status(int wait_status);     // as of waitpid; 128 + signal for who was killed
int exit_signal(int wait_status);     // 0: it exited
std::string how_ended(int status, int signal);
std::filesystem::path own_executable();

// Where `name` is: beside this executable, then in PATH. status 127: nowhere, 126: there, but it cannot be executed.
struct Program {
  std::string path;
  int status = 0;
  std::string why;
};
Program find_program(const std::string& name, std::string_view path_variable);
inline constexpr std::string_view kDefaultPath = "/usr/local/bin:/usr/bin:/bin";

// CPUs this process may use, ordered so that neighbours share caches: by package, core, hardware thread.
std::vector<int> usable_cpus();
// The cpus of share `index` of `shares`; sizes differ by one at most.
std::span<const int> share_of(std::span<const int> cpus, int index, int shares);

std::string random_hex(int bytes);
int free_port();  // a TCP port nobody listened on just now

// A private folder (0700) in memory where there is /dev/shm; gone with its owner, and with it what ranks that have
// ended left in /dev/shm. What owners left that were killed together with all their helpers is removed by the next one.
class PrivateFolder {
 public:
  explicit PrivateFolder(const std::filesystem::path& base);
  ~PrivateFolder();
  PrivateFolder(PrivateFolder&&) = delete;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  Fd lock_;
};
// What the owner would remove at its end, for its helpers, when it was killed.
void remove_job_files(const std::filesystem::path& folder);
// /dev/shm if it can be written and has so many bytes free; else tmpdir, else /tmp.
std::filesystem::path private_folder_base(std::string_view tmpdir, i64 bytes);
i64 open_mpi_bytes(int ranks);  // that Open MPI may need there
inline constexpr std::string_view kPrivatePrefix = "ds-launch.";

struct Pipe {
  Fd read, write;
};
Pipe make_pipe();

// A local socket that never blocks, and waits for connections. Throws Errc::Io, or Errc::Config where TMPDIR is too
// long.
Fd listen_at(const std::string& path);
// Connects to one; no descriptor if nobody listens there.
Fd connect_to(const std::string& path);

// The process at the other end of a local socket.
class Peer {
 public:
  explicit Peer(const Fd& socket);  // connected
  // True from the moment at which others can see that it has closed anything, though it may still listen then.
  bool is_ending() const;

 private:
  i32 pid_ = 0;  // 0: unknown
  u64 start_ = 0;
};

// fork and exec in a process group of its own, all signals at their defaults, the three streams as given; the child
// gets `death_signal` when we die. Returns its pid. If exec fails the child's status is 127 or 126 and *error is set.
struct Spawn {
  std::string program;
  std::vector<std::string> argv;
  Environment environment;
  int stdin_fd, stdout_fd, stderr_fd;
  int death_signal;
  std::vector<int> cpus = {};  // to run on; none: all
};
pid_t spawn(const Spawn& what, int* error);

// Stops this process as SIGSTOP does, until somebody continues it. A signal of `waking` that this process blocks
// continues it too: it would otherwise wait, unread, for as long as the process is stopped.
void stop_until_told(std::span<const int> waking);

// Ends every descendant of this process, which must be a subreaper: descendants come back to us as children, level by
// level.
void kill_descendants();

// Blocks the signals of the list that are not ignored and returns a descriptor to read them from; the destructor drops
// what nobody has read, and restores.
class SignalInbox {
 public:
  explicit SignalInbox(const std::vector<int>& signals);
  ~SignalInbox();
  SignalInbox(SignalInbox&&) = delete;
  int fd() const noexcept { return fd_.get(); }
  struct Signal {
    int number = 0;
    pid_t sender = 0;
    explicit operator bool() const noexcept { return number != 0; }
  };
  Signal next();  // false: no more now

 private:
  sigset_t before_;
  Fd fd_;
};

}  // namespace ds::launch
