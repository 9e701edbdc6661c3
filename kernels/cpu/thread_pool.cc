// SPDX-License-Identifier: Apache-2.0
// The thread pool: workers sleep on `epoch`. The caller opens a gate, works on the tiles itself, closes the gate and
// waits for the workers that entered. A worker that wakes late finds the gate shut and continues to sleep, so a call
// never waits for one.

#include "ds/kernels/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds {
namespace {

constexpr std::size_t kAlignment = ThreadPool::kScratchUnit;  // a cache line
// Bit 31 of the gate: workers may join. The lower bits count those inside.
constexpr u32 kOpen = 0x80000000u;
// About 10 us of polling before a thread sleeps: longer than the gap between two ops of a step, shorter than a time
// slice.
constexpr int kSpins = 300;

void relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns the first value of `word` that is not `old`.
u32 wait_while(const std::atomic<u32>& word, u32 old, int spins) noexcept {
  for (int i = 0; i < spins; ++i) {
    if (const u32 now = word.load(std::memory_order_acquire); now != old) return now;
    relax();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

}  // namespace

struct ThreadPool::State {
  struct alignas(kAlignment) Scratch {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  // The pool for which the current thread is working, and its number there.
  struct Place {
    const State* pool = nullptr;
    int worker = 0;
  };
  static thread_local Place place;

  explicit State(int num_threads) : scratch(static_cast<std::size_t>(std::max(num_threads, 1))) {
    if (static_cast<unsigned>(num_threads) <= std::thread::hardware_concurrency()) spins = kSpins;
    workers.reserve(scratch.size() - 1);
    try {
      for (int w = 1; w < num_threads; ++w) workers.emplace_back([this, w] { serve(w); });
    } catch (const std::system_error& e) {
      const std::size_t refused = workers.size() + 2;  // the caller is the first
      dismiss();
      throw std::system_error(e.code(), "thread " + std::to_string(refused) + " of " + std::to_string(num_threads));
    }
  }

  ~State() {
    dismiss();
    for (const Scratch& s : scratch) ::operator delete(s.data, std::align_val_t(kAlignment));
  }

  // Wakes the workers so that they end; otherwise joining them would wait forever.
  void dismiss() noexcept {
    stop.store(true, std::memory_order_relaxed);
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
    workers.clear();
  }

  // Joining is valid whichever call opened the gate: that call cannot return, nor its fields change, before we leave.
  bool join() noexcept {
    u32 now = gate.load(std::memory_order_relaxed);
    while ((now & kOpen) != 0) {
      if (gate.compare_exchange_weak(now, now + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
    }
    return false;
  }

  void serve(int worker) noexcept {
    place = {this, worker};
    for (u32 seen = 0;;) {
      seen = wait_while(epoch, seen, spins);
      if (stop.load(std::memory_order_relaxed)) return;
      if (!join()) continue;
      work(worker);
      if (gate.fetch_sub(1, std::memory_order_release) == 1) gate.notify_one();  // only the caller waits on the gate
    }
  }

  void work(int worker) noexcept {
    for (i64 t; (t = next.fetch_add(1, std::memory_order_relaxed)) < num_tiles;) (*fn)(t, worker);
  }

  void grow(Scratch& s, std::size_t bytes) noexcept {
    if (bytes <= s.bytes) return;
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    ::operator delete(s.data, std::align_val_t(kAlignment));
    s.data = ::operator new(bytes, std::align_val_t(kAlignment));
    scratch_bytes.fetch_add(static_cast<i64>(bytes - s.bytes), std::memory_order_relaxed);
    s.bytes = bytes;
  }

  // Written by the caller while the gate is shut and empty; read by those inside.
  const FunctionRef<void(i64, int)>* fn = nullptr;
  i64 num_tiles = 0;

  alignas(kAlignment) std::atomic<i64> next{0};
  alignas(kAlignment) std::atomic<u32> gate{0};
  alignas(kAlignment) std::atomic<u32> epoch{0};
  std::atomic<bool> stop{false};
  std::atomic<i64> scratch_bytes{0};
  std::size_t reserved = 0;  // of every worker
  int spins = 0;
  std::vector<Scratch> scratch;
  std::vector<std::jthread> workers;
};

thread_local ThreadPool::State::Place ThreadPool::State::place;

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>(num_threads)) {}
ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const noexcept { return static_cast<int>(state_->scratch.size()); }

void ThreadPool::parallel_for(i64 num_tiles, FunctionRef<void(i64, int)> fn) noexcept {
  State& s = *state_;
  const State::Place outer = State::place;
  const bool nested = outer.pool == &s;
  if (nested || num_tiles <= 1 || s.workers.empty()) {
    if (!nested) State::place = {&s, 0};
    for (i64 t = 0; t < num_tiles; ++t) fn(t, State::place.worker);
    State::place = outer;
    return;
  }
  State::place = {&s, 0};
  s.fn = &fn;
  s.num_tiles = num_tiles;
  s.next.store(0, std::memory_order_relaxed);
  s.gate.store(kOpen, std::memory_order_release);
  s.epoch.fetch_add(1, std::memory_order_release);
  s.epoch.notify_all();
  s.work(0);
  u32 inside = s.gate.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  while (inside != 0) inside = wait_while(s.gate, inside, s.spins);
  State::place = outer;
}

void* ThreadPool::reserve_scratch(std::size_t bytes) noexcept {
  State& s = *state_;
  const bool nested = State::place.pool == &s;  // then other workers are active
  const std::size_t caller = nested ? static_cast<std::size_t>(State::place.worker) : 0;
  if (nested) {
    s.grow(s.scratch[caller], bytes);
  } else if (bytes > s.reserved) {
    s.reserved = bytes;
    for (State::Scratch& one : s.scratch) s.grow(one, bytes);
  }
  return s.scratch[caller].data;
}

void* ThreadPool::scratch(int worker) const noexcept { return state_->scratch[static_cast<std::size_t>(worker)].data; }

i64 ThreadPool::scratch_bytes() const noexcept { return state_->scratch_bytes.load(std::memory_order_relaxed); }

}  // namespace ds
