// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs kernels without a GPU: blocks one after the other, and the threads of a block as fibers of the calling thread
// that switch at barriers and warp operations. It detects what the hardware leaves undefined: barriers that not all
// threads reach, use of more shared memory than requested and, with DS_SIM_SEED set, results that depend on the order
// of threads (the seed shuffles the order at every switch). For tests only.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <type_traits>

#include "ds/kernels/thread_pool.h"

namespace ds::cuda::sim {

struct Block {
  dim3 grid, index;
  int size = 0;
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
};
// The block that the calling thread runs, and the number in it of the thread that runs now. Every kernel asks often, so
// the model of the variable is the fastest that a plug-in can have.
struct Running {
  Block block;
  int thread = 0;
};
[[gnu::tls_model("initial-exec")]] extern constinit thread_local Running running;
inline const Block& block() noexcept { return running.block; }
inline int thread_index() noexcept { return running.thread; }

void sync_block();
// Publishes `bytes` (at most 64) of this lane; returns the slots of the 32 lanes, 64 bytes apart, valid until the
// warp's second exchange after this one.
const std::byte* warp_exchange_bytes(const void* mine, size_t bytes);

template <class T>
struct Lanes {
  const std::byte* slots;
  const T& operator[](size_t lane) const noexcept { return *reinterpret_cast<const T*>(slots + 64 * lane); }
};
template <class T>
Lanes<T> warp_exchange(const T& mine) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 64);
  return {warp_exchange_bytes(&mine, sizeof(T))};
}

// Copies are executed when they are waited for, as late as the hardware may. from == nullptr: zeros.
void copy_async(void* to, const void* from, size_t bytes);
void copies_commit();
void copies_wait(int pending);

// Executes `work` now or, between cudaStreamBeginCapture and its end, adds it to the graph. All work enqueued on a
// stream passes through here.
void enqueue(std::function<void()> work);

// The most shared memory that a block may have: DS_SIM_SHARED_BYTES, or that of an A100, 163 KiB.
size_t most_shared_bytes();
void check_shared(size_t bytes);
void run_grid(dim3 grid, int block_size, size_t shared_bytes, FunctionRef<void()> thread);

}  // namespace ds::cuda::sim
