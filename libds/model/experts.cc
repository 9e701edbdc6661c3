// SPDX-License-Identifier: Apache-2.0
#include "model/experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "comm/message_tag.h"
#include "config/family.h"
#include "ds/communicator.h"
#include "model/models.h"

namespace ds::model {
namespace {

// N = R k places at most on the rank that routes R tokens; M rows that arrive in a round, or N where nothing travels.
enum Saved : size_t {
  kChosen,      // [R,k] int32
  kWeights,     // [R,k], by which rows are added
  kOfRouter,    // [R,k]: the router's weights; with parts
  kAllOffsets,  // of all ranks of ep
  kOffsets,     // [experts + 1] int32: this rank's among them
  kPlaces,      // [R,k] int32
  kTokens,      // [N] int32
  kChoices,     // [N] int32
  kScores,      // [R,E]
  kLogits,      // [R,E]
  kStats,       // RouterStats, of the micro-batch and, if losses are those of sequences, of each
  kScoreGrad,   // [E], or for each sequence; none if ctx.shared_stats has it
  kPre,         // [M,W]
  kGroups,      // offsets of the rows that arrive; with ep
  kArrivedX,    // [M,C]; with ep
};
enum Gradient : size_t {
  kDPre,          // [M,W]
  kWeighted,      // [M,F]: the hidden values times the weights of their places
  kDLogits,       // [R,E]
  kDArrived,      // [M,C]: gradients of outputs; with ep
  kSentDPre,      // [N,W], by place; for several rounds
  kSentWeighted,  // [N,F]
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
  kSortedX,  // [N,C]; for several rounds
  kSumUp,    // fp32, of the experts' parameters; for several rounds
  kSumDown,
  kSumUpBias,
  kSumDownBias,
  kBiasDot,      // [M,1]; with biases
  kOneLoss,      // [1]
  kBatchCounts,  // [E]: of all ranks; if the loss compares counts of the global batch
};

TensorView one_matrix(TensorView m) { return m.reshaped({1, m.dim(0), m.dim(1)}); }
TensorView one_column(TensorView v) { return v.reshaped({v.numel(), 1}); }
TensorView flat(TensorView v) { return v ? v.reshaped({v.numel()}) : v; }

// The rows of the busiest of so many ranks that divide the experts of a block, as a multiple of their mean.
double busiest_of(const ExpertsConfig& c, i64 block, i64 ranks) {
  if (c.loads.empty() || c.loads[static_cast<size_t>(block)].empty()) return 1;
  const std::vector<i64>& loads = c.loads[static_cast<size_t>(block)];
  const i64 n = c.count / ranks;
  i64 most = 0, all = 0;
  for (auto own = loads.begin(); own < loads.end(); own += n) {
    const i64 sum = std::accumulate(own, own + n, i64{0});
    most = std::max(most, sum);
    all += sum;
  }
  return all > 0 ? static_cast<double>(most * ranks) / static_cast<double>(all) : 1;
}

bool any_sparse_after(const ExpertsConfig& c, i64 block) {
  for (i64 l = block + 1; l < std::ssize(c.layers); ++l) {
    if (c.sparse(l)) return true;
  }
  return false;
}

}  // namespace

Experts::Experts(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 layer,
                 const Shard& shard)
    : config_(c.experts),
      shard_(shard),
      C_(c.hidden),
      F_(c.experts.intermediate),
      last_(!any_sparse_after(c.experts, layer - 1)),
      busiest_(busiest_of(c.experts, layer - 1, shard.tp * shard.ep)),
      gating_(c, shard, layer),
      mlp_(c),
      exchange_(c.experts.count / shard.tp, c.experts.per_token, shard.expert_room, shard, busiest_) {
  const auto add = [&](ParamRow row) {
    row.std = c.initializer_range;
    row.decay = true;
    rows.push_back(std::move(row));
    return rows.size() - 1;
  };
  // Every rank of tp routes all rows.
  router_ = add(equal_row({.name = name + ".gate.weight", .shape = {E(), C_}}, shard));
  if (config_.balancing_bias) bias_ = add(balancing_bias(name + ".gate"));
  mlp_.declare(name + ".experts", c, [&](ParamRow row) {
    rows.push_back(cut_experts(std::move(row)));
    return rows.size() - 1;
  });
  if (config_.shared > 0) shared_.emplace(rows, name, c, shard);
}

ParamRow Experts::balancing_bias(const std::string& router) const {
  ParamRow row =
      equal_row({.name = fmt::format("{}{}", router, kBalancingBias), .shape = {E()}, .init = Init::Zeros}, shard_);
  row.trained = false;
  row.group = balance_group(expert_splits(shard_));
  row.balances = narrow<i64>(router_);
  return row;
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

std::vector<Linear*> Experts::linears() { return shared_ ? shared_->linears() : std::vector<Linear*>{}; }

std::vector<size_t> Experts::matrices() const { return {}; }

void Experts::plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const {
  const i64 R = pass.rows(), N = R * k(), M = exchange_.most_rows(std::max(R, pass.largest)),
            n = exchange_.own_experts();
  const auto work = pass.work, f32 = DType::F32, i32 = DType::I32;
  const bool train = pass.mode == Mode::Train, repeats = travels() && exchange_.may_repeat(R), biased = mlp_.biased();
  const i64 sequences = by_sequence() && train ? pass.B : 0;
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
  add(a.saved, {kept(i32, {R, k()}), kept(f32, {R, k()}), has_parts() ? kept(f32, {R, k()}) : none, all_offsets,
                exchange_.own_offsets(all_offsets), kept(i32, {R, k()}), kept(i32, {N}), kept(i32, {N}),
                kept(f32, {R, E()}), kept(f32, {R, E()}), kept(f32, {(1 + sequences) * RouterStats{E()}.size()}),
                pools() ? none : kept(f32, {std::max<i64>(sequences, 1) * E()}), p.saved(work, {M, mlp_.width()})});
  add(a.saved, {travels() ? kept(i32, {exchange_.groups() + 1}) : none, travels() ? p.saved(work, {M, C_}) : none});
  add(a.temporary,
      {p.temporary(work, {N, C_}), p.temporary(work, {M, F_}), travels() ? p.temporary(work, {M, C_}) : none});
  if (train) {
    add(a.gradients,
        {p.gradient(work, {M, mlp_.width()}), p.gradient(work, {M, F_}), p.gradient(work, {R, E()}),
         travels() ? p.gradient(work, {M, C_}) : none, repeats ? p.gradient(work, {N, mlp_.width()}) : none,
         repeats ? p.gradient(work, {N, F_}) : none});
    // The gradient of a bias needs the weights again.
    const auto weights = [&](i64 rows) { return biased ? p.gradient(f32, {rows, 1}) : p.temporary(f32, {rows, 1}); };
    add(a.temporary, {p.temporary(work, {M, F_}), weights(N), p.temporary(f32, {N, 1}), p.temporary(f32, {R, k()}),
                      p.temporary(f32, {R, E()}), p.temporary(work, {R, C_}), travels() ? weights(M) : none,
                      travels() ? p.temporary(f32, {M, 1}) : none, repeats ? p.temporary(work, {N, C_}) : none});
    const std::vector<std::vector<i64>> shapes = mlp_.shapes(n);
    for (size_t i = 0; i < 4; ++i) {
      if (!repeats || i >= shapes.size()) {
        a.temporary.push_back(none);
      } else if (const std::vector<i64>& shape = shapes[i]; shape.size() == 2) {
        a.temporary.push_back(p.temporary(f32, {shape[0], shape[1]}));
      } else {
        a.temporary.push_back(p.temporary(f32, {shape[0], shape[1], shape[2]}));
      }
    }
    add(a.temporary, {biased ? p.temporary(f32, {M, 1}) : none, p.temporary(f32, {1}),
                      over_batch() ? p.temporary(f32, {E()}) : none});
  }
  a.inner.push_back(gating_.plan(p, pass));
  acts.inner.push_back(std::move(a));
  if (shared_) shared_->plan(acts, p, pass);
}

TensorView Experts::offsets(const LayerActs& own) const { return own.saved[travels() ? kGroups : kOffsets]; }

TensorView Experts::expected(const PassContext& ctx, TensorView rows) const {
  if (!rows || !ctx.predicts) return rows;
  const double own = static_cast<double>(ctx.B * ctx.T * k()) * busiest_ / shard_.tp;
  const i64 n = travels() ? exchange_.arriving() : std::lround(own);
  return rows.rows(0, std::clamp<i64>(n, 1, rows.dim(0)));
}

void Experts::route(const PassContext& ctx, RowViews params, TensorView all, const LayerActs& acts) const {
  const LayerActs &own = acts.inner.front(), &gating = own.inner.front();
  const auto& s = own.saved;
  const TensorView weights = s[has_parts() ? kOfRouter : kWeights];
  ctx.ops.grouped_matmul(s[kLogits], gating_.router_input(ctx, all, gating), one_matrix(params.own[router_]), {},
                         /*trans_b=*/true, ctx.stream);
  gating_.round(ctx, s[kLogits], gating);
  gating_.choose(ctx, s[kChosen], weights, s[kScores], s[kLogits], bias_ ? params.own[*bias_] : TensorView{}, gating);
  ctx.ops.sort_choices(s[kOffsets], s[kPlaces], s[kTokens], s[kChoices], gating_.kept(s[kChosen], gating),
                       first_expert(), ctx.stream);
  if (!has_parts()) return;
  shared_->weigh_parts(ctx, params, all, acts);
  ctx.ops.combine_rows(s[kWeights], weights, {}, shared_->experts_weight(acts), {}, ctx.stream);
}

void Experts::count_rows(const PassContext& ctx, const LayerActs& own, TensorView stats, i64 first, i64 count) const {
  const auto& s = own.saved;
  const auto rows = [&](TensorView of) { return of ? of.rows(first * ctx.T, count * ctx.T) : of; };
  ctx.ops.router_stats(stats, rows(s[kChosen]), rows(gating_.dropped(own.inner.front())), rows(s[kScores]),
                       rows(s[kLogits]), rows(ctx.targets), config_.router, losses(0, 0), ctx.stream);
}

// Counts tokens; those of the global batch are complete when the ticket is.
Ticket Experts::count(const PassContext& ctx, const LayerActs& own) const {
  const TensorView all = own.saved[kStats];
  const i64 size = RouterStats{E()}.size();
  count_rows(ctx, own, all.rows(0, size), 0, ctx.B);
  Ticket of_batch = over_batch() ? count_batch(ctx, own) : Ticket{};
  if (by_sequence()) {
    for (i64 b = 0; b < ctx.B; ++b) count_rows(ctx, own, all.rows((1 + b) * size, size), b, 1);
  }
  if (ctx.groups.shard.sp > 1) {
    ctx.groups[Axis::Sp]
        .all_reduce(all.data, all.numel(), DType::F32, ReduceOp::Sum, message_text(Axis::Sp, Collective::AllReduce))
        .wait();
  }
  constexpr i64 kReport = RouterStats::kReport;
  ctx.ops.cast(ctx.counts.rows(0, E()), all.rows(0, E()), ctx.stream);
  ctx.ops.cast(ctx.counts.rows(E(), kReport), all.rows(RouterStats{E()}.report(), kReport), ctx.stream);
  return of_batch;
}

// The ranks that add up have other tokens each, those of sp among them. Sums of integers are exact, in any order.
Ticket Experts::count_batch(const PassContext& ctx, const LayerActs& own) const {
  const TensorView counts = own.temporary[kBatchCounts];
  const i64 first = config_.first_choice_loss ? RouterStats{E()}.firsts() : 0;
  ctx.ops.cast(counts, own.saved[kStats].rows(first, E()), ctx.stream);
  if (ctx.groups.shard.counting == 1) return {};
  return ctx.groups[Axis::Dp].all_reduce(counts.data, E(), DType::F32, ReduceOp::Sum,
                                         message_text(Axis::Dp, Collective::AllReduce));
}

// Each rank of sp has the losses of all tokens of its sequences; one of them reports them.
void Experts::add_losses(const PassContext& ctx, const LayerActs& own) const {
  const TensorView all = own.saved[kStats], grad = own.saved[kScoreGrad], one = own.temporary[kOneLoss];
  const i64 size = RouterStats{E()}.size();
  if (pools()) {
    add_pooled_loss(ctx, own);
  } else if (!by_sequence()) {
    if (over_batch()) ctx.ops.add(ctx.step_counts, ctx.step_counts, own.temporary[kBatchCounts], ctx.stream);
    ctx.ops.router_loss(ctx.aux_loss, grad, all.rows(0, size), ctx.step_counts, k(),
                        losses(config_.balance_loss, config_.z_loss), ctx.stream);
  } else {
    const float share = config_.balance_loss / static_cast<float>(ctx.B);
    ctx.ops.router_loss(ctx.aux_loss, grad.rows(0, E()), all.rows(0, size), {}, k(), losses(0, config_.z_loss),
                        ctx.stream);
    for (i64 b = 0; b < ctx.B; ++b) {
      ctx.ops.router_loss(one, grad.rows(b * E(), E()), all.rows((1 + b) * size, size), {}, k(), losses(share, 0),
                          ctx.stream);
      ctx.ops.add(ctx.aux_loss, ctx.aux_loss, one, ctx.stream);
    }
  }
  if (ctx.groups.shard.sp_rank > 0) ctx.ops.scaled_sum(ctx.aux_loss, ctx.aux_loss, 0, 0, nullptr, ctx.stream);
}

// The sums over the blocks are complete in the last of them.
void Experts::add_pooled_loss(const PassContext& ctx, const LayerActs& own) const {
  const i64 size = RouterStats{E()}.size();
  const TensorView stats = own.saved[kStats].rows(0, size), sums = ctx.shared_stats.rows(0, size),
                   grad = ctx.shared_stats.rows(size, E()), one = own.temporary[kOneLoss];
  ctx.ops.add(sums, sums, stats, ctx.stream);
  ctx.ops.router_loss(ctx.aux_loss, grad, stats, {}, k(), losses(0, config_.z_loss), ctx.stream);
  if (!last_) return;
  const i64 choices = config_.first_choice_loss ? 1 : k();
  ctx.ops.router_loss(one, grad, sums, {}, k(), losses(config_.balance_loss * static_cast<float>(choices), 0),
                      ctx.stream);
  ctx.ops.add(ctx.aux_loss, ctx.aux_loss, one, ctx.stream);
}

// rows [N,C] = those of `all` by place.
void Experts::sort(const PassContext& ctx, TensorView rows, TensorView all, const LayerActs& own) const {
  ctx.ops.embedding_fwd(rows, all, own.saved[kTokens], 0, false, ctx.stream);
}

// The rows of this round where the experts are: `to`, or where they are anyway.
TensorView Experts::arrive(const PassContext& ctx, TensorView to, TensorView sorted) const {
  if (!travels()) return sorted;
  exchange_.start_to_experts(ctx, to, sorted).wait();
  return to;
}

void Experts::forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                      const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &t = own.temporary;
  x = gating_.input(ctx, x, own.inner.front());
  const TensorView all = all_rows(ctx, x), rows = t[kRows];
  route(ctx, params, all, acts);
  Ticket of_batch = ctx.counts ? count(ctx, own) : Ticket{};
  sort(ctx, rows, all, own);
  if (travels()) {
    exchange_.agree(ctx, s[kAllOffsets]);
    if (ctx.counts && ctx.host != nullptr) ctx.host->add_rounds(exchange_.rounds() - 1);
  }
  Ticket on_their_way;
  if (travels()) {
    exchange_.begin(ctx, s[kGroups], 0);
    on_their_way = exchange_.start_to_experts(ctx, s[kArrivedX], rows);
  }
  if (shared_) {
    shared_->forward(ctx, params, y, x, residual, acts);
    residual = y;
  }
  on_their_way.wait();
  for (i64 round = 0; round < exchange_.rounds(); ++round) {
    if (round > 0) {
      exchange_.begin(ctx, s[kGroups], round);
      exchange_.start_to_experts(ctx, s[kArrivedX], rows).wait();
    }
    const TensorView pre = expected(ctx, s[kPre]), out = travels() ? t[kArrivedOut] : rows;
    mlp_.to_pre(ctx, params, pre, expected(ctx, travels() ? s[kArrivedX] : rows), offsets(own));
    mlp_.from_pre(ctx, params, expected(ctx, out), pre, expected(ctx, t[kHidden]), offsets(own));
    if (travels()) exchange_.from_experts(ctx, rows, out);
  }
  ctx.ops.combine_rows(partial_sum(ctx, y), rows, s[kPlaces], s[kWeights], first_term(ctx, residual), ctx.stream);
  sum_partials(ctx, y, residual);
  of_batch.wait();
  if (ctx.counts && adds_loss()) add_losses(ctx, own);
}

void Experts::recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &t = own.temporary;
  x = gating_.input(ctx, x, own.inner.front());
  if (shared_) shared_->recompute(ctx, params, x, acts);
  sort(ctx, t[kRows], all_rows(ctx, x), own);
  if (travels()) {
    exchange_.recall(ctx, s[kAllOffsets]);
    if (exchange_.rounds() > 1) return;  // the backward pass does it, round by round
    exchange_.begin(ctx, s[kGroups], 0);
  }
  const TensorView arrived = expected(ctx, arrive(ctx, s[kArrivedX], t[kRows]));
  mlp_.to_pre(ctx, params, expected(ctx, s[kPre]), arrived, offsets(own));
}

