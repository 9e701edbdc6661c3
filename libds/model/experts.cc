// SPDX-License-Identifier: Apache-2.0
#include "model/experts.h"

#include <fmt/format.h>

#include "comm/message_tag.h"
#include "config/family.h"
#include "ds/communicator.h"
#include "model/models.h"

namespace ds::model {
namespace {

// N = R k places at most on the rank that routes R tokens; M rows that arrive in a round, or N where nothing travels.
enum Saved : size_t {
  kChosen,      // [R,k] int32
  kWeights,     // [R,k]
  kAllOffsets,  // of all ranks of ep
  kOffsets,     // [experts + 1] int32: this rank's among them
  kPlaces,      // [R,k] int32
  kTokens,      // [N] int32
  kChoices,     // [N] int32
  kScores,      // [R,E]
  kLogits,      // [R,E]
  kStats,       // [2E+1]
  kScoreGrad,   // [E]
  kGateUp,      // [M,2F]
  kGroups,      // offsets of the rows that arrive; with ep
  kArrivedX,    // [M,C]; with ep
  kSharedOut,   // stream
  kSharedLogit,
  kSharedScore,
  kSharedWeight,  // [S,1], of each row of the stream
  kSharedChosen,
};
enum Gradient : size_t {
  kDGateUp,    // [M,2F]
  kWeighted,   // [M,F]: the hidden values times the weights of their places
  kDLogits,    // [R,E]
  kDArrived,   // [M,C]: gradients of outputs; with ep
  kSumGateUp,  // fp32, of the matrices; for several rounds
  kSumDown,
  kDShared,       // stream
  kDSharedLogit,  // [S,1]
};
enum Temporary : size_t {
  kRows,        // [N,C], by place: inputs, then outputs; or gradients of outputs, then of inputs
  kHidden,      // [M,F]
  kArrivedOut,  // [M,C]: outputs, or gradients of inputs; with ep
  kDHidden,
  kPlaceWeights,  // [N,1]
  kDPlaceWeights,
  kDWeights,        // [R,k]
  kDLogits32,       // [R,E]
  kRouterDx,        // [R,C]
  kArrivedWeights,  // [M,1]; with ep
  kDArrivedWeights,
  kSortedX,         // [N,C]; for several rounds
  kDSharedWeight,   // [S,1]
  kDSharedLogit32,  // [S,1]
};

TensorView columns_of(TensorView rows, i64 first, i64 count) {
  rows.data = static_cast<char*>(rows.data) + first * dtype_bytes(rows.dtype);
  rows.shape[1] = count;
  return rows;
}

TensorView one_matrix(TensorView m) { return m.reshaped({1, m.dim(0), m.dim(1)}); }
TensorView one_column(TensorView v) { return v.reshaped({v.numel(), 1}); }
TensorView flat(TensorView v) { return v ? v.reshaped({v.numel()}) : v; }

constexpr RouterParams kSharedGate{.sigmoid = true};

}  // namespace

Experts::Experts(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, const Shard& shard)
    : config_(c.experts),
      shard_(shard),
      C_(c.hidden),
      F_(c.experts.intermediate),
      exchange_(c.experts.count / shard.tp, c.experts.per_token, shard.expert_room, shard) {
  const auto add = [&](ParamRow row) {
    row.std = c.initializer_range;
    row.decay = true;
    rows.push_back(std::move(row));
    return rows.size() - 1;
  };
  // Every rank of tp routes all rows.
  router_ = add(equal_row({.name = name + ".gate.weight", .shape = {E(), C_}}, shard));
  gate_up_ = add(cut_experts({.name = name + ".experts.gate_up_proj", .shape = {E(), 2 * F_, C_}}));
  down_ = add(cut_experts({.name = name + ".experts.down_proj", .shape = {E(), C_, F_}}));
  if (config_.shared == 0) return;
  const std::string shared = fmt::format("{}.{}", name, spec_of(c.family).experts.shared);
  shared_.emplace(Shared{.mlp = GatedMlp(rows, shared, c, config_.shared, shard, 1), .gated = config_.shared_gate});
  if (shared_->gated)
    shared_->gate = add(whole_row({.name = name + ".shared_expert_gate.weight", .shape = {1, C_}}, shard));
}

ParamRow Experts::cut_experts(ParamRow row) const {
  row.tokens = static_cast<double>(k()) / static_cast<double>(E());
  if (shard_.tp * shard_.ep == 1) return row;
  const i64 n = exchange_.own_experts(), first = first_expert() + shard_.ep_rank * n;
  row.whole = row.shape;
  row.shape[0] = n;
  row.slice = {0, {{first, first + n}}};
  if (travels()) row.group = kExpertGroup;
  return row;
}

std::vector<Linear*> Experts::linears() { return shared_ ? shared_->mlp.linears() : std::vector<Linear*>{}; }

std::vector<size_t> Experts::matrices() const { return {}; }

void Experts::plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const {
  const i64 R = pass.rows(), S = stream_rows(shard_, pass.mode, R), N = R * k(), M = exchange_.most_rows(R),
            n = exchange_.own_experts();
  const auto work = pass.work, f32 = DType::F32, i32 = DType::I32;
  const bool train = pass.mode == Mode::Train, gated = shared_ && shared_->gated,
             repeats = travels() && exchange_.may_repeat(R);
  const TensorView none{};
  LayerActs a;
  const auto add = [](std::vector<TensorView>& to, std::initializer_list<TensorView> views) {
    to.insert(to.end(), views);
  };
  // A recomputation takes the routing of the forward pass.
  const auto kept = [&](DType dtype, std::initializer_list<i64> shape) {
    return train ? p.kept(dtype, shape) : p.saved(dtype, shape);
  };
  const TensorView all_offsets = kept(i32, {exchange_.members(), E() / shard_.tp + 1});
  add(a.saved, {kept(i32, {R, k()}), kept(f32, {R, k()}), all_offsets, exchange_.own_offsets(all_offsets),
                kept(i32, {R, k()}), kept(i32, {N}), kept(i32, {N}), kept(f32, {R, E()}), kept(f32, {R, E()}),
                kept(f32, {2 * E() + 1}), kept(f32, {E()}), p.saved(work, {M, 2 * F_})});
  add(a.saved, {travels() ? kept(i32, {exchange_.groups() + 1}) : none, travels() ? p.saved(work, {M, C_}) : none});
  if (gated) {
    add(a.saved, {p.saved(work, {S, C_}), p.saved(f32, {S, 1}), p.saved(f32, {S, 1}), p.saved(f32, {S, 1}),
                  p.saved(i32, {S, 1})});
  }
  add(a.temporary,
      {p.temporary(work, {N, C_}), p.temporary(work, {M, F_}), travels() ? p.temporary(work, {M, C_}) : none});
  if (train) {
    add(a.gradients, {p.gradient(work, {M, 2 * F_}), p.gradient(work, {M, F_}), p.gradient(work, {R, E()}),
                      travels() ? p.gradient(work, {M, C_}) : none, repeats ? p.gradient(f32, {n, 2 * F_, C_}) : none,
                      repeats ? p.gradient(f32, {n, C_, F_}) : none});
    add(a.temporary,
        {p.temporary(work, {M, F_}), p.temporary(f32, {N, 1}), p.temporary(f32, {N, 1}), p.temporary(f32, {R, k()}),
         p.temporary(f32, {R, E()}), p.temporary(work, {R, C_}), travels() ? p.temporary(f32, {M, 1}) : none,
         travels() ? p.temporary(f32, {M, 1}) : none, repeats ? p.temporary(work, {N, C_}) : none});
    if (gated) {
      add(a.gradients, {p.gradient(work, {S, C_}), p.gradient(work, {S, 1})});
      add(a.temporary, {p.temporary(f32, {S, 1}), p.temporary(f32, {S, 1})});
    }
  }
  acts.inner.push_back(std::move(a));
  if (shared_) shared_->mlp.plan(acts, p, pass);
}

TensorView Experts::offsets(const LayerActs& own) const { return own.saved[travels() ? kGroups : kOffsets]; }

void Experts::route(const PassContext& ctx, RowViews params, TensorView all, const LayerActs& own) const {
  const auto& s = own.saved;
  ctx.ops.grouped_matmul(s[kLogits], all, one_matrix(params.own[router_]), {}, /*trans_b=*/true, ctx.stream);
  ctx.ops.route(s[kChosen], s[kWeights], s[kScores], s[kLogits], {}, config_.router, ctx.stream);
  ctx.ops.sort_choices(s[kOffsets], s[kPlaces], s[kTokens], s[kChoices], s[kChosen], first_expert(), ctx.stream);
}

// Counts tokens, and makes losses of them. Each rank of sp has the losses of all tokens of its sequences; one of them
// reports them.
void Experts::count(const PassContext& ctx, const LayerActs& own) const {
  const auto& s = own.saved;
  const TensorView stats = s[kStats];
  ctx.ops.router_stats(stats, s[kChosen], s[kScores], s[kLogits], ctx.targets, config_.router, losses(), ctx.stream);
  if (ctx.groups.shard.sp > 1) {
    ctx.groups[Axis::Sp]
        .all_reduce(stats.data, stats.numel(), DType::F32, ReduceOp::Sum, message_text(Axis::Sp, Collective::AllReduce))
        .wait();
  }
  ctx.ops.cast(ctx.counts.rows(0, E()), stats.rows(0, E()), ctx.stream);
  if (!adds_loss()) return;
  ctx.ops.router_loss(ctx.aux_loss, s[kScoreGrad], stats, k(), losses(), ctx.stream);
  if (ctx.groups.shard.sp_rank > 0) ctx.ops.scaled_sum(ctx.aux_loss, ctx.aux_loss, 0, 0, nullptr, ctx.stream);
}

// rows [N,C] = those of `all` by place.
void Experts::sort(const PassContext& ctx, TensorView rows, TensorView all, const LayerActs& own) const {
  ctx.ops.embedding_fwd(rows, all, own.saved[kTokens], 0, false, ctx.stream);
}

// The rows of this round where the experts are: `to`, or where they are anyway.
TensorView Experts::arrive(const PassContext& ctx, TensorView to, TensorView sorted) const {
  if (!travels()) return sorted;
  exchange_.to_experts(ctx, to, sorted);
  return to;
}

// Gate and up from the inputs of the experts.
void Experts::to_hidden(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& own) const {
  ctx.ops.grouped_matmul(own.saved[kGateUp], x, params.own[gate_up_], offsets(own), /*trans_b=*/true, ctx.stream);
}

void Experts::forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                      const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &t = own.temporary;
  if (shared_) {
    forward_shared(ctx, params, y, x, residual, acts);
    residual = y;
  }
  const TensorView all = all_rows(ctx, x), rows = t[kRows];
  route(ctx, params, all, own);
  if (ctx.mode == Mode::Train) count(ctx, own);
  sort(ctx, rows, all, own);
  if (travels()) {
    exchange_.agree(ctx, s[kAllOffsets]);
    if (ctx.mode == Mode::Train && ctx.host != nullptr) ctx.host->add_rounds(exchange_.rounds() - 1);
  }
  for (i64 round = 0; round < exchange_.rounds(); ++round) {
    if (travels()) exchange_.begin(ctx, s[kGroups], round);
    to_hidden(ctx, params, arrive(ctx, s[kArrivedX], rows), own);
    ctx.ops.swiglu_fwd(t[kHidden], columns_of(s[kGateUp], 0, F_), columns_of(s[kGateUp], F_, F_), ctx.stream);
    const TensorView out = travels() ? t[kArrivedOut] : rows;
    ctx.ops.grouped_matmul(out, t[kHidden], params.own[down_], offsets(own), /*trans_b=*/true, ctx.stream);
    if (travels()) exchange_.from_experts(ctx, rows, out);
  }
  ctx.ops.combine_rows(partial_sum(ctx, y), rows, s[kPlaces], s[kWeights], first_term(ctx, residual), ctx.stream);
  sum_partials(ctx, y, residual);
}

