// SPDX-License-Identifier: Apache-2.0
// The arena of processes: files in /dev/shm (shared_file.h), mapped by Boost.Interprocess. Boost's managed segments are
// not used: a process that opens one which its creator left unfinished waits forever. A segment here gets its name when
// it is finished, is reserved before it is touched (a full /dev/shm would be a SIGBUS), and loses its name as soon as
// all have opened it.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <boost/interprocess/file_mapping.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <cctype>
#include <cerrno>
#include <set>
#include <thread>

#include "base/limits.h"
#include "base/process_stat.h"
#include "comm/arena.h"
#include "comm/ended_ranks.h"
#include "comm/make_communicator.h"
#include "comm/shared_file.h"

namespace ds {
namespace {

namespace bip = boost::interprocess;
using Clock = std::chrono::steady_clock;

constexpr u64 kMagic = 0x314d48532d736464u;  // "dds-SHM1"
constexpr u32 kVersion = 5;
constexpr i64 kPage = 4096;
constexpr i64 kHugePage = i64{2} << 20;
constexpr int kCollapse = 25;       // MADV_COLLAPSE of Linux 6.1, missing in older headers
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14

i64 free_bytes_now() {
  struct statvfs fs {};
  if (statvfs("/dev/shm", &fs) != 0) return 0;
  // A tmpfs mounted without a limit reports no blocks: memory is the limit.
  return fs.f_blocks == 0 ? i64{sysconf(_SC_PHYS_PAGES)} * kPage : static_cast<i64>(fs.f_bavail * fs.f_frsize);
}

std::string segment_name(std::string_view job) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '-'; };
  DS_CHECK(!job.empty() && job.size() <= 128 && std::all_of(job.begin(), job.end(), allowed), Errc::Config,
           "job name \"{}\" must be 1 to 128 letters, digits and hyphens", job);
  return fmt::format("{}{}", kJobPrefix, job);
}

// Contains all members, since groups with the same first but other members may be created at the same time.
std::string group_segment_name(const std::string& world, std::string_view name, std::span<const int> members) {
  u64 hash = 14695981039346656037u;
  for (const int member : members) hash = (hash ^ static_cast<u64>(member)) * 1099511628211u;
  return fmt::format("{}.{}.{}-{:016x}", world, name, members.front(), hash);
}

// For a rank that is waited for and has created nothing yet.
void throw_if_ended(const std::string& segment, int rank) {
  if (rank_has_ended(segment, rank))
    throw Error(Errc::Comm, fmt::format("rank {} ended before it attached", rank), rank);
}

// Alignment of the parts of a region.
i64 region_alignment(i64 bytes) { return bytes >= kHugePage ? kHugePage : kPage; }

class SharedSegment {
 public:
  SharedSegment() = default;
  static SharedSegment create(const std::string& name, i64 bytes, i64 reserved_bytes, int size) {
    SharedSegment s(SharedFile::create(), name);
    DS_CHECK(ftruncate(s.fd(), bytes) == 0, Errc::OutOfMemory, "/dev/shm/{} cannot grow to {} bytes: {}", name, bytes,
             system_reason(errno));
    s.reserve(0, reserved_bytes, "a job's control segment");
    s.map(bytes);
    *s.header() = {.magic = kMagic, .version = kVersion, .size = size};
    DS_CHECK(s.file_.link(name), Errc::Comm, "/dev/shm/{} exists already: another job runs under this name", name);
    return s;
  }

