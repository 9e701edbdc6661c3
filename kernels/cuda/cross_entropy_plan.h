// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the softmax of linear_cross_entropy reads rows of logits that it needs more than once, for the gradient or for
// label smoothing: from device memory each time, or once, into the shared memory of a block. Bits are the same.

#include <algorithm>

#include "cuda/simt.h"

namespace ds::cuda {

inline constexpr int kSoftmaxBlock = 512;  // threads; a part of the order of sums
inline constexpr int kKeptBlocks = 2;      // on a multiprocessor, if rows are kept; limits the registers of a thread

// The memory of a block for sums over its threads.
struct SoftmaxSums {
  float top[kSoftmaxBlock / kWarp];
  float sum[kSoftmaxBlock / kWarp];
};

struct SoftmaxPlan {
  bool kept;            // a block copies its row to shared memory, in packs of eight logits, after its SoftmaxSums
  i64 blocks;           // kept: each takes every `blocks`-th row; otherwise one for each row
  size_t shared_bytes;  // of a block

  // rows: of V logits of `each` bytes, `stride` apart. again: they are needed more than once. aligned: all begin at
  // 16-byte boundaries. most_shared_bytes: the limit of a block on this device.
  static constexpr SoftmaxPlan of(i64 rows, i64 stride, i64 V, size_t each, bool again, bool aligned,
                                  size_t most_shared_bytes, int num_multiprocessors) noexcept {
    const size_t bytes = sizeof(SoftmaxSums) + static_cast<size_t>((V + 7) / 8 * 8) * each;
    // Copies are of 16 bytes. The last one of a row ends in the space between rows, which a single row may not have.
    const bool whole_copies = aligned && static_cast<size_t>(stride) * each % 16 == 0;
    if (!again || !whole_copies || bytes > most_shared_bytes) return {false, rows, sizeof(SoftmaxSums)};
    // As many blocks as run at the same time. A multiprocessor has the memory of one largest block and reserves 1 KiB
    // for each. A block that takes several rows copies the next one while it writes the gradient of the last.
    constexpr size_t kReserved = 1024;
    const size_t fit = (most_shared_bytes + kReserved) / (bytes + kReserved);
    const i64 together = std::min(i64{kKeptBlocks}, static_cast<i64>(fit));
    return {true, std::min(rows, together * num_multiprocessors), bytes};
  }
};

}  // namespace ds::cuda
