// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this machine has: cores, memory, the rate of a matrix product.

#include <string>

#include "base/check.h"
#include "ds/kernels/ops.h"

namespace ds::probe {

// The CPU kernels of this run: DS_ISA or the best that the CPU has. Throws Errc::Config for a DS_ISA that is no name,
// Errc::Unavailable where the CPU lacks it.
const OpTable& cpu_backend();

// Cores this process may run on.
int num_cores();

struct AvailableMemory {
  i64 bytes = 0;
  std::string limited_by;
};
// The tightest of: free memory of the node, the cgroup's limit less its use, the address space limit.
AvailableMemory available_memory();

// FLOP/s of an n^3 product in `work`, best of three; takes the memory of three n x n matrices for the time of the call.
double matmul_rate(const OpTable& ops, Stream& stream, DType work, i64 n);

}  // namespace ds::probe
