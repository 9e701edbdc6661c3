// SPDX-License-Identifier: Apache-2.0
// The numbers are measured, of Open MPI 4.1.4 with the settings of launch/launch_plan: the least with which ranks that
// do nothing start and end.

#include "launch/limits.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/limits.h"

namespace ds::launch {
namespace {

constexpr u64 kStack = 512 << 10;        // 208 KiB, with 128 KiB for arguments and environment
constexpr u64 kFileSize = 16 << 10;      // 12 KiB; ranks that call MPI need more (comm/mpi_communicator)
constexpr u64 kAddressSpace = 64 << 20;  // 54 MB, beside the stacks of its threads
constexpr u64 kFiles = 27, kFilesOfRank = 4;
constexpr int kThreads = 4, kTasksOfRank = 2;  // a rank has a shim
constexpr int kThreadsWithStacks = 2;          // of mpirun at a time
// With many ranks further threads start them.
constexpr int kManyRanks = 32, kFurtherThreads = 4;

// Files that were left open for us, beside the standard ones: mpirun and its children get them too.
u64 inherited_files() {
  u64 n = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    const int flags = ::fcntl(fd, F_GETFD);
    n += fd > STDERR_FILENO && flags >= 0 && (flags & FD_CLOEXEC) == 0;
  }
  return n;
}

}  // namespace

void check_limits(int ranks) {
  const std::string start = fmt::format("starting {} rank{}", ranks, ranks == 1 ? "" : "s");
  const u64 n = static_cast<u64>(ranks);
  require_limit(RLIMIT_NOFILE, kFiles + inherited_files() + kFilesOfRank * n, start);
  require_limit(RLIMIT_STACK, kStack, start);
  require_limit(RLIMIT_AS, kAddressSpace + kThreads * thread_stack_bytes(), start);
  require_limit(RLIMIT_FSIZE, kFileSize, start);
  require_stacks(kThreadsWithStacks, start);
  require_tasks(kThreads + (ranks < kManyRanks ? 0 : kFurtherThreads) + kTasksOfRank * ranks, start);
}

}  // namespace ds::launch
