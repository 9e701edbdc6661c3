// SPDX-License-Identifier: Apache-2.0
#pragma once
// Records which ranks of a job on this node have ended, and how: /dev/shm/ds-job.JOB.ended, one byte for each. The
// launcher writes it. A rank that waits for another in shared memory so learns that the other will never arrive, and a
// rank with an error to report learns whether rank 0 had one. (A failed rank does not matter to ranks that wait, since
// the launcher ends the job.)

#include <optional>
#include <string>
#include <string_view>

#include "comm/shared_file.h"

namespace ds {

class EndedRanks {
 public:
  // job: the value of DS_JOB. Creates nothing before a rank ends.
  EndedRanks(std::string_view job, int ranks);
  // If there is no room for the file nothing is recorded, and ranks wait until their timeout.
  void add(int rank, bool well) noexcept;

 private:
  const std::string name_;
  const int ranks_;
  std::optional<SharedFile> file_;
};

// segment: the name of the job's segment, "ds-job.JOB".
bool rank_has_ended(const std::string& segment, int rank);  // with success
bool rank_has_failed(const std::string& segment, int rank);

}  // namespace ds