void Experts::recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &t = own.temporary;
  if (shared_ && shared_->gated) {
    forward_shared(ctx, params, t[kRouterDx].rows(0, x.dim(0)), x, {}, acts);
  } else if (shared_) {
    shared_->mlp.recompute(ctx, params, x, acts);
  }
  sort(ctx, t[kRows], all_rows(ctx, x), own);
  if (travels()) {
    exchange_.recall(ctx, s[kAllOffsets]);
    if (exchange_.rounds() > 1) return;  // the backward pass does it, round by round
    exchange_.begin(ctx, s[kGroups], 0);
  }
  to_hidden(ctx, params, arrive(ctx, s[kArrivedX], t[kRows]), own);
}

void Experts::backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                             TensorView residual, const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &t = own.temporary;
  if (shared_) {
    backward_shared(ctx, params, dx, dy, x, residual, acts);
    residual = dx;
  }
  if (travels()) exchange_.recall(ctx, s[kAllOffsets]);
  // Ranks of tp may have different numbers of rounds, and gather rows together.
  if (exchange_.rounds() > 1 || (ctx.groups.shard.sequence && travels() && exchange_.may_repeat(ctx.B * ctx.T)))
    sort(ctx, t[kSortedX], all_rows(ctx, x), own);
  const TensorView rows = t[kRows];
  sort(ctx, rows, all_rows(ctx, dy), own);
  ctx.ops.embedding_fwd(t[kPlaceWeights], one_column(s[kWeights]), s[kChoices], 0, false, ctx.stream);
  if (exchange_.rounds() > 1) {
    backward_rounds(ctx, params, own);
  } else if (travels()) {
    exchange_.begin(ctx, s[kGroups], 0);
    backward_round(ctx, params, own);
  } else {
    backward_experts(ctx, params, rows, rows, t[kPlaceWeights], t[kDPlaceWeights], own);
  }
  backward_router(ctx, params, own);

  const TensorView from_router = stream_part(ctx, t[kRouterDx]);
  if (residual) ctx.ops.add(from_router, from_router, residual, ctx.stream);
  ctx.ops.combine_rows(partial_sum(ctx, dx), rows, s[kPlaces], {}, first_term(ctx, from_router), ctx.stream);
  sum_partials(ctx, dx, from_router);
}

