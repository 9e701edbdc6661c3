// SPDX-License-Identifier: Apache-2.0
// The child's message is: a byte that says whether the filter is in place, a byte that says what follows, and that.

#include "formats/confined.h"

#include <fcntl.h>
#include <poll.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/limits.h"
#include "base/thread.h"
#include "ds/log.h"
#include "ds/printable.h"

namespace ds {
namespace {

enum Kind : char { kAnswer, kError, kNoMemory };

constexpr size_t kMaxMessage = 4096;

// A system call that the child may make; with `arg`, only if the low half of that argument has this value.
struct Rule {
  long call;
  int arg = -1;
  u32 value = 0;
};

// Lets the rules pass and refuses everything else; a call by another processor's numbers ends its thread.
bool install_filter(const std::vector<Rule>& rules) {
  const std::unique_ptr<void, void (*)(scmp_filter_ctx)> filter(::seccomp_init(SCMP_ACT_ERRNO(EPERM)),
                                                                ::seccomp_release);
  if (!filter) return false;
  for (const Rule& r : rules) {
    const scmp_arg_cmp arg{static_cast<unsigned>(std::max(r.arg, 0)), SCMP_CMP_MASKED_EQ, 0xffffffff, r.value};
    if (::seccomp_rule_add_array(filter.get(), SCMP_ACT_ALLOW, static_cast<int>(r.call), r.arg < 0 ? 0 : 1, &arg) != 0)
      return false;
  }
  return ::seccomp_load(filter.get()) == 0;  // which forbids new privileges, too
}

bool forbid_all_but_computing(int answers) {
  const auto value = [](auto x) { return static_cast<u32>(x); };
  return install_filter({
      {SYS_pread64},
      {SYS_read},
      {SYS_write, 0, value(answers)},
      {SYS_brk},
      {SYS_mmap, 4, value(-1)},  // memory, not files
      {SYS_munmap},
      {SYS_mremap},
      {SYS_mprotect},
      {SYS_madvise, 2, value(MADV_DONTNEED)},  // as allocators say
      {SYS_madvise, 2, value(MADV_FREE)},
      {SYS_madvise, 2, value(MADV_HUGEPAGE)},
      {SYS_madvise, 2, value(MADV_NOHUGEPAGE)},
      {SYS_madvise, 2, value(MADV_DONTDUMP)},
      {SYS_futex},
      {SYS_sched_yield},
      {SYS_clock_gettime},
      {SYS_gettimeofday},
      {SYS_getrandom},
      {SYS_getpid},
      {SYS_gettid},
      {SYS_rt_sigaction},
      {SYS_rt_sigprocmask},
      {SYS_rt_sigreturn},
      {SYS_sigaltstack},
      {SYS_tgkill, 0, value(::getpid())},  // abort()
      {SYS_exit},
      {SYS_exit_group},
  });
}

// A limit never rises above what the process has already.
void limit(int resource, u64 value) {
  rlimit r{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &r) != 0) return;
  r.rlim_max = std::min<rlim_t>(r.rlim_max, value);
  r.rlim_cur = std::min(r.rlim_cur, r.rlim_max);
  ::setrlimit(static_cast<__rlimit_resource>(resource), &r);
}

void close_all_but(int a, int b) {
  const auto close_between = [](i64 first, i64 last) {
    if (first > last || ::close_range(static_cast<u32>(first), static_cast<u32>(last), 0) == 0) return;
    const i64 most = std::min<i64>(last, ::sysconf(_SC_OPEN_MAX));  // a kernel before 5.9
    for (i64 fd = first; fd <= most; ++fd) ::close(static_cast<int>(fd));
  };
  const i64 low = std::min(a, b), high = std::max(a, b);
  close_between(0, low - 1);
  close_between(std::max<i64>(low, -1) + 1, high - 1);
  close_between(high + 1, std::numeric_limits<u32>::max());
}

// Unmaps memory shared with other processes (that through which ranks exchange data, a device's). Reads the table of
// mappings line by line: "begin-end rwxs ...".
bool drop_shared_memory() {
  const int fd = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  std::vector<std::pair<u64, u64>> shared;  // not dropped while the table is read
  std::string line;
  std::array<char, 4096> part;
  ssize_t n = 0;
  while ((n = ::read(fd, part.data(), part.size())) > 0) {
    for (const char c : std::string_view(part.data(), static_cast<size_t>(n))) {
      if (c != '\n') {
        line += c;
        continue;
      }
      char* at = nullptr;
      const u64 begin = std::strtoull(line.c_str(), &at, 16);
      const u64 end = *at == '-' ? std::strtoull(at + 1, &at, 16) : 0;
      if (std::string_view(at).size() > 4 && at[4] == 's') shared.emplace_back(begin, end);
      line.clear();
    }
  }
  ::close(fd);
  bool dropped = n == 0;
  for (const auto& [begin, end] : shared)
    dropped &= ::munmap(reinterpret_cast<void*>(begin), end - begin) == 0;  // NOLINT(performance-no-int-to-ptr)
  return dropped;
}

// Returns whether there is a filter, and no shared memory.
bool confine(pid_t parent, int descriptor, int answers, const ConfinedLimits& limits) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it died before it could take us along
  // The child must not run this program's handlers, which may notify other threads.
  for (int s = 1; s < NSIG; ++s) ::signal(s, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const bool is_alone = drop_shared_memory();
  // A copy of this process has what that has: gigabytes of models and reservations of drivers, perhaps.
  const u64 has = address_space_bytes();
  close_all_but(descriptor, answers);
  limit(RLIMIT_CPU, static_cast<u64>(limits.seconds));
  limit(RLIMIT_FSIZE, 0);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_NOFILE, 0);
  limit(RLIMIT_NPROC, 0);
  if (has != 0) limit(RLIMIT_AS, has + static_cast<u64>(limits.memory_bytes));
  return forbid_all_but_computing(answers) && is_alone;
}

