// SPDX-License-Identifier: Apache-2.0
// Processes that outlive a killed launcher, and how they are detected.
#include "launch/process.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/process_stat.h"
#include "comm/shared_file.h"
#include "ds/signals.h"
#include "temp_directory.h"

namespace ds::launch {
namespace launch_process_test {

namespace fs = std::filesystem;

// A process may close its last descriptors in any order: a socket that still takes connections proves nothing.
TEST(Peer, AnEndingProcessIsKnownThoughItsSocketStillListens) {
  const ds::testing::TempDirectory folder;
  const std::string path = folder / "socket";
  const Fd listener = listen_at(path);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const Fd connection = connect_to(path);
    ::pause();
    ::_exit(0);
  }
  pollfd polled{listener.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&polled, 1, -1), 1);
  const Fd connection(::accept(listener.get(), nullptr, nullptr));
  ASSERT_TRUE(connection);
  const Peer peer(connection);
  EXPECT_FALSE(peer.is_ending());
  ::kill(pid, SIGKILL);
  char byte = 0;
  ASSERT_EQ(::read(connection.get(), &byte, 1), 0);
  EXPECT_TRUE(peer.is_ending());
  EXPECT_TRUE(connect_to(path));
  ASSERT_EQ(::waitpid(pid, nullptr, 0), pid);
  EXPECT_TRUE(peer.is_ending());
}

TEST(RemoveJobFiles, OthersThatStillUseTheFolderOrRemoveItToo) {
  const ds::testing::TempDirectory outer;
  const fs::path folder = outer / "job";
  fs::create_directories(folder);
  std::atomic<bool> last = false;
  std::jthread user([&] {  // as mpirun does until it ends
    for (int i = 0; !last; ++i) {
      std::error_code ignored;
      fs::create_directories(folder / std::to_string(i % 50), ignored);
      std::ofstream(folder / std::to_string(i % 50) / "file") << i;
    }
    fs::create_directories(folder / "last");
  });
  std::jthread end([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    last = true;
    user.join();
  });
  while (!fs::exists(folder / "9")) std::this_thread::yield();
  {
    std::jthread other([&] { remove_job_files(folder); });
    while (!last) remove_job_files(folder);
    end.join();
    remove_job_files(folder);
  }
  EXPECT_FALSE(fs::exists(folder));
}

char state_of(pid_t pid) { return process_stat(pid).state; }

void wait_until_stopped(pid_t pid) {
  while (state_of(pid) != 'T') std::this_thread::yield();
}

// A process that blocks `blocked`, stops until one of `waking` arrives, and returns 7.
pid_t start_stopping(const std::vector<int>& blocked, const std::vector<int>& waking) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : blocked) sigaddset(&set, signal);
    ::sigprocmask(SIG_BLOCK, &set, nullptr);
    stop_until_told(waking);
    ::_exit(::waitpid(-1, nullptr, WNOHANG) < 0 ? 7 : 1);  // without a child
  }
  wait_until_stopped(pid);
  return pid;
}

TEST(StopUntilTold, ContinuesWhenASignalThatEndsTheJobWaits) {
  const pid_t pid = start_stopping({SIGTERM, SIGUSR1}, {SIGTERM});
  ::kill(pid, SIGUSR1);  // is not one of them
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(state_of(pid), 'T');
  ::kill(pid, SIGTERM);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(exit_status(status), 7);
}

TEST(StopUntilTold, SomebodyElseContinuesIt) {
  const pid_t pid = start_stopping({SIGTERM}, {SIGTERM});
  ::kill(pid, SIGCONT);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(exit_status(status), 7);
}

TEST(SignalInbox, DropsWhatNobodyHasRead) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    {
      SignalInbox inbox({SIGTERM, SIGUSR1});
      ::raise(SIGUSR1);
      ::raise(SIGTERM);
      if (inbox.next().number != SIGUSR1) ::_exit(1);
    }
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(exit_status(status), 7);
}

TEST(RemoveSharedNames, RemovesThoseOfThisProcessAndNotOfItsParent) {
  const std::string name = fmt::format("{}names-{}", kJobPrefix, ::getpid());
  SharedFile file = SharedFile::create();
  ASSERT_TRUE(file.link(name));
  const pid_t child = ::fork();
  if (child == 0) {
    remove_shared_names();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(fs::exists(shared_path(name)));
  remove_shared_names();
  EXPECT_FALSE(fs::exists(shared_path(name)));
}

TEST(EndingSignals, AreThoseThatOthersSend) {
  const std::vector<int> signals = ending_signals();
  const auto has = [&](int signal) { return std::ranges::find(signals, signal) != signals.end(); };
  for (const int signal :
       {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU, SIGPWR, SIGRTMIN, SIGRTMAX})
    EXPECT_TRUE(has(signal)) << signal;
  for (const int signal : {SIGKILL, SIGSTOP, SIGTSTP, SIGCONT, SIGCHLD, SIGWINCH, SIGSEGV, SIGABRT, SIGPIPE, SIGXFSZ})
    EXPECT_FALSE(has(signal)) << signal;
}

}  // namespace launch_process_test
}  // namespace ds::launch
