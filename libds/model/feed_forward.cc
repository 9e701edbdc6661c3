// SPDX-License-Identifier: Apache-2.0
#include "model/feed_forward.h"

#include <cmath>
#include <span>

#include "base/check.h"

namespace ds::model {
namespace {

std::span<const TensorView> pair_of(const std::vector<TensorView>& views) { return std::span(views).first(2); }

}  // namespace

GatedMlp::GatedMlp(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 intermediate,
                   const Shard& shard, size_t number)
    : F_(intermediate / shard.tp), number_(number) {
  const auto column = [&](const char* map) {
    return LinearSpec{.name = name + map,
                      .in = c.hidden,
                      .out = intermediate,
                      .split = Split::Column,
                      .bias = c.mlp_bias,
                      .std = c.initializer_range};
  };
  gate_up_ = LinearGroup(rows, std::initializer_list<LinearSpec>{column(".gate_proj"), column(".up_proj")}, shard,
                         c.joined_products);
  down_ = Linear(rows,
                 {.name = name + ".down_proj",
                  .in = intermediate,
                  .out = c.hidden,
                  .split = Split::Row,
                  .bias = c.mlp_bias,
                  .std = c.initializer_range},
                 shard);
}

void GatedMlp::plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const {
  const i64 R = pass.rows();
  const DType work = pass.work;
  LayerActs a;
  gate_up_.add_outputs(a.saved, [&](i64 columns) { return p.saved(work, {R, columns}); });
  a.saved.push_back(p.saved(work, {R, F_}));
  if (pass.mode == Mode::Train)
    gate_up_.add_outputs(a.gradients, [&](i64 columns) { return p.gradient(work, {R, columns}); });
  DS_ASSERT(acts.inner.size() == number_);
  acts.inner.push_back(std::move(a));
  gate_up_.plan(acts, p, work, R, pass.mode);
  down_.plan(acts, p, work, R, pass.mode);
}

void GatedMlp::forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                       const LayerActs& acts) const {
  const std::vector<TensorView>& s = acts.inner[number_].saved;
  gate_up_.forward(ctx, params, acts, pair_of(s), all_rows(ctx, x));
  ctx.ops.swiglu_fwd(s[kGated], s[kGate], s[kUp], ctx.stream);
  down_.forward(ctx, params, acts, y, s[kGated], {.residual = residual});
}

void GatedMlp::recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  const std::vector<TensorView>& s = acts.inner[number_].saved;
  gate_up_.forward(ctx, params, acts, pair_of(s), all_rows(ctx, x));
  ctx.ops.swiglu_fwd(s[kGated], s[kGate], s[kUp], ctx.stream);
  down_.recompute(ctx, params, acts, s[kGated]);
}

void GatedMlp::backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView,
                              TensorView residual, const LayerActs& acts) const {
  const std::vector<TensorView>&s = acts.inner[number_].saved, &g = acts.inner[number_].gradients;
  down_.backward_input(ctx, params, acts, g[kDGate], all_rows(ctx, dy));
  ctx.ops.swiglu_bwd(g[kDGate], g[kDUp], g[kDGate], s[kGate], s[kUp], ctx.stream);
  gate_up_.backward_input(ctx, params, acts, partial_sum(ctx, dx), pair_of(g), first_term(ctx, residual));
  sum_partials(ctx, dx, residual);
}

void GatedMlp::backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                               const LayerActs& acts) const {
  const std::vector<TensorView>&s = acts.inner[number_].saved, &g = acts.inner[number_].gradients;
  down_.backward_weight(ctx, grads, acts, all_rows(ctx, dy), s[kGated]);
  gate_up_.backward_weight(ctx, grads, acts, pair_of(g), all_rows(ctx, x));
}

PlainMlp::PlainMlp(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 intermediate,
                   const Shard& shard, size_t number)
    : F_(intermediate / shard.tp), activation_(c.activation), number_(number) {
  wide_ = Linear(rows,
                 {.name = name + ".c_fc",
                  .in = c.hidden,
                  .out = intermediate,
                  .split = Split::Column,
                  .orientation = Orientation::InOut,
                  .std = c.initializer_range},
                 shard);
  narrow_ = Linear(rows,
                   {.name = name + ".c_proj",
                    .in = intermediate,
                    .out = c.hidden,
                    .split = Split::Row,
                    .orientation = Orientation::InOut,
                    .std = c.initializer_range / std::sqrt(2.0f * static_cast<float>(c.layers))},
                   shard);
}

void PlainMlp::plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const {
  const i64 R = pass.rows();
  LayerActs a;
  a.saved = {p.saved(pass.work, {R, F_}), p.saved(pass.work, {R, F_})};
  if (pass.mode == Mode::Train) a.gradients = {p.gradient(pass.work, {R, F_})};
  DS_ASSERT(acts.inner.size() == number_);
  acts.inner.push_back(std::move(a));
  for (const Linear* map : {&wide_, &narrow_}) map->plan(acts, p, pass.work, R, pass.mode);
}

void PlainMlp::widen(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  const std::vector<TensorView>& s = acts.inner[number_].saved;
  wide_.forward(ctx, params, acts, s[kActivated], all_rows(ctx, x), {.activation = activation_, .preact = s[kPre]});
}

void PlainMlp::forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                       const LayerActs& acts) const {
  widen(ctx, params, x, acts);
  narrow_.forward(ctx, params, acts, y, acts.inner[number_].saved[kActivated], {.residual = residual});
}

void PlainMlp::recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  widen(ctx, params, x, acts);
  narrow_.recompute(ctx, params, acts, acts.inner[number_].saved[kActivated]);
}

void PlainMlp::backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView,
                              TensorView residual, const LayerActs& acts) const {
  const TensorView dpre = acts.inner[number_].gradients[kDPre];
  narrow_.backward_input(ctx, params, acts, dpre, all_rows(ctx, dy));
  ctx.ops.activation_bwd(dpre, dpre, acts.inner[number_].saved[kPre], activation_, ctx.stream);
  wide_.backward_input(ctx, params, acts, partial_sum(ctx, dx), dpre, first_term(ctx, residual));
  sum_partials(ctx, dx, residual);
}

void PlainMlp::backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                               const LayerActs& acts) const {
  const LayerActs& own = acts.inner[number_];
  narrow_.backward_weight(ctx, grads, acts, all_rows(ctx, dy), own.saved[kActivated]);
  wide_.backward_weight(ctx, grads, acts, own.gradients[kDPre], all_rows(ctx, x));
}

}  // namespace ds::model
