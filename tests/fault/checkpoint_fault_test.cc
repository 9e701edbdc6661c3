// SPDX-License-Identifier: Apache-2.0
// A save is stopped at each of its system calls in turn: by a kill, by one refusal, by refusals from there on. Whatever
// the moment, the run directory then holds a latest step that loads bit for bit. The calls are caught by defining them
// here, which takes precedence over libc for this program and the libraries under it.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <mutex>
#include <set>

#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint_state.h"

namespace {

enum class Fault { None, Kill, Once, Sticky };

// Armed in child processes only.
std::atomic<bool> armed = false;
std::atomic<int> calls = 0;
Fault fault = Fault::None;
int fault_at = 0, fault_errno = 0;

// File operations in order, logged while `recording`.
bool recording = false;
std::mutex log_mutex;
std::vector<std::pair<std::string, std::string>> events;

void record(const char* what, const std::string& path) {
  if (!recording) return;
  const std::lock_guard lock(log_mutex);
  events.emplace_back(what, path);
}
std::string path_of(int fd) {
  char path[4096];
  const ssize_t n = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path);
  return {path, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

// True: the call must fail with errno as set. Does not return where the process is to die here.
bool stopped() {
  if (!armed) return false;
  const int call = ++calls;
  if (fault == Fault::Kill && call == fault_at) ::raise(SIGKILL);
  const bool fails = (fault == Fault::Once && call == fault_at) || (fault == Fault::Sticky && call >= fault_at);
  if (fails) errno = fault_errno;
  return fails;
}

template <class F>
F real(const char* name) {
  return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

#define INTERPOSE extern "C" __attribute__((visibility("default")))

INTERPOSE int open(const char* path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const auto mode = va_arg(args, mode_t);
  va_end(args);
  static const auto next = real<int (*)(const char*, int, mode_t)>("open");
  if ((flags & O_CREAT) != 0) {
    if (stopped()) return -1;
    record("create", path);
  }
  return next(path, flags, mode);
}
INTERPOSE ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  static const auto next = real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  if (stopped()) return -1;
  record("write", path_of(fd));
  return next(fd, data, bytes, at);
}
INTERPOSE ssize_t pwrite64(int fd, const void* data, size_t bytes, off_t at) { return pwrite(fd, data, bytes, at); }
INTERPOSE int ftruncate(int fd, off_t bytes) noexcept {
  static const auto next = real<int (*)(int, off_t)>("ftruncate");
  if (stopped()) return -1;
  record("write", path_of(fd));
  return next(fd, bytes);
}
INTERPOSE int ftruncate64(int fd, off_t bytes) noexcept { return ftruncate(fd, bytes); }
INTERPOSE int fsync(int fd) {
  if (stopped()) return -1;
  record("sync", path_of(fd));
  return 0;  // a killed process loses nothing that it wrote: what counts here is the order
}
INTERPOSE int mkdir(const char* path, mode_t mode) noexcept {
  static const auto next = real<int (*)(const char*, mode_t)>("mkdir");
  if (stopped()) return -1;
  record("create", path);
  return next(path, mode);
}
INTERPOSE int rename(const char* from, const char* to) noexcept {
  static const auto next = real<int (*)(const char*, const char*)>("rename");
  if (stopped()) return -1;
  record("rename", to);
  return next(from, to);
}
INTERPOSE int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) noexcept {
  static const auto next = real<int (*)(int, const char*, int, const char*, unsigned)>("renameat2");
  if (stopped()) return -1;
  record("rename", to);
  return next(from_dir, from, to_dir, to, flags);
}
INTERPOSE int unlinkat(int dir, const char* path, int flags) noexcept {
  static const auto next = real<int (*)(int, const char*, int)>("unlinkat");
  return stopped() ? -1 : next(dir, path, flags);
}
INTERPOSE int unlink(const char* path) noexcept {
  static const auto next = real<int (*)(const char*)>("unlink");
  return stopped() ? -1 : next(path);
}

namespace ds {
namespace {

namespace fs = std::filesystem;
using namespace testing;

constexpr int kThrew = 7;

// Saves in a child process under the given fault; returns the wait status, and the number of calls in *num_calls.
int save_in_child(const std::string& dir, i64 step, Fault kind, int at, int error, int* num_calls = nullptr) {
  int pipe[2];
  EXPECT_EQ(::pipe(pipe), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    fault = kind;
    fault_at = at;
    fault_errno = error;
    armed = true;
    int status = 0;
    try {
      save_sample(dir, step, DType::BF16, 2, 1, 2);
    } catch (const Error& e) {
      status = e.code() == Errc::Io ? kThrew : 1;
      if (status == 1) std::fprintf(stderr, "call %d: %s\n", at, e.what());
    }
    armed = false;
    const int n = calls;
    if (::write(pipe[1], &n, sizeof n) != sizeof n) status = 2;
    ::_exit(status);
  }
  ::close(pipe[1]);
  int n = 0;
  if (::read(pipe[0], &n, sizeof n) == sizeof n && num_calls != nullptr) *num_calls = n;
  ::close(pipe[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

std::set<std::string> entries(const std::string& dir) {
  std::set<std::string> names;
  for (const auto& e : fs::directory_iterator(dir)) names.insert(e.path().filename().string());
  return names;
}

class SaveStopped : public ::testing::TestWithParam<std::tuple<Fault, int, bool>> {};

TEST_P(SaveStopped, AtEveryCallLeavesALatestThatLoads) {
  const auto [kind, error, again] = GetParam();
  const TempDirectory dir;
  const std::string pristine = dir / "pristine", run = dir / "run";
  save_sample(pristine, 1, DType::BF16, 2, 1);
  const i64 step = again ? 1 : 2;  // also the case that the same step is saved again

  int num_calls = 0;
  fs::copy(pristine, run, fs::copy_options::recursive);
  ASSERT_EQ(save_in_child(run, step, Fault::None, 0, 0, &num_calls), 0);
  ASSERT_GT(num_calls, 40);
  int saved = 0;
  for (int call = 1; call <= num_calls; ++call) {
    fs::remove_all(run);
    fs::copy(pristine, run, fs::copy_options::recursive);
    const int status = save_in_child(run, step, kind, call, error);
    if (kind == Fault::Kill) {
      ASSERT_TRUE(WIFSIGNALED(status)) << call;
    } else {
      ASSERT_TRUE(WIFEXITED(status)) << call;
      ASSERT_TRUE(WEXITSTATUS(status) == kThrew || WEXITSTATUS(status) == 0) << call << ": " << WEXITSTATUS(status);
    }
    const std::string found = find_checkpoint(run);
    ASSERT_TRUE(CheckpointReader(found).verify({}).empty()) << call;
    load_sample(found, DType::BF16, 1);
    saved += found == run + "/" + step_name(step) && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 1 : 0;
    for (const std::string& name : entries(run)) {
      const bool whole = name == "latest" || (parse_step_name(name) && fs::exists(run + "/" + name + "/manifest.json"));
      // One refusal is cleaned up after, unless it hit the cleaning itself; kills and dead disks leave temporary names.
      ASSERT_TRUE(whole || name.starts_with(".tmp-step-") || name.starts_with(".latest.tmp-")) << call << " " << name;
    }
    // The next save succeeds and clears what was left of this one.
    if (call % 7 == 0) {
      ASSERT_EQ(save_in_child(run, step, Fault::None, 0, 0), 0);
      for (const std::string& name : entries(run)) ASSERT_FALSE(name.starts_with(".")) << call << " " << name;
      ASSERT_EQ(find_checkpoint(run), run + "/" + step_name(step));
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "call " << call;
  }
  EXPECT_LT(saved, num_calls / 2);  // the faults do stop saves
}

INSTANTIATE_TEST_SUITE_P(Faults, SaveStopped,
                         ::testing::Values(std::tuple{Fault::Kill, 0, false}, std::tuple{Fault::Kill, 0, true},
                                           std::tuple{Fault::Once, ENOSPC, false}, std::tuple{Fault::Once, EIO, true},
                                           std::tuple{Fault::Sticky, ENOSPC, false},
                                           std::tuple{Fault::Sticky, EIO, true}),
                         [](const auto& p) {
                           const Fault f = std::get<0>(p.param);
                           return std::string(f == Fault::Kill   ? "Kill"
                                              : f == Fault::Once ? "OneRefusal"
                                                                 : "RefusalsFromThere") +
                                  (std::get<2>(p.param) ? "SameStep" : "NewStep");
                         });

TEST(SaveOrder, OneRefusalLeavesNoTemporaryFiles) {
  const TempDirectory dir;
  save_sample(dir / "run", 1, DType::BF16, 2, 1);
  for (int call = 4; call < 40; call += 5) {  // among the writes of the rank files
    ASSERT_EQ(WEXITSTATUS(save_in_child(dir / "run", 2, Fault::Once, call, EIO)), kThrew);
    EXPECT_EQ(entries(dir / "run"), (std::set<std::string>{"latest", "step-00000001"})) << call;
  }
}

// A power failure preserves only synced data: at every rename, everything that the new name shows must be synced.
TEST(SaveOrder, EverythingIsSyncedBeforeItGetsItsName) {
  const TempDirectory dir;
  const std::string run = dir / "run";
  save_sample(run, 1, DType::BF16, 2, 1);
  recording = true;
  save_sample(run, 2, DType::BF16, 2, 1);
  recording = false;

  std::set<std::string> dirty;  // files with unsynced bytes, directories with unsynced names
  int renames = 0;
  for (const auto& [what, path] : events) {
    const std::string parent = parent_directory(path);
    if (what == "write") dirty.insert(path);
    if (what == "create") dirty.insert(parent);
    if (what == "sync") dirty.erase(path);
    if (what != "rename") continue;
    ++renames;
    if (path == run + "/step-00000002") {
      for (const std::string& d : dirty)
        EXPECT_FALSE(d.starts_with(run + "/.tmp-")) << d << " before the step's rename";
    } else if (path == run + "/latest") {
      dirty.erase(run);  // its temporary name, which need not last
      EXPECT_TRUE(dirty.empty()) << *dirty.begin() << " before latest moves";
    }
    dirty.insert(parent);
  }
  EXPECT_EQ(renames, 3);  // manifest, step, latest
  EXPECT_TRUE(dirty.empty()) << *dirty.begin() << " at the end";
}

}  // namespace
}  // namespace ds
