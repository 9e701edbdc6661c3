// SPDX-License-Identifier: Apache-2.0
#include "launch/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <csignal>
#include <ctime>
#include <fstream>
#include <map>
#include <thread>
#include <tuple>
#include <utility>

#include "base/limits.h"
#include "base/process_stat.h"
#include "base/thread.h"
#include "comm/shared_file.h"

namespace ds::launch {
namespace fs = std::filesystem;
namespace {

// Files of Open MPI 4.1 in its folder: 8 MiB of PMIx in steps of 4 MiB, and 4 MiB of messages for every rank.
constexpr i64 kOpenMpiBytes = i64{16} << 20;
constexpr i64 kOpenMpiRankBytes = i64{4} << 20;

constexpr const char* kMemory = "/dev/shm";

// Attempts to remove a folder that other processes still use, or remove too.
constexpr int kRemovals = 40;
constexpr std::chrono::milliseconds kBetweenRemovals{25};

bool is_executable_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

int topology(int cpu, const char* what) {
  int value = 0;
  std::ifstream(fmt::format("/sys/devices/system/cpu/cpu{}/topology/{}", cpu, what)) >> value;
  return value;
}

Fd open_folder(const fs::path& path) {
  return Fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// Removes folders whose owner no longer holds the lock.
void sweep(const fs::path& base) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(base, ignored)) {
    if (!entry.path().filename().string().starts_with(kPrivatePrefix)) continue;
    const Fd fd = open_folder(entry.path());
    struct stat info {};
    if (fd && ::fstat(fd.get(), &info) == 0 && info.st_uid == ::geteuid() && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0)
      fs::remove_all(entry.path(), ignored);
  }
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& s : strings) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

i64 monotonic_ns() noexcept {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

int exit_status(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

int exit_signal(int wait_status) { return WIFSIGNALED(wait_status) ? WTERMSIG(wait_status) : 0; }

std::string how_ended(int status, int signal) {
  return signal != 0 ? fmt::format("was killed by signal {} ({})", signal, signal_name(signal))
                     : fmt::format("exited with status {}", status);
}

fs::path own_executable() { return fs::read_symlink("/proc/self/exe"); }

Program find_program(const std::string& name, std::string_view path_variable) {
  std::vector<fs::path> candidates;
  if (name.find('/') != std::string::npos) {
    candidates.emplace_back(name);
  } else if (!name.empty()) {
    candidates.push_back(own_executable().parent_path() / name);
    for (std::size_t begin = 0; begin <= path_variable.size();) {
      const std::size_t end = std::min(path_variable.find(':', begin), path_variable.size());
      const std::string_view folder = path_variable.substr(begin, end - begin);
      candidates.push_back(fs::path(folder.empty() ? "." : folder) / name);
      begin = end + 1;
    }
  }
  Program found{.path = "",
                .status = 127,
                .why = fmt::format("'{}' is neither a program in the directory of ds-launch nor in PATH", name)};
  if (name.find('/') != std::string::npos) found.why = fmt::format("'{}' does not exist", name);
  for (const fs::path& candidate : candidates) {
    std::error_code ignored;
    if (is_executable_file(candidate)) return {.path = candidate.string(), .status = 0, .why = ""};
    if (!fs::exists(candidate, ignored) || found.status == 126) continue;
    if (fs::is_directory(candidate, ignored) && name.find('/') == std::string::npos) continue;
    found = {.path = "",
             .status = 126,
             .why = fmt::format("'{}' cannot be executed: {}", candidate.string(),
                                fs::is_directory(candidate, ignored) ? "it is a directory" : "no execute permission")};
  }
  return found;
}

std::vector<int> usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (::sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  if (cpus.empty()) {  // more CPUs than the set holds: take them as they are numbered
    for (int cpu = 0; cpu < static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); ++cpu)
      cpus.push_back(cpu);
  }
  std::map<int, std::tuple<int, int>> place;
  for (const int cpu : cpus) place[cpu] = {topology(cpu, "physical_package_id"), topology(cpu, "core_id")};
  std::stable_sort(cpus.begin(), cpus.end(), [&](int a, int b) { return place[a] < place[b]; });
  return cpus;
}

std::span<const int> share_of(std::span<const int> cpus, int index, int shares) {
  const i64 n = static_cast<i64>(cpus.size());
  const i64 begin = n * index / shares;
  const i64 end = n * (index + 1) / shares;
  return cpus.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
}

std::string random_hex(int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    u8 byte = 0;
    DS_CHECK(::getrandom(&byte, 1, 0) == 1, Errc::Io, "no random numbers: {}", system_reason(errno));
    text += fmt::format("{:02x}", byte);
  }
  return text;
}

int free_port() {
  const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const bool found = fd && ::bind(fd.get(), generic, length) == 0 && ::getsockname(fd.get(), generic, &length) == 0;
  DS_CHECK(found, Errc::Io, "no free TCP port: {}", system_reason(errno));
  return ntohs(address.sin_port);
}

fs::path private_folder_base(std::string_view tmpdir, i64 bytes) {
  const auto writable = [](const fs::path& base) { return ::access(base.c_str(), W_OK | X_OK) == 0; };
  std::error_code error;
  const fs::path memory = kMemory, folder = tmpdir;
  const fs::space_info space = fs::space(memory, error);
  const bool room = !error && (space.capacity == 0 || std::cmp_greater_equal(space.available, bytes));  // 0: no limit
  if (room && writable(memory)) return memory;
  return !folder.empty() && writable(folder) ? folder : "/tmp";
}

i64 open_mpi_bytes(int ranks) { return kOpenMpiBytes + ranks * kOpenMpiRankBytes; }

PrivateFolder::PrivateFolder(const fs::path& base) {
  sweep(base);
  if (base != kMemory) sweep(kMemory);
  remove_abandoned();
  const auto gone = [&] { return ::access(path_.c_str(), F_OK) != 0; };
  do {  // before it is locked, another's sweep may take it for abandoned
    std::string name = (base / kPrivatePrefix).string() + "XXXXXX";
    DS_CHECK(::mkdtemp(name.data()) != nullptr, Errc::Io, "cannot create a folder in {}: {}", base.string(),
             system_reason(errno));
    path_ = name;
    lock_ = open_folder(path_);
    DS_CHECK(lock_ || errno == ENOENT, Errc::Io, "cannot open {}: {}", name, system_reason(errno));
  } while (!lock_ || (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) || gone());
}

PrivateFolder::~PrivateFolder() { remove_job_files(path_); }

void remove_job_files(const fs::path& folder) {
  // Several may do so at once, and what mpirun still has in it comes and goes.
  for (int tries = 0; tries < kRemovals && !folder.empty(); ++tries) {
    std::error_code failed;
    fs::remove_all(folder, failed);
    if (!fs::exists(folder, failed)) break;
    std::this_thread::sleep_for(kBetweenRemovals);
  }
  remove_abandoned();
}

Pipe make_pipe() {
  int fds[2];
  DS_CHECK(::pipe2(fds, O_CLOEXEC) == 0, Errc::Io, "pipe: {}", system_reason(errno));
  return {Fd(fds[0]), Fd(fds[1])};
}

Fd listen_at(const std::string& path) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  DS_CHECK(path.size() < sizeof address.sun_path, Errc::Config, "TMPDIR is too long for a socket: {}", path);
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const bool good = fd && ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                    ::listen(fd.get(), SOMAXCONN) == 0;
  DS_CHECK(good, Errc::Io, "cannot listen at {}: {}", path, system_reason(errno));
  return fd;
}

