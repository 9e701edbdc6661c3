// SPDX-License-Identifier: Apache-2.0
// What stays behind when a launcher is killed, and who can tell.
#include "launch/process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "temp_directory.h"

namespace ds::launch {
namespace launch_process_test {

namespace fs = std::filesystem;

// Its last descriptor may be closed in any order: a socket that still takes connections says nothing.
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

}  // namespace launch_process_test
}  // namespace ds::launch
