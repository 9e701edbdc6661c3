// SPDX-License-Identifier: Apache-2.0
#pragma once
// How one AdamW step over many tensors becomes launches: the tensors are cut into chunks, one block each, and a table
// of tensors travels with the launch as a kernel parameter.

#include <span>

#include "ds/kernels/ops.h"

namespace ds::cuda {

// Elements of a block: few enough that small models fill the machine, many enough that finding the tensor costs
// nothing.
inline constexpr i64 kAdamWChunk = 16384;

struct AdamWSlot {
  void* param;  // null: not wanted
  float *master, *m, *v;
  const float* grad;
  i64 n;
  float weight_decay;
  DType param_dtype;
  bool wide;  // all addresses allow four elements at a time
};

struct AdamWBatch {
  static constexpr int kSlots = 64;
  AdamWSlot slots[kSlots];
  u32 first_chunk[kSlots + 1];  // of a slot, among the chunks of the launch; [num_slots]: their number
  int num_slots;

  u32 num_chunks() const noexcept { return first_chunk[num_slots]; }
  // The slot of a chunk: the last one that starts at or before it.
  DS_HOST_DEVICE int slot_of(u32 chunk) const noexcept {
    int low = 0, high = num_slots;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_chunk[middle] <= chunk ? low : high) = middle;
    }
    return low;
  }
};

// Takes tensors from the front of `rest`, skipping empty ones, until a launch is full or none is left.
inline AdamWBatch next_adamw_batch(std::span<const AdamWTensor>& rest) noexcept {
  constexpr i64 kMaxChunks = 0x7FFFFFFF;  // of a grid
  AdamWBatch batch{};
  while (!rest.empty() && batch.num_slots < AdamWBatch::kSlots) {
    const AdamWTensor& t = rest.front();
    const i64 n = t.master.numel(), chunks = (n + kAdamWChunk - 1) / kAdamWChunk;
    if (i64{batch.num_chunks()} + chunks > kMaxChunks && batch.num_slots > 0) break;
    if (n > 0) {
      const auto aligned = [](const void* p, size_t bytes) { return reinterpret_cast<size_t>(p) % bytes == 0; };
      void* const param = t.param.data == t.master.data ? nullptr : t.param.data;
      const bool wide = aligned(t.master.data, 16) && aligned(t.m.data, 16) && aligned(t.v.data, 16) &&
                        aligned(t.grad.data, 16) && aligned(param, static_cast<size_t>(4 * dtype_bytes(t.param.dtype)));
      batch.slots[batch.num_slots] = {param,           t.master.as<float>(), t.m.as<float>(),
                                      t.v.as<float>(), t.grad.as<float>(),   n,
                                      t.weight_decay,  t.param.dtype,        wide};
      batch.first_chunk[batch.num_slots + 1] = batch.first_chunk[batch.num_slots] + static_cast<u32>(chunks);
      ++batch.num_slots;
    }
    rest = rest.subspan(1);
  }
  return batch;
}

}  // namespace ds::cuda