void Experts::backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                             TensorView residual, const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &t = own.temporary;
  const bool jitters = gating_.jitters_input(ctx.mode);
  const TensorView after = jitters ? residual : TensorView{};  // added when the jitter has been undone
  x = gating_.input(ctx, x, own.inner.front());
  if (jitters) residual = {};
  if (travels()) exchange_.recall(ctx, s[kAllOffsets]);
  if (sorts_again(ctx)) sort(ctx, t[kSortedX], all_rows(ctx, x), own);
  const TensorView rows = t[kRows];
  sort(ctx, rows, all_rows(ctx, dy), own);
  ctx.ops.embedding_fwd(t[kPlaceWeights], one_column(s[kWeights]), s[kChoices], 0, false, ctx.stream);
  const bool at_once = travels() && exchange_.rounds() == 1;
  Ticket on_their_way[2];
  if (at_once) {
    exchange_.begin(ctx, s[kGroups], 0);
    start_gradients(ctx, on_their_way, own);
  }
  if (shared_) {
    shared_->backward_input(ctx, params, dx, dy, x, residual, acts);
    residual = dx;
  }
  for (Ticket& ticket : on_their_way) ticket.wait();
  if (at_once) {
    backward_round(ctx, params, own);
  } else if (travels()) {
    backward_rounds(ctx, params, own);
  } else {
    backward_experts(ctx, params, rows, rows, t[kPlaceWeights], t[kDPlaceWeights], own);
  }
  backward_router(ctx, params, acts);

  const TensorView from_router = stream_part(ctx, t[kRouterDx]);
  if (has_parts()) shared_->backward_parts(ctx, params, from_router, acts);
  if (residual) ctx.ops.add(from_router, from_router, residual, ctx.stream);
  ctx.ops.combine_rows(partial_sum(ctx, dx), rows, s[kPlaces], {}, first_term(ctx, from_router), ctx.stream);
  sum_partials(ctx, dx, from_router);
  if (jitters) gating_.input_grad(ctx, dx, after);
}

