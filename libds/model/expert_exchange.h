// SPDX-License-Identifier: Apache-2.0
#pragma once
// Expert parallelism (Lepikhin et al., "GShard", 2021): the ranks of ep have different experts, and rows of tokens
// travel to the ranks of the experts that were chosen for them, and back. A rank gets as many rows as the routers of
// all ranks send, and has memory for some; if more come, they come in rounds, each of whole ranks' rows, so that
// whatever is summed by source and expert does not depend on the memory.

#include <algorithm>
#include <vector>

#include "ds/communicator.h"
#include "ds/layer.h"

namespace ds::model {

// E: the experts of all ranks of ep together, for a rank of tp; k: those of a token. Rows at their source are sorted by
// expert, and lie where sort_choices() has put them; at their destination they are sorted by source, then by expert.
class ExpertExchange {
 public:
  ExpertExchange() = default;
  // room: see ExpertParallelConfig. busiest: the rows that this rank gets in a prediction, as a multiple of its even
  // share.
  ExpertExchange(i64 experts, i64 per_token, double room, const Shard& shard, double busiest = 1);

  i64 ranks() const noexcept { return ranks_; }
  // Those of the communicator, which joins all ranks of sp; each sends to those with its part of sequences.
  i64 members() const noexcept { return ranks_ * sp_; }
  i64 own_experts() const noexcept { return experts_ / ranks_; }
  i64 groups() const noexcept { return ranks_ * own_experts(); }  // of rows that arrive
  // The most rows that arrive in one round, if each rank has R tokens.
  i64 most_rows(i64 R) const noexcept;

  // The part of all [members, E+1] int32 for this rank's offsets [E+1].
  TensorView own_offsets(TensorView all) const { return all.rows(member(rank_), 1).reshaped({all.dim(1)}); }
  // Fills in the offsets of the other ranks. The host waits for them. Throws Errc::OutOfMemory on all members if there
  // are several rounds, and no further one is wanted.
  void agree(const PassContext& ctx, TensorView all) const;
  // Reads what was agreed on before, without messages.
  void recall(const PassContext& ctx, TensorView all) const;
  // The rounds of the pass that was last agreed on or recalled: the same on all members, which make the same calls.
  i64 rounds() const noexcept { return rounds_; }
  // Whether there can be more than one.
  bool may_repeat(i64 R) const noexcept { return most_rows(R) < ranks_ * rows_of_one(R); }
  // The rows that arrive in the round at hand, or in the only one.
  i64 arriving() const noexcept { return arriving_; }
  // groups [groups() + 1] int32 = the offsets of the rows that arrive in this round, to which the next messages belong.
  void begin(const PassContext& ctx, TensorView groups, i64 round) const;
  // The same for the rows from rank q alone, of any round.
  void begin_rank(const PassContext& ctx, TensorView groups, i64 q) const;
  // The part of `groups` for the rows from rank q.
  TensorView of_rank(TensorView groups, i64 q) const { return groups.rows(q * own_experts(), own_experts() + 1); }
  // Complete when the ticket has been waited for; `sorted` must not change before.
  Ticket start_to_experts(const PassContext& ctx, TensorView arrived, TensorView sorted) const;
  void from_experts(const PassContext& ctx, TensorView sorted, TensorView arrived) const;

 private:
  i64 member(i64 rank, i64 sp_rank) const noexcept { return rank * sp_ + sp_rank; }
  i64 member(i64 rank) const noexcept { return member(rank, sp_rank_); }
  const i32* offsets_of(i64 member) const noexcept { return all_.data() + member * (experts_ + 1); }
  const i32* offsets(i64 rank) const noexcept { return offsets_of(member(rank)); }
  struct Run {
    i64 first = 0, count = 0;
  };
  // The most that a rank sends to another.
  i64 rows_of_one(i64 R) const noexcept { return R * std::min(per_token_, own_experts()); }
  i64 rows(i64 from, i64 to, i64 sp_rank) const noexcept;
  i64 rows(i64 from, i64 to) const noexcept { return rows(from, to, sp_rank_); }
  void predict(i64 tokens, i64 tp) const;
  void plan_rounds(i64 tokens) const;
  // comes(q): whether rows come from rank q now; goes(q): whether they go there.
  void begin(const PassContext& ctx, TensorView groups, FunctionRef<bool(i64)> comes,
             FunctionRef<bool(i64)> goes) const;
  Ticket move(const PassContext& ctx, TensorView to, const std::vector<Run>& runs_in, TensorView from,
              const std::vector<Run>& runs_out) const;

  i64 experts_ = 0, per_token_ = 0, ranks_ = 1, rank_ = 0, sp_ = 1, sp_rank_ = 0;
  double room_ = 1, busiest_ = 1;
  bool further_rounds_ = true;
  // The host's numbers of the pass at hand: a layer runs one pass at a time.
  mutable std::vector<i32> all_, groups_;
  mutable std::vector<i64> round_of_;            // [to, from]
  mutable std::vector<Run> sorted_, arrived_;    // of each rank
  mutable std::vector<AllToAllSlice> in_, out_;  // of each member
  mutable i64 rounds_ = 1, arriving_ = 0;
};

}  // namespace ds::model
