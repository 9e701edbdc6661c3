// SPDX-License-Identifier: Apache-2.0
#pragma once
// The least that a layer of experts needs of the house: y = x + x W, where W is that of the expert to whose part of the
// micro-batch a row belongs. Each rank of the axis ep has one of the experts, a matrix of a batch of which it holds a
// slice, and receives rows of all ranks, as many as it has room for. Beside it, an auxiliary loss: weight * mean(x^2).

#include "comm/message_tag.h"
#include "ds/building_blocks.h"

namespace ds::testing {

struct ToyExperts {
  i64 hidden = 0;
  double capacity = 1;   // rows for which an expert has room, of those that a rank has for it
  float aux_weight = 0;  // of the auxiliary loss; 0: the layer has none
  size_t group = 0;      // reduces the experts
};

class ToyExpertLayer final : public model::Layer {
 public:
  ToyExpertLayer(std::string name, const ToyExperts& toy, const model::Shard& shard)
      : Layer(std::move(name)), toy_(toy), shard_(shard) {
    model::ParamRow row{.name = name_ + ".experts.weight", .shape = {shard.ep, C(), C()}, .std = 0.3f, .decay = true};
    row = model::whole_row(std::move(row), shard);
    if (shard.ep > 1) {
      row.whole = row.shape;
      row.shape[0] = 1;
      row.slice = {0, {{shard.ep_rank, shard.ep_rank + 1}}};
      row.group = toy.group;
    }
    rows_ = {row};
  }
  std::string_view type() const noexcept override { return "ToyExpertLayer"; }
  bool is_block() const noexcept override { return true; }
  bool adds_loss() const noexcept override { return toy_.aux_weight > 0; }
  i64 product_rows(i64 R) const noexcept override { return std::max(R, shard_.ep * room(R)); }

  model::LayerActs plan(model::ActivationPlanner& p, const model::PlannedPass& pass) const override {
    const model::PlannedPass own = pass.over(1, shard_.ep * room(pass.rows()));
    model::LayerActs a;
    a.saved = {p.saved(own.work, {own.rows(), C()})};
    a.gradients = {p.gradient(own.work, {own.rows(), C()})};
    a.temporary = {p.temporary(own.work, {own.rows(), C()}), p.temporary(own.work, {own.rows(), C()}),
                   p.temporary(DType::F32, {pass.rows(), C()}), p.temporary(DType::F32, {1, 1})};
    return a;
  }
  void forward(const model::PassContext& ctx, model::RowViews params, TensorView x,
               const model::LayerActs& a) const override {
    const TensorView received = a.saved[0], made = a.temporary[0], back = a.temporary[1];
    to_experts(ctx, received, x, made);
    model::linear_forward(of_expert(ctx), made, received, expert(params), {.orientation = kInOut});
    all_to_all(ctx, back, made);
    from_experts(ctx, a.output, x, back);
    if (ctx.mode == model::Mode::Train && adds_loss()) {
      const TensorView sum = a.temporary[3], all = x.reshaped({1, x.numel()});
      ctx.ops.matmul(sum, all, all, {}, {}, {}, {.trans_b = true}, ctx.stream);
      ctx.ops.scaled_sum(ctx.aux_loss, sum.reshaped({1}), 0, toy_.aux_weight / elems(ctx), nullptr, ctx.stream);
    }
  }
  void recompute(const model::PassContext& ctx, model::RowViews, TensorView x, const model::LayerActs& a,
                 model::Keep keep) const override {
    if (keep == model::Keep::Input) to_experts(ctx, a.saved[0], x, a.temporary[0]);
  }
  void backward_input(const model::PassContext& ctx, model::RowViews params, TensorView x, TensorView dy,
                      const model::LayerActs& a) const override {
    const TensorView received = a.gradients[0], made = a.temporary[0], back = a.temporary[1], terms = a.temporary[2];
    to_experts(ctx, received, dy, made);
    model::linear_backward_input(of_expert(ctx), made, received, expert(params), kInOut);
    all_to_all(ctx, back, made);
    from_experts(ctx, a.input_grad, dy, back);
    if (!adds_loss()) return;
    const TensorView flat = terms.reshaped({terms.numel()});
    ctx.ops.cast(terms, x, ctx.stream);
    ctx.ops.scaled_sum(flat, flat, 0, 2 * toy_.aux_weight / elems(ctx), ctx.aux_grad.as<float>(), ctx.stream);
    ctx.ops.bias_residual(a.input_grad, terms, {}, a.input_grad, ctx.stream);
  }
  void backward_weight(const model::PassContext& ctx, model::RowViews grads, TensorView, TensorView,
                       const model::LayerActs& a) const override {
    model::linear_backward_weight(of_expert(ctx), expert(grads), {}, a.gradients[0], a.saved[0], kInOut);
  }

 private:
  static constexpr auto kInOut = model::Orientation::InOut;

  i64 C() const noexcept { return toy_.hidden; }
  // Rows of R that a rank sends to an expert, and rows for which there is room.
  i64 sent(i64 R) const noexcept { return std::min(R / shard_.ep, room(R)); }
  i64 room(i64 R) const noexcept {
    return static_cast<i64>(std::ceil(toy_.capacity * static_cast<double>(R / shard_.ep)));
  }
  // Elements of the stream in a micro-batch, on all ranks of sp.
  float elems(const model::PassContext& ctx) const noexcept {
    return static_cast<float>(ctx.B * ctx.groups.sequence_length * C());
  }
  model::PassContext of_expert(const model::PassContext& ctx) const {
    return ctx.over(1, shard_.ep * room(ctx.B * ctx.T));
  }
  model::Matrix expert(const model::RowViews& views) const {
    const TensorView batch = views.own[0];
    EXPECT_EQ(batch.rank, 3);
    return {batch.reshaped({C(), C()})};
  }
  void all_to_all(const model::PassContext& ctx, TensorView to, TensorView from) const {
    if (shard_.ep == 1) return ctx.ops.cast(to, from, ctx.stream);
    ctx.groups[Axis::Ep]
        .all_to_all(from.data, to.data, from.bytes() / shard_.ep, message_text(Axis::Ep, Collective::AllToAll))
        .wait();
  }
  // Part q of a rank's rows goes to expert q; where it has room for more, rows are zero.
  void to_experts(const model::PassContext& ctx, TensorView received, TensorView x, TensorView parcels) const {
    const i64 R = ctx.B * ctx.T, n = sent(R), most = room(R);
    for (i64 q = 0; q < shard_.ep; ++q) {
      ctx.ops.cast(parcels.rows(q * most, n), x.rows(q * (R / shard_.ep), n), ctx.stream);
      constexpr i64 kNoId = i64{1} << 30;
      if (most > n)
        ctx.ops.embedding_fwd(parcels.rows(q * most + n, most - n), x, ctx.ids.rows(0, most - n), kNoId, false,
                              ctx.stream);
    }
    all_to_all(ctx, received, parcels);
  }
  // y = x + back, where the experts had room.
  void from_experts(const model::PassContext& ctx, TensorView y, TensorView x, TensorView back) const {
    const i64 R = ctx.B * ctx.T, n = sent(R), most = room(R);
    ctx.ops.cast(y, x, ctx.stream);
    for (i64 q = 0; q < shard_.ep; ++q) {
      const TensorView rows = y.rows(q * (R / shard_.ep), n);
      ctx.ops.add(rows, rows, back.rows(q * most, n), ctx.stream);
    }
  }

  ToyExperts toy_;
  model::Shard shard_;
};

}  // namespace ds::testing
