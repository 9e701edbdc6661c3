// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the gradients of ranks become sums: a Reduction takes the fresh gradient of a segment from every rank and leaves
// in each rank's memory the sum of the slice that the rank owns. Every segment has one. To add a way to reduce
// gradients, write a file like coded_reduction.cc and append its ReductionKind to GradOptions::reductions of a plan. A
// reduction allocates its memory when it is made, and keeps its own tickets and the state that it must save.

#include <memory>
#include <optional>
#include <vector>

#include "comm/message_tag.h"
#include "comm/quantized.h"
#include "zero/fresh_grads.h"
#include "zero/grad_sums.h"
#include "zero/saved_state.h"

namespace ds::zero {

// A reduction group's ranks, and two splits of them, null if there are none: ranks side by side, which keep second
// shards of parameters and sum coded gradients first; and the ranks with the same number among those.
struct GroupRanks {
  Communicator& all;
  Communicator *near = nullptr, *across = nullptr;
};

// The ranks, the device and the memory that gradients are reduced with; what it refers to outlives the reductions.
struct GradParts {
  GroupRanks ranks;
  Device& device;
  MemoryLedger& ledger;
  MakeArray tier = {};  // GradSums
};

// The arguments of a reduction; all that they refer to outlives it.
struct ReductionParts {
  const Layout& layout;
  const GradOptions& options;
  const GradParts with;
  const FreshGrads& fresh;
  const GradSums& sums;
  const std::vector<i64> segments;  // their numbers, ascending: those that it reduces

  i64 number(const Segment& s) const noexcept { return &s - layout.segments().data(); }
};

// Properties of the gradients of a step that are known before they are computed.
struct GradStep {
  bool reduces = true;   // else each rank keeps the sums of its own micro-batches (GradOptions::keeps_own)
  float loss_scale = 1;  // gradients are multiplied by it
};

class Reduction {
 public:
  virtual ~Reduction() = default;
  // Calls of a step, in this order; all ranks make the same ones. `continues`: sums of this step are added to, else
  // overwritten. Memory of a fresh gradient is unchanged from committed() until release() of its bucket.
  virtual void begin(const GradStep& step) { static_cast<void>(step); }
  // The fresh gradient of a segment was written.
  virtual void committed(const Segment& s, bool continues) { static_cast<void>(s), static_cast<void>(continues); }
  // All units of its bucket were written. False: the segment is to be reduced densely.
  virtual bool add(const Segment& s, bool continues) = 0;
  // All segments of a bucket were added.
  virtual void start(size_t bucket, bool continues) { static_cast<void>(bucket), static_cast<void>(continues); }
  // The memory of a bucket will be written again, and its sums are wanted soon: waits for what uses either.
  virtual void release(size_t bucket) { static_cast<void>(bucket); }
  // After the last micro-batch: all sums are final when it returns, or behind what it has enqueued on the device.
  virtual void finish() = 0;

  // At stage 0: sends this rank's slice of the sum of a segment to all ranks. False: it is to be sent densely.
  virtual bool gather(const Segment& s) { return static_cast<void>(s), false; }
  // All segments were gathered.
  virtual void finish_gather() {}

  // State that checkpoints hold, such as what a compression has lost; null: none. It lives as long as the reduction.
  virtual SavedState* saved_state() noexcept { return nullptr; }
};

// A reduce-scatter of each bucket in the wire dtype, which runs while earlier layers compute.
std::unique_ptr<Reduction> make_dense_reduction(const ReductionParts& parts);
// Sends the blocks that are not zero, if that is less than the dense gradient, when the bucket is full. Nothing runs
// beside it. The bounds are those of GradOptions::sparse.
ReductionKind sparse_reduction(const std::vector<SparseUnit>& units);
// Sends codes of 8 or 4 bits, one segment at a time, from its commit until the next one's; loco: adds the errors of the
// codes to the next gradients. All units.
ReductionKind coded_reduction(int bits, std::optional<LocoOptions> loco);

}  // namespace ds::zero
