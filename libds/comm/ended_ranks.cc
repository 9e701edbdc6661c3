// SPDX-License-Identifier: Apache-2.0
#include "comm/ended_ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "ds/error.h"
#include "ds/ranks.h"

namespace ds {

EndedRanks::EndedRanks(std::string_view job, int ranks)
    : name_(fmt::format("{}{}.ended", kJobPrefix, job)), ranks_(ranks) {}

namespace {

constexpr char kWell = 1, kFailed = 2;

char end_of(const std::string& segment, int rank) {
  const std::optional<SharedFile> file = SharedFile::open(segment + ".ended", false);
  char end = 0;
  return file && pread(file->descriptor(), &end, 1, rank) == 1 ? end : char{0};
}

}  // namespace

void EndedRanks::add(int rank, bool well) noexcept try {
  if (!file_) {
    SharedFile file = SharedFile::create();
    if (ftruncate(file.descriptor(), ranks_) != 0 || !file.link(name_)) return;
    file_ = std::move(file);
  }
  [[maybe_unused]] const ssize_t written = pwrite(file_->descriptor(), well ? &kWell : &kFailed, 1, rank);
} catch (const std::exception&) {
}

bool rank_has_ended(const std::string& segment, int rank) { return end_of(segment, rank) == kWell; }
bool rank_has_failed(const std::string& segment, int rank) { return end_of(segment, rank) == kFailed; }

bool has_failed_within(const RankInfo& ranks, int rank, double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < deadline) {
    if (!ranks.job.empty() && rank_has_failed(std::string(kJobPrefix) + ranks.job, rank)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace ds
