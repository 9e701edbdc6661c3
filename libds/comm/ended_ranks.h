// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which ranks of a job on this node have ended, and how: /dev/shm/ds-job.JOB.ended, a byte for each. The launcher
// writes it, so that a rank that waits for another to come in shared memory learns that it never will, and one that has
// a mistake to tell whether rank 0 had one. (For those who wait, a rank that fails is no matter: the launcher ends the
// job.)

#include <optional>
#include <string>
#include <string_view>

#include "comm/shared_file.h"

namespace ds {

class EndedRanks {
 public:
  // job: as the ranks know it (DS_JOB). Nothing is made before a rank ends.
  EndedRanks(std::string_view job, int ranks);
  // Where there is no room for the file nobody is told, and who waits does so until its timeout.
  void add(int rank, bool well) noexcept;

 private:
  const std::string name_;
  const int ranks_;
  std::optional<SharedFile> file_;
};

// segment: the name of the job's segment, "ds-job.JOB".
bool rank_has_ended(const std::string& segment, int rank);  // well
bool rank_has_failed(const std::string& segment, int rank);

}  // namespace ds
