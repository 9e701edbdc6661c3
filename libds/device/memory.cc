// SPDX-License-Identifier: Apache-2.0
#include "device/memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "ds/limits.h"

namespace ds {

void MemoryLedger::add(Tag tag, i64 bytes) noexcept {
  const std::lock_guard lock(mutex_);
  Count& c = counts_[static_cast<size_t>(tag)];
  c.current += bytes;
  c.peak = std::max(c.peak, c.current);
  ++num_allocations_;
}

void MemoryLedger::remove(Tag tag, i64 bytes) noexcept {
  const std::lock_guard lock(mutex_);
  counts_[static_cast<size_t>(tag)].current -= bytes;
}

i64 MemoryLedger::current(Tag tag) const noexcept {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<size_t>(tag)].current;
}

i64 MemoryLedger::peak(Tag tag) const noexcept {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<size_t>(tag)].peak;
}

i64 MemoryLedger::num_allocations() const noexcept {
  const std::lock_guard lock(mutex_);
  return num_allocations_;
}

std::string MemoryLedger::describe() const {
  std::vector<std::pair<i64, Tag>> held;
  for (size_t t = 0; t < counts_.size(); ++t) {
    if (const i64 bytes = current(static_cast<Tag>(t)); bytes > 0) held.emplace_back(bytes, static_cast<Tag>(t));
  }
  std::sort(held.rbegin(), held.rend());
  std::string text;
  for (const auto& [bytes, tag] : held) {
    text +=
        fmt::format("{}{} {:.3f} GiB", text.empty() ? "" : ", ", tag_name(tag), static_cast<double>(bytes) / 0x1p30);
  }
  return text.empty() ? "nothing" : text;
}

namespace {
constexpr i64 kAlignment = 64;
constexpr i64 kHugePage = i64{2} << 20;
}  // namespace

Buffer::Buffer(MemoryLedger& ledger, Tag tag, i64 bytes) : ledger_(&ledger), tag_(tag), bytes_(bytes) {
  if (bytes == 0) {
    ledger_ = nullptr;
    return;
  }
  const i64 alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  data_ = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(align_up(bytes, alignment)));
  DS_CHECK(data_ != nullptr, Errc::OutOfMemory, "no memory for {} bytes of {}: {}", bytes, tag_name(tag),
           system_reason(ENOMEM));
  if (alignment == kHugePage) madvise(data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  std::memset(data_, 0, static_cast<size_t>(bytes));
  ledger.add(tag, bytes);
}

Buffer::Buffer(MemoryLedger& ledger, Tag tag, void* data, i64 bytes, std::function<void()> release)
    : ledger_(&ledger), tag_(tag), data_(data), bytes_(bytes), release_(std::move(release)) {
  ledger.add(tag, bytes);
}

Buffer::~Buffer() { reset(); }

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    reset();
    ledger_ = std::exchange(other.ledger_, nullptr);
    tag_ = other.tag_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    release_ = std::exchange(other.release_, nullptr);
  }
  return *this;
}

void Buffer::reset() noexcept {
  if (data_ == nullptr) return;
  if (release_) {
    release_();
  } else {
    std::free(data_);
  }
  ledger_->remove(tag_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  release_ = nullptr;
}

}  // namespace ds
