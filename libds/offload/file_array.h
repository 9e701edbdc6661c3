// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank in a file: accumulated gradients, slices of parameters. Leased data is in memory, in a buffer of
// about its size; other buffers contain data that was leased before, is read ahead, or is being written.

#include <optional>
#include <vector>

#include "offload/block_file.h"
#include "offload/host_place.h"
#include "zero/tier_array.h"

namespace ds::offload {

class FileArray final : public zero::TierArray {
 public:
  struct Options {
    std::string dir;  // empty: a prediction, which counts memory and requests without accessing them
    IoOptions io = {};
    Tag tag = Tag::Offload;  // of buffers
    i64 beside = 2;          // buffers of the largest size in addition to the leased one
    i64 pages = 1024;        // partly written pages that are kept in memory
    bool read_ahead = true, write_behind = true;
  };
  // `most`: the most bytes of a lease. Buffers are allocated in host memory as leases need them. After a failed request
  // every later one fails.
  FileArray(const HostPlace& host, MemoryLedger& ledger, i64 bytes, i64 most, const Options& options);
  ~FileArray() override;
  bool in_place() const noexcept override { return false; }
  void expect(i64 begin, i64 bytes) override;
  bool reads_directly() const noexcept override { return true; }
  Reading begin_read(void* to, i64 begin, i64 bytes) override;
  void end_read(Reading reading) override { file_->wait(reading); }
  const BlockFile* file() const noexcept { return file_.get(); }  // null: the array is empty

 private:
  static constexpr i64 kPage = BlockFile::kPage;
  enum class Is : u8 { Free, Coming, Here, Leased, Going };
  // Holds [begin, begin + bytes), in whole pages.
  struct Slot {
    Buffer memory;
    char* data = nullptr;  // at a page
    i64 room = 0;          // bytes
    Is is = Is::Free;
    i64 begin = 0, bytes = 0;
    BlockFile::Ticket ticket = 0;  // of its transfer
    i64 used = 0;                  // time of last use, in the order of calls
    bool current = false;          // false: other leases may have written to its first or last page since
    i64 end() const noexcept { return begin + bytes; }
  };
  // A partly written page, kept in memory for a while because other leases will write the rest.
  struct Page {
    i64 number = -1;
    i64 used = 0;
  };

  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;
  void write_back(Slot& slot, i64 begin, i64 bytes);
  // A slot of this size that can be reused; null: all are leased, or busy and `may_wait` is not set.
  Slot* at_rest(i64 room, bool may_wait);
  // The size of the smallest buffer that is not leased and fits so many bytes; 0: there is none.
  i64 room_at_rest(i64 bytes) const noexcept;
  // The size of buffers for so many bytes, wherever they begin: at most an eighth more.
  static i64 room_of(i64 bytes) noexcept;
  void settle(Slot& slot);
  void flush();                                      // brings all that was written to the file
  void settle_going(i64 begin, i64 end);             // waits for writes of these bytes
  void forget(i64 begin, i64 end, const Slot* but);  // drops buffers with an old content of these bytes
  void add_slot(i64 room);
  char* bytes_of(const Page& page) const noexcept { return page_data_ + (&page - pages_.data()) * kPage; }
  Page* find_page(i64 number) noexcept;
  void put_pages(Slot& slot);
  Page& take_page(i64 number);
  void write_page(Page& page);

  const HostPlace host_;
  MemoryLedger& ledger_;
  const Options options_;
  const i64 most_;
  std::vector<Slot> slots_;
  i64 uses_ = 0;
  bool flushed_ = true;  // nothing was written since
  Buffer page_memory_;
  char* page_data_ = nullptr;  // at a page
  std::vector<Page> pages_;
  std::unique_ptr<BlockFile> file_;  // destroyed before the memory of its requests
};

}  // namespace ds::offload