  // Waits until rank `creator` has created it.
  static SharedSegment open(const std::string& name, i64 bytes, int size, int creator, double timeout_s,
                            FunctionRef<void()> look) {
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
      look();
      throw_if_ended(name, creator);
      if (Clock::now() > deadline)
        throw Error(Errc::Timeout,
                    fmt::format("rank {} did not arrive within {} s: it made no /dev/shm/{}", creator, timeout_s, name),
                    creator);
      std::optional<SharedFile> file = SharedFile::open(name, true);
      if (!file) continue;
      DS_CHECK(file->size() >= bytes, Errc::Comm, "/dev/shm/{} has {} bytes where rank {} of {} ranks makes {}", name,
               file->size(), creator, size, bytes);
      SharedSegment s(std::move(*file), name);
      s.map(bytes);
      DS_CHECK(s.header()->magic == kMagic && s.header()->version == kVersion && s.header()->size == size, Errc::Comm,
               "/dev/shm/{} is not a segment of this version for {} ranks", name, size);
      return s;
    }
  }

  // After this, touching [offset, offset + bytes) cannot fail.
  void reserve(i64 offset, i64 bytes, std::string_view what) {
    int error = 0;
    do error = posix_fallocate(fd(), offset, bytes);
    while (error == EINTR);
    DS_CHECK(
        error == 0, Errc::OutOfMemory,
        "no {} bytes of shared memory for {}: {} ({} bytes of /dev/shm are free; enlarge it, or use another backend)",
        bytes, what, system_reason(error), free_bytes_now());
  }

  // Maps the pages now, so that they count as resident from here on; a kernel before 5.14 maps them when they are
  // touched.
  void populate(i64 offset, i64 bytes) noexcept {
    madvise(data() + offset, static_cast<size_t>(bytes), kPopulateWrite);
  }

  // Merges the pages into huge ones, if the kernel can: large folds and copies run 1.3 to 1.6 times as fast.
  void collapse(i64 offset, i64 bytes) noexcept {
    if (bytes >= kHugePage) madvise(data() + offset, static_cast<size_t>(bytes), kCollapse);
  }

  std::byte* data() const noexcept { return static_cast<std::byte*>(region_.get_address()); }

  void unlink() noexcept { file_.unlink(); }

 private:
  SharedSegment(SharedFile file, std::string name) : file_(std::move(file)), name_(std::move(name)) {}
  int fd() const noexcept { return file_.descriptor(); }
  SegmentHeader* header() const noexcept { return reinterpret_cast<SegmentHeader*>(data()); }
  // Maps at an address on a huge page boundary, so that whole huge pages can be mapped.
  void map(i64 size) try {
    const auto bytes = static_cast<size_t>(size), slack = static_cast<size_t>(kHugePage);
    void* reserved = mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    DS_CHECK(reserved != MAP_FAILED, Errc::OutOfMemory, "no {} bytes of address space for shared memory: {}", bytes,
             system_reason(errno));
    auto* const start = static_cast<std::byte*>(reserved);
    std::byte* const base = start + (slack - reinterpret_cast<size_t>(start) % slack) % slack;
    std::byte* const end = base + align_up(size, kPage);
    region_ = bip::mapped_region(bip::file_mapping(file_.opened_as().c_str(), bip::read_write), bip::read_write, 0,
                                 bytes, base, MAP_FIXED);  // replaces that part of the reservation
    if (base > start) munmap(start, static_cast<size_t>(base - start));
    munmap(end, static_cast<size_t>(start + bytes + slack - end));
  } catch (const bip::interprocess_exception& e) {
    throw Error(Errc::OutOfMemory, fmt::format("/dev/shm/{} cannot be mapped: {}", name_, e.what()));
  }

  SharedFile file_;
  std::string name_;  // for messages
  bip::mapped_region region_;
};

class ShmArena final : public Arena {
 public:
  // creator: the world rank of this arena's rank 0.
  ShmArena(std::string name, int rank, int size, int creator, double timeout_s, FunctionRef<void()> look)
      : Arena(rank, size), name_(std::move(name)), creator_(creator), timeout_s_(timeout_s) {
    if (rank == 0) {
      segment_ = SharedSegment::create(name_, total_bytes(size), staging_offset(size), size);
    } else {
      segment_ = SharedSegment::open(name_, total_bytes(size), size, creator, timeout_s, look);
    }
    base_ = segment_.data();
    RankSlot& own = slot(rank);
    i32 nobody = 0;
    DS_CHECK(own.pid.compare_exchange_strong(nobody, -1), Errc::Comm, "two processes of job {} are rank {}",
             name_.substr(kJobPrefix.size()), rank);
    own.process_start = process_stat(getpid()).start;
    own.pid_namespace = pid_namespace();
    own.pid.store(getpid(), std::memory_order_release);
  }

  // Need in /dev/shm without channels. Only one page of a region's header is ever touched.
  static i64 needed_bytes(int size, std::span<const i64> allocations) {
    i64 bytes = channels_offset(size);
    for (const i64 b : allocations) bytes += b == 0 ? 0 : kPage + size * align_up(b, kPage);
    return bytes;
  }

  std::unique_ptr<Arena> group(int rank, std::span<const int> members, int creator, std::string_view name,
                               double timeout_s, FunctionRef<void()> look) override {
    return std::make_unique<ShmArena>(group_segment_name(name_, name, members), rank, static_cast<int>(members.size()),
                                      creator, timeout_s, look);
  }

  void reserve_staging() override {
    const i64 offset = staging(rank(), 0) - segment_.data();
    segment_.reserve(offset, 2 * kStagingHalf, "the staging of a rank");
    segment_.populate(offset, 2 * kStagingHalf);
  }
  void attached() override { segment_.unlink(); }

  std::optional<Address> locate(const std::byte* p, i64 bytes) const override {
    for (size_t i = 0; i < regions_.size(); ++i) {
      const Region& r = *regions_[i];
      const std::byte* own = r.part(rank());
      if (p >= own && p + bytes <= own + r.stride) return Address{.region = static_cast<i64>(i), .offset = p - own};
    }
    return std::nullopt;
  }

