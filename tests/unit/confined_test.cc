// SPDX-License-Identifier: Apache-2.0
// The rights of the child of formats/confined, and its end if it does something else.

#include "formats/confined.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <thread>
#include <vector>

#include "base/file.h"
#include "temp_directory.h"

namespace ds {
namespace confined_test {

using testing::TempDirectory;

std::string run(const std::function<std::string()>& work, const ConfinedLimits& limits = {}, int descriptor = -1) {
  return ConfinedChild("x.h5", "the parser", descriptor, limits, work).answer();
}

int open_descriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

TEST(Confined, AnswersComeWhole) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{65536}, size_t{5'000'000}}) {
    std::string want(n, 'x');
    for (size_t i = 0; i < n; ++i) want[i] = static_cast<char>(i * 7);
    EXPECT_EQ(run([&] { return want; }), want);
  }
}

TEST(Confined, OurErrorsComeAsTheyWere) {
  EXPECT_ERROR(run([]() -> std::string { throw Error(Errc::Unavailable, "x.h5: /a is compressed"); }),
               Errc::Unavailable, "x.h5: /a is compressed");
  EXPECT_ERROR(run([]() -> std::string { throw Error(Errc::Corrupt, "a\x1b[2Jb"); }), Errc::Corrupt, R"(a\x1b[2Jb)");
  // For example, no parser has reason to report a wrong configuration.
  EXPECT_ERROR(run([]() -> std::string { throw Error(Errc::Config, "c"); }), Errc::Corrupt, "gave an invalid answer");
}

TEST(Confined, ADeadChildIsADamagedFile) {
  const auto killed_by = [](int signal) {
    return [signal]() -> std::string {
      ::signal(signal, SIG_DFL);
      ::raise(signal);
      return "";
    };
  };
  EXPECT_ERROR(run(killed_by(SIGSEGV)), Errc::Corrupt,
               "x.h5: the parser was killed by SIGSEGV while it read this file; it is not read");
  EXPECT_ERROR(run(killed_by(SIGFPE)), Errc::Corrupt, "SIGFPE");
  EXPECT_ERROR(run([]() -> std::string { std::abort(); }), Errc::Corrupt, "SIGABRT");
  EXPECT_ERROR(run([]() -> std::string { throw 1; }), Errc::Corrupt, "SIGABRT");
  EXPECT_ERROR(run([]() -> std::string { ::_exit(3); }), Errc::Corrupt, "ended with status 3");
  EXPECT_ERROR(run([]() -> std::string { ::_exit(0); }), Errc::Corrupt, "gave no answer");
}

TEST(Confined, HungAndHungryChildrenAreStopped) {
  const auto begin = std::chrono::steady_clock::now();
  const auto busy = [] {
    while (::getpid() != 0) ::sched_yield();
    return std::string();
  };
  EXPECT_ERROR(run(busy, {.seconds = 1}), Errc::Corrupt, "took more than 1 s");
  const auto asleep = [] {
    std::mutex mutex;
    mutex.lock();
    mutex.lock();
    return std::string();
  };
  EXPECT_ERROR(run(asleep, {.seconds = 1}), Errc::Corrupt, "took more than 1 s");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  const auto hungry = [] {
    std::vector<std::string> all;
    while (true) all.emplace_back(1 << 20, 'x');
    return std::string();
  };
  EXPECT_ERROR(run(hungry, {.seconds = 5, .memory_bytes = 64 << 20}), Errc::Corrupt, "it is not read");
  EXPECT_EQ(run([] { return std::string(40 << 20, 'x'); }, {.memory_bytes = 160 << 20}).size(), size_t{40} << 20);
  EXPECT_ERROR(run([] { return std::string(2000, 'x'); }, {.answer_bytes = 1000}), Errc::Corrupt, "answers with more");
}

