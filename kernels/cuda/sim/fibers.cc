// SPDX-License-Identifier: Apache-2.0
#include "cuda/sim/fibers.h"

#include <boost/context/detail/fcontext.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace ds::cuda::sim {
namespace {

namespace ctx = boost::context::detail;

constexpr size_t kLanes = 32;
constexpr size_t kStackBytes = size_t{256} << 10;
// Stacks begin at different offsets of a page, an odd number of cache lines apart. All of them at the same offset would
// compete for a few sets of the caches at every switch.
constexpr size_t kStackStep = 17 * 64, kStackSteps = 60;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "CUDA simulator: %s\n", what);
  std::abort();
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  int group;
};

struct Fiber {
  std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};
  ctx::fcontext_t context = nullptr;
  void* fake_stack = nullptr;
  bool finished = true;
  // The turn of a barrier that it waits for: until `*barrier` differs from `turn`; null: it can run.
  const u32* barrier = nullptr;
  u32 turn = 0;
  std::vector<Copy> copies;
  int groups = 0;  // committed

  bool runnable() const noexcept { return !finished && (barrier == nullptr || *barrier != turn); }
};

struct alignas(64) Warp {
  alignas(64) std::byte slots[2][kLanes * 64];
  int arrived = 0;
  u32 turn = 0;
};

struct Machine {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  std::vector<int> order;  // of threads
  int arrived = 0;
  u32 turn = 0;
  int finished = 0;
  FunctionRef<void()>* thread = nullptr;
  ctx::fcontext_t scheduler = nullptr;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  u64 random = 0;  // 0: in order

  void run_block();
  bool run(std::span<const int> threads);
  void switch_to(Fiber& fiber);
  void wait_for(const u32& barrier);
};

Machine& machine() {
  thread_local Machine m;
  return m;
}

void start_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* bottom, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, bottom, bytes);
#endif
}
void finish_switch([[maybe_unused]] void* save, [[maybe_unused]] const void** bottom, [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(save, bottom, bytes);
#endif
}

void fiber_main(ctx::transfer_t from) {
  Machine& m = machine();
  finish_switch(nullptr, &m.scheduler_stack, &m.scheduler_stack_bytes);
  m.scheduler = from.fctx;
  (*m.thread)();
  Fiber& self = *m.fibers[running.thread];
  self.finished = true;
  ++m.finished;
  start_switch(nullptr, m.scheduler_stack, m.scheduler_stack_bytes);
  ctx::jump_fcontext(m.scheduler, nullptr);
  die("a finished thread ran on");
}

void Machine::switch_to(Fiber& fiber) {
  start_switch(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
  const ctx::transfer_t back = ctx::jump_fcontext(fiber.context, nullptr);
  finish_switch(scheduler_fake_stack, nullptr, nullptr);
  fiber.context = back.fctx;
}

// Returns to the scheduler until the barrier has its next turn.
void Machine::wait_for(const u32& barrier) {
  Fiber& self = *fibers[running.thread];
  const int me = running.thread;
  self.barrier = &barrier;
  self.turn = barrier;
  start_switch(&self.fake_stack, scheduler_stack, scheduler_stack_bytes);
  const ctx::transfer_t from = ctx::jump_fcontext(scheduler, nullptr);
  finish_switch(self.fake_stack, nullptr, nullptr);
  scheduler = from.fctx;
  running.thread = me;
}

// Runs each of the threads that can run until it has to wait; returns whether one could.
bool Machine::run(std::span<const int> threads) {
  bool any = false;
  for (const int i : threads) {
    Fiber& f = *fibers[i];
    if (!f.runnable()) continue;
    any = true;
    running.thread = i;
    switch_to(f);
  }
  return any;
}

void Machine::run_block() {
  const int n = running.block.size;
  while (static_cast<int>(fibers.size()) < n) fibers.push_back(std::make_unique<Fiber>());
  warps.resize(static_cast<size_t>(n) / kLanes);
  for (Warp& w : warps) w.arrived = 0;
  arrived = finished = 0;
  for (int i = 0; i < n; ++i) {
    Fiber& f = *fibers[i];
    f.finished = false;
    f.barrier = nullptr;
    f.copies.clear();
    f.groups = 0;
    const size_t bytes = kStackBytes - static_cast<size_t>(i) % kStackSteps * kStackStep;
    f.context = ctx::make_fcontext(f.stack.get() + bytes, bytes, fiber_main);
  }
  order.resize(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  while (finished < n) {
    bool any = false;
    if (random != 0) {
      for (size_t i = order.size(); i > 1; --i) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[i - 1], order[(random >> 33) % i]);
      }
      any = run(order);
    } else {
      // A warp runs until all of it waits for the block: the stacks of 32 threads fit into a cache.
      for (size_t first = 0; first < order.size(); first += kLanes)
        while (run(std::span(order).subspan(first, kLanes))) any = true;
    }
    if (!any) die("not all threads of a block or warp reached a barrier");
  }
}

}  // namespace

