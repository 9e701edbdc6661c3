// SPDX-License-Identifier: Apache-2.0
#include "serve/generation.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/limits.h"
#include "ds/log.h"
#include "ds/units.h"
#include "launch/process.h"
#include "probe/host.h"

namespace ds::serve {
namespace {

namespace fs = std::filesystem;

std::string layout_text(const std::vector<RankLayout>& ranks) {
  std::vector<std::string> texts;
  for (const RankLayout& r : ranks) texts.push_back(r.text());
  offload::Packer out;
  out.put(texts);
  return out.text();
}

}  // namespace

void write_sealed(const std::string& path, std::string text) {
  const u64 sum = XXH3_64bits(text.data(), text.size());
  text.append(reinterpret_cast<const char*>(&sum), sizeof sum);
  replace_text_file(path, text);
}

std::string read_sealed(const std::string& path) {
  DS_CHECK(fs::exists(path), Errc::Corrupt, "{} is missing", path);
  std::string text = read_text_file(path, kMostText);
  u64 sum = 0;
  DS_CHECK(text.size() >= sizeof sum, Errc::Corrupt, "{}: truncated", path);
  std::memcpy(&sum, text.data() + text.size() - sizeof sum, sizeof sum);
  text.resize(text.size() - sizeof sum);
  DS_CHECK(sum == XXH3_64bits(text.data(), text.size()), Errc::Corrupt, "{}: checksum mismatch: damaged", path);
  return text;
}

// After waiting for a lock, the file may have been removed and its name given to another one.
std::optional<DirectoryLock> DirectoryLock::take(const std::string& directory) {
  const std::string path = directory + "/lock";
  for (;;) {
    DirectoryLock lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (lock.fd_ < 0 && errno == ENOENT) return std::nullopt;
    const bool cannot_be_one = lock.fd_ < 0 && (errno == ELOOP || errno == EISDIR || errno == ENXIO);
    DS_CHECK(lock.fd_ >= 0 || cannot_be_one, Errc::Io, "cannot open {}: {}", path, system_reason(errno));
    struct stat mine {
    }, named{};
    DS_CHECK(!cannot_be_one && ::fstat(lock.fd_, &mine) == 0 && S_ISREG(mine.st_mode), Errc::Io,
             "{} is not a regular file, so a server cannot lock it: remove it with ds-offload rm {}", path,
             fs::path(directory).filename().string());
    if (::flock(lock.fd_, LOCK_EX | LOCK_NB) != 0) return std::nullopt;
    if (::fstat(lock.fd_, &mine) == 0 && ::stat(path.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
        mine.st_dev == named.st_dev)
      return lock;
  }
}

DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) ::close(fd_);
}

void RankLayout::check() const {
  const auto inside = [](i64 at, i64 bytes, i64 all) { return at >= 0 && bytes >= 0 && at <= all - bytes; };
  constexpr i64 kMost = i64{1} << 40;
  for (const offload::ServedSet& set : sets) {
    const bool shares = set.gradient_bytes > 0;
    bool good = set.elems >= 0 && set.elems <= kMost && set.window_bytes >= 0 && set.gradient_bytes >= 0 &&
                (set.work == DType::F32 || set.work == DType::BF16 || set.work == DType::F16);
    for (const State s : kStates) {
      const i64 bytes = set.places[s] < 0 ? 0 : set.elems * 4 + state_blocks(set.elems) * 4;
      good = good && inside(std::max<i64>(set.places[s], 0), bytes, set.window_bytes);
    }
    for (const i64 bytes : set.chunk_bytes)
      good = good && bytes >= 0 && bytes <= kMost && bytes % PageBuffer::kPage == 0;
    DS_CHECK(good, Errc::Corrupt, "impossible sizes of a rank's memory");
    for (const offload::ServedPart& p : set.parts) {
      good = p.param >= 0 && p.begin >= 0 && p.begin <= kMost && p.count >= 0 && p.count <= kMost && p.chunk >= 0 &&
             p.chunk < std::ssize(set.chunk_bytes) &&
             (!p.is_trained() || (inside(p.work, p.count * dtype_bytes(set.work), set.window_bytes) &&
                                  inside(p.gradient, p.count * 4, shares ? set.gradient_bytes : set.window_bytes))) &&
             p.dtypes[State::Master] == static_cast<i64>(DType::F32);
      for (const State s : kStates) {
        if (!good || p.dtypes[s] < 0) continue;
        const auto dtype = static_cast<DType>(p.dtypes[s]);
        const bool known = dtype == DType::F32 || dtype == DType::BF16 || is_coded(dtype);
        const i64 of = set.chunk_bytes[static_cast<size_t>(p.chunk)];
        good = known && set.places[s] >= 0 && inside(p.offsets[s], p.count * dtype_bytes(dtype), of) &&
               inside(p.scales[s], is_coded(dtype) ? state_blocks(p.count) * 4 : 0, of);
      }
      DS_CHECK(good, Errc::Corrupt, "a part of parameter {} lies outside of its memory", p.param);
    }
  }
}

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
  std::string id = read_sealed(path);
  DS_CHECK(is_generation_id(id), Errc::Corrupt, "{}: does not name a generation", path);
  DS_CHECK(fs::is_directory(fmt::format("{}/{}", directory, id)), Errc::Corrupt, "{} names {}, which does not exist",
           path, id);
  return id;
}

