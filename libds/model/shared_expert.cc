// SPDX-License-Identifier: Apache-2.0
#include "model/shared_expert.h"

#include <fmt/format.h>

#include "config/family.h"

namespace ds::model {
namespace {

constexpr RouterParams kGate{.sigmoid = true};
constexpr RouterParams kBothParts{};

TensorView batch_of_one(TensorView m) { return m.reshaped({1, m.dim(0), m.dim(1)}); }
TensorView as_column(TensorView v) { return v.reshaped({v.numel(), 1}); }
TensorView as_list(TensorView v) { return v.reshaped({v.numel()}); }

}  // namespace

SharedExpert::SharedExpert(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c,
                           const Shard& shard)
    : kind_(c.experts.residual      ? Kind::Residual
            : c.experts.shared_gate ? Kind::Gated
                                    : Kind::Sum),
      C_(c.hidden),
      shard_(shard) {
  const std::string mlp = fmt::format("{}.{}", name, spec_of(c.family).experts.shared);
  if (c.experts.plain) {
    mlp_ = std::make_unique<PlainMlp>(rows, mlp, c, c.experts.shared, shard, 1);
  } else {
    mlp_ = std::make_unique<GatedMlp>(rows, mlp, c, c.experts.shared, shard, 1);
  }
  map_ = rows.size();
  const auto matrix = [&](const char* end, i64 outputs) {
    rows.push_back(
        whole_row({.name = name + end, .shape = {outputs, C_}, .std = c.initializer_range, .decay = true}, shard));
  };
  if (kind_ == Kind::Gated) matrix(".shared_expert_gate.weight", 1);
  if (kind_ != Kind::Residual) return;
  matrix(".coefficient.weight", 2);
  rows.push_back(whole_row({.name = name + ".coefficient.bias", .shape = {2}, .init = Init::Zeros}, shard));
}

void SharedExpert::plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const {
  mlp_->plan(acts, p, pass);
  if (kind_ == Kind::Sum) return;
  const i64 R = pass.rows(), S = stream_rows(shard_, pass.mode, R);
  const bool train = pass.mode == Mode::Train, residual = kind_ == Kind::Residual;
  const auto work = pass.work, f32 = DType::F32, i32 = DType::I32;
  LayerActs a;
  if (residual) {
    // A recomputation takes the weights of the forward pass.
    const auto kept = [&](DType dtype, std::initializer_list<i64> shape) {
      return train ? p.kept(dtype, shape) : p.saved(dtype, shape);
    };
    a.saved = {p.saved(work, {S, C_}), kept(f32, {R, 2}), kept(f32, {R, 2}), kept(f32, {R, 2}),  kept(i32, {R, 2}),
               kept(f32, {2 * R, 1}),  kept(i32, {R, 2}), kept(i32, {3}),    kept(i32, {2 * R}), kept(i32, {2 * R})};
  } else {
    a.saved = {p.saved(work, {S, C_}), p.saved(f32, {S, 1}), p.saved(f32, {S, 1}), p.saved(f32, {S, 1}),
               p.saved(i32, {S, 1})};
  }
  if (train) {
    const i64 n = residual ? 2 : 1;
    a.gradients = {p.gradient(work, {S, C_}), p.gradient(work, {S, n})};
    a.temporary = {p.temporary(f32, {S, n}), p.temporary(f32, {S, n})};
    if (residual) a.temporary.push_back(p.temporary(f32, {2 * R, 1}));
  }
  acts.inner.push_back(std::move(a));
}

void SharedExpert::weigh_parts(const PassContext& ctx, RowViews params, TensorView all, const LayerActs& acts) const {
  const auto& s = own(acts).saved;
  ctx.ops.matmul(s[kLogits], all, params.own[map_], params.own[map_ + 1], {}, {}, {.trans_b = true, .rowwise = true},
                 ctx.stream);
  ctx.ops.route(s[kChosen], s[kWeights], s[kScores], s[kLogits], {}, {}, kBothParts, ctx.stream);
  ctx.ops.sort_choices(s[kOffsets], s[kPlaces], s[kTokens], s[kChoices], s[kChosen], 0, ctx.stream);
  ctx.ops.embedding_fwd(s[kParts], as_column(s[kWeights]), s[kChoices], 0, false, ctx.stream);
}

TensorView SharedExpert::weight(const PassContext& ctx, const LayerActs& acts) const {
  const auto& s = own(acts).saved;
  return residual() ? stream_part(ctx, half(s[kParts], 1)) : s[kWeights];
}

// To the output and its weight.
void SharedExpert::evaluate(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  const auto& s = own(acts).saved;
  mlp_->forward(ctx, params, s[kOut], x, {}, acts);
  if (residual()) return;
  ctx.ops.grouped_matmul(s[kLogits], x, batch_of_one(params.own[map_]), {}, /*trans_b=*/true, ctx.stream);
  ctx.ops.route(s[kChosen], s[kWeights], s[kScores], s[kLogits], {}, {}, kGate, ctx.stream);
}

void SharedExpert::forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                           const LayerActs& acts) const {
  if (kind_ == Kind::Sum) return mlp_->forward(ctx, params, y, x, residual, acts);
  evaluate(ctx, params, x, acts);
  ctx.ops.combine_rows(y, own(acts).saved[kOut], {}, weight(ctx, acts), residual, ctx.stream);
}

