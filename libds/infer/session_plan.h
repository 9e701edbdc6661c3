// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plan of a session: its memory besides the weights: the caches, and the activations of its largest pass. The
// session allocates by this plan, and --check prints it.

#include <memory>
#include <optional>
#include <vector>

#include "ds/session_sizes.h"
#include "infer/block_lives.h"
#include "plan/op_tally.h"
#include "plan/run_plan.h"

namespace ds::infer {

// Layers whose caches need the same blocks of a sequence: a number of blocks, and arrays for as many in each layer.
struct CacheSpace {
  BlockLives lives;
  i64 window = 0;
  i64 blocks = 0;
  std::vector<i64> layers{};  // of this rank
  bool all = true;            // each block is needed until the end of its sequence
};

// The arrays of AttentionSequences, side by side: begins, keys, tables.
class SequenceArrays {
 public:
  static constexpr i64 size(i64 sequences) noexcept { return 3 * sequences + 1; }
  static AttentionSequences over(const i32* arrays, i64 n) noexcept {
    return {.count = n, .begins = arrays, .keys = arrays + n + 1, .tables = arrays + 2 * n + 1};
  }
  void add(i64 fresh, i64 keys, i64 table);
  std::vector<i32> joined() const;

 private:
  std::vector<i32> begins_ = {0}, keys_, tables_;
};

struct SessionPlan {
  SessionSizes sizes;
  i64 rows = 0, logit_rows = 0;  // of a pass, at most
  bool rope_apart = false;       // rotations depend on the length of a sequence, so each has tables of its own
  std::vector<CacheSpace> spaces{};
  i64 working_bytes = 0, temporary_bytes = 0, message_bytes = 0;
  i64 table_bytes = 0, cache_bytes = 0;  // of all spaces: where blocks are, and the blocks
  i64 sequence_bytes = 0;                // of the sequences of a pass (AttentionSequences)
  // Rows of the token embedding that are looked up alone (plan::RunPlan::looked_up): as elements of a row; and bytes
  // of the rows of a pass, followed by their ids.
  i64 looked_up = 0, looked_up_bytes = 0;
  model::PassMemory pass{};
  // For OpTable::sample: bytes of a Draw for each row of logits and of a LogitChange for each id, which is enough for
  // any row; and its results, [2, logit_rows] int32.
  TensorView draws{}, changes{}, drawn{};

  // The arrays of a layer: [1, rows, heads, dim] each, without memory. Scales of codes follow their array.
  std::vector<TensorView> arrays_of(const model::Layer& layer, const CacheSpace& space, DType work) const;
  static i64 array_bytes(const TensorView& array) noexcept;
  // Gives an array of array_bytes() its memory.
  static void place(TensorView& array, char* memory) noexcept;
  static constexpr i64 kAlign = 64;  // bytes: each array, and each table
  plan::TagBytes bytes() const;
};

// The ops that this rank's layers call in a pass over one token of each of sizes.at_once sequences, all of them at the
// end of their context.
plan::OpTally decoding_work(const model::Model& model, const plan::RunPlan& plan, const SessionPlan& session);

SessionPlan plan_session(const model::Model& model, const plan::RunPlan& plan, const SessionSizes& sizes);

// Worker scratch of a session, like plan::scratch_bytes: an upper bound for a device that has done nothing else.
std::optional<i64> session_scratch(const model::Model& model, const plan::RunPlan& plan, const SessionPlan& session,
                                   const OpTable& backend, int threads);

}  // namespace ds::infer
