// SPDX-License-Identifier: Apache-2.0
#include "offload/ordered_file.h"

#include <algorithm>
#include <map>

namespace ds::offload {

std::vector<PlannedUse> plan_uses(std::span<const PartUse> uses, size_t buffers) {
  std::vector<PlannedUse> planned(uses.size());
  std::vector<std::optional<size_t>> read_by(uses.size());  // of writes
  std::map<i64, size_t> written;                            // by place: the last write
  for (size_t i = 0; i < uses.size(); ++i) {
    planned[i].use = uses[i];
    if (uses[i].write) {
      written[uses[i].at] = i;
      continue;
    }
    const auto by = written.find(uses[i].at);
    DS_ASSERT(by != written.end() && !read_by[by->second]);
    planned[i].written_by = by->second;
    read_by[by->second] = i;
  }

  struct InBuffer {
    std::optional<size_t> used;   // last
    std::optional<size_t> stays;  // a write that is read from it
  };
  std::vector<InBuffer> in(buffers);
  for (size_t i = 0; i < uses.size(); ++i) {
    PlannedUse& p = planned[i];
    if (!p.use.write) {
      const PlannedUse& by = planned[*p.written_by];
      p.in_file = by.in_file;
      if (!p.in_file) {
        p.buffer = by.buffer;
        p.before = in[p.buffer].used;
        in[p.buffer] = {.used = i, .stays = {}};
        continue;
      }
    }
    // Free ones before those whose content stays; of these the one that is read last, which goes to the file then.
    const auto rank = [&](const InBuffer& b) {
      return b.stays ? std::pair(true, uses.size() - *read_by[*b.stays]) : std::pair(false, b.used ? *b.used + 1 : 0);
    };
    const auto best = std::ranges::min_element(in, {}, rank);
    if (best->stays) planned[*best->stays].in_file = true;
    p.buffer = static_cast<size_t>(best - in.begin());
    p.before = best->used;
    *best = {.used = i, .stays = {}};
    if (!p.use.write) continue;
    DS_ASSERT(read_by[i]);
    p.in_file = *read_by[i] - i >= 2 * buffers;
    if (!p.in_file) best->stays = i;
  }
  return planned;
}

OrderedFile::OrderedFile(Device& device, MemoryLedger& ledger, const OrderedUses& array, const Options& options)
    : part_bytes_(array.part_bytes), options_(options) {
  if (array.bytes == 0) return;
  DS_ASSERT(options.buffers > 0 && part_bytes_ > 0 && part_bytes_ % BlockFile::kPage == 0 &&
            array.bytes % part_bytes_ == 0);
  windows_.resize(static_cast<size_t>(std::min(options.buffers, array.bytes / part_bytes_)));
  uses_ = plan_uses(array.uses, windows_.size());
  if (options.checksums && !options.dir.empty()) checksums_.resize(uses_.size());
  const i64 bytes = std::ssize(windows_) * part_bytes_;
  memory_ = device_buffer(device, ledger, options.tag, bytes + BlockFile::kPage);
  base_ = reinterpret_cast<char*>(align_up(reinterpret_cast<i64>(memory_.data()), BlockFile::kPage));
  file_ = options.dir.empty() ? std::make_unique<BlockFile>()
                              : std::make_unique<BlockFile>(options.dir, array.bytes,
                                                            std::span(base_, static_cast<size_t>(bytes)), options.io);
}

OrderedFile::~OrderedFile() = default;

void OrderedFile::settle(Window& w) {
  if (w.under_way) file_->wait(*std::exchange(w.under_way, std::nullopt));
}

bool OrderedFile::at_rest(Window& w) {
  if (w.under_way && !file_->done(*w.under_way)) return false;
  settle(w);
  return true;
}

OrderedFile::Window* OrderedFile::going_for(const PlannedUse& read) noexcept {
  Window& w = windows_[uses_[*read.written_by].buffer];
  return w.under_way && w.use == *read.written_by ? &w : nullptr;
}

void OrderedFile::begin_read(size_t use) {
  const PlannedUse& p = uses_[use];
  if (Window* const going = going_for(p)) settle(*going);
  Window& w = windows_[p.buffer];
  settle(w);
  w.under_way = file_->read(memory(p.buffer), p.use.at, part_bytes_);
  w.use = use;
}

void* OrderedFile::open(i64 begin, i64 bytes, zero::LeaseTo access) {
  const PlannedUse& p = uses_[next_];
  DS_ASSERT(p.use == PartUse(begin, access == zero::LeaseTo::Fill) && bytes == part_bytes_);
  file_->throw_if_failed();
  if (ahead_ <= next_) {
    if (!p.use.write && p.in_file) begin_read(next_);
    ahead_ = next_ + 1;
  }
  settle(windows_[p.buffer]);
  if (!p.use.write && p.in_file && !checksums_.empty() &&
      checksum(memory(p.buffer), part_bytes_) != checksums_[*p.written_by]) {
    file_->fail(std::make_exception_ptr(
        Error(Errc::Corrupt,
              fmt::format("{}: an offloaded input of layers was not read back as it was written", options_.dir))));
    file_->throw_if_failed();
  }
  return memory(p.buffer);
}

void OrderedFile::close(void*, i64, i64, zero::LeaseTo) noexcept {
  const size_t use = next_;
  const PlannedUse& p = uses_[use];
  try {
    if (p.use.write && p.in_file) {
      if (!checksums_.empty()) checksums_[use] = checksum(memory(p.buffer), part_bytes_);
      windows_[p.buffer] = {.under_way = file_->write(memory(p.buffer), p.use.at, part_bytes_), .use = use};
    }
    if (++next_ == uses_.size()) next_ = ahead_ = 0;
    read_ahead();
  } catch (...) {
    file_->fail(std::current_exception());  // the next call reports it
  }
}

// Reads begin in their order, each when its buffer has no other use before it and what it reads is in the file.
void OrderedFile::read_ahead() {
  for (; ahead_ < uses_.size(); ++ahead_) {
    const PlannedUse& p = uses_[ahead_];
    if (p.use.write || !p.in_file) continue;
    if (*p.written_by >= next_ || (p.before && *p.before >= next_)) return;
    Window* const going = going_for(p);
    if ((going != nullptr && !at_rest(*going)) || !at_rest(windows_[p.buffer])) return;
    begin_read(ahead_);
  }
}

}  // namespace ds::offload