// A weight's gradient is the inner product of an output and its gradient, and so that of the hidden values and their
// gradient, both as if the weight were 1: outputs need not be kept. dx may be dy.
void Experts::backward_experts(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy,
                               TensorView weights, TensorView dweights, const LayerActs& own) const {
  const auto &g = own.gradients, &t = own.temporary;
  const TensorView gate_up = own.saved[kGateUp], gate = columns_of(gate_up, 0, F_), up = columns_of(gate_up, F_, F_);
  ctx.ops.grouped_matmul(t[kDHidden], dy, params.own[down_], offsets(own), /*trans_b=*/false, ctx.stream);
  ctx.ops.swiglu_fwd(t[kHidden], gate, up, ctx.stream);
  ctx.ops.combine_rows(g[kWeighted], t[kHidden], {}, weights, {}, ctx.stream);
  ctx.ops.combine_rows_grad(t[kDHidden], dweights, t[kDHidden], t[kHidden], {}, weights, ctx.stream);
  ctx.ops.swiglu_bwd(columns_of(g[kDGateUp], 0, F_), columns_of(g[kDGateUp], F_, F_), t[kDHidden], gate, up,
                     ctx.stream);
  ctx.ops.grouped_matmul(dx, g[kDGateUp], params.own[gate_up_], offsets(own), /*trans_b=*/false, ctx.stream);
}