// Every attempt returns -1 and EPERM: the filter, not chance. Skipped where the kernel has no filters.
TEST(Confined, TheChildCanTouchNothing) {
  if (::prctl(PR_GET_SECCOMP) < 0) GTEST_SKIP() << "this kernel has no seccomp";
  const TempDirectory dir;
  testing::write_file(dir / "in", "abc");
  const File file = File::create(dir / "inout");
  file.write_at(0, "abcd", 4);
  const int fd = file.descriptor(), mine = ::open((dir / "in").c_str(), O_RDONLY | O_CLOEXEC);
  const std::string in = dir / "in", out = dir / "out";
  const auto attempts = [&] {
    std::string results;
    const auto denied = [&](const char* what, i64 result) {
      if (result != -1 || errno != EPERM) results += fmt::format("{}: {} (errno {}); ", what, result, errno);
    };
    char c = 0;
    denied("open", ::open(in.c_str(), O_RDONLY));
    denied("create", ::open(out.c_str(), O_RDWR | O_CREAT, 0666));
    denied("unlink", ::unlink(in.c_str()));
    denied("socket", ::socket(AF_INET, SOCK_STREAM, 0));
    denied("kill", ::kill(::getppid(), 0));
    denied("fork", ::vfork());
    denied("pwrite", ::pwrite(fd, "y", 1, 0));
    denied("write", ::write(fd, "y", 1));
    denied("ftruncate", ::ftruncate(fd, 0));
    denied("map", ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0);
    denied("chmod", ::chmod(in.c_str(), 0));
    if (::pread(fd, &c, 1, 2) != 1 || c != 'c') results += "pread of its file; ";
    if (::pread(mine, &c, 1, 0) != -1 || errno != EBADF) results += "pread of another; ";
    for (int s : {0, 1, 2}) {
      if (s != fd && (::read(s, &c, 1) != -1 || errno != EBADF)) results += "a standard stream; ";
    }
    return results;
  };
  EXPECT_EQ(run(attempts, {}, fd), "");
  EXPECT_EQ(testing::read_file(dir / "inout"), "abcd");
  EXPECT_FALSE(std::filesystem::exists(out));
  ::close(mine);
}

TEST(Confined, TheChildSharesNoMemory) {
  auto* const page =
      static_cast<volatile int*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(page, MAP_FAILED);
  *page = 7;
  ConfinedChild child("x.h5", "a parser", -1, {}, [&] {
    *page = 42;
    return std::string();
  });
  EXPECT_ERROR(child.answer(), Errc::Corrupt, "SEGV");
  EXPECT_EQ(*page, 7);
  ::munmap(const_cast<int*>(page), 4096);
}

TEST(Confined, LimitsHoldInTheChildAlone) {
  rlimit before{}, after{};
  ::getrlimit(RLIMIT_AS, &before);
  const int open = open_descriptors();
  run([] { return std::string("x"); });
  try {
    run([]() -> std::string {
      ::raise(SIGKILL);
      return "";
    });
  } catch (const Error&) {
  }
  ::getrlimit(RLIMIT_AS, &after);
  EXPECT_EQ(before.rlim_cur, after.rlim_cur);
  EXPECT_EQ(open_descriptors(), open);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no child is left
}

volatile sig_atomic_t handled = 0;

TEST(Confined, HandlersOfTheProgramDoNotRunInTheChild) {
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) { handled = 1; };
  ::sigaction(SIGTERM, &action, &before);
  EXPECT_ERROR(run([]() -> std::string {
                 ::raise(SIGTERM);
                 return handled != 0 ? "the handler ran" : "";
               }),
               Errc::Corrupt, "SIGTERM");
  ::sigaction(SIGTERM, &before, nullptr);
}

TEST(Confined, AProgramThatIgnoresItsChildrenStillGetsAnswers) {
  const auto before = ::signal(SIGCHLD, SIG_IGN);
  EXPECT_EQ(run([] { return std::string("x"); }), "x");
  EXPECT_ERROR(run([]() -> std::string {
                 ::raise(SIGKILL);
                 return "";
               }),
               Errc::Corrupt, "gave no answer");
  ::signal(SIGCHLD, before);
}

// Threads that allocate all the time hold malloc's locks when the copy is made.
TEST(Confined, BesideBusyThreads) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "its allocator does not care for fork as glibc's does";
#endif
  std::atomic<bool> stop = false;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (size_t n = 1; !stop; n = n * 5 % 100003) std::string(n, 'x').shrink_to_fit();
    });
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(run([&] {
                std::string s;
                for (int k = 0; k < 1000; ++k) s += std::string(static_cast<size_t>(k), 'y');
                return s.substr(0, 3);
              }),
              "yyy");
  }
  stop = true;
}

}  // namespace confined_test
}  // namespace ds
