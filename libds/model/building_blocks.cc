// SPDX-License-Identifier: Apache-2.0
#include "model/building_blocks.h"

namespace ds::model {

i64 Model::num_params() const noexcept {
  i64 n = 0;
  for (const auto& l : layers) {
    for (const ParamRow& r : l->rows()) n += r.numel();
  }
  return n;
}

i64 Model::num_matmul_params() const noexcept {
  i64 n = tied ? vocab * hidden : 0;
  for (size_t l = 1; l < layers.size(); ++l) {
    for (const ParamRow& r : layers[l]->rows()) n += r.shape.size() > 1 ? r.numel() : 0;
  }
  return n;
}

double Model::flops_per_token(i64 T) const noexcept {
  const double blocks = static_cast<double>(layers.size()) - 2;
  return 6.0 * static_cast<double>(num_matmul_params()) + 12.0 * blocks * static_cast<double>(num_heads * head_dim * T);
}

void Layer::logits(const PassContext&, RowViews, const LayerActs&, TensorView) const { DS_ASSERT(false); }

void attend(const PassContext& ctx, TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v,
            const AttentionParams& params) {
  if (ctx.mode != Mode::Generate) {
    ctx.ops.attention_fwd(o, lse, q, k, v, params, ctx.stream);
    return;
  }
  KvCache& cache = *ctx.cache;
  const i64 G = k.dim(2), D = k.dim(3), T = k.dim(1);
  const auto append = [&](TensorView all, TensorView fresh) {
    for (i64 t = 0; t < T; ++t) {
      const i64 bytes = dtype_bytes(all.dtype);
      const TensorView to =
          TensorView::of(static_cast<char*>(all.data) + (cache.length + t) * G * D * bytes, all.dtype, {G * D});
      const TensorView from =
          TensorView::of(static_cast<char*>(fresh.data) + t * fresh.stride[1] * bytes, fresh.dtype, {G * D});
      ctx.ops.cast(to, from, ctx.stream);
    }
  };
  append(cache.k, k);
  append(cache.v, v);
  cache.length += T;
  TensorView all_k = cache.k, all_v = cache.v;
  all_k.shape[1] = all_v.shape[1] = cache.length;
  AttentionParams inference = params;
  inference.dropout = 0;
  ctx.ops.attention_fwd(o, lse, q, all_k, all_v, inference, ctx.stream);
}

namespace {

class Head final : public Layer {
 public:
  Head(NormKind norm, std::string norm_name, std::string projection_name, i64 hidden, i64 vocab, bool tied, float eps,
       float init_std)
      : Layer(norm_name), norm_(norm), C_(hidden), V_(vocab), tied_(tied), eps_(eps) {
    rows_.push_back({.name = norm_name + ".weight", .shape = {C_}, .init = Init::Ones});
    if (norm_ == NormKind::LayerNorm)
      rows_.push_back({.name = norm_name + ".bias", .shape = {C_}, .init = Init::Zeros});
    if (!tied_)
      rows_.push_back({.name = std::move(projection_name), .shape = {V_, C_}, .std = init_std, .decay = true});
  }

  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const override {
    const i64 R = B * T;
    LayerActs a;
    a.saved = {planner.saved(work, {R, C_}), planner.saved(DType::F32, {R}), planner.saved(DType::F32, {R})};
    if (mode == Mode::Train) a.saved.push_back(planner.saved(work, {R, C_}));
    a.output = a.saved[kNormed];
    return a;
  }

  void forward(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const override {
    const TensorView normed = acts.saved[kNormed];
    if (norm_ == NormKind::LayerNorm) {
      ctx.ops.layernorm_fwd(normed, acts.saved[kMean], acts.saved[kRstd], x, params.own[0], params.own[1], eps_,
                            ctx.stream);
    } else {
      ctx.ops.rmsnorm_fwd(normed, acts.saved[kRstd], x, params.own[0], eps_, ctx.stream);
    }
    const TensorView projection = tied_ ? params.tied : params.own.back();
    if (ctx.mode == Mode::Generate) {
      TensorView last = normed;  // the last position of each sequence
      last.data = static_cast<char*>(normed.data) + (ctx.T - 1) * C_ * dtype_bytes(normed.dtype);
      last.shape[0] = ctx.B;
      last.stride[0] = ctx.T * C_;
      ctx.ops.matmul(ctx.logits, last, projection, {}, {}, {}, {.trans_b = true}, ctx.stream);
      return;
    }
    // The backward pass of the projection happens here, chunk by chunk, while the logits of a chunk exist.
    const bool train = ctx.mode == Mode::Train;
    ctx.ops.linear_cross_entropy(ctx.losses, train ? acts.saved[kNormedGrad] : TensorView{},
                                 train ? ctx.head_weight_grad : TensorView{}, {}, normed, projection, {}, ctx.targets,
                                 ctx.logits, {.grad_scale = ctx.loss_grad, .chunk_tokens = ctx.logits.dim(0)},
                                 ctx.stream);
  }

  void backward(const PassContext& ctx, RowViews params, RowViews grads, TensorView x, TensorView, TensorView dx,
                const LayerActs& acts) const override {
    const TensorView dnormed = acts.saved[kNormedGrad];
    if (norm_ == NormKind::LayerNorm) {
      ctx.ops.layernorm_bwd(dx, grads.own[0], grads.own[1], dnormed, {}, x, params.own[0], acts.saved[kMean],
                            acts.saved[kRstd], ctx.stream);
    } else {
      ctx.ops.rmsnorm_bwd(dx, grads.own[0], dnormed, {}, x, params.own[0], acts.saved[kRstd], ctx.stream);
    }
    if (!tied_) ctx.ops.cast(grads.own.back(), ctx.head_weight_grad, ctx.stream);
  }

  void logits(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView out) const override {
    linear_forward(ctx, out, acts.saved[kNormed], tied_ ? params.tied : params.own.back(), {});
  }

 private:
  enum Saved : size_t { kNormed, kMean, kRstd, kNormedGrad };
  NormKind norm_;
  i64 C_, V_;
  bool tied_;
  float eps_;
};

}  // namespace

std::unique_ptr<Layer> make_head(NormKind norm, std::string norm_name, std::string projection_name, i64 hidden,
                                 i64 vocab, bool tied, float eps, float init_std) {
  return std::make_unique<Head>(norm, std::move(norm_name), std::move(projection_name), hidden, vocab, tied, eps,
                                init_std);
}

}  // namespace ds::model