void send(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) ::_exit(1);
    text.remove_prefix(static_cast<size_t>(n));
  }
}

[[noreturn]] void run_child(pid_t parent, int descriptor, int answers, const ConfinedLimits& limits,
                            const std::function<std::string()>& work) noexcept {
  const char filtered = confine(parent, descriptor, answers, limits) ? 1 : 0;
  std::string head{filtered, kAnswer}, body;
  try {
    body = work();
  } catch (const Error& e) {
    head[1] = kError;
    body = std::string(1, static_cast<char>(e.code())) + e.what();
  } catch (const std::bad_alloc&) {
    head[1] = kNoMemory;
  }  // anything else is our bug, and ends the child
  send(answers, head);
  send(answers, body);
  ::_exit(0);  // not exit(): buffers and handlers at exit are the parent's
}

}  // namespace

ConfinedChild::ConfinedChild(std::string path, std::string who, int descriptor, const ConfinedLimits& limits,
                             const std::function<std::string()>& work)
    : path_(std::move(path)),
      who_(std::move(who)),
      limits_(limits),
      deadline_(std::chrono::steady_clock::now() + std::chrono::seconds(limits.seconds)) {
  std::array<int, 2> ends{};
  DS_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, Errc::Io, "{}: no pipe to a separate process for {}: {}", path_, who_,
           system_reason(errno));
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of this program runs in the child
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) run_child(parent, descriptor, ends[1], limits_, work);
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::close(ends[1]);
  pipe_ = ends[0];
  if (pid_ < 0) {
    ::close(pipe_);
    throw cannot_start({error, std::generic_category(), fmt::format("a process for {} to read {}", who_, path_)});
  }
}

ConfinedChild::~ConfinedChild() {
  reap();
  ::close(pipe_);
}

std::string ConfinedChild::answer() {
  const std::string text = receive();
  const int status = reap();
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    if (signal == SIGXCPU) refuse(fmt::format("took more than {} s", limits_.seconds));
    const char* name = ::sigabbrev_np(signal);
    refuse(fmt::format("was killed by SIG{}", name != nullptr ? name : std::to_string(signal)));
  }
  if (WEXITSTATUS(status) != 0) refuse(fmt::format("ended with status {}", WEXITSTATUS(status)));
  if (text.size() < 2) refuse("gave no answer");
  if (text[0] == 0) {
    log_message(LogLevel::Verbose,
                fmt::format("{}: there are no seccomp filters or no /proc; only limits confine {}", path_, who_));
  }
  switch (text[1]) {
    case kAnswer: return text.substr(2);
    case kNoMemory: {
      // The limit of this process itself is not the file's fault.
      const std::optional<u64> own = limit_of(RLIMIT_AS);
      DS_CHECK(
          !own || *own >= address_space_bytes() + static_cast<u64>(limits_.memory_bytes), Errc::OutOfMemory,
          "{}: out of memory: the limit of address space (ulimit -v) is {} KiB, and {} may take {} KiB to read this "
          "file",
          path_, *own >> 10, who_, limits_.memory_bytes >> 10);
      refuse(fmt::format("needed more than {} MiB of memory", limits_.memory_bytes >> 20));
    }
    case kError: {
      const auto code = text.size() > 2 ? static_cast<Errc>(text[2]) : Errc::Internal;
      if (code != Errc::Corrupt && code != Errc::Unavailable && code != Errc::Io) break;
      throw Error(code, shortened(printable(std::string_view(text).substr(3)), kMaxMessage));
    }
    default: break;
  }
  refuse("gave an invalid answer");
}

std::string ConfinedChild::receive() {
  std::string text;
  std::vector<char> part(64 << 10);
  while (true) {
    using std::chrono::milliseconds;
    const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - std::chrono::steady_clock::now()).count();
    pollfd ready{pipe_, POLLIN, 0};
    const int n = left <= 0 ? 0 : ::poll(&ready, 1, static_cast<int>(std::min<i64>(left, 60'000)));
    if (n == 0 && left <= 60'000) refuse(fmt::format("took more than {} s", limits_.seconds));
    if (n <= 0) continue;
    const ssize_t got = ::read(pipe_, part.data(), part.size());
    if (got == 0) return text;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(Errc::Io, fmt::format("{}: cannot read from {}: {}", path_, who_, system_reason(errno)));
    if (static_cast<i64>(text.size()) + got > limits_.answer_bytes)
      refuse(fmt::format("answers with more than {} MiB", limits_.answer_bytes >> 20));
    text.append(part.data(), static_cast<size_t>(got));
  }
}

int ConfinedChild::reap() noexcept {
  if (pid_ < 0) return 0;
  ::kill(pid_, SIGKILL);  // after the end of its answer it is dead already, or will not end by itself
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0) {
    if (errno == EINTR) continue;
    status = 0;  // this program ignores SIGCHLD: the answer alone must tell
    break;
  }
  pid_ = -1;
  return status;
}

void ConfinedChild::refuse(std::string_view what) const {
  throw Error(Errc::Corrupt, fmt::format("{}: {} {} while it read this file; it is not read", path_, who_, what));
}

}  // namespace ds