// dx may be dy.
void Experts::backward_experts(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy,
                               TensorView weights, TensorView dweights, const LayerActs& own) const {
  const auto &g = own.gradients, &t = own.temporary;
  const auto part = [&](TensorView rows) { return expected(ctx, rows); };
  mlp_.backward(ctx, params, part(dx), part(dy), part(weights), part(dweights),
                {.pre = part(own.saved[kPre]),
                 .dpre = part(g[kDPre]),
                 .weighted = part(g[kWeighted]),
                 .hidden = part(t[kHidden]),
                 .dhidden = part(t[kDHidden]),
                 .dot = part(t[kBiasDot])},
                offsets(own));
}

// Gradients of outputs, and weights.
void Experts::start_gradients(const PassContext& ctx, std::span<Ticket, 2> tickets, const LayerActs& own) const {
  const auto& t = own.temporary;
  tickets[0] = exchange_.start_to_experts(ctx, own.gradients[kDArrived], t[kRows]);
  tickets[1] = exchange_.start_to_experts(ctx, t[kArrivedWeights], t[kPlaceWeights]);
}

// The same for what has arrived in the round that has begun.
void Experts::backward_round(const PassContext& ctx, RowViews params, const LayerActs& own) const {
  const auto &g = own.gradients, &t = own.temporary;
  backward_experts(ctx, params, t[kArrivedOut], g[kDArrived], t[kArrivedWeights], t[kDArrivedWeights], own);
  exchange_.from_experts(ctx, t[kRows], t[kArrivedOut]);
  exchange_.from_experts(ctx, t[kDPlaceWeights], t[kDArrivedWeights]);
}