constinit thread_local Running running;

void sync_block() {
  Machine& m = machine();
  if (++m.arrived == running.block.size) {
    m.arrived = 0;
    ++m.turn;
    return;
  }
  m.wait_for(m.turn);
}

const std::byte* warp_exchange_bytes(const void* mine, size_t bytes) {
  Machine& m = machine();
  Warp& w = m.warps[static_cast<size_t>(running.thread) / kLanes];
  std::byte* slots = w.slots[w.turn % 2];
  std::memcpy(slots + 64 * (static_cast<size_t>(running.thread) % kLanes), mine, bytes);
  if (++w.arrived == static_cast<int>(kLanes)) {
    w.arrived = 0;
    ++w.turn;
  } else {
    m.wait_for(w.turn);
  }
  return slots;
}

void copy_async(void* to, const void* from, size_t bytes) {
  if (reinterpret_cast<size_t>(to) % bytes != 0 || reinterpret_cast<size_t>(from) % bytes != 0)
    die("an asynchronous copy is not aligned");
  Fiber& f = *machine().fibers[running.thread];
  f.copies.push_back({to, from, bytes, f.groups});
}

void copies_commit() {
  Machine& m = machine();
  ++m.fibers[running.thread]->groups;
}

void copies_wait(int pending) {
  Machine& m = machine();
  Fiber& f = *m.fibers[running.thread];
  std::erase_if(f.copies, [&](const Copy& c) {
    if (c.group >= f.groups - pending) return false;
    if (c.from == nullptr) {
      std::memset(c.to, 0, c.bytes);
    } else {
      std::memcpy(c.to, c.from, c.bytes);
    }
    return true;
  });
}

size_t most_shared_bytes() {
  const char* bytes = std::getenv("DS_SIM_SHARED_BYTES");
  return bytes != nullptr ? std::strtoull(bytes, nullptr, 10) : size_t{163} << 10;
}

void check_shared(size_t bytes) {
  if (bytes > block().shared_bytes) die("a kernel uses more shared memory than its launch asked for");
}

void run_grid(dim3 grid, int block_size, size_t shared_bytes, FunctionRef<void()> thread) {
  if (block_size <= 0 || block_size > 1024 || block_size % 32 != 0) die("a block is not 32 to 1024 threads");
  if (shared_bytes > most_shared_bytes()) die("a block asks for more shared memory than the device has");
  if (grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535) die("a grid is too large");
  Machine& m = machine();
  const char* seed = std::getenv("DS_SIM_SEED");
  m.random = seed != nullptr ? std::strtoull(seed, nullptr, 10) : 0;
  m.shared.resize(shared_bytes + 1024);
  auto* base = m.shared.data();
  base += (1024 - reinterpret_cast<size_t>(base) % 1024) % 1024;
  running.block = {grid, {}, block_size, base, shared_bytes};
  m.thread = &thread;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        running.block.index = dim3(x, y, z);
        std::memset(base, 0xFF, shared_bytes);  // NaN, in every format
        m.run_block();
      }
    }
  }
}

}  // namespace ds::cuda::sim
