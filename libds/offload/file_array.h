// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank in a file: accumulated gradients, slices of parameters. What is leased is in memory, in one of
// some buffers; others have what was leased last, comes next, or goes.

#include <exception>
#include <map>
#include <optional>
#include <vector>

#include "device/device.h"
#include "offload/block_file.h"
#include "zero/tier_array.h"

namespace ds::offload {

class FileArray final : public zero::TierArray {
 public:
  struct Options {
    std::string dir;  // empty: a prediction, in which memory and requests are counted, and nobody looks at them
    IoOptions io = {};
    i64 beside = 2;  // buffers beside those that are leased at a time
    bool read_ahead = true, write_behind = true;
  };
  // `most`: bytes of a lease. Buffers are taken as leases need them, in device memory that the host can use.
  FileArray(Device& device, MemoryLedger& ledger, i64 bytes, i64 most, const Options& options);
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
    Is is = Is::Free;
    i64 begin = 0, bytes = 0;
    BlockFile::Ticket ticket = 0;  // of what comes or goes
    i64 used = 0;                  // when, in the order of calls
    i64 end() const noexcept { return begin + bytes; }
  };
  // A page that more than one lease writes to. Those stay in memory: of a page that goes, others may hold the rest.
  struct Page {
    char bytes[kPage];
  };

  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;
  // `known`: what the slot has of its pages outside of these bytes is the file's.
  void write_back(Slot& slot, i64 begin, i64 bytes, bool known);
  Slot* at_rest(bool may_wait);  // one that can be given another content
  void settle(Slot& slot);
  void settle_going(i64 begin, i64 end);  // what goes of these bytes
  void add_slot();
  void put_shared_pages(Slot& slot) const;
  Page& shared_page(i64 number, const Slot& slot, bool known);

  Device& device_;
  MemoryLedger& ledger_;
  const Options options_;
  const i64 slot_bytes_;
  std::vector<Slot> slots_;
  i64 leased_ = 0, uses_ = 0;
  std::map<i64, std::unique_ptr<Page>> shared_;  // by number
  std::exception_ptr failed_;        // a lease could not give back what it had: told when somebody asks next
  std::unique_ptr<BlockFile> file_;  // after the memory that its requests have
};

}  // namespace ds::offload