bool Experts::sorts_again(const PassContext& ctx) const noexcept {
  return exchange_.rounds() > 1 || (ctx.groups.shard.sequence && travels() && exchange_.may_repeat(ctx.B * ctx.T));
}

// Several rounds: the forward pass has kept rows of the last one alone. Gradients of parameters need rows that are made
// here and for which there is no room: the ranks that the tokens come from keep them.
void Experts::backward_rounds(const PassContext& ctx, RowViews params, const LayerActs& own) const {
  const auto &s = own.saved, &g = own.gradients, &t = own.temporary;
  for (i64 round = 0; round < exchange_.rounds(); ++round) {
    exchange_.begin(ctx, s[kGroups], round);
    const TensorView x = expected(ctx, arrive(ctx, s[kArrivedX], t[kSortedX]));
    mlp_.to_pre(ctx, params, expected(ctx, s[kPre]), x, s[kGroups]);
    Ticket tickets[2];
    start_gradients(ctx, tickets, own);
    for (Ticket& ticket : tickets) ticket.wait();
    backward_round(ctx, params, own);
    exchange_.from_experts(ctx, g[kSentDPre], g[kDPre]);
    exchange_.from_experts(ctx, g[kSentWeighted], g[kWeighted]);
  }
}

// All ranks of tp have the same gradients of logits.
void Experts::backward_router(const PassContext& ctx, RowViews params, const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto &s = own.saved, &g = own.gradients, &t = own.temporary;
  const TensorView dweights = t[kDWeights], none{};
  ctx.ops.embedding_fwd(one_column(dweights), t[kDPlaceWeights], flat(s[kPlaces]), 0, false, ctx.stream);
  if (shard_.tp > 1) {
    ctx.groups[Axis::Tp]
        .all_reduce(dweights.data, dweights.numel(), DType::F32, ReduceOp::Sum,
                    message_text(Axis::Tp, Collective::AllReduce))
        .wait();
  }
  if (has_parts()) {
    ctx.ops.combine_rows_grad(dweights, shared_->experts_weight_grad(acts), dweights, s[kOfRouter], {},
                              shared_->experts_weight(acts), ctx.stream);
  }
  const i64 size = RouterStats{E()}.size(), parts = by_sequence() ? ctx.B : 1, n = ctx.B / parts * ctx.T;
  const TensorView stats = adds_loss() ? s[kStats].rows(0, size) : none;
  for (i64 b = 0; b < parts; ++b) {
    const auto rows = [&](TensorView of) { return of ? of.rows(b * n, n) : of; };
    const TensorView grad = !adds_loss() ? none
                            : pools()    ? ctx.shared_stats.rows(size, E())
                                         : s[kScoreGrad].rows(b * E(), E());
    ctx.ops.route_grad(rows(t[kDLogits32]), rows(dweights), rows(gating_.kept(s[kChosen], own.inner.front())),
                       rows(s[kScores]), rows(s[kLogits]), grad, stats, rows(ctx.targets),
                       adds_loss() ? ctx.aux_grad : none, config_.router, losses(config_.balance_loss, config_.z_loss),
                       ctx.stream);
  }
  ctx.ops.cast(g[kDLogits], t[kDLogits32], ctx.stream);
  ctx.ops.grouped_matmul(t[kRouterDx], g[kDLogits], one_matrix(params.own[router_]), {}, /*trans_b=*/false, ctx.stream);
  gating_.router_input_grad(ctx, t[kRouterDx]);
}

