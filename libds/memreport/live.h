// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranks that train on this machine now, by what they show of themselves (run/live_counters.h).

#include <string>
#include <vector>

#include "ds/train.h"
#include "mesh/mesh.h"

namespace ds::memreport {

struct LiveRank {
  i64 pid = 0;
  std::string job;  // of ds-launch; empty: a rank alone
  int rank = 0, world_size = 1;
  MeshShape mesh;
  MeshCoord coord;
  std::string directory;  // of the run; empty: it keeps nothing
  std::string device;
  i64 step = 0, total_steps = 0;                            // taken, of
  double loss = 0, step_ms = 0, tokens_per_s = 0, mfu = 0;  // of the last step, as in metrics.jsonl
  i64 comm_bytes = 0;                                       // sent by this rank in it
  i64 resident_bytes = 0, base_bytes = 0;  // probe/resident.h: lately; before the engine took its memory
  double age_s = 0;                        // since the last step ended, or training began
  std::vector<TagMemory> memory;           // tags with anything to say
};

// The rank with this pid. Throws Errc::Config if no such process of this machine trains, Errc::Io if it is another
// user's, Errc::Mismatch if it is of another version, Errc::Timeout if it was stopped while it wrote.
LiveRank read_live(i64 pid);

// All of this user's, job by job, ranks in their order; ranks of other machines have counters there. Those that cannot
// be read are left out. Removes what killed processes left.
std::vector<LiveRank> find_live();

}  // namespace ds::memreport
