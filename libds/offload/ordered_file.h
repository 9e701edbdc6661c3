// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank in a file whose parts are written and read in an order that is known and the same in every step:
// inputs of layers, kept from the forward pass until their layers are computed again. What is in memory at which use is
// planned ahead, so that neither memory nor traffic depends on the disk's speed: what is read soon after it was written
// stays in a buffer and never goes, all else goes while others are used and comes back ahead of its use.

#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "offload/block_file.h"
#include "zero/tier_array.h"

namespace ds::offload {

// A use of the part of an array that begins at byte `at`: it is written, or read again.
struct PartUse {
  i64 at = 0;
  bool write = false;
  friend bool operator==(const PartUse&, const PartUse&) = default;
};
// Of an array that is cut in parts of one size: all that a step does with it. What is written is read once.
struct OrderedUses {
  i64 bytes = 0, part_bytes = 0;  // of all of it; of a part, a multiple of BlockFile::kPage
  std::vector<PartUse> uses{};
};

// What happens with a use.
struct PlannedUse {
  PartUse use;
  size_t buffer = 0;
  bool in_file = false;                   // a write goes to the file; a read comes from there
  std::optional<size_t> before = {};      // the use before it of its buffer, in this step
  std::optional<size_t> written_by = {};  // of a read
};
// A pure function. A write whose read comes within twice as many uses as there are buffers stays in its buffer, if
// there is room: those are the last ones before a backward pass, which reads in the opposite order. Others take the
// buffer that has not been used for longest, which gives what goes and what comes the most time.
std::vector<PlannedUse> plan_uses(std::span<const PartUse> uses, size_t buffers);

class OrderedFile final : public zero::TierArray {
 public:
  struct Options {
    std::string dir;  // empty: a prediction, in which memory and requests are counted, and nobody looks at them
    IoOptions io = {};
    Tag tag = Tag::Offload;  // of buffers
    i64 buffers = 4;         // 1 or more
    bool checksums = false;  // what comes is held to what went
  };
  // The buffers are memory of the device that the host can use.
  OrderedFile(Device& device, MemoryLedger& ledger, const OrderedUses& array, const Options& options);
  ~OrderedFile() override;
  // Leases are those of the uses in their order, Fill for a write, one at a time; the last is followed by the first.
  bool in_place() const noexcept override { return false; }
  const BlockFile* file() const noexcept { return file_.get(); }  // null: of no bytes

 private:
  struct Window {
    std::optional<BlockFile::Ticket> under_way;
    size_t use = 0;  // of what is under way
  };
  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;
  char* memory(size_t buffer) const noexcept { return base_ + static_cast<i64>(buffer) * part_bytes_; }
  void settle(Window& window);
  // Whether nothing is under way there any more.
  bool at_rest(Window& window);
  // The window from which what a use reads goes still; null: it has gone.
  Window* going_for(const PlannedUse& read) noexcept;
  void begin_read(size_t use);
  void read_ahead();

  const i64 part_bytes_;
  const Options options_;
  std::vector<PlannedUse> uses_;
  std::vector<u64> checksums_;  // by use, of writes
  std::vector<Window> windows_;
  Buffer memory_;
  char* base_ = nullptr;             // at a page
  size_t next_ = 0;                  // use
  size_t ahead_ = 0;                 // reads before this use have begun
  std::unique_ptr<BlockFile> file_;  // after the memory that its requests have
};

}  // namespace ds::offload