// A part is what comes from one rank.
void Experts::expert_grads(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                           const LayerActs& own) const {
  const auto &s = own.saved, &g = own.gradients, &t = own.temporary;
  const ExpertMlp::Rows wanted = mlp_.of(grads);
  const bool down = wanted.down || wanted.down_bias, up = wanted.up || wanted.up_bias;
  if (!down && !up) return;
  if (travels()) exchange_.recall(ctx, s[kAllOffsets]);
  if (sorts_again(ctx) && (ctx.part < 0 || ctx.part == shard_.ep_rank)) {
    sort(ctx, t[kSortedX], all_rows(ctx, x), own);
    sort(ctx, t[kRows], all_rows(ctx, dy), own);
  }
  if (exchange_.rounds() > 1) return expert_grads_by_rank(ctx, wanted, own);
  const TensorView groups = ctx.part < 0 ? offsets(own) : exchange_.of_rank(offsets(own), ctx.part);
  const auto sorted = [&](TensorView stream) {
    sort(ctx, t[kRows], all_rows(ctx, stream), own);
    return t[kRows];
  };
  const auto part = [&](TensorView rows) {
    const TensorView all = expected(ctx, rows);
    return all && ctx.predicts && ctx.part >= 0 ? all.rows(0, div_ceil(all.dim(0), exchange_.ranks())) : all;
  };
  if (down) {
    const TensorView weights = t[travels() ? kArrivedWeights : kPlaceWeights];
    mlp_.down_grads(ctx, wanted, part(travels() ? g[kDArrived] : sorted(dy)), part(g[kWeighted]), part(weights), groups,
                    ctx.adds_gradients());
  }
  if (up) {
    mlp_.up_grads(ctx, wanted, part(g[kDPre]), part(travels() ? s[kArrivedX] : sorted(x)), groups,
                  ctx.adds_gradients());
  }
}