// The same for what arrives in the round that has begun.
void Experts::backward_round(const PassContext& ctx, RowViews params, const LayerActs& own) const {
  const auto &g = own.gradients, &t = own.temporary;
  exchange_.to_experts(ctx, g[kDArrived], t[kRows]);
  exchange_.to_experts(ctx, t[kArrivedWeights], t[kPlaceWeights]);
  backward_experts(ctx, params, t[kArrivedOut], g[kDArrived], t[kArrivedWeights], t[kDArrivedWeights], own);
  exchange_.from_experts(ctx, t[kRows], t[kArrivedOut]);
  exchange_.from_experts(ctx, t[kDPlaceWeights], t[kDArrivedWeights]);
}

// Several rounds: what the forward pass has kept is of the last one.
void Experts::backward_rounds(const PassContext& ctx, RowViews params, const LayerActs& own) const {
  const auto &s = own.saved, &g = own.gradients;
  for (i64 round = 0; round < exchange_.rounds(); ++round) {
    exchange_.begin(ctx, s[kGroups], round);
    to_hidden(ctx, params, arrive(ctx, s[kArrivedX], own.temporary[kSortedX]), own);
    backward_round(ctx, params, own);
    ctx.ops.grouped_matmul_grad(g[kSumDown], g[kDArrived], g[kWeighted], s[kGroups], round > 0, ctx.stream);
    ctx.ops.grouped_matmul_grad(g[kSumGateUp], g[kDGateUp], s[kArrivedX], s[kGroups], round > 0, ctx.stream);
  }
}

