// SPDX-License-Identifier: Apache-2.0
#include "offload/block_file.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <limits>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "base/limits.h"
#include "base/thread.h"
#include "ds/units.h"

namespace ds::offload {
namespace {

[[noreturn]] void refuse(const std::string& dir, const std::string& why) {
  throw Error(Errc::Unavailable, fmt::format("{}: cannot offload to this directory: {}", dir, why));
}

void check_directory(const std::string& dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) refuse(dir, error ? error.message() : "not a directory");
  if (::access(dir.c_str(), W_OK | X_OK) != 0) refuse(dir, system_reason(errno));
}

Error no_space(const std::string& dir, i64 bytes, double free) {
  return Error(Errc::Unavailable,
               fmt::format("{}: cannot reserve {} for offloading: {} ({} are free)", dir, bytes_text(bytes),
                           system_reason(ENOSPC), bytes_text(static_cast<i64>(free))));
}

// Bytes; infinite where that is not known.
double free_bytes(const std::string& dir) {
  struct statvfs there;
  if (::statvfs(dir.c_str(), &there) != 0) return std::numeric_limits<double>::infinity();
  return static_cast<double>(there.f_bavail) * static_cast<double>(there.f_frsize);
}

// Without a name; where the file system has no such files, its name goes at once.
File make_file(const std::string& dir) {
  check_directory(dir);
  if (std::optional<File> file = File::create_unnamed(dir + "/offload")) return std::move(*file);
  static std::atomic<int> number = 0;
  const std::string name = fmt::format("{}/.ds-offload-{}-{}", dir, ::getpid(), number++);
  try {
    File file = File::create(name);
    ::unlink(name.c_str());
    return file;
  } catch (const Error& e) {
    refuse(dir, e.what());
  }
}

// For its owner alone.
File open_named(const BlockFile::Named& named, const std::string& dir, i64 bytes) {
  check_directory(dir);
  if (named.is_new) {
    File file = File::create(named.path);
    DS_CHECK(::fchmod(file.descriptor(), 0600) == 0, Errc::Io, "{}: {}", named.path, system_reason(errno));
    return file;
  }
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::symlink_status(named.path, ignored);
  DS_CHECK(std::filesystem::exists(there), Errc::Corrupt,
           "{} does not exist: it was removed, or its disk is not mounted", named.path);
  DS_CHECK(std::filesystem::is_regular_file(there), Errc::Io, "{} is refused: it is not the file that the server made",
           named.path);
  File file = File::open_write(named.path);
  struct stat st {};
  DS_CHECK(::fstat(file.descriptor(), &st) == 0 && st.st_uid == ::geteuid() && (st.st_mode & 077) == 0, Errc::Io,
           "{} is refused: it belongs to another user, or others can open it", named.path);
  DS_CHECK(st.st_size == bytes, Errc::Corrupt, "{} has {} bytes, not {}", named.path, i64{st.st_size}, bytes);
  return file;
}

// All of it now: a disk that is full is told before the first step, and is not filled to see that it is too small.
void take_space(const File& file, const std::string& dir, i64 bytes) {
  if (file.size() >= bytes) return;
  BlockFile::check(dir, bytes);
  const int failed = ::posix_fallocate(file.descriptor(), 0, bytes);
  if (failed == ENOSPC || failed == EFBIG || failed == EDQUOT) throw no_space(dir, bytes, free_bytes(dir));
  DS_CHECK(failed == 0, Errc::Io, "{}: cannot reserve {} for offloading: {}", dir, bytes_text(bytes),
           system_reason(failed));
}

}  // namespace

u64 checksum(const char* data, i64 bytes) noexcept { return XXH3_64bits(data, static_cast<size_t>(bytes)); }

// The requests, in blocks. What carries them out takes blocks and hands them back.
class BlockFile::Worker {
 public:
  Worker(File file, std::string dir, const IoOptions& options)
      : file_(std::move(file)), dir_(std::move(dir)), options_(options) {
    const int flags = ::fcntl(file_.descriptor(), F_GETFL);
    direct_ = ::fcntl(file_.descriptor(), F_SETFL, flags | O_DIRECT) == 0;
  }
  virtual ~Worker() = default;

