// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who a process is among the ranks of its job.

#include <string>

#include "ds/error.h"

namespace ds {

// This process among the ranks of the job, as the launcher says.
struct RankInfo {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // among the ranks of this node
  int local_world_size = 1;  // ranks on this node
  std::string job = {};      // names the job's shared memory; empty: there is none
};

// Whether a rank of this node ended with a failure, of which ds-launch told; waits for so long, or until it has.
DS_API bool has_failed_within(const RankInfo& ranks, int rank, double seconds);

}  // namespace ds
