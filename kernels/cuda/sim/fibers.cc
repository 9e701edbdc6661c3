// SPDX-License-Identifier: Apache-2.0
#include "cuda/sim/fibers.h"

#include <boost/context/detail/fcontext.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace ds::cuda::sim {
namespace {

namespace ctx = boost::context::detail;

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kLanes = 32;

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
  std::vector<Copy> copies;
  int groups = 0;  // committed
};

struct alignas(64) Warp {
  alignas(64) std::byte slots[2][kLanes * 64];
  int arrived = 0;
  u32 turn = 0;
};

struct Machine {
  Block block;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  int current = 0;
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
  void switch_to(Fiber& fiber);
  void yield();
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
  Fiber& self = *m.fibers[m.current];
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

void Machine::yield() {
  Fiber& self = *fibers[current];
  const int me = current;
  start_switch(&self.fake_stack, scheduler_stack, scheduler_stack_bytes);
  const ctx::transfer_t from = ctx::jump_fcontext(scheduler, nullptr);
  finish_switch(self.fake_stack, nullptr, nullptr);
  scheduler = from.fctx;
  current = me;
}

void Machine::run_block() {
  const int n = block.size;
  while (static_cast<int>(fibers.size()) < n) fibers.push_back(std::make_unique<Fiber>());
  warps.resize(static_cast<size_t>(n) / kLanes);
  for (Warp& w : warps) w.arrived = 0;
  arrived = finished = 0;
  for (int i = 0; i < n; ++i) {
    Fiber& f = *fibers[i];
    f.finished = false;
    f.copies.clear();
    f.groups = 0;
    f.context = ctx::make_fcontext(f.stack.get() + kStackBytes, kStackBytes, fiber_main);
  }
  // Every fiber runs until it has to wait. A round without progress is a deadlock.
  std::vector<int> order(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) order[i] = i;
  while (finished < n) {
    if (random != 0) {
      for (size_t i = order.size(); i > 1; --i) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[i - 1], order[(random >> 33) % i]);
      }
    }
    const u32 block_turn = turn;
    const int done = finished;
    u64 warp_turns = 0;
    for (const Warp& w : warps) warp_turns += kLanes * w.turn + static_cast<u64>(w.arrived);
    const int came = arrived;
    for (const int i : order) {
      Fiber& f = *fibers[i];
      if (f.finished) continue;
      current = i;
      switch_to(f);
    }
    u64 warp_turns_now = 0;
    for (const Warp& w : warps) warp_turns_now += kLanes * w.turn + static_cast<u64>(w.arrived);
    if (block_turn == turn && done == finished && came == arrived && warp_turns == warp_turns_now)
      die("not all threads of a block or warp reached a barrier");
  }
}

}  // namespace

const Block& block() noexcept { return machine().block; }
int thread_index() noexcept { return machine().current; }

void sync_block() {
  Machine& m = machine();
  const u32 turn = m.turn;
  if (++m.arrived == m.block.size) {
    m.arrived = 0;
    ++m.turn;
    return;
  }
  while (m.turn == turn) m.yield();
}

const std::byte* warp_exchange_bytes(const void* mine, size_t bytes) {
  Machine& m = machine();
  Warp& w = m.warps[static_cast<size_t>(m.current) / kLanes];
  const u32 turn = w.turn;
  std::byte* slots = w.slots[turn % 2];
  std::memcpy(slots + 64 * (static_cast<size_t>(m.current) % kLanes), mine, bytes);
  if (++w.arrived == static_cast<int>(kLanes)) {
    w.arrived = 0;
    ++w.turn;
  } else {
    while (w.turn == turn) m.yield();
  }
  return slots;
}

void copy_async(void* to, const void* from, size_t bytes) {
  if (reinterpret_cast<size_t>(to) % bytes != 0 || reinterpret_cast<size_t>(from) % bytes != 0)
    die("an asynchronous copy is not aligned");
  Fiber& f = *machine().fibers[machine().current];
  f.copies.push_back({to, from, bytes, f.groups});
}

void copies_commit() {
  Machine& m = machine();
  ++m.fibers[m.current]->groups;
}

void copies_wait(int pending) {
  Machine& m = machine();
  Fiber& f = *m.fibers[m.current];
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

void check_shared(size_t bytes) {
  if (bytes > block().shared_bytes) die("a kernel uses more shared memory than its launch asked for");
}

void run_grid(dim3 grid, int block_size, size_t shared_bytes, FunctionRef<void()> thread) {
  if (block_size <= 0 || block_size > 1024 || block_size % 32 != 0) die("a block is not 32 to 1024 threads");
  if (shared_bytes > (size_t{163} << 10)) die("a block asks for more shared memory than an A100 has, 163 KiB");
  if (grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535) die("a grid is too large");
  Machine& m = machine();
  const char* seed = std::getenv("DS_SIM_SEED");
  m.random = seed != nullptr ? std::strtoull(seed, nullptr, 10) : 0;
  m.shared.resize(shared_bytes + 1024);
  auto* base = m.shared.data();
  base += (1024 - reinterpret_cast<size_t>(base) % 1024) % 1024;
  m.block = {grid, {}, block_size, base, shared_bytes};
  m.thread = &thread;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        m.block.index = dim3(x, y, z);
        std::memset(base, 0xFF, shared_bytes);  // NaN, in every format
        m.run_block();
      }
    }
  }
}

}  // namespace ds::cuda::sim
