// SPDX-License-Identifier: Apache-2.0
#include "comm/arena.h"

#include <fmt/ranges.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <map>

#include "ds/limits.h"

namespace ds {
namespace {

long futex(std::atomic<u32>& word, int op, u32 value, const timespec* limit) noexcept {
  return syscall(SYS_futex, &word, op, value, limit, nullptr, 0);
}

// Finds a group's memory for the threads of a world: created by the first to ask, removed when all have it.
class GroupRegistry {
 public:
  template <class Make>
  std::shared_ptr<std::byte> join(const std::string& name, int size, Make make) {
    const std::lock_guard lock(mutex_);
    auto& [memory, joined] = groups_[name];
    if (memory == nullptr) memory = make();
    const std::shared_ptr<std::byte> result = memory;
    if (++joined == size) groups_.erase(name);
    return result;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::pair<std::shared_ptr<std::byte>, int>> groups_;
};

// Ranks are threads, so pointers are valid for all of them.
class ThreadArena final : public Arena {
 public:
  ThreadArena(int rank, int size, std::shared_ptr<std::byte> memory, std::shared_ptr<GroupRegistry> registry)
      : Arena(rank, size), memory_(std::move(memory)), registry_(std::move(registry)) {
    base_ = memory_.get();
  }

  std::unique_ptr<Arena> group(int rank, std::span<const int> members, int, std::string_view name, double,
                               FunctionRef<void()>) override {
    const int size = static_cast<int>(members.size());
    auto memory =
        registry_->join(fmt::format("{} {}", name, fmt::join(members, " ")), size, [&] { return make_memory(size); });
    return std::make_unique<ThreadArena>(rank, size, std::move(memory), registry_);
  }

  static std::shared_ptr<std::byte> make_memory(int size) {
    const auto bytes = static_cast<size_t>(total_bytes(size));
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    DS_CHECK(p != MAP_FAILED, Errc::OutOfMemory, "no {} bytes for a communicator of {} ranks: {}", bytes, size,
             system_reason(errno));
    return {static_cast<std::byte*>(p), [bytes](std::byte* q) { munmap(q, bytes); }};
  }

  std::optional<Address> locate(const std::byte* p, i64) const override {
    return Address{.region = 0, .offset = reinterpret_cast<i64>(p)};
  }
  const std::byte* resolve(int, Address a) const override { return reinterpret_cast<const std::byte*>(a.offset); }
  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes, FunctionRef<void()>) override {
    return Buffer(ledger, tag, bytes);
  }
  Health health(int) const override { return {}; }

 private:
  const std::shared_ptr<std::byte> memory_;
  const std::shared_ptr<GroupRegistry> registry_;
};

}  // namespace

// Poster and sleeper each write one word and then read the other's, sequentially consistent, so at least one sees the
// other's write.
void post(Event& event, u32 value) noexcept {
  event.value.store(value, std::memory_order_seq_cst);
  if (event.waiters.load(std::memory_order_seq_cst) != 0) wake_all(event);
}

void sleep_on(Event& event, u32 seen, std::chrono::nanoseconds limit) noexcept {
  const timespec ts{.tv_sec = limit.count() / 1'000'000'000, .tv_nsec = limit.count() % 1'000'000'000};
  event.waiters.fetch_add(1, std::memory_order_seq_cst);
  if (event.value.load(std::memory_order_seq_cst) == seen) futex(event.value, FUTEX_WAIT, seen, &ts);
  event.waiters.fetch_sub(1, std::memory_order_relaxed);
}

void wake_all(Event& event) noexcept { futex(event.value, FUTEX_WAKE, INT_MAX, nullptr); }

Channel& Arena::channel(int from, int to) {
  const i64 offset = channels_offset(size_) + (i64{from} * size_ + to) * static_cast<i64>(sizeof(Channel));
  reserve_channel(offset);
  return *reinterpret_cast<Channel*>(base_ + offset);
}

std::vector<std::unique_ptr<Arena>> make_thread_arenas(int size) {
  const std::shared_ptr<std::byte> memory = ThreadArena::make_memory(size);
  const auto registry = std::make_shared<GroupRegistry>();
  std::vector<std::unique_ptr<Arena>> arenas;
  for (int r = 0; r < size; ++r) arenas.push_back(std::make_unique<ThreadArena>(r, size, memory, registry));
  return arenas;
}

}  // namespace ds
