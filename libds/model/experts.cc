// SPDX-License-Identifier: Apache-2.0
#include "model/experts.h"

#include "comm/message_tag.h"
#include "ds/communicator.h"

namespace ds::model {
namespace {

// M = R k places. Arrays of the shared expert are last.
enum Saved : size_t {
  kChosen,     // [R,k] int32
  kWeights,    // [R,k]
  kOffsets,    // [experts of this rank + 1] int32
  kPlaces,     // [R,k] int32
  kTokens,     // [M] int32
  kChoices,    // [M] int32
  kScores,     // [R,E]
  kLogits,     // [R,E]
  kGateUp,     // [M,2F]
  kStats,      // [2E+1]
  kScoreGrad,  // [E]
  kSharedOut,  // stream
  kSharedLogit,
  kSharedScore,
  kSharedWeight,  // of each row of the stream, [S,1]
  kSharedChosen,
};
enum Gradient : size_t {
  kDGateUp,       // [M,2F]
  kWeighted,      // [M,F]: the hidden values times the weights of their places
  kDLogits,       // [R,E]
  kDShared,       // stream
  kDSharedLogit,  // [S,1]
};
enum Temporary : size_t {
  kRows,    // [M,C]: inputs, or gradients of outputs, by place
  kOut,     // [M,C]: outputs, or gradients of inputs
  kHidden,  // [M,F]
  kDHidden,
  kPlaceWeights,  // [M,1]
  kDPlaceWeights,
  kDWeights,        // [R,k]
  kDLogits32,       // [R,E]
  kRouterDx,        // [R,C]
  kDSharedWeight,   // [S,1]
  kDSharedLogit32,  // [S,1]
};

TensorView columns_of(TensorView rows, i64 first, i64 count) {
  rows.data = static_cast<char*>(rows.data) + first * dtype_bytes(rows.dtype);
  rows.shape[1] = count;
  return rows;
}

TensorView one_matrix(TensorView m) { return m.reshaped({1, m.dim(0), m.dim(1)}); }

constexpr RouterParams kSharedGate{.sigmoid = true};

}  // namespace

Experts::Experts(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, const Shard& shard)
    : config_(c.experts), shard_(shard), C_(c.hidden), F_(c.experts.intermediate) {
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
  shared_.emplace(Shared{.mlp = GatedMlp(rows, name + ".shared_expert", c, config_.shared, shard, 1),
                         .gated = config_.shared_gate});
  if (shared_->gated)
    shared_->gate = add(whole_row({.name = name + ".shared_expert_gate.weight", .shape = {1, C_}}, shard));
}

ParamRow Experts::cut_experts(ParamRow row) const {
  if (shard_.tp == 1) return row;
  row.whole = row.shape;
  row.shape[0] = own_experts();
  row.slice = {0, {{first_expert(), first_expert() + own_experts()}}};
  return row;
}

std::vector<Linear*> Experts::linears() { return shared_ ? shared_->mlp.linears() : std::vector<Linear*>{}; }

std::vector<size_t> Experts::matrices() const { return {}; }

void Experts::plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const {
  const i64 R = pass.rows(), S = stream_rows(shard_, pass.mode, R), M = R * k();
  const auto work = pass.work, f32 = DType::F32, i32 = DType::I32;
  const bool train = pass.mode == Mode::Train, gated = shared_ && shared_->gated;
  LayerActs a;
  const auto add = [](std::vector<TensorView>& to, std::initializer_list<TensorView> views) {
    to.insert(to.end(), views);
  };
  // A recomputation takes the routing of the forward pass.
  add(a.saved, {p.kept(i32, {R, k()}), p.kept(f32, {R, k()}), p.kept(i32, {own_experts() + 1}), p.kept(i32, {R, k()}),
                p.kept(i32, {M}), p.kept(i32, {M})});
  add(a.saved, {p.kept(f32, {R, E()}), p.kept(f32, {R, E()}), p.saved(work, {M, 2 * F_})});
  add(a.saved, {p.kept(f32, {2 * E() + 1}), p.kept(f32, {E()})});
  if (gated) {
    add(a.saved, {p.saved(work, {S, C_}), p.saved(f32, {S, 1}), p.saved(f32, {S, 1}), p.saved(f32, {S, 1}),
                  p.saved(i32, {S, 1})});
  }
  add(a.temporary, {p.temporary(work, {M, C_}), p.temporary(work, {M, C_}), p.temporary(work, {M, F_})});
  if (train) {
    add(a.gradients, {p.gradient(work, {M, 2 * F_}), p.gradient(work, {M, F_}), p.gradient(work, {R, E()})});
    add(a.temporary, {p.temporary(work, {M, F_}), p.temporary(f32, {M, 1}), p.temporary(f32, {M, 1}),
                      p.temporary(f32, {R, k()}), p.temporary(f32, {R, E()}), p.temporary(work, {R, C_})});
    if (gated) {
      add(a.gradients, {p.gradient(work, {S, C_}), p.gradient(work, {S, 1})});
      add(a.temporary, {p.temporary(f32, {S, 1}), p.temporary(f32, {S, 1})});
    }
  }
  acts.inner.push_back(std::move(a));
  if (shared_) shared_->mlp.plan(acts, p, pass);
}

void Experts::route(const PassContext& ctx, RowViews params, TensorView all, const LayerActs& own) const {
  const auto& s = own.saved;
  ctx.ops.grouped_matmul(s[kLogits], all, one_matrix(params.own[router_]), {}, /*trans_b=*/true, ctx.stream);
  ctx.ops.route(s[kChosen], s[kWeights], s[kScores], s[kLogits], {}, config_.router, ctx.stream);
  ctx.ops.sort_choices(s[kOffsets], s[kPlaces], s[kTokens], s[kChoices], s[kChosen], first_expert(), ctx.stream);
}

// Each rank of sp has the losses of all tokens of its sequences; one of them reports them.
void Experts::add_losses(const PassContext& ctx, const LayerActs& own) const {
  const auto& s = own.saved;
  ctx.ops.router_stats(s[kStats], s[kChosen], s[kScores], s[kLogits], ctx.targets, config_.router, losses(),
                       ctx.stream);
  if (ctx.groups.shard.sp > 1) {
    ctx.groups[Axis::Sp]
        .all_reduce(s[kStats].data, s[kStats].numel(), DType::F32, ReduceOp::Sum,
                    message_text(Axis::Sp, Collective::AllReduce))
        .wait();
  }
  ctx.ops.router_loss(ctx.aux_loss, s[kScoreGrad], s[kStats], k(), losses(), ctx.stream);
  if (ctx.groups.shard.sp_rank > 0) ctx.ops.scaled_sum(ctx.aux_loss, ctx.aux_loss, 0, 0, nullptr, ctx.stream);
}

// rows [M,C] = those of `all` by place.
void Experts::gather(const PassContext& ctx, TensorView rows, TensorView all, const LayerActs& own) const {
  ctx.ops.embedding_fwd(rows, all, own.saved[kTokens], 0, false, ctx.stream);
}

// The inputs of the experts, and from them gate and up.
void Experts::to_hidden(const PassContext& ctx, RowViews params, TensorView all, const LayerActs& own) const {
  gather(ctx, own.temporary[kRows], all, own);
  ctx.ops.grouped_matmul(own.saved[kGateUp], own.temporary[kRows], params.own[gate_up_], own.saved[kOffsets],
                         /*trans_b=*/true, ctx.stream);
}

void Experts::forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                      const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &t = own.temporary;
  if (shared_) {
    forward_shared(ctx, params, y, x, residual, acts);
    residual = y;
  }
  const TensorView all = all_rows(ctx, x);
  route(ctx, params, all, own);
  if (ctx.mode == Mode::Train && adds_loss()) add_losses(ctx, own);
  to_hidden(ctx, params, all, own);
  ctx.ops.swiglu_fwd(t[kHidden], columns_of(s[kGateUp], 0, F_), columns_of(s[kGateUp], F_, F_), ctx.stream);
  ctx.ops.grouped_matmul(t[kOut], t[kHidden], params.own[down_], s[kOffsets], /*trans_b=*/true, ctx.stream);
  ctx.ops.combine_rows(partial_sum(ctx, y), t[kOut], s[kPlaces], s[kWeights], first_term(ctx, residual), ctx.stream);
  sum_partials(ctx, y, residual);
}