Fd connect_to(const std::string& path) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  if (!fd || ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return Fd();
  return fd;
}

Peer::Peer(const Fd& socket) {
  ucred other{};
  socklen_t size = sizeof other;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &size) != 0 || other.pid <= 0) return;
  pid_ = other.pid;
  start_ = process_stat(pid_).start;
}

bool Peer::is_ending() const {
  if (pid_ == 0) return false;
  const ProcessStat now = process_stat(pid_);
  return now.exiting || has_ended(now, start_);
}

pid_t spawn(const Spawn& what, int* error) {
  std::vector<std::string> arguments = what.argv;
  std::vector<std::string> variables;
  for (const auto& [name, value] : what.environment) variables.push_back(name + "=" + value);
  const std::vector<char*> argv = pointers(arguments);
  const std::vector<char*> environment = pointers(variables);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const int cpu : what.cpus) CPU_SET(cpu, &cpus);

  int report[2];  // closed by a successful exec
  DS_CHECK(::pipe2(report, O_CLOEXEC) == 0, Errc::Io, "pipe: {}", system_reason(errno));
  const Fd read_end(report[0]);
  Fd write_end(report[1]);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw cannot_start({errno, std::generic_category(), fmt::format("a process for {}", what.program)});
  if (pid == 0) {  // only async-signal-safe calls from here
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, what.death_signal);
    if (::getppid() != parent) ::_exit(128 + SIGKILL);
    for (int signal = 1; signal < NSIG; ++signal) ::signal(signal, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    if (!what.cpus.empty()) ::sched_setaffinity(0, sizeof cpus, &cpus);
    ::dup2(what.stdin_fd, STDIN_FILENO);
    ::dup2(what.stdout_fd, STDOUT_FILENO);
    ::dup2(what.stderr_fd, STDERR_FILENO);
    ::execve(what.program.c_str(), argv.data(), environment.data());
    const int reason = errno;
    [[maybe_unused]] const ssize_t n = ::write(write_end.get(), &reason, sizeof reason);
    ::_exit(reason == ENOENT ? 127 : 126);
  }
  ::setpgid(pid, pid);
  write_end.reset();
  *error = 0;
  while (::read(read_end.get(), error, sizeof *error) < 0 && errno == EINTR) {
  }
  return pid;
}

