// SPDX-License-Identifier: Apache-2.0
#include "base/limits.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <system_error>
#include <vector>

namespace ds {
namespace {

constexpr size_t kSmallStack = 64 << 10;
// Threads get stacks of the limit's size, and arguments and environment may take 128 KiB of the first one.
constexpr u64 kLeastStack = 512 << 10;
constexpr u64 kLeastData = 16 << 20;   // without the stacks of threads
constexpr u64 kBesideStack = 1 << 20;  // memory of a thread outside its stack

std::string name_of(__rlimit_resource resource) {
  switch (resource) {
    case RLIMIT_FSIZE: return "file size (ulimit -f)";
    case RLIMIT_STACK: return "the stack (ulimit -s)";
    case RLIMIT_NOFILE: return "open files (ulimit -n)";
    case RLIMIT_AS: return "address space (ulimit -v)";
    case RLIMIT_DATA: return "data (ulimit -d)";
    default: throw Error(Errc::Internal, "a limit without a name");
  }
}

std::string amount_of(__rlimit_resource resource, u64 value) {
  return resource == RLIMIT_NOFILE ? std::to_string(value) : fmt::format("{} KiB", (value + 1023) >> 10);
}

// Reads a number from a file of this process's cgroup; empty for "max".
std::optional<u64> of_cgroup(std::string_view file) {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path", or "8:pids:/path" in cgroup v1
    const bool unified = line.starts_with("0::");
    const size_t path = unified ? 3 : line.find(":pids:") + 6;
    if (!unified && path < 6) continue;
    std::ifstream in(fmt::format("/sys/fs/cgroup{}{}/{}", unified ? "" : "/pids", line.substr(path), file));
    if (u64 value = 0; in >> value) return value;
  }
  return std::nullopt;
}

// How many of `wanted` threads could be started.
int count_startable(int wanted) {
  std::atomic<bool> over = false;
  const auto wait = [](void* flag) -> void* {
    static_cast<std::atomic<bool>*>(flag)->wait(false);
    return nullptr;
  };
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setstacksize(&attributes, kSmallStack);
  std::vector<pthread_t> threads;
  threads.reserve(wanted);
  for (pthread_t thread{}; std::ssize(threads) < wanted && ::pthread_create(&thread, &attributes, wait, &over) == 0;)
    threads.push_back(thread);
  ::pthread_attr_destroy(&attributes);
  over = true;
  over.notify_all();
  for (const pthread_t thread : threads) ::pthread_join(thread, nullptr);
  return narrow<int>(std::ssize(threads));
}

// Tests for memory for that many threads, allocated like the C library does: reserved, then made writable, when the
// limit applies. Includes a thread's other memory.
bool has_room_for_stacks(int threads) noexcept {
  const size_t bytes = static_cast<size_t>(threads) * (thread_stack_bytes() + kBesideStack);
  void* const room = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (room == MAP_FAILED) return false;
  const bool writable = ::mprotect(room, bytes, PROT_READ | PROT_WRITE) == 0;
  ::munmap(room, bytes);
  return writable;
}

// A field of /proc/self/statm, which counts pages, in bytes; 0: unknown.
u64 statm_bytes(int field) noexcept {
  std::array<char, 256> text{};
  const int fd = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd < 0 ? -1 : ::read(fd, text.data(), text.size() - 1);
  if (fd >= 0) ::close(fd);
  u64 pages = 0;
  for (char *at = text.data(), *end = at; n > 0 && field >= 0; --field, at = end) pages = std::strtoull(at, &end, 10);
  return pages * static_cast<u64>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

std::optional<u64> limit_of(__rlimit_resource resource) noexcept {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

std::string system_reason(int error) {
  std::string reason = std::generic_category().message(error);
  const auto add = [&](__rlimit_resource resource) {
    if (const std::optional<u64> limit = limit_of(resource))
      reason += fmt::format(": the limit of {} is {}", name_of(resource), amount_of(resource, *limit));
  };
  if (error == EMFILE) add(RLIMIT_NOFILE);
  if (error == EFBIG) add(RLIMIT_FSIZE);
  if (error == ENOMEM) add(RLIMIT_AS);
  if (error == ENOMEM) add(RLIMIT_DATA);
  return reason;
}

u64 address_space_bytes() noexcept { return statm_bytes(0); }
u64 data_bytes() noexcept { return statm_bytes(5); }

u64 thread_stack_bytes() noexcept {
  pthread_attr_t attributes;
  size_t bytes = 0;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  return bytes;
}

void require_limit(__rlimit_resource resource, u64 needed, std::string_view needed_for) {
  const std::optional<u64> has = limit_of(resource);
  DS_CHECK(!has || *has >= needed, Errc::Unavailable, "the limit of {} is {}, and {} needs {}: raise it",
           name_of(resource), amount_of(resource, *has), needed_for, amount_of(resource, needed));
}

void require_stacks(int threads, std::string_view needed_for) {
  const std::optional<u64> data = limit_of(RLIMIT_DATA), stack = limit_of(RLIMIT_STACK);
  const u64 stacks = static_cast<u64>(threads) * thread_stack_bytes();
  if (data) require_limit(RLIMIT_DATA, kLeastData + stacks, needed_for);
  DS_CHECK(!stack || has_room_for_stacks(threads), Errc::Unavailable,
           "the limit of {} is {}, and {} needs {} threads, which cannot have so much each: lower it",
           name_of(RLIMIT_STACK), amount_of(RLIMIT_STACK, *stack), needed_for, threads);
}

void require_tasks(int needed, std::string_view needed_for) {
  const int startable = count_startable(needed);
  DS_CHECK(startable == needed, Errc::Unavailable, "{}: {} more can be started, and {} needs {}: raise it",
           limit_of_tasks(), startable, needed_for, needed);
}

std::string limit_of_tasks() {
  const std::optional<u64> user = limit_of(RLIMIT_NPROC);
  // The system reports a stack without room with the same error.
  if (!has_room_for_stacks(1)) {
    const u64 stack = thread_stack_bytes() + kBesideStack;
    const std::optional<u64> space = limit_of(RLIMIT_AS), data = limit_of(RLIMIT_DATA);
    const __rlimit_resource cause = space && address_space_bytes() + stack > *space ? RLIMIT_AS
                                    : data && *data < kLeastData + stack            ? RLIMIT_DATA
                                                                                    : RLIMIT_STACK;
    if (const std::optional<u64> limit = limit_of(cause))
      return fmt::format("the limit of {} is {}{}", name_of(cause), amount_of(cause, *limit),
                         cause == RLIMIT_STACK ? ", more than a thread can have" : "");
  }
  const std::optional<u64> group = of_cgroup("pids.max"), in_group = of_cgroup("pids.current");
  if (group && (!user || *group < *user || in_group.value_or(0) >= *group))
    return fmt::format("the limit of processes and threads of this cgroup (pids.max) is {}", *group);
  if (user) return fmt::format("the limit of processes and threads of this user (ulimit -u) is {}", *user);
  return "there is a limit of processes and threads";
}

void check_process_limits() { require_limit(RLIMIT_STACK, kLeastStack, "this program"); }

}  // namespace ds
