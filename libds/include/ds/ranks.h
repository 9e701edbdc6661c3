// SPDX-License-Identifier: Apache-2.0
#pragma once
// The place of a process among the ranks of its job.

#include <string>

#include "ds/error.h"

namespace ds {

// As stated by the launcher.
struct RankInfo {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // among the ranks of this node
  int local_world_size = 1;  // ranks on this node
  std::string job = {};      // names the job's shared memory; empty: none
};

// Waits up to `seconds` until ds-launch reports that a rank of this node has failed; returns whether it did.
DS_API bool has_failed_within(const RankInfo& ranks, int rank, double seconds);

}  // namespace ds
