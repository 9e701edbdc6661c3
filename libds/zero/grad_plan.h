// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of a plan that concerns gradients: dtypes, buckets, and how each unit is reduced. Pure.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ds/kernels/tensor.h"
#include "ds/kernels/thread_pool.h"
#include "ds/layer.h"
#include "zero/layout.h"

namespace ds::zero {

class Reduction;
struct ReductionParts;

// A way to reduce the gradients of some units (zero/reduction.h).
struct ReductionKind {
  std::vector<i64> units = {};  // none: all
  std::function<std::unique_ptr<Reduction>(const ReductionParts&)> make;
};

// A unit whose gradients are mostly zero. Blocks have 64 elements; the numbers bound those that are not zero.
struct SparseUnit {
  i64 unit = 0;
  i64 of_rank = 0;  // in the gradient of one rank
  i64 of_sum = 0;   // in a rank's slice of the sum
};

struct GradOptions {
  std::string axis = "dp";                    // the group of ranks, as named in counts of messages
  DType work = DType::F32;                    // dtype of the parameters
  DType wire = DType::F32;                    // dtype of fresh gradients and of messages
  DType sums = DType::F32;                    // dtype in which sums are stored
  i64 bucket_elems = 0;                       // reduce_bucket_size
  std::vector<std::vector<i64>> passes = {};  // the units that each instruction of a schedule acquires, in order
  std::vector<i64> open = {};                 // units that are committed after those of their tiles, ascending
  std::vector<i64> beside = {};               // units that are written while another unit is acquired
  i64 ahead = -1;                             // a unit whose sum is sent on before the step ends: it ends its bucket
  bool overlap = true;                        // overlap_comm
  i64 micro_batches = 1;                      // per step, times `parts`
  i64 parts = 1;                              // that a micro-batch has (Layer::gradient_parts), each committed alone
  bool reduce_each_micro = false;             // "micro" order; else "boundary"
  bool keeps_own = false;                     // stages 0 and 1: some steps do not reduce gradients over ranks
  // Backward adds to the fp32 sums of the rank's own micro-batches itself (only if accumulates_locally()).
  bool fused = false;
  // The sharded segments of a unit are reduced by the first of these that has the unit; all other segments densely.
  std::vector<ReductionKind> reductions = {};
  std::vector<SparseUnit> sparse = {};  // ascending: bounds for sparse_reduction()

  // Whether backward writes fp32, which commit() rounds to the wire dtype.
  bool staged() const noexcept { return !fused && wire != work && wire != DType::F32; }
  // The dtype that backward writes.
  DType fresh() const noexcept { return fused || staged() ? DType::F32 : wire; }
  // Whether the sums of its own micro-batches are those of a group of so many ranks: nothing is rounded or sent.
  bool sums_are_final(i64 ranks) const noexcept { return fused && ranks == 1 && wire == DType::F32; }
  bool accumulates_locally() const noexcept { return !reduce_each_micro && micro_batches > 1; }
};

// Units that are reduced together, in the order of the backward pass.
struct Bucket {
  std::vector<i64> units;
  i64 elems = 0;      // padded
  bool open = false;  // of one unit, which is committed after others
};
// The most elements of a bucket whose sums are stored in 16 bits, unless one unit has more.
inline constexpr i64 kMostNarrowBucket = i64{1} << 22;

// Consecutive units of a pass until the next would exceed `bucket_elems`, or up to GradOptions::ahead; a larger unit is
// a bucket of its own. A bucket belongs to one instruction, and units that are written together share a bucket.
std::vector<Bucket> plan_buckets(const Layout& layout, const GradOptions& options);

// The rows of each unit in memory of that dtype: element i of a unit is at memory_at(unit, i). Null: rows of another
// group, or in tiles, which follow as units of one row.
using GradRows = std::span<const std::span<const model::ParamRow>>;  // by unit
std::vector<std::vector<TensorView>> row_views(const Layout& layout, GradRows rows, DType dtype,
                                               FunctionRef<void*(size_t unit, i64 element)> memory_at);

}  // namespace ds::zero
