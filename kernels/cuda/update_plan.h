// SPDX-License-Identifier: Apache-2.0
#pragma once
// Converts one optimizer pass over many tensors to launches: tensors are cut into chunks, one per block, and a table of
// tensors is passed to the launch as a kernel parameter.

#include <span>

#include "ds/kernels/ops.h"

namespace ds::cuda {

// Elements per block: few enough to fill the machine with small models, and enough to hide the search for the tensor.
inline constexpr i64 kUpdateChunk = 16384;

struct UpdateSlot {
  void* param;  // null: not wanted
  void* master;
  void* states[2];
  float* scales[2];  // of codes
  float* grad;
  const float* factor;  // null: 1
  i64 n;
  i64 first;
  u32 site;
  float weight_decay;
  DType param_dtype, master_dtype;
  DType state_dtypes[2];
  bool wide;  // all addresses allow access to four elements at a time
};

struct UpdateBatch {
  static constexpr int kSlots = 64;
  UpdateSlot slots[kSlots];
  u32 first_chunk[kSlots + 1];  // of a slot, among the chunks of the launch; [num_slots]: total number
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

// Takes tensors from the front of `rest` until a launch is full or none is left. Skips empty ones, and those whose
// states and master are all fp32 if `decoded`, or not all fp32 otherwise.
inline UpdateBatch next_update_batch(std::span<const UpdateTensor>& rest, bool decoded = false) noexcept {
  constexpr i64 kMaxChunks = 0x7FFFFFFF;  // maximum of a grid
  UpdateBatch batch{};
  while (!rest.empty() && batch.num_slots < UpdateBatch::kSlots) {
    const UpdateTensor& t = rest.front();
    const i64 n = t.master.numel(), chunks = (n + kUpdateChunk - 1) / kUpdateChunk;
    if (i64{batch.num_chunks()} + chunks > kMaxChunks && batch.num_slots > 0) break;
    if (n > 0 && (t.states[0].dtype != DType::F32 || t.master.dtype != DType::F32) == decoded) {
      const auto aligned = [](const void* p, size_t bytes) { return reinterpret_cast<size_t>(p) % bytes == 0; };
      void* const param = t.param.data == t.master.data ? nullptr : t.param.data;
      bool wide = aligned(t.master.data, static_cast<size_t>(4 * dtype_bytes(t.master.dtype))) &&
                  aligned(t.grad.data, 16) && aligned(param, static_cast<size_t>(4 * dtype_bytes(t.param.dtype)));
      for (const TensorView& state : t.states)
        wide = wide && aligned(state.data, static_cast<size_t>(4 * dtype_bytes(state.dtype)));
      batch.slots[batch.num_slots] = {param,
                                      t.master.data,
                                      {t.states[0].data, t.states[1].data},
                                      {t.states[0].scale, t.states[1].scale},
                                      t.grad.as<float>(),
                                      t.factor,
                                      n,
                                      t.first,
                                      t.site,
                                      t.weight_decay,
                                      t.param.dtype,
                                      t.master.dtype,
                                      {t.states[0].dtype, t.states[1].dtype},
                                      wide};
      batch.first_chunk[batch.num_slots + 1] = batch.first_chunk[batch.num_slots] + static_cast<u32>(chunks);
      ++batch.num_slots;
    }
    rest = rest.subspan(1);
  }
  return batch;
}

}  // namespace ds::cuda