// All ranks of tp have the same gradients of logits.
void Experts::backward_router(const PassContext& ctx, RowViews params, const LayerActs& own) const {
  const auto &s = own.saved, &g = own.gradients, &t = own.temporary;
  const TensorView dweights = t[kDWeights], none{};
  ctx.ops.embedding_fwd(one_column(dweights), t[kDPlaceWeights], flat(s[kPlaces]), 0, false, ctx.stream);
  if (shard_.tp > 1) {
    ctx.groups[Axis::Tp]
        .all_reduce(dweights.data, dweights.numel(), DType::F32, ReduceOp::Sum,
                    message_text(Axis::Tp, Collective::AllReduce))
        .wait();
  }
  const bool more = adds_loss();
  ctx.ops.route_grad(t[kDLogits32], dweights, s[kChosen], s[kScores], s[kLogits], more ? s[kScoreGrad] : none,
                     more ? s[kStats] : none, ctx.targets, more ? ctx.aux_grad : none, config_.router, losses(),
                     ctx.stream);
  ctx.ops.cast(g[kDLogits], t[kDLogits32], ctx.stream);
  ctx.ops.grouped_matmul(t[kRouterDx], g[kDLogits], one_matrix(params.own[router_]), {}, /*trans_b=*/false, ctx.stream);
}

void Experts::backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                              const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &g = own.gradients;
  if (travels()) exchange_.recall(ctx, s[kAllOffsets]);
  const bool summed = exchange_.rounds() > 1;
  // A part is what comes from one rank.
  const TensorView groups = ctx.part < 0 ? offsets(own) : exchange_.of_rank(offsets(own), ctx.part);
  const auto product = [&](size_t row, TensorView of, TensorView with) {
    ctx.ops.grouped_matmul_grad(grads.own[row], of, with, groups, ctx.adds_gradients(), ctx.stream);
  };
  const auto sorted = [&](TensorView stream) {
    sort(ctx, own.temporary[kRows], all_rows(ctx, stream), own);
    return own.temporary[kRows];
  };
  if (summed) {
    // Several rounds leave only a sum, which is the first part; the others are zero.
    const auto rounded = [&](size_t row, TensorView sum) {
      if (ctx.part > 0) ctx.ops.scaled_sum(flat(sum), flat(sum), 0, 0, nullptr, ctx.stream);
      round_gradient(ctx, flat(grads.own[row]), flat(sum));
    };
    rounded(down_, g[kSumDown]);
    rounded(gate_up_, g[kSumGateUp]);
  } else {
    if (grads.own[down_]) product(down_, travels() ? g[kDArrived] : sorted(dy), g[kWeighted]);
    if (grads.own[gate_up_]) product(gate_up_, g[kDGateUp], travels() ? s[kArrivedX] : sorted(x));
  }
  if (ctx.part > 0) return;
  if (grads.own[router_])
    linear_backward_weight(ctx, grads.own[router_], {}, g[kDLogits], all_rows(ctx, x), Orientation::OutIn);
  if (!shared_) return;
  if (shared_->gated)
    linear_backward_weight(ctx, grads.own[shared_->gate], {}, g[kDSharedLogit], x, Orientation::OutIn);
  shared_->mlp.backward_weight(ctx, grads, shared_->gated ? g[kDShared] : dy, x, acts);
}

void Experts::forward_shared(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                             const LayerActs& acts) const {
  if (!shared_->gated) return shared_->mlp.forward(ctx, params, y, x, residual, acts);
  const auto& s = acts.inner.front().saved;
  shared_->mlp.forward(ctx, params, s[kSharedOut], x, {}, acts);
  ctx.ops.grouped_matmul(s[kSharedLogit], x, one_matrix(params.own[shared_->gate]), {}, /*trans_b=*/true, ctx.stream);
  ctx.ops.route(s[kSharedChosen], s[kSharedWeight], s[kSharedScore], s[kSharedLogit], {}, kSharedGate, ctx.stream);
  ctx.ops.combine_rows(y, s[kSharedOut], {}, s[kSharedWeight], residual, ctx.stream);
}

void Experts::backward_shared(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                              TensorView residual, const LayerActs& acts) const {
  if (!shared_->gated) return shared_->mlp.backward_input(ctx, params, dx, dy, x, residual, acts);
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &g = own.gradients, &t = own.temporary;
  ctx.ops.combine_rows_grad(g[kDShared], t[kDSharedWeight], dy, s[kSharedOut], {}, s[kSharedWeight], ctx.stream);
  ctx.ops.route_grad(t[kDSharedLogit32], t[kDSharedWeight], s[kSharedChosen], s[kSharedScore], s[kSharedLogit], {}, {},
                     {}, {}, kSharedGate, {}, ctx.stream);
  ctx.ops.cast(g[kDSharedLogit], t[kDSharedLogit32], ctx.stream);
  shared_->mlp.backward_input(ctx, params, dx, g[kDShared], x, residual, acts);
  ctx.ops.matmul(dx, g[kDSharedLogit], params.own[shared_->gate], {}, {}, dx, {}, ctx.stream);
}

}  // namespace ds::model
