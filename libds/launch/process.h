// SPDX-License-Identifier: Apache-2.0
#pragma once
// The operating system's services for launcher and shim.

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
int exit_status(int wait_status);     // of a wait status; 128 + signal if it was killed
int exit_signal(int wait_status);     // 0: it exited
std::string how_ended(int status, int signal);
std::filesystem::path own_executable();

// Finds `name` in the directory of this executable, then in PATH. status 127: not found; 126: found, but it cannot be
// executed.
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
int free_port();  // a TCP port that was free a moment ago

// A private folder (0700), in memory if there is /dev/shm. The destructor removes it, and files that ended ranks left
// in /dev/shm. If an owner was killed together with all its helpers, the next owner removes its files.
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
// Removes what the owner's destructor would remove; helpers call it when the owner was killed.
void remove_job_files(const std::filesystem::path& folder);
// /dev/shm if it is writable and has `bytes` free; else tmpdir, else /tmp.
std::filesystem::path private_folder_base(std::string_view tmpdir, i64 bytes);
i64 open_mpi_bytes(int ranks);  // bytes that Open MPI may need in the folder
inline constexpr std::string_view kPrivatePrefix = "ds-launch.";

struct Pipe {
  Fd read, write;
};
Pipe make_pipe();

// A non-blocking local socket that listens. Throws Errc::Io, or Errc::Config if TMPDIR is too long.
Fd listen_at(const std::string& path);
// Connects to such a socket; no descriptor if none listens there.
Fd connect_to(const std::string& path);

// The process at the other end of a local socket.
class Peer {
 public:
  explicit Peer(const Fd& socket);  // connected
  // True as soon as it has begun to exit, even if it still listens.
  bool is_ending() const;

 private:
  i32 pid_ = 0;  // 0: unknown
  u64 start_ = 0;
};

// Forks and executes in a new process group, with all signals at their defaults and the three streams as given. The
// child gets `death_signal` when this process dies. Returns its pid. If exec fails, the child's status is 127 or 126
// and *error is set.
struct Spawn {
  std::string program;
  std::vector<std::string> argv;
  Environment environment;
  int stdin_fd, stdout_fd, stderr_fd;
  int death_signal;
  std::vector<int> cpus = {};  // on which it may run; empty: all
};
pid_t spawn(const Spawn& what, int* error);

// Stops this process like SIGSTOP, until it gets SIGCONT. A blocked signal of `waking` continues it too, since
// otherwise it would stay pending for as long as the process is stopped.
void stop_until_told(std::span<const int> waking);

// Kills every descendant of this process, which must be a subreaper: orphaned descendants become its children, level by
// level.
void kill_descendants();

// Blocks the given signals, except ignored ones, and offers a descriptor to read them from. The destructor drops unread
// ones and restores the mask.
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
  Signal next();  // number 0: none is pending

 private:
  sigset_t before_;
  Fd fd_;
};

}  // namespace ds::launch