void Experts::recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  if (shared_) {
    if (shared_->gated) {
      forward_shared(ctx, params, acts.inner.front().temporary[kRouterDx], x, {}, acts);
    } else {
      shared_->mlp.recompute(ctx, params, x, acts);
    }
  }
  to_hidden(ctx, params, all_rows(ctx, x), acts.inner.front());
}

void Experts::backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                             TensorView residual, const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &g = own.gradients, &t = own.temporary;
  const TensorView gate = columns_of(s[kGateUp], 0, F_), up = columns_of(s[kGateUp], F_, F_);
  if (shared_) {
    backward_shared(ctx, params, dx, dy, x, residual, acts);
    residual = dx;
  }
  // An output's weight is the inner product of its gradient with it, and so that of the hidden gradient with the hidden
  // values, all without the weight: outputs need not be kept.
  gather(ctx, t[kRows], all_rows(ctx, dy), own);
  ctx.ops.grouped_matmul(t[kDHidden], t[kRows], params.own[down_], s[kOffsets], /*trans_b=*/false, ctx.stream);
  ctx.ops.swiglu_fwd(t[kHidden], gate, up, ctx.stream);
  ctx.ops.embedding_fwd(t[kPlaceWeights], s[kWeights].reshaped({s[kWeights].numel(), 1}), s[kChoices], 0, false,
                        ctx.stream);
  ctx.ops.combine_rows(g[kWeighted], t[kHidden], {}, t[kPlaceWeights], {}, ctx.stream);
  ctx.ops.combine_rows_grad(t[kDHidden], t[kDPlaceWeights], t[kDHidden], t[kHidden], {}, t[kPlaceWeights], ctx.stream);
  ctx.ops.swiglu_bwd(columns_of(g[kDGateUp], 0, F_), columns_of(g[kDGateUp], F_, F_), t[kDHidden], gate, up,
                     ctx.stream);
  ctx.ops.grouped_matmul(t[kOut], g[kDGateUp], params.own[gate_up_], s[kOffsets], /*trans_b=*/false, ctx.stream);

  // The router, whose gradient is the same on all ranks of tp.
  const TensorView dweights = t[kDWeights];
  ctx.ops.embedding_fwd(dweights.reshaped({dweights.numel(), 1}), t[kDPlaceWeights],
                        s[kPlaces].reshaped({s[kPlaces].numel()}), 0, false, ctx.stream);
  if (shard_.tp > 1) {
    ctx.groups[Axis::Tp]
        .all_reduce(dweights.data, dweights.numel(), DType::F32, ReduceOp::Sum,
                    message_text(Axis::Tp, Collective::AllReduce))
        .wait();
  }
  const bool losses_too = adds_loss();
  const TensorView none{};
  ctx.ops.route_grad(t[kDLogits32], dweights, s[kChosen], s[kScores], s[kLogits], losses_too ? s[kScoreGrad] : none,
                     losses_too ? s[kStats] : none, ctx.targets, losses_too ? ctx.aux_grad : none, config_.router,
                     losses(), ctx.stream);
  ctx.ops.cast(g[kDLogits], t[kDLogits32], ctx.stream);
  ctx.ops.grouped_matmul(t[kRouterDx], g[kDLogits], one_matrix(params.own[router_]), {}, /*trans_b=*/false, ctx.stream);

  const TensorView from_router = stream_part(ctx, t[kRouterDx]);
  if (residual) ctx.ops.add(from_router, from_router, residual, ctx.stream);
  ctx.ops.combine_rows(partial_sum(ctx, dx), t[kOut], s[kPlaces], {}, first_term(ctx, from_router), ctx.stream);
  sum_partials(ctx, dx, from_router);
}

void Experts::backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                              const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &g = own.gradients;
  const TensorView rows = own.temporary[kRows];
  const auto product = [&](size_t row, TensorView of, TensorView with) {
    ctx.ops.grouped_matmul_grad(grads.own[row], of, with, s[kOffsets], ctx.adds_gradients(), ctx.stream);
  };
  if (grads.own[down_]) {
    gather(ctx, rows, all_rows(ctx, dy), own);
    product(down_, rows, g[kWeighted]);
  }
  if (grads.own[gate_up_] || grads.own[router_]) {
    const TensorView all = all_rows(ctx, x);
    linear_backward_weight(ctx, grads.own[router_], {}, g[kDLogits], all, Orientation::OutIn);
    if (grads.own[gate_up_]) {
      gather(ctx, rows, all, own);
      product(gate_up_, g[kDGateUp], rows);
    }
  }
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
