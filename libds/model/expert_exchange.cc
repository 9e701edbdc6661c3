// SPDX-License-Identifier: Apache-2.0
#include "model/expert_exchange.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "comm/message_tag.h"

namespace ds::model {

ExpertExchange::ExpertExchange(i64 experts, i64 per_token, double room, const Shard& shard, double busiest)
    : experts_(experts),
      per_token_(per_token),
      ranks_(shard.ep),
      rank_(shard.ep_rank),
      sp_(shard.sp),
      sp_rank_(shard.sp_rank),
      room_(room / shard.tp),
      busiest_(busiest),
      further_rounds_(shard.expert_rounds) {
  const auto n = static_cast<size_t>(ranks_), all = static_cast<size_t>(members());
  all_.resize(all * static_cast<size_t>(experts_ + 1));
  groups_.resize(static_cast<size_t>(groups()) + 1);
  round_of_.resize(n * n);
  sorted_.resize(n);
  arrived_.resize(n);
  in_.resize(all);
  out_.resize(all);
}

i64 ExpertExchange::most_rows(i64 R) const noexcept {
  if (ranks_ == 1) return R * per_token_;
  const i64 of_one = rows_of_one(R);
  return std::clamp(static_cast<i64>(std::ceil(room_ * static_cast<double>(R * per_token_))), of_one, ranks_ * of_one);
}

i64 ExpertExchange::rows(i64 from, i64 to, i64 sp_rank) const noexcept {
  const i32* const of_rank = offsets_of(member(from, sp_rank)) + to * own_experts();
  return of_rank[own_experts()] - of_rank[0];
}

void ExpertExchange::agree(const PassContext& ctx, TensorView all) const {
  const AllGatherSegment segment{all.data, all.bytes() / members()};
  ctx.groups[Axis::Ep].all_gather({&segment, 1}, message_text(Axis::Ep, Collective::AllGather)).wait();
  recall(ctx, all);
  if (further_rounds_ || rounds_ == 1) return;
  i64 most = 0;
  for (i64 sp_rank = 0; sp_rank < sp_; ++sp_rank) {
    for (i64 to = 0; to < ranks_; ++to) {
      i64 sum = 0;
      for (i64 from = 0; from < ranks_; ++from) sum += rows(from, to, sp_rank);
      most = std::max(most, sum);
    }
  }
  throw Error(Errc::OutOfMemory,
              fmt::format("{} rows of tokens go to the experts of one rank, which has room for {}: raise "
                          "expert_parallel.room, or leave out expert_parallel.further_rounds",
                          most, most_rows(std::max(ctx.B * ctx.T, ctx.largest))));
}

void ExpertExchange::recall(const PassContext& ctx, TensorView all) const {
  const i64 tokens = std::max(ctx.B * ctx.T, ctx.largest);
  if (ctx.host != nullptr) {
    ctx.host->download(all_.data(), all.data, all.bytes());
  } else {
    predict(tokens, ctx.groups.shard.tp);
  }
  plan_rounds(tokens);
}

// In a dry run every expert of a rank gets the same share, and so does every rank, but for this one.
void ExpertExchange::predict(i64 tokens, i64 tp) const {
  const i64 sent = tokens * per_token_ / tp,
            here = std::min(rows_of_one(tokens), std::lround(static_cast<double>(sent / ranks_) * busiest_)),
            elsewhere = ranks_ > 1 ? std::max<i64>(sent - here, 0) / (ranks_ - 1) : 0;
  for (i64 q = 0; q < members(); ++q) {
    i32* at = all_.data() + q * (experts_ + 1);
    i64 sum = *at = 0;
    for (i64 rank = 0; rank < ranks_; ++rank) {
      const i64 rows = rank == rank_ ? here : elsewhere;
      for (i64 e = 1; e <= own_experts(); ++e) *++at = narrow<i32>(sum + rows * e / own_experts());
      sum += rows;
    }
  }
}

// A rank takes the rows of as many ranks in a round as it has room for, in the order of ranks.
void ExpertExchange::plan_rounds(i64 tokens) const {
  const i64 most = most_rows(tokens);
  rounds_ = 1;
  arriving_ = 0;
  for (i64 q = 0; q < ranks_; ++q) arriving_ += rows(q, rank_);
  for (i64 sp_rank = 0; sp_rank < sp_; ++sp_rank) {
    for (i64 to = 0; to < ranks_; ++to) {
      i64 round = 0, taken = 0;
      for (i64 from = 0; from < ranks_; ++from) {
        const i64 n = rows(from, to, sp_rank);
        if (taken + n > most) ++round, taken = 0;
        taken += n;
        if (sp_rank == sp_rank_) round_of_[static_cast<size_t>(to * ranks_ + from)] = round;
      }
      rounds_ = std::max(rounds_, round + 1);
    }
  }
}

void ExpertExchange::begin(const PassContext& ctx, TensorView groups, i64 round) const {
  const auto takes = [&](i64 to, i64 from) { return round_of_[static_cast<size_t>(to * ranks_ + from)] == round; };
  begin(
      ctx, groups, [&](i64 q) { return takes(rank_, q); }, [&](i64 q) { return takes(q, rank_); });
}

void ExpertExchange::begin_rank(const PassContext& ctx, TensorView groups, i64 source) const {
  begin(
      ctx, groups, [&](i64 q) { return q == source; }, [&](i64) { return rank_ == source; });
}

void ExpertExchange::begin(const PassContext& ctx, TensorView groups, FunctionRef<bool(i64)> comes,
                           FunctionRef<bool(i64)> goes) const {
  i64 at = 0, group = 0;
  for (i64 q = 0; q < ranks_; ++q) {
    const i32 *const own = offsets(rank_), *const theirs = offsets(q);
    sorted_[static_cast<size_t>(q)] = {own[q * own_experts()], goes(q) ? rows(rank_, q) : 0};
    arrived_[static_cast<size_t>(q)] = {at, comes(q) ? rows(q, rank_) : 0};
    for (i64 e = rank_ * own_experts(); e < (rank_ + 1) * own_experts(); ++e) {
      groups_[static_cast<size_t>(group++)] = narrow<i32>(at);
      if (comes(q)) at += theirs[e + 1] - theirs[e];
    }
  }
  groups_[static_cast<size_t>(group)] = narrow<i32>(at);
  arriving_ = at;
  if (ctx.host != nullptr) ctx.host->upload(groups.data, groups_.data(), groups.bytes());
}

Ticket ExpertExchange::start_to_experts(const PassContext& ctx, TensorView arrived, TensorView sorted) const {
  return move(ctx, arrived, arrived_, sorted, sorted_);
}
void ExpertExchange::from_experts(const PassContext& ctx, TensorView sorted, TensorView arrived) const {
  move(ctx, sorted, sorted_, arrived, arrived_).wait();
}

Ticket ExpertExchange::move(const PassContext& ctx, TensorView to, const std::vector<Run>& runs_in, TensorView from,
                            const std::vector<Run>& runs_out) const {
  const i64 row = to.dim(1) * dtype_bytes(to.dtype);
  for (i64 q = 0; q < ranks_; ++q) {
    const auto bytes = [&](const std::vector<Run>& runs) {
      const Run& run = runs[static_cast<size_t>(q)];
      return AllToAllSlice{run.first * row, run.count * row};
    };
    in_[static_cast<size_t>(member(q))] = bytes(runs_in);
    out_[static_cast<size_t>(member(q))] = bytes(runs_out);
  }
  return ctx.groups[Axis::Ep].all_to_allv(from.data, out_, to.data, in_, message_text(Axis::Ep, Collective::AllToAllV));
}

}  // namespace ds::model