void SharedExpert::recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const {
  if (kind_ == Kind::Sum) return mlp_->recompute(ctx, params, x, acts);
  evaluate(ctx, params, x, acts);
}

void SharedExpert::backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                                  TensorView residual, const LayerActs& acts) const {
  if (kind_ == Kind::Sum) return mlp_->backward_input(ctx, params, dx, dy, x, residual, acts);
  const auto &s = own(acts).saved, &g = own(acts).gradients, &t = own(acts).temporary;
  const TensorView dweight = this->residual() ? stream_part(ctx, half(t[kDParts], 1)) : t[kDWeights];
  ctx.ops.combine_rows_grad(g[kDOut], dweight, dy, s[kOut], {}, weight(ctx, acts), ctx.stream);
  mlp_->backward_input(ctx, params, dx, g[kDOut], x, residual, acts);
  if (this->residual()) return;
  ctx.ops.route_grad(t[kDLogits32], dweight, s[kChosen], s[kScores], s[kLogits], {}, {}, {}, {}, kGate, {}, ctx.stream);
  ctx.ops.cast(g[kDLogits], t[kDLogits32], ctx.stream);
  ctx.ops.matmul(dx, g[kDLogits], params.own[map_], {}, {}, dx, {}, ctx.stream);
}

void SharedExpert::backward_parts(const PassContext& ctx, RowViews params, TensorView dx, const LayerActs& acts) const {
  const auto &s = own(acts).saved, &g = own(acts).gradients, &t = own(acts).temporary;
  ctx.ops.embedding_fwd(as_column(t[kDWeights]), t[kDParts], as_list(stream_part(ctx, s[kPlaces])), 0, false,
                        ctx.stream);
  ctx.ops.route_grad(t[kDLogits32], t[kDWeights], stream_part(ctx, s[kChosen]), stream_part(ctx, s[kScores]),
                     stream_part(ctx, s[kLogits]), {}, {}, {}, {}, kBothParts, {}, ctx.stream);
  ctx.ops.cast(g[kDLogits], t[kDLogits32], ctx.stream);
  ctx.ops.matmul(dx, g[kDLogits], params.own[map_], {}, {}, dx, {}, ctx.stream);
}

void SharedExpert::backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                                   const LayerActs& acts) const {
  if (kind_ == Kind::Sum) return mlp_->backward_weight(ctx, grads, dy, x, acts);
  const auto& g = own(acts).gradients;
  linear_backward_weight(ctx, grads.own[map_], residual() ? grads.own[map_ + 1] : TensorView{}, g[kDLogits], x,
                         Orientation::OutIn);
  mlp_->backward_weight(ctx, grads, g[kDOut], x, acts);
}

}  // namespace ds::model