  Ticket start(bool write, char* memory, i64 at, i64 bytes) {
    DS_ASSERT(bytes > 0 && at % kPage == 0 && bytes % kPage == 0 &&
              reinterpret_cast<std::uintptr_t>(memory) % kPage == 0);
    Ticket ticket = 0;
    {
      const std::lock_guard lock(mutex_);
      (write ? counts_.written_bytes : counts_.read_bytes) += bytes;
      if (free_.empty()) {
        free_.push_back(narrow<Ticket>(std::ssize(requests_)));
        requests_.emplace_back();
      }
      ticket = free_.back();
      free_.pop_back();
      Request& r = requests_[static_cast<size_t>(ticket)];
      r = {.write = write, .blocks = div_ceil(bytes, options_.block_bytes)};
      for (i64 first = 0; first < bytes; first += options_.block_bytes)
        pending_.push_back({ticket, write, memory + first, at + first, std::min(options_.block_bytes, bytes - first)});
      if (options_.busy != nullptr) options_.busy->begin();
    }
    work_.notify_all();
    return ticket;
  }
  bool done(Ticket ticket) const {
    const std::lock_guard lock(mutex_);
    return requests_[static_cast<size_t>(ticket)].blocks == 0;
  }
  void wait(Ticket ticket) {
    std::unique_lock lock(mutex_);
    const size_t i = static_cast<size_t>(ticket);
    if (requests_[i].blocks > 0) {
      const Clock::time_point start = Clock::now();
      done_.wait(lock, [&] { return requests_[i].blocks == 0; });
      counts_.waited_s += seconds_since(start);
    }
    const Request r = requests_[i];
    free_.push_back(ticket);
    if (r.error == 0) return;
    throw Error(Errc::Io, fmt::format("{}: cannot {} offloaded data: {}", dir_, r.write ? "write" : "read",
                                      r.error == kShort ? "the file ends early" : system_reason(r.error)));
  }

  FileCounts counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  std::string method;
  bool is_direct() const noexcept { return direct_; }

 protected:
  struct Block {
    Ticket ticket = 0;
    bool write = false;
    char* memory = nullptr;
    i64 at = 0, bytes = 0;
  };
  static constexpr int kShort = -1;

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    work_.notify_all();
  }
  // Waits for a block where `may_wait`; false: there is none.
  bool take(Block& block, bool may_wait) {
    std::unique_lock lock(mutex_);
    if (may_wait) work_.wait(lock, [&] { return stopped_ || first_ < pending_.size(); });
    if (first_ == pending_.size()) return false;
    block = pending_[first_++];
    if (first_ == pending_.size() || first_ == kTaken) {
      pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    return true;
  }
  // Handles the system's result for a block: the number of bytes, or minus errno. False: a part of it is still to be
  // done.
  bool finish(Block& block, i64 result) {
    if (result == -EINTR || result == -EAGAIN) return false;
    int error = result < 0 ? static_cast<int>(-result) : 0;
    if (result >= 0 && result < block.bytes) {
      const i64 whole = result / kPage * kPage;  // what comes next begins at a page again
      block.memory += whole, block.at += whole, block.bytes -= whole;
      if (whole > 0) return false;
      error = result > 0 ? EIO : block.write ? ENOSPC : kShort;
    }
    {
      const std::lock_guard lock(mutex_);
      Request& r = requests_[static_cast<size_t>(block.ticket)];
      if (r.error == 0) r.error = error;
      if (--r.blocks > 0) return true;
      if (options_.busy != nullptr) options_.busy->end();
    }
    done_.notify_all();
    return true;
  }

  File file_;
  const std::string dir_;
  const IoOptions options_;
  bool direct_ = false;

 private:
  struct Request {
    bool write = false;
    i64 blocks = 0;  // still to be done
    int error = 0;
  };
  mutable std::mutex mutex_;
  FileCounts counts_;
  std::condition_variable work_, done_;
  std::vector<Request> requests_;
  std::vector<Ticket> free_;
  std::vector<Block> pending_;
  size_t first_ = 0;  // of pending_: those before it are taken
  static constexpr size_t kTaken = 1024;
  bool stopped_ = false;
};