// One rank's rows at a time, for which there always is room; more than one add up in fp32.
void Experts::expert_grads_by_rank(const PassContext& ctx, const ExpertMlp::Rows& wanted, const LayerActs& own) const {
  const auto &s = own.saved, &g = own.gradients, &t = own.temporary;
  const bool all = ctx.part < 0;
  const auto sum_of = [&](TensorView row, Temporary sum) {
    return all && row && row.dtype != DType::F32 ? t[sum] : row;
  };
  const ExpertMlp::Rows sums{sum_of(wanted.up, kSumUp), sum_of(wanted.down, kSumDown),
                             sum_of(wanted.up_bias, kSumUpBias), sum_of(wanted.down_bias, kSumDownBias)};
  for (i64 q = all ? 0 : ctx.part; q < (all ? exchange_.ranks() : ctx.part + 1); ++q) {
    exchange_.begin_rank(ctx, s[kGroups], q);
    Ticket tickets[] = {
        exchange_.start_to_experts(ctx, s[kArrivedX], t[kSortedX]),
        exchange_.start_to_experts(ctx, g[kDArrived], t[kRows]),
        exchange_.start_to_experts(ctx, g[kDPre], g[kSentDPre]),
        exchange_.start_to_experts(ctx, g[kWeighted], g[kSentWeighted]),
        mlp_.biased() ? exchange_.start_to_experts(ctx, t[kArrivedWeights], t[kPlaceWeights]) : Ticket{}};
    for (Ticket& ticket : tickets) ticket.wait();
    const TensorView groups = exchange_.of_rank(s[kGroups], q);
    const bool adds = ctx.adds_gradients() || (all && q > 0);
    mlp_.down_grads(ctx, sums, expected(ctx, g[kDArrived]), expected(ctx, g[kWeighted]),
                    expected(ctx, t[kArrivedWeights]), groups, adds);
    mlp_.up_grads(ctx, sums, expected(ctx, g[kDPre]), expected(ctx, s[kArrivedX]), groups, adds);
  }
  const auto round = [&](TensorView row, TensorView sum) {
    if (row.data != sum.data) ctx.ops.cast(flat(row), flat(sum), ctx.stream);
  };
  round(wanted.up, sums.up);
  round(wanted.down, sums.down);
  round(wanted.up_bias, sums.up_bias);
  round(wanted.down_bias, sums.down_bias);
}

void Experts::backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                              const LayerActs& acts) const {
  const LayerActs& own = acts.inner.front();
  const auto& g = own.gradients;
  x = gating_.input(ctx, x, own.inner.front());
  expert_grads(ctx, grads, dy, x, own);
  if (ctx.part > 0) return;
  if (grads.own[router_]) {
    linear_backward_weight(ctx, grads.own[router_], {}, g[kDLogits],
                           gating_.router_input(ctx, all_rows(ctx, x), own.inner.front()), Orientation::OutIn);
  }
  if (shared_) shared_->backward_weight(ctx, grads, dy, x, acts);
}

}  // namespace ds::model
