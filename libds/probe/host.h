// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this machine has: cores, memory, the rate of a matrix product.

#include <string>

#include "base/check.h"
#include "device/device.h"

namespace ds::probe {

// The CPU kernels of this run: DS_ISA or the best that the CPU has. Throws Errc::Config for a DS_ISA that is no name,
// Errc::Unavailable where the CPU lacks it.
const OpTable& cpu_backend();

// Cores this process may run on.
int num_cores();

// Threads for a rank among `local_world_size` on this node, at least 1: the first number of OMP_NUM_THREADS, which
// ds-launch sets, or else this rank's share of the cores. A value that is no number is a warning.
int rank_threads(int local_world_size);
// That share: `allowed` cores divided by the ranks, or all of them where they are fewer than the node has `online`, for
// then somebody has given this rank cores of its own.
int core_share(int allowed, int online, int local_world_size) noexcept;

struct AvailableMemory {
  i64 bytes = 0;
  std::string limited_by;
};
// The tightest of: free memory of the node, the cgroup's limit less its use, the address space limit.
AvailableMemory available_memory();

// FLOP/s of an n^3 product in `work`, best of three, with an n that keeps the device busy for a millisecond; takes
// the memory of three n x n matrices for the time of the call.
double matmul_rate(Device& device, DType work);
// That memory on a CPU, with the scratch of so many threads.
i64 matmul_rate_bytes(const OpTable& cpu, int threads, DType work) noexcept;

}  // namespace ds::probe
