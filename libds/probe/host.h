// SPDX-License-Identifier: Apache-2.0
#pragma once
// Properties of this machine: cores, memory, rate of a matrix product.

#include <string>

#include "base/check.h"
#include "device/device.h"

namespace ds::probe {

// The CPU kernels of this run: those that DS_ISA names, or the best that the CPU supports. Throws Errc::Config for an
// unknown DS_ISA, Errc::Unavailable if the CPU does not support it.
const OpTable& cpu_backend();

// Cores this process may run on.
int num_cores();

// Number of threads for a rank among `local_world_size` on this node, at least 1: the first number in OMP_NUM_THREADS,
// which ds-launch sets, or else core_share(). Warns about an invalid value.
int rank_threads(int local_world_size);
// The cores of one rank: `allowed` divided by the ranks; or all of `allowed` if they are fewer than the node's `online`
// cores, since the rank has then been given cores of its own.
int core_share(int allowed, int online, int local_world_size) noexcept;

struct AvailableMemory {
  i64 bytes = 0;
  std::string limited_by;
};
// The tightest of three bounds: free memory of the node, cgroup limit minus usage, address space limit.
AvailableMemory available_memory();

// FLOP/s of an n^3 product in `work`, best of three, with n large enough to keep the device busy for a millisecond.
// Uses the memory of three n x n matrices during the call.
double matmul_rate(Device& device, DType work);
// The memory of matmul_rate() on a CPU, including the scratch of that many threads.
i64 matmul_rate_bytes(const OpTable& cpu, int threads, DType work) noexcept;

}  // namespace ds::probe
