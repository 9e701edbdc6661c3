// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs kernels without a GPU: blocks one after the other, the threads of a block as fibers of the calling thread that
// change places at barriers and warp operations. It checks what the hardware leaves undefined: a barrier that not all
// threads reach, shared memory beyond what was asked for, and, with DS_SIM_SEED set, results that depend on the order
// in which threads run (the order is shuffled by the seed at every change of place). For tests only.

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
const Block& block() noexcept;
int thread_index() noexcept;

void sync_block();
// Publishes `bytes` (at most 64) of this lane; returns the 32 lanes' slots, 64 bytes apart, valid until the warp's next
// exchange but one.
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

// Copies happen when they are waited for, as late as the hardware may do them. from == nullptr: zeros.
void copy_async(void* to, const void* from, size_t bytes);
void copies_commit();
void copies_wait(int pending);

// Does `work` now; or, between cudaStreamBeginCapture and its end, puts it into the graph. Everything that is enqueued
// on a stream passes here.
void enqueue(std::function<void()> work);

void check_shared(size_t bytes);
void run_grid(dim3 grid, int block_size, size_t shared_bytes, FunctionRef<void()> thread);

}  // namespace ds::cuda::sim