// One thread has as many blocks in the ring as its depth: it hands them in when it begins to wait, and whenever one is
// done.
class BlockFile::Ring final : public BlockFile::Worker {
 public:
  struct Exit {
    void operator()(io_uring* ring) const noexcept {
      ::io_uring_queue_exit(ring);
      delete ring;
    }
  };
  using Handle = std::unique_ptr<io_uring, Exit>;
  // Null: the kernel has none for us, for the reason in `why`.
  static Handle open(int depth, std::string& why) {
    auto made = std::make_unique<io_uring>();
    if (const int failed = ::io_uring_queue_init(static_cast<unsigned>(depth), made.get(), 0); failed != 0) {
      why = system_reason(-failed);
      return nullptr;
    }
    Handle ring(made.release());
    // That it runs what it is given.
    io_uring_cqe* done = nullptr;
    ::io_uring_prep_nop(::io_uring_get_sqe(ring.get()));
    int failed = ::io_uring_submit(ring.get());
    if (failed == 1) failed = ::io_uring_wait_cqe(ring.get(), &done);
    if (failed != 0) {
      why = system_reason(-failed);
      return nullptr;
    }
    ::io_uring_cqe_seen(ring.get(), done);
    return ring;
  }
  Ring(File file, const std::string& dir, std::span<char> memory, const IoOptions& options, Handle ring)
      : Worker(std::move(file), dir, options),
        handle_(std::move(ring)),
        ring_(*handle_),
        memory_(memory),
        slots_(static_cast<size_t>(options.depth)) {
    const int fd = file_.descriptor();
    has_file_ = ::io_uring_register_files(&ring_, &fd, 1) == 0;
    constexpr size_t kMost = size_t{1} << 30;  // of what is registered as one
    const iovec all{memory.data(), memory.size()};
    has_memory_ = !memory.empty() && memory.size() <= kMost && ::io_uring_register_buffers(&ring_, &all, 1) == 0;
    for (i64 i = 0; i < options.depth; ++i) free_.push_back(i);
    method = fmt::format("io_uring{}, {}", has_memory_ || memory.empty() ? "" : " without registered memory",
                         direct_ ? "direct" : "through the page cache");
    thread_ = start_thread("a thread for offloading", [this] { run(); });
  }
  ~Ring() override {
    stop();
    thread_.join();
  }