  const std::byte* resolve(int rank, Address a) const override { return regions_[a.region]->part(rank) + a.offset; }

  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes, FunctionRef<void()> meet) override {
    if (bytes == 0) return {};
    auto region = std::make_shared<Region>();
    region->alignment = region_alignment(bytes);
    region->stride = align_up(bytes, region->alignment);
    const std::string name = fmt::format("{}.{}", name_, regions_.size());
    const i64 total = region->alignment + size() * region->stride;
    if (rank() == 0) region->segment = SharedSegment::create(name, total, kPage, size());
    meet();
    const auto made = [] {};
    if (rank() != 0) region->segment = SharedSegment::open(name, total, size(), creator_, timeout_s_, made);
    // Huge pages only as far as they are full: memory that nobody requested is not taken.
    region->segment.reserve(region->offset(rank()), align_up(bytes, kPage), tag_name(tag));
    region->segment.collapse(region->offset(rank()), bytes / kHugePage * kHugePage);
    meet();
    region->segment.unlink();
    std::byte* own = region->part(rank());
    regions_.push_back(region);
    // Peers may still read the rest of the region, so only our pages are freed; the mapping is freed with the
    // communicator.
    return Buffer(ledger, tag, own, bytes,
                  [region, own] { madvise(own, static_cast<size_t>(region->stride), MADV_REMOVE); });
  }

  bool is_dead(int rank) const override {
    const RankSlot& s = slot(rank);
    const i32 pid = s.pid.load(std::memory_order_acquire);
    if (pid <= 0) return rank_has_ended(name_, rank);
    return s.pid_namespace == slot(this->rank()).pid_namespace && has_ended(process_stat(pid), s.process_start);
  }

  Health health(int rank) const override {
    const RankSlot& s = slot(rank);
    const i32 pid = s.pid.load(std::memory_order_acquire);
    if (pid <= 0 && rank_has_ended(name_, rank)) return {.dead = true, .words = "it ended before it attached"};
    if (pid <= 0) return {.dead = false, .words = "it has not attached"};
    if (s.pid_namespace != slot(this->rank()).pid_namespace) return {};
    const ProcessStat now = process_stat(pid);
    if (has_ended(now, s.process_start)) return {.dead = true, .words = fmt::format("its process {} has ended", pid)};
    if (now.state == 'T' || now.state == 't')
      return {.dead = false, .words = fmt::format("its process {} is stopped", pid)};
    return {.dead = false, .words = fmt::format("its process {} is alive", pid)};
  }

 private:
  // A header and one part per rank.
  struct Region {
    i64 offset(int rank) const noexcept { return alignment + rank * stride; }
    std::byte* part(int rank) const noexcept { return segment.data() + offset(rank); }
    SharedSegment segment;
    i64 alignment = kPage;
    i64 stride = 0;
  };

  void reserve_channel(i64 offset) override {
    const std::lock_guard lock(mutex_);
    if (!reserved_channels_.insert(offset).second) return;
    segment_.reserve(offset, sizeof(Channel), "a point-to-point channel");
    segment_.populate(offset, sizeof(Channel));
  }

  const std::string name_;
  const int creator_;
  const double timeout_s_;
  SharedSegment segment_;
  std::vector<std::shared_ptr<const Region>> regions_;
  std::mutex mutex_;
  std::set<i64> reserved_channels_;
};

}  // namespace

i64 shm_channel_bytes() noexcept { return static_cast<i64>(sizeof(Channel)); }
i64 shm_needed_bytes(int size, std::span<const i64> allocations) { return ShmArena::needed_bytes(size, allocations); }

// The number of pages is passed as the size of a file, which takes none.
i64 shm_free_bytes(std::string_view job, int rank, int size, double timeout_s, SharedFile& told) {
  const std::string name = segment_name(job) + ".free";
  if (access("/dev/shm", W_OK | X_OK) != 0) return 0;
  if (rank == 0) {
    remove_abandoned();
    const i64 pages = free_bytes_now() / kPage;
    if (size == 1) return pages * kPage;
    told = SharedFile::create();
    DS_CHECK(ftruncate(told.descriptor(), pages) == 0, Errc::Io, "/dev/shm/{} cannot be written: {}", name,
             system_reason(errno));
    DS_CHECK(told.link(name), Errc::Comm, "/dev/shm/{} exists already: another job runs under this name", name);
    return pages * kPage;
  }
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
    if (const std::optional<SharedFile> file = SharedFile::open(name, false)) return file->size() * kPage;
    throw_if_ended(segment_name(job), 0);
    if (Clock::now() > deadline)
      throw Error(Errc::Timeout,
                  fmt::format("rank 0 did not arrive within {} s: it made no /dev/shm/{}", timeout_s, name), 0);
  }
}

i64 shm_free_bytes_here() { return access("/dev/shm", W_OK | X_OK) == 0 ? free_bytes_now() : 0; }

std::unique_ptr<Arena> make_shm_arena(std::string_view job, int rank, int size, int creator, double timeout_s,
                                      FunctionRef<void()> look) {
  const std::string name = segment_name(job);
  if (rank == 0) remove_abandoned();
  return std::make_unique<ShmArena>(name, rank, size, creator, timeout_s, look);
}

}  // namespace ds
