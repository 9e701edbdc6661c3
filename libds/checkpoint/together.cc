// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/together.h"

#include <algorithm>
#include <cstring>

#include "base/as_error.h"
#include "base/check.h"

namespace ds {
namespace {

constexpr std::string_view kTag = "checkpoint";

// Travels as raw bytes; the text is cut at its end where it is longer.
struct Outcome {
  i32 failed = 0;
  Errc code = Errc::Internal;
  char message[1016] = {};
};

}  // namespace

std::optional<Error> attempt(const std::function<void()>& work) noexcept {
  try {
    work();
  } catch (const std::exception& e) {
    return as_error(e);
  }
  return std::nullopt;
}

std::optional<Error> agree_on_outcome(Communicator& comm, const std::optional<Error>& error) {
  std::vector<Outcome> all(static_cast<size_t>(comm.size()));
  Outcome& mine = all[comm.rank()];
  if (error) {
    mine.failed = 1;
    mine.code = error->code();
    std::strncpy(mine.message, error->what(), sizeof mine.message - 1);
  }
  const AllGatherSegment segment{all.data(), sizeof(Outcome)};
  comm.all_gather({&segment, 1}, kTag).wait();
  const auto first = std::find_if(all.begin(), all.end(), [](const Outcome& o) { return o.failed != 0; });
  if (first == all.end()) return std::nullopt;
  const int rank = static_cast<int>(first - all.begin());
  return Error(first->code, fmt::format("rank {}: {}", rank, first->message), rank);
}

void together(Communicator& comm, const std::function<void()>& work) {
  if (const std::optional<Error> failed = agree_on_outcome(comm, attempt(work))) throw Error(*failed);
}

std::vector<std::string> gather_text(Communicator& comm, const std::string& text) {
  const i64 bytes = narrow<i64>(text.size());
  i64 longest = bytes;
  comm.all_reduce(&longest, 1, DType::I64, ReduceOp::Max, kTag).wait();
  // Slices of one size: length, text, padding.
  const i64 slice = align_up(longest + static_cast<i64>(sizeof bytes), 64);
  std::vector<char> all(static_cast<size_t>(comm.size() * slice));
  char* mine = all.data() + comm.rank() * slice;
  std::memcpy(mine, &bytes, sizeof bytes);
  std::memcpy(mine + sizeof bytes, text.data(), text.size());
  const AllGatherSegment segment{all.data(), slice};
  comm.all_gather({&segment, 1}, kTag).wait();

  std::vector<std::string> texts;
  for (const char* p = all.data(); p != all.data() + all.size(); p += slice) {
    i64 n = 0;
    std::memcpy(&n, p, sizeof n);
    texts.emplace_back(p + sizeof n, static_cast<size_t>(n));
  }
  return texts;
}

}  // namespace ds
