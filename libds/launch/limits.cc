// SPDX-License-Identifier: Apache-2.0
// The numbers are measured, of Open MPI 4.1.4 with the settings of launch/plan: the least with which ranks that do
// nothing start and end.

#include "launch/limits.h"

#include "base/limits.h"

namespace ds::launch {
namespace {

constexpr u64 kStack = 512 << 10;        // 208 KiB, with 128 KiB for arguments and environment
constexpr u64 kFileSize = 16 << 10;      // 12 KiB; ranks that call MPI need more (comm/mpi_communicator)
constexpr u64 kAddressSpace = 64 << 20;  // 54 MB, beside the stacks of its threads
constexpr u64 kFiles = 27, kFilesOfRank = 4;
constexpr int kThreads = 4, kTasksOfRank = 2;  // a rank has a shim
// With many ranks further threads start them.
constexpr int kManyRanks = 32, kFurtherThreads = 4;

}  // namespace

void check_limits(int ranks) {
  const std::string start = fmt::format("starting {} rank{}", ranks, ranks == 1 ? "" : "s");
  const u64 n = static_cast<u64>(ranks);
  require_limit(RLIMIT_NOFILE, kFiles + kFilesOfRank * n, start);
  require_limit(RLIMIT_STACK, kStack, start);
  require_limit(RLIMIT_AS, kAddressSpace + kThreads * thread_stack_bytes(), start);
  require_limit(RLIMIT_FSIZE, kFileSize, start);
  require_tasks(kThreads + (ranks < kManyRanks ? 0 : kFurtherThreads) + kTasksOfRank * ranks, start);
}

}  // namespace ds::launch