 private:
  void run() {
    i64 under_way = 0;
    for (;;) {
      Block block;
      while (!free_.empty() && take(block, under_way == 0)) {
        enqueue(block);
        ++under_way;
      }
      if (under_way == 0) return;  // stopped, and all is done
      int submitted = 0;
      do {
        submitted = ::io_uring_submit(&ring_);
        if (submitted < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the kernel has no memory now
      } while (submitted < 0);
      io_uring_cqe* cqe = nullptr;
      if (::io_uring_wait_cqe(&ring_, &cqe) != 0) continue;
      do {
        const i64 slot = static_cast<i64>(::io_uring_cqe_get_data64(cqe));
        const i64 result = cqe->res;
        ::io_uring_cqe_seen(&ring_, cqe);
        Block done = slots_[static_cast<size_t>(slot)];
        free_.push_back(slot);
        if (finish(done, result)) {
          --under_way;
        } else {
          enqueue(done);
        }
      } while (::io_uring_peek_cqe(&ring_, &cqe) == 0);
      ::io_uring_submit(&ring_);
    }
  }
  void enqueue(const Block& b) {
    io_uring_sqe* const sqe = ::io_uring_get_sqe(&ring_);  // as many as there are slots
    DS_ASSERT(sqe != nullptr);
    const i64 slot = free_.back();
    free_.pop_back();
    slots_[static_cast<size_t>(slot)] = b;
    const int fd = has_file_ ? 0 : file_.descriptor();
    const auto bytes = static_cast<unsigned>(b.bytes);
    const auto at = static_cast<u64>(b.at);
    const bool fixed =
        has_memory_ && b.memory >= memory_.data() && b.memory + b.bytes <= memory_.data() + memory_.size();
    if (b.write) {
      fixed ? ::io_uring_prep_write_fixed(sqe, fd, b.memory, bytes, at, 0)
            : ::io_uring_prep_write(sqe, fd, b.memory, bytes, at);
    } else {
      fixed ? ::io_uring_prep_read_fixed(sqe, fd, b.memory, bytes, at, 0)
            : ::io_uring_prep_read(sqe, fd, b.memory, bytes, at);
    }
    if (has_file_) ::io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    ::io_uring_sqe_set_data64(sqe, static_cast<u64>(slot));
  }

  Handle handle_;
  io_uring& ring_;
  std::span<char> memory_;
  std::vector<Block> slots_;
  std::vector<i64> free_;  // of slots_
  bool has_file_ = false, has_memory_ = false;
  std::jthread thread_;
};

class BlockFile::Threads final : public BlockFile::Worker {
 public:
  Threads(File file, const std::string& dir, const IoOptions& options) : Worker(std::move(file), dir, options) {
    method = fmt::format("{} thread{}, {}", options.threads, options.threads == 1 ? "" : "s",
                         direct_ ? "direct" : "through the page cache");
    try {
      for (int i = 0; i < options.threads; ++i)
        threads_.push_back(start_thread("a thread for offloading", [this] { run(); }));
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Threads() override { stop(); }

 private:
  void run() {
    Block block;
    while (take(block, true)) {
      i64 result = 0;
      do {
        const auto bytes = static_cast<size_t>(block.bytes);
        result = block.write ? ::pwrite(file_.descriptor(), block.memory, bytes, block.at)
                             : ::pread(file_.descriptor(), block.memory, bytes, block.at);
        if (result < 0) result = -errno;
      } while (!finish(block, result));
    }
  }
  std::vector<std::jthread> threads_;
};

BlockFile::BlockFile(const std::string& dir, i64 bytes, std::span<char> memory, const IoOptions& options) {
  open(make_file(dir), dir, bytes, memory, options);
}

BlockFile::BlockFile(const Named& named, i64 bytes, std::span<char> memory, const IoOptions& options) {
  const std::string dir = parent_directory(named.path);
  open(open_named(named, dir, bytes), dir, bytes, memory, options);
}

void BlockFile::open(File file, const std::string& dir, i64 bytes, std::span<char> memory, const IoOptions& options) {
  DS_ASSERT(options.block_bytes > 0 && options.block_bytes % kPage == 0 && options.depth > 0 && options.threads > 0);
  take_space(file, dir, bytes);
  if (options.io_uring) {
    if (Ring::Handle ring = Ring::open(options.depth, refused_ring_))
      worker_ = std::make_unique<Ring>(std::move(file), dir, memory, options, std::move(ring));
  }
  if (!worker_) worker_ = std::make_unique<Threads>(std::move(file), dir, options);
}

void BlockFile::check(const std::string& dir, i64 bytes) {
  check_directory(dir);
  if (const double free = free_bytes(dir); free < static_cast<double>(bytes)) throw no_space(dir, bytes, free);
}

BlockFile::BlockFile() = default;
BlockFile::~BlockFile() = default;

BlockFile::Ticket BlockFile::read(void* to, i64 at, i64 bytes) {
  if (is_there()) return worker_->start(false, static_cast<char*>(to), at, bytes);
  counted_.read_bytes += bytes;
  return 0;
}
BlockFile::Ticket BlockFile::write(const void* from, i64 at, i64 bytes) {
  if (is_there()) return worker_->start(true, const_cast<char*>(static_cast<const char*>(from)), at, bytes);
  counted_.written_bytes += bytes;
  return 0;
}
bool BlockFile::done(Ticket ticket) const { return !is_there() || worker_->done(ticket); }
void BlockFile::wait(Ticket ticket) {
  if (!is_there()) return;
  try {
    worker_->wait(ticket);
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}
void BlockFile::fail(std::exception_ptr why) noexcept {
  if (!failed_) failed_ = std::move(why);
}
void BlockFile::throw_if_failed() const {
  if (failed_) std::rethrow_exception(failed_);
}
FileCounts BlockFile::counts() const noexcept { return is_there() ? worker_->counts() : counted_; }
bool BlockFile::is_direct() const noexcept { return !is_there() || worker_->is_direct(); }
const std::string& BlockFile::method() const noexcept {
  static const std::string none;
  return is_there() ? worker_->method : none;
}

}  // namespace ds::offload
