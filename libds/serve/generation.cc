// SPDX-License-Identifier: Apache-2.0
#include "serve/generation.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "base/limits.h"
#include "ds/units.h"
#include "probe/host.h"

namespace ds::serve {
namespace {

namespace fs = std::filesystem;

std::string layout_text(const std::vector<RankLayout>& ranks) {
  offload::Packer out;
  out.put(std::ssize(ranks));
  for (const RankLayout& r : ranks) out.put(r.text());
  return out.text();
}

}  // namespace

std::string RankLayout::text() const {
  offload::Packer out;
  out.put(identity);
  std::vector<offload::ServedSet> bare = sets;
  for (offload::ServedSet& set : bare) set.window.clear(), set.gradients.clear();
  out.put(bare);
  return out.text();
}

RankLayout RankLayout::parse(std::string_view text) {
  offload::Unpacker in(text);
  RankLayout r;
  in.get(r.identity);
  in.get(r.sets);
  return r;
}

std::string current_generation(const std::string& directory) {
  const std::string path = directory + "/current";
  if (!fs::exists(path)) return "";
  std::string id = read_text_file(path, 64);
  DS_CHECK(id.size() == 16 && id.find_first_not_of("0123456789abcdef") == std::string::npos, Errc::Corrupt,
           "{}: names no generation", path);
  return id;
}

void Generation::number_chunks() {
  for (const RankLayout& r : ranks_) {
    std::vector<i64>& first = first_.emplace_back();
    for (const offload::ServedSet& set : r.sets) {
      first.push_back(std::ssize(chunk_bytes_));
      for (const i64 bytes : set.chunk_bytes)
        DS_CHECK(bytes >= 0 && bytes % PageBuffer::kPage == 0, Errc::Corrupt, "a chunk of {} bytes", bytes);
      chunk_bytes_.insert(chunk_bytes_.end(), set.chunk_bytes.begin(), set.chunk_bytes.end());
    }
  }
}

Generation::Generation(const std::string& directory, std::vector<RankLayout> ranks, bool two_versions, i64 taken,
                       const Options& options)
    : directory_(directory), id_(random_hex64()), options_(options), ranks_(std::move(ranks)) {
  number_chunks();
  const i64 chunks = std::ssize(chunk_bytes_);
  // In a file, all windows may be under way to slots of their own.
  const i64 beside = options.path.empty() ? 1 : options.windows + 1;
  const TableHeader fresh{
      .two_versions = two_versions ? 1u : 0u,
      .chunks = chunks,
      .slots = (two_versions ? 2 * chunks : chunks) + beside,
      .slot_bytes = chunk_bytes_.empty() ? 0 : *std::ranges::max_element(chunk_bytes_),
  };
  const i64 bytes = fresh.slots * fresh.slot_bytes;
  DS_CHECK(options.capacity == 0 || taken + bytes <= options.capacity, Errc::Unavailable,
           "the states of this run take {}{}, and its --capacity is {}{}", bytes_text(bytes),
           two_versions ? ", in two versions, for an optimizer of several passes" : "", bytes_text(options.capacity),
           taken == 0 ? "" : fmt::format(", of which {} are of the run's layout before", bytes_text(taken)));
  const std::string dir = fmt::format("{}/{}", directory_, id_);
  DS_CHECK(::mkdir(dir.c_str(), 0700) == 0, Errc::Io, "cannot make {}: {}", dir, system_reason(errno));
  try {
    replace_text_file(file("layout"), layout_text(ranks_));
    const std::string states =
        options.path.empty() ? file("slots") : fmt::format("{}/ds-offload.{}.{}", options.path, options.name, id_);
    std::error_code error;
    fs::create_symlink(states, file("states"), error);
    DS_CHECK(!error, Errc::Io, "cannot make {}: {}", file("states"), error.message());
    slots_ = std::make_unique<Slots>(offload::Segment::create(file("table"), Slots::table_bytes(chunks)), fresh);
    if (options.path.empty()) (void)offload::Segment::create(states, bytes);
    open_memory(states);
  } catch (...) {
    remove();
    throw;
  }
}

Generation::Generation(const std::string& directory, const std::string& id, const Options& options)
    : directory_(directory), id_(id), options_(options) {
  const std::string text = read_text_file(file("layout"), kMostText);
  offload::Unpacker in(text);
  const i64 ranks = in.get<i64>();
  DS_CHECK(ranks >= 0 && ranks <= std::ssize(text), Errc::Corrupt, "{}: {} ranks", file("layout"), ranks);
  for (i64 r = 0; r < ranks; ++r) ranks_.push_back(RankLayout::parse(in.get<std::string>()));
  number_chunks();
  slots_ = std::make_unique<Slots>(Slots::open(file("table")));
  DS_CHECK(header().chunks == std::ssize(chunk_bytes_) &&
               std::ranges::all_of(chunk_bytes_, [&](i64 bytes) { return bytes <= header().slot_bytes; }),
           Errc::Corrupt, "{} does not fit {}", file("table"), file("layout"));
  std::error_code error;
  const std::string states = fs::read_symlink(file("states"), error);
  DS_CHECK(!error, Errc::Corrupt, "{}: {}", file("states"), error.message());
  open_memory(states);
}

void Generation::open_memory(const std::string& states) {
  if (states == file("slots")) {
    segment_ = offload::Segment::open(states, bytes());
    memory_ = std::make_unique<SlotMemory>(*slots_, segment_, chunk_bytes_, options_.pool);
    return;
  }
  host_ = make_cpu_device(probe::cpu_backend(), 1);
  layout_ = std::make_unique<offload::ChunkLayout>(chunk_bytes_);
  auto chunks =
      std::make_unique<offload::FileChunks>(*layout_, *host_, ledger_,
                                            offload::FileChunks::Options{.dir = parent_directory(states),
                                                                         .io = options_.io,
                                                                         .windows = std::max<i64>(options_.windows, 1),
                                                                         .file = &states,
                                                                         .places = slots_.get(),
                                                                         .file_bytes = bytes()});
  file_ = chunks.get();
  memory_ = std::move(chunks);
}

Generation::~Generation() = default;

void Generation::flush() {
  if (file_ != nullptr && file_->file() != nullptr) file_->flush();
}

void Generation::remove() noexcept { remove(directory_, id_); }

void Generation::remove(const std::string& directory, const std::string& id) noexcept {
  const std::string dir = fmt::format("{}/{}", directory, id);
  std::error_code ignored;
  const fs::path states = fs::read_symlink(dir + "/states", ignored);
  // Only what a generation can have named.
  if (!ignored && states.filename().string().ends_with(id)) fs::remove(states, ignored);
  fs::remove_all(dir, ignored);
}

}  // namespace ds::serve
