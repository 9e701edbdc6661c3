// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank in a file whose parts are written and read in a known order, the same in every step: inputs of
// layers, kept from the forward pass until the layers are recomputed. The contents of memory at each use are planned
// ahead, so neither memory nor traffic depends on the disk's speed. A part that is read soon after it was written stays
// in a buffer and is never written to the file; other parts are written while others are used, and read ahead of their
// use.

#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "offload/block_file.h"
#include "zero/tier_array.h"

namespace ds::offload {

// A use of the part of an array that begins at byte `at`: a write or a read.
struct PartUse {
  i64 at = 0;
  bool write = false;
  friend bool operator==(const PartUse&, const PartUse&) = default;
};
// All uses in a step of an array that is cut into parts of one size. Each written part is read once.
struct OrderedUses {
  i64 bytes = 0, part_bytes = 0;  // of the array; of a part, a multiple of BlockFile::kPage
  std::vector<PartUse> uses{};
};

// The plan of one use.
struct PlannedUse {
  PartUse use;
  size_t buffer = 0;
  bool in_file = false;                   // a write is written to the file; a read is read from it
  std::optional<size_t> before = {};      // the previous use of its buffer in this step
  std::optional<size_t> written_by = {};  // the write of the same part, for a read
};
// A pure function. A write whose read follows within twice as many uses as there are buffers stays in its buffer, if
// there is room: these are the last ones before a backward pass, which reads in the opposite order. Others use the
// least recently used buffer, which leaves the most time for transfers.
std::vector<PlannedUse> plan_uses(std::span<const PartUse> uses, size_t buffers);

class OrderedFile final : public zero::TierArray {
 public:
  struct Options {
    std::string dir;  // empty: a prediction, which counts memory and requests without accessing them
    IoOptions io = {};
    Tag tag = Tag::Offload;  // of buffers
    i64 buffers = 4;         // 1 or more
    bool checksums = false;  // compares data that is read with what was written
  };
  // The buffers are memory of the device that the host can access.
  OrderedFile(Device& device, MemoryLedger& ledger, const OrderedUses& array, const Options& options);
  ~OrderedFile() override;
  // Leases follow the uses in their order, one at a time, with Fill for a write; the first use follows the last.
  bool in_place() const noexcept override { return false; }
  const BlockFile* file() const noexcept { return file_.get(); }  // null: the array is empty

 private:
  struct Window {
    std::optional<BlockFile::Ticket> under_way;
    size_t use = 0;  // of the transfer in progress
  };
  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;
  char* memory(size_t buffer) const noexcept { return base_ + static_cast<i64>(buffer) * part_bytes_; }
  void settle(Window& window);
  // Whether its transfer has ended.
  bool at_rest(Window& window);
  // The window from which the data of a read is still being written; null: it has been written.
  Window* going_for(const PlannedUse& read) noexcept;
  void begin_read(size_t use);
  void read_ahead();

  const i64 part_bytes_;
  const Options options_;
  std::vector<PlannedUse> uses_;
  std::vector<u64> checksums_;  // of writes, by use
  std::vector<Window> windows_;
  Buffer memory_;
  char* base_ = nullptr;             // at a page
  size_t next_ = 0;                  // next use
  size_t ahead_ = 0;                 // reads before this use have been started
  std::unique_ptr<BlockFile> file_;  // destroyed before the memory of its requests
};

}  // namespace ds::offload