void kill_descendants() {
  const std::string list = fmt::format("/proc/self/task/{}/children", ::gettid());
  for (int level = 0; level < 1000; ++level) {
    std::ifstream children(list);
    bool any = false;
    for (pid_t pid; children >> pid; any = true) ::kill(pid, SIGKILL);
    if (!any) return;
    while (::waitpid(-1, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

namespace {

// The state that /proc/PID/status reports. Makes only async-signal-safe calls, so that a forked process may use it
// before exec.
struct StoppedState {
  bool stopped = false;
  u64 pending = 0;  // signal n is bit n - 1
};
StoppedState stopped_state(const char* status_file) {
  const int fd = ::open(status_file, O_RDONLY | O_CLOEXEC);
  std::array<char, 4096> text{};
  const ssize_t n = ::read(fd, text.data(), text.size());
  ::close(fd);
  const std::string_view status(text.data(), static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
  constexpr std::string_view kState = "\nState:\t", kPending = "\nShdPnd:\t";
  const std::size_t state = status.find(kState), pending = status.find(kPending);
  StoppedState found;
  if (state == status.npos || pending == status.npos) return found;
  found.stopped = status[state + kState.size()] == 'T';
  const char* digits = status.data() + pending + kPending.size();
  std::from_chars(digits, digits + 16, found.pending, 16);
  return found;
}

}  // namespace

void stop_until_told(std::span<const int> waking) {
  const pid_t self = ::getpid();
  const std::string status_file = fmt::format("/proc/{}/status", self);
  u64 wakes = 0;
  for (const int signal : waking) wakes |= u64{1} << (signal - 1);
  const pid_t watch = ::fork();  // if it fails, only an explicit SIGCONT continues this process
  if (watch == 0) {
    ::setpgid(0, 0);  // what the terminal sends to us is not for it
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (::getppid() == self) {
      const StoppedState state = stopped_state(status_file.c_str());
      if (state.stopped && (state.pending & wakes) != 0) ::kill(self, SIGCONT);
      const timespec pause{.tv_sec = 0, .tv_nsec = 20'000'000};
      ::nanosleep(&pause, nullptr);
    }
    ::_exit(0);
  }
  ::raise(SIGSTOP);
  if (watch < 0) return;
  ::kill(watch, SIGKILL);
  while (::waitpid(watch, nullptr, 0) < 0 && errno == EINTR) {
  }
}

SignalInbox::SignalInbox(const std::vector<int>& signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&set, signal);  // nohup stays nohup
  }
  ::sigprocmask(SIG_BLOCK, &set, &before_);
  fd_ = Fd(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  DS_CHECK(static_cast<bool>(fd_), Errc::Io, "signalfd: {}", system_reason(errno));
}

SignalInbox::~SignalInbox() {
  while (next()) {
  }
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

SignalInbox::Signal SignalInbox::next() {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof info) != sizeof info) return {};
  return {static_cast<int>(info.ssi_signo), static_cast<pid_t>(info.ssi_pid)};
}

}  // namespace ds::launch
