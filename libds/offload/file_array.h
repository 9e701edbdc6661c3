// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank in a file: accumulated gradients, slices of parameters. What is leased is in memory, in a buffer
// of about its size; others have what was leased last, comes next, or goes.

#include <optional>
#include <vector>

#include "offload/block_file.h"
#include "offload/host_place.h"
#include "zero/tier_array.h"

namespace ds::offload {

class FileArray final : public zero::TierArray {
 public:
  struct Options {
    std::string dir;  // empty: a prediction, in which memory and requests are counted, and nobody looks at them
    IoOptions io = {};
    Tag tag = Tag::Offload;  // of buffers
    i64 beside = 2;          // buffers of the largest size beside one that is leased
    i64 pages = 1024;        // in memory, of which leases have written a part
    bool read_ahead = true, write_behind = true;
  };
  // `most`: bytes of a lease. Buffers are taken as leases need them, in memory of the host.
  // Once a request has failed, all that is asked fails.
  FileArray(const HostPlace& host, MemoryLedger& ledger, i64 bytes, i64 most, const Options& options);
  ~FileArray() override;
  bool in_place() const noexcept override { return false; }
  void expect(i64 begin, i64 bytes) override;
  const BlockFile* file() const noexcept { return file_.get(); }  // null: of no bytes

 private:
  static constexpr i64 kPage = BlockFile::kPage;
  enum class Is : u8 { Free, Coming, Here, Leased, Going };
  // Holds [begin, begin + bytes), from a page's begin to a page's end.
  struct Slot {
    Buffer memory;
    char* data = nullptr;  // at a page
    i64 room = 0;          // bytes
    Is is = Is::Free;
    i64 begin = 0, bytes = 0;
    BlockFile::Ticket ticket = 0;  // of what comes or goes
    i64 used = 0;                  // when, in the order of calls
    bool current = false;          // else others may have written to its first or last page meanwhile
    i64 end() const noexcept { return begin + bytes; }
  };
  // A page of which leases have written a part: it stays in memory for a while, as others write the rest.
  struct Page {
    i64 number = -1;
    i64 used = 0;
  };

  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;
  void write_back(Slot& slot, i64 begin, i64 bytes);
  // One of this size that can be given another content; null: all are leased, or busy and `may_wait` is not set.
  Slot* at_rest(i64 room, bool may_wait);
  // Of the smallest buffer that is not leased and has room for so many bytes; 0: none has.
  i64 room_at_rest(i64 bytes) const noexcept;
  // The size of buffers for so many bytes, wherever they begin: an eighth more at most.
  static i64 room_of(i64 bytes) noexcept;
  void settle(Slot& slot);
  void settle_going(i64 begin, i64 end);             // what goes of these bytes
  void forget(i64 begin, i64 end, const Slot* but);  // what has an old content of these bytes
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
  Buffer page_memory_;
  char* page_data_ = nullptr;  // at a page
  std::vector<Page> pages_;
  std::unique_ptr<BlockFile> file_;  // after the memory that its requests have
};

}  // namespace ds::offload
