// SPDX-License-Identifier: Apache-2.0
#include "comm/ended_ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include "ds/error.h"

namespace ds {

EndedRanks::EndedRanks(std::string_view job, int ranks)
    : name_(fmt::format("{}{}.ended", kJobPrefix, job)), ranks_(ranks) {}

void EndedRanks::add(int rank) noexcept try {
  if (!file_) {
    SharedFile file = SharedFile::create();
    if (ftruncate(file.descriptor(), ranks_) != 0 || !file.link(name_)) return;
    file_ = std::move(file);
  }
  const char ended = 1;
  [[maybe_unused]] const ssize_t written = pwrite(file_->descriptor(), &ended, 1, rank);
} catch (const std::exception&) {
}

bool rank_has_ended(const std::string& segment, int rank) {
  const std::optional<SharedFile> file = SharedFile::open(segment + ".ended", false);
  char ended = 0;
  return file && pread(file->descriptor(), &ended, 1, rank) == 1 && ended == 1;
}

}  // namespace ds