void Generation::number_chunks() {
  for (const RankLayout& r : ranks_) r.check();
  for (const RankLayout& r : ranks_) {
    std::vector<i64>& first = first_.emplace_back();
    for (const offload::ServedSet& set : r.sets) {
      first.push_back(std::ssize(chunk_bytes_));
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
      .checksums = options.checksums ? 1 : 0,
  };
  const i64 bytes = checked_mul({fresh.slots, fresh.slot_bytes}).value_or(std::numeric_limits<i64>::max() / 2);
  DS_CHECK(options.capacity == 0 || taken + bytes <= options.capacity, Errc::Unavailable,
           "the states of this run take {}{}, and its --capacity is {}{}", bytes_text(bytes),
           two_versions ? ", in two versions, for an optimizer of several passes" : "", bytes_text(options.capacity),
           taken == 0
               ? ""
               : fmt::format(", of which {} are taken by what it has until the run's is whole", bytes_text(taken)));
  const std::string dir = fmt::format("{}/{}", directory_, id_);
  DS_CHECK(::mkdir(dir.c_str(), 0700) == 0, Errc::Io, "cannot make {}: {}", dir, system_reason(errno));
  try {
    write_sealed(file("layout"), layout_text(ranks_));
    states_ = options.path.empty() ? file("slots") : fmt::format("{}/{}", options.path, disk_name(options.name, id_));
    std::error_code error;
    fs::create_symlink(states_, file("states"), error);
    DS_CHECK(!error, Errc::Io, "cannot make {}: {}", file("states"), error.message());
    slots_ = std::make_unique<Slots>(offload::Segment::create(file("table"), Slots::table_bytes(fresh)), fresh);
    if (options.path.empty()) (void)offload::Segment::create(states_, bytes);
    open_memory(true);
  } catch (...) {
    remove();
    throw;
  }
}

Generation::Generation(const std::string& directory, const std::string& id, const Options& options)
    : directory_(directory), id_(id), options_(options) {
  parse_file(file("layout"), [&](offload::Unpacker& in) {
    std::vector<std::string> ranks;
    in.get(ranks);
    for (const std::string& text : ranks) ranks_.push_back(RankLayout::parse(text));
    number_chunks();
  });
  slots_ = std::make_unique<Slots>(Slots::open(file("table")));
  DS_CHECK(header().chunks == std::ssize(chunk_bytes_) &&
               std::ranges::all_of(chunk_bytes_, [&](i64 bytes) { return bytes <= header().slot_bytes; }),
           Errc::Corrupt, "{} does not fit {}", file("table"), file("layout"));
  for (i64 c = 0; c < header().chunks && header().published != 0; ++c)
    DS_CHECK(slots_->is_there(c), Errc::Corrupt, "{}: chunk {} is missing", file("table"), c);
  std::error_code error;
  states_ = fs::read_symlink(file("states"), error);
  DS_CHECK(!error, Errc::Corrupt, "{}: {}", file("states"), error.message());
  open_memory(false);
}

void Generation::open_memory(bool is_new) {
  if (states_ == file("slots")) {
    segment_ = offload::Segment::open(states_, bytes());
    memory_ = std::make_unique<SlotMemory>(*slots_, segment_, chunk_bytes_, options_.pool);
    return;
  }
  host_ = make_cpu_device(probe::cpu_backend(), 1);
  layout_ = std::make_unique<offload::ChunkLayout>(chunk_bytes_);
  auto chunks =
      std::make_unique<offload::FileChunks>(*layout_, *host_, ledger_,
                                            offload::FileChunks::Options{.dir = parent_directory(states_),
                                                                         .io = options_.io,
                                                                         .windows = std::max<i64>(options_.windows, 1),
                                                                         .file = &states_,
                                                                         .file_is_new = is_new,
                                                                         .places = slots_.get(),
                                                                         .file_bytes = bytes()});
  file_ = chunks.get();
  memory_ = std::move(chunks);
  if (!options_.serves || bytes() == 0) return;
  locked_ = File::open_write(states_);
  DS_CHECK(::flock(locked_->descriptor(), LOCK_EX | LOCK_NB) == 0, Errc::Unavailable, "another server uses {}",
           states_);
}

Generation::~Generation() = default;

std::string Generation::where() const {
  const offload::BlockFile* const file = file_ == nullptr ? nullptr : file_->file();
  if (file == nullptr) return "in memory";
  return fmt::format("in a file ({}{}{})", file->method(),
                     file->refused_ring().empty() ? "" : "; io_uring: ", file->refused_ring());
}

void Generation::flush() {
  if (file_ != nullptr && file_->file() != nullptr) file_->flush();
}

void Generation::remove() noexcept try {
  locked_.reset();
  remove(directory_, id_);
} catch (const std::exception& e) {
  log_message(LogLevel::Warning, e.what());
}

void Generation::remove(const std::string& directory, const std::string& id) {
  const std::string dir = fmt::format("{}/{}", directory, id);
  remove_from_disk(dir + "/states", id);
  std::error_code error;
  fs::remove_all(dir, error);
  DS_CHECK(!error, Errc::Io, "cannot remove {}: {}", dir, error.message());
}

bool is_generation_id(std::string_view name) {
  return name.size() == 16 && name.find_first_not_of("0123456789abcdef") == name.npos;
}

std::string disk_name(const std::string& server, const std::string& id) {
  std::string host = launch::host_name();
  std::ranges::replace(host, '/', '_');
  return fmt::format("ds-offload.{}.{}.{}", server, id, host);
}

std::optional<DiskName> parse_disk_name(std::string_view file, const std::string& server) {
  const std::string prefix = fmt::format("ds-offload.{}.", server);
  if (!file.starts_with(prefix)) return std::nullopt;
  file.remove_prefix(prefix.size());
  if (constexpr std::string_view kStep = "step-"; file.starts_with(kStep)) file.remove_prefix(kStep.size());
  const std::string_view id = file.substr(0, file.find('.'));
  if (!is_generation_id(id)) return std::nullopt;
  return DiskName{std::string(id), std::string(file.substr(std::min(id.size() + 1, file.size())))};
}

void remove_from_disk(const std::string& link, const std::string& id) {
  std::error_code error;
  const fs::path path = fs::read_symlink(link, error);
  if (error || path.filename().string().find(id) == std::string::npos) return;  // slots in memory; none made yet
  struct stat st {};
  if (::lstat(path.c_str(), &st) != 0) {
    DS_CHECK(errno == ENOENT || errno == ENOTDIR, Errc::Io, "cannot remove {}: {}", path.string(),
             system_reason(errno));
    return;
  }
  DS_CHECK(st.st_uid == ::geteuid() && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)), Errc::Io,
           "{} is not removed: it belongs to another user, or the server did not make it", path.string());
  if (S_ISREG(st.st_mode)) {
    const File file = File::open_write(path);
    DS_CHECK(::flock(file.descriptor(), LOCK_EX | LOCK_NB) == 0, Errc::Unavailable,
             "{} is not removed: another server uses it", path.string());
    fs::remove(path, error);
  } else {
    fs::remove_all(path, error);
  }
  DS_CHECK(!error, Errc::Io, "cannot remove {}: {}", path.string(), error.message());
}

}  // namespace ds::serve
