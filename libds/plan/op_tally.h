// SPDX-License-Identifier: Apache-2.0
#pragma once
// The work of a training step, op by op: the layer calls of a RunPlan run with ops that count what they
// would do, and what the engine does beside layers, counted with the same ops. A pure function; on one rank, what is
// counted in an engine's step is equal, call by call (tests/unit/op_tally_test.cc).
//
// Conventions.
//   FLOPs   of products alone: 2 M N K of a matmul; attention 4 D forward and 10 D backward for every visible pair of a
//           query and a key (two products and five, for scores are not stored), so that causal attention counts about
//           half of T S. Model::flops_per_token counts 4 D + 8 D for all pairs. Everything else is bound by memory: 0.
//   bytes   what an op must read and write, each operand once, in its dtype; what is accumulated to is read as well. An
//           embedding reads the rows that it looks up.
//   linear_cross_entropy stands for what it consists of, chunk by chunk: its products are under "matmul", and under its
//           own name is the pass over the logits.
// Copies and fills that a device makes outside of its ops are not counted.

#include <array>
#include <compare>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "plan/dry_run.h"

namespace ds::plan {

// Calls that cost the same.
struct OpCall {
  std::string_view op;       // as in OpTable
  DType dtype = DType::F32;  // of what it reads: a, x, q, the first source
  i64 flops = 0, bytes = 0;  // of one call
  std::array<i64, 3>
      shape{};  // matmul: M, N, K; grouped: matrices, N, K; attention: heads of all sequences, queries, keys
  auto operator<=>(const OpCall&) const = default;
};

struct OpTotal {
  i64 calls = 0;
  double flops = 0, bytes = 0;
  bool operator==(const OpTotal&) const = default;
};

class OpTally {
 public:
  void add(const OpCall& call, i64 calls = 1) { calls_[call] += calls; }
  void add(const OpTally& other, i64 times = 1) {
    for (const auto& [call, n] : other.calls_) calls_[call] += n * times;
  }
  const std::map<OpCall, i64>& calls() const noexcept { return calls_; }
  std::map<std::string_view, OpTotal> by_op() const;
  OpTotal total() const;
  bool operator==(const OpTally&) const = default;

 private:
  std::map<OpCall, i64> calls_;
};

// Ops that compute nothing and add themselves to the OpTally that Stream::native points to; null: to none. They look at
// shapes and at whether views have data.
const OpTable& counting_ops() noexcept;

// The count of a fold of so many sources like `source`.
OpCall fold_of(TensorView dst, TensorView source, i64 sources, bool accumulate);

// The work of one pass over one micro-batch.
struct PassWork {
  OpTally ops;
  std::map<std::string, CommCount> messages;  // "axis.collective" of tp and sp
};

struct ChunkWork {
  using Passes = std::array<PassWork, kPasses>;  // by Pass; of one micro-batch
  Passes passes;
  std::optional<Passes> later;  // of those after the first, if they add to sums of gradients that it begins
  // Work of the whole step.
  OpTally gathers;    // codes of gathered parameters
  OpTally gradients;  // rounding to the wire's dtype, sums of micro-batches, of losses
  const PassWork& of(Pass pass) const noexcept { return passes[static_cast<size_t>(pass)]; }
  // Each micro-batch but the first.
  const PassWork& of_later(Pass pass) const noexcept { return (later ? *later : passes)[static_cast<size_t>(pass)]; }
};

// The work of one rank in one step.
struct StepWork {
  i64 micro_batches = 1;
  std::vector<ChunkWork> chunks;  // by StageCalls::chunks
  // The folds of dp's reduce-scatters, in whole slices: by the communicator, in its thread. Measured times of a
  // reduce-scatter over several ranks have them in them.
  OpTally reductions;
  OpTally optimizer;  // sums of what stands on several ranks, the norm, AdamW
  OpTally host;       // beside a GPU: updates of what is offloaded

  // Everything but the reductions: what the engine calls.
  OpTally total() const;
  // The same, of all micro-batches, of one pass.
  OpTally total(Pass pass) const;
};

// `model`: of which `plan` was made, of a run that trains.
StepWork tally_step(const model::Model& model, const RunPlan& plan);

// Pairs (query, key) of one head that see each other; AttentionParams says which.
i64 visible_pairs(i64 queries, i64 keys, bool causal, i64 window) noexcept;
// The pairs of queries and keys of all heads of a call that its layout lets meet.
i64 visible_pairs(i64 heads, i64 queries, i64 keys, const AttentionParams&) noexcept;

}  // namespace ds::plan
