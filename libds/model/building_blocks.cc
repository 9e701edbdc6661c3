// SPDX-License-Identifier: Apache-2.0
#include "ds/building_blocks.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "comm/message_tag.h"
#include "config/parallel.h"
#include "ds/communicator.h"
#include "model/attention_pattern.h"

namespace ds::model {

i64 Model::num_params() const noexcept {
  i64 n = 0;
  for (const ParamRow& r : shared) n += r.whole_numel();
  for (const auto& l : layers) {
    for (const ParamRow& r : l->rows()) n += r.whole_numel();
  }
  return n;
}

i64 Model::largest_vocab_share() const noexcept { return vocab_begin(vocab, shard, 1); }
i64 Model::vocab_share() const noexcept {
  return vocab_begin(vocab, shard, shard.tp_rank + 1) - vocab_begin(vocab, shard, shard.tp_rank);
}

bool Model::trains(i64 layer) const noexcept {
  const auto trained = [](const ParamRow& row) { return row.trained; };
  return std::ranges::any_of(layers[static_cast<size_t>(layer)]->rows(), trained) ||
         (uses_shared(layer) && std::ranges::any_of(shared, trained));
}

i64 Model::backward_end() const noexcept {
  i64 layer = 0;
  while (layer + 1 < std::ssize(layers) && !trains(layer)) ++layer;
  return layer;
}

bool Model::trains_projection() const noexcept {
  const auto trained = [](const ParamRow& row) { return row.trained && row.matrices().count > 0; };
  return tied() ? std::ranges::any_of(shared, trained) : std::ranges::any_of(layers.back()->rows(), trained);
}

i64 Model::projection_row() const noexcept {
  if (tied()) return -1;
  const std::vector<ParamRow>& rows = layers.back()->rows();
  i64 row = std::ssize(rows) - 1;
  while (row >= 0 && rows[static_cast<size_t>(row)].matrices().count == 0) --row;
  return row;
}

bool Model::adds_gradients() const noexcept {
  return std::ranges::all_of(layers, [](const auto& layer) { return layer->adds_gradients(); });
}

i64 Model::product_rows(i64 R) const noexcept {
  i64 most = R;
  for (const auto& layer : layers) most = std::max(most, layer->product_rows(R));
  return most;
}

i64 Model::fp8_bytes(i64 R) const noexcept {
  i64 most = 0;
  for (const Fp8Map& map : fp8) most = std::max(most, map.bytes(R));
  return most;
}

i64 Model::num_aux_losses() const noexcept { return aux_losses_before(std::ssize(layers)); }

i64 Model::aux_losses_before(i64 layer) const noexcept {
  return std::count_if(layers.begin(), layers.begin() + layer, [](const auto& l) { return l->adds_loss(); });
}

namespace {

i64 matrix_elems(const ParamRow& r) noexcept { return r.matrices().count > 0 ? r.whole_numel() : 0; }

// Columns [first, first + n) of a matrix, if there is one.
TensorView columns(TensorView v, i64 first, i64 n) {
  if (!v) return v;
  v.data = static_cast<char*>(v.data) + first * dtype_bytes(v.dtype);
  v.shape[1] = n;
  return v;
}

// [rows, columns] fp32: a[:, tile] b[tile], summed over the tiles of a matrix.
TensorView sum_of_tiles(const PassContext& ctx, TensorView a, Matrix b, bool rowwise) {
  const TensorView sum = TensorView::of(ctx.tile_sum.data, DType::F32, {a.dim(0), b.whole.dim(1)});
  b.tiles->for_each(b.row, [&](i64 first, TensorView tile) {
    ctx.ops.matmul(sum, columns(a, first, tile.dim(0)), tile, {}, {}, {}, {.accumulate = first > 0, .rowwise = rowwise},
                   ctx.stream);
  });
  return sum;
}

ParamRow cut(ParamRow row, int dim, std::vector<std::pair<i64, i64>> ranges) {
  i64 n = 0;
  for (const auto& [begin, end] : ranges) n += end - begin;
  row.whole = row.shape;
  row.shape[dim] = n;
  row.slice = {dim, std::move(ranges)};
  return row;
}

// All ranks' rows of groups.gathered.
TensorView gather_rows(const PassContext& ctx) {
  const Groups& g = ctx.groups;
  const AllGatherSegment segment{g.gathered.data, g.gathered.bytes() / g.shard.tp};
  g[Axis::Tp].all_gather({&segment, 1}, message_text(Axis::Tp, Collective::AllGather)).wait();
  return g.gathered.rows(0, ctx.B * ctx.T);
}

// This rank's rows of a sum: part of a whole stream, or all that the rank has of a cut one.
struct OwnRows {
  i64 first, count;  // of all R rows
  bool cut;
  TensorView of(TensorView stream) const { return !stream || cut ? stream : stream.rows(first, count); }
};

// Folds groups.partial, calls `finish` to turn this rank's fp32 sums into rows of the stream, and distributes them.
template <class Finish>
void finish_sum(const PassContext& ctx, TensorView out, Finish&& finish) {
  const Groups& g = ctx.groups;
  const ReduceScatterSegment segment{g.partial.data, g.sum.as<float>(), g.sum.numel()};
  g[Axis::Tp]
      .reduce_scatter({&segment, 1}, g.partial.dtype, false, message_text(Axis::Tp, Collective::ReduceScatter))
      .wait();
  const i64 slice = g.sum.dim(0), first = slice * g.shard.tp_rank,
            count = std::clamp<i64>(ctx.B * ctx.T - first, 0, slice);
  const OwnRows own{first, count, g.shard.sequence};
  if (count > 0) finish(own, own.cut ? out : g.gathered.rows(first, count), g.sum.rows(0, count));
  if (!own.cut) ctx.ops.cast(out, gather_rows(ctx), ctx.stream);
}

class Head final : public Layer {
 public:
  Head(NormKind norm, std::string norm_name, std::string projection_name, i64 hidden, i64 vocab, bool tied, float eps,
       float init_std, const Shard& shard)
      : Layer(norm_name), norm_(norm), C_(hidden), V_(vocab), tied_(tied), eps_(eps), shard_(shard) {
    rows_.push_back(whole_row({.name = norm_name + ".weight", .shape = {C_}, .init = Init::Ones}, shard));
    if (norm_ == NormKind::LayerNorm)
      rows_.push_back(whole_row({.name = norm_name + ".bias", .shape = {C_}, .init = Init::Zeros}, shard));
    if (!tied_)
      rows_.push_back(cut_vocabulary(
          {.name = std::move(projection_name), .shape = {V_, C_}, .std = init_std, .decay = true, .packs = true},
          shard));
  }

  std::string_view type() const noexcept override { return kHeadType; }
  bool splits() const noexcept override { return false; }
  bool adds_gradients() const noexcept override { return true; }

  LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const override {
    const i64 R = stream_rows(shard_, pass.mode, pass.rows());
    const DType work = pass.work;
    LayerActs a;
    a.saved = {planner.saved(work, {R, C_}), planner.saved(DType::F32, {R}), planner.saved(DType::F32, {R})};
    if (pass.mode == Mode::Train) {
      for (size_t n = 0; n < rows_.size() && rows_[n].shape.size() == 1; ++n)
        a.gradients.push_back(planner.gradient(DType::F32, {C_}));
    }
    // The gradient of the normalised stream, or the rows whose logits are wanted.
    if (pass.mode != Mode::Eval) a.temporary = {planner.temporary(work, {R, C_})};
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
    if (ctx.mode == Mode::Generate) wanted_logits(ctx, normed, acts.temporary[0], projection(params), V_);
    if (ctx.mode == Mode::Eval) projection_loss(ctx, normed, {.weight = projection(params), .vocab = V_});
  }

  void backward_input(const PassContext& ctx, RowViews params, TensorView x, TensorView,
                      const LayerActs& acts) const override {
    const TensorView dnormed = acts.temporary[0];
    projection_loss(ctx, acts.saved[kNormed],
                    {.weight = projection(params), .dh = dnormed, .dweight = ctx.head_weight_grad, .vocab = V_});
    if (norm_ == NormKind::LayerNorm) {
      ctx.ops.layernorm_bwd(acts.input_grad, acts.gradients[0], acts.gradients[1], dnormed, {}, x, params.own[0],
                            acts.saved[kMean], acts.saved[kRstd], ctx.stream);
    } else {
      ctx.ops.rmsnorm_bwd(acts.input_grad, acts.gradients[0], dnormed, {}, x, params.own[0], acts.saved[kRstd],
                          ctx.stream);
    }
  }

  void backward_weight(const PassContext& ctx, RowViews grads, TensorView, TensorView,
                       const LayerActs& acts) const override {
    round_gradient(ctx, grads.own[0], acts.gradients[0]);
    if (norm_ == NormKind::LayerNorm) round_gradient(ctx, grads.own[1], acts.gradients[1]);
    round_projection_gradient(ctx, projection(grads));
  }

  void logits(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView out) const override {
    linear_forward(ctx, out, acts.saved[kNormed], projection(params), {});
  }

 private:
  enum Saved : size_t { kNormed, kMean, kRstd };
  TensorView projection(RowViews rows) const { return tied_ ? rows.shared : rows.own.back(); }

  NormKind norm_;
  i64 C_, V_;
  bool tied_;
  float eps_;
  Shard shard_;
};

}  // namespace

i64 Model::num_active_params() const noexcept {
  double n = 0;
  for (const ParamRow* row : params()) n += row->tokens * static_cast<double>(row->whole_numel());
  return static_cast<i64>(std::llround(n));
}

i64 Model::counts_before(i64 layer) const noexcept {
  i64 n = 0;
  for (i64 l = 0; l < layer; ++l) n += layers[static_cast<size_t>(l)]->num_counts();
  return n;
}
i64 Model::num_counts() const noexcept { return counts_before(std::ssize(layers)); }

i64 Model::step_counts_before(i64 layer) const noexcept {
  i64 n = 0;
  for (i64 l = 0; l < layer; ++l) n += layers[static_cast<size_t>(l)]->num_step_counts();
  return n;
}

i64 Model::num_step_counts() const noexcept { return step_counts_before(std::ssize(layers)); }

i64 Model::num_shared_stats() const noexcept {
  i64 most = 0;
  for (const auto& layer : layers) most = std::max(most, layer->num_shared_stats());
  return most;
}

i64 Model::gradient_parts() const noexcept {
  i64 most = 1;
  for (const auto& layer : layers) most = std::max(most, layer->gradient_parts());
  return most;
}

i64 Model::num_matmul_params() const noexcept {
  i64 n = tied() ? vocab * hidden : 0;
  for (size_t l = 1; l < layers.size(); ++l) {
    for (const ParamRow& row : layers[l]->rows()) n += matrix_elems(row);
  }
  return n;
}

double Model::flops_per_token(i64 T) const noexcept {
  double met = 1;
  if (layout != nullptr) {
    const i64 n = layout->count(), all = layout->layouts() * (causal ? n * (n + 1) / 2 : n * n);
    met = static_cast<double>(layout->present(causal)) / static_cast<double>(all);
  }
  // A matrix has three products: one forward, one for the gradient of its input, one for its own.
  const auto products = [](bool backward, bool trained) { return (1 + backward + trained) / 3.0; };
  const i64 end = backward_end();
  double multiplied = 0, attended = 0;
  if (tied()) multiplied += products(true, trains_projection()) * static_cast<double>(vocab * hidden);
  for (i64 l = 1; l < std::ssize(layers); ++l) {
    const Layer& layer = *layers[static_cast<size_t>(l)];
    const bool backward = l >= end;
    const double tokens = static_cast<double>(layer.tokens(T)), share = tokens / static_cast<double>(T);
    double of_layer = 0;
    for (const ParamRow& row : layer.rows())
      of_layer += products(backward, row.trained) * row.tokens * static_cast<double>(matrix_elems(row));
    multiplied += share * of_layer;
    if (l + 1 < std::ssize(layers)) attended += (backward ? 1.0 : 1 / 3.0) * share * tokens;
  }
  return 6.0 * multiplied + 6.0 * attended * met * static_cast<double>(num_heads * (head_dim + value_dim));
}

void Layer::recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts, Keep) const {
  forward(ctx, params, x, acts);
}
void Layer::logits(const PassContext&, RowViews, const LayerActs&, TensorView) const { DS_ASSERT(false); }

void linear_forward(const PassContext& ctx, TensorView y, TensorView x, Matrix weight, const LinearForward& o) {
  const bool out_in = o.orientation == Orientation::OutIn || weight.whole.codes;
  const MatmulParams params{.trans_b = out_in, .activation = o.activation, .rowwise = ctx.rowwise()};
  if (weight.is_whole()) return ctx.ops.matmul(y, x, weight.whole, o.bias, o.preact, o.residual, params, ctx.stream);
  if (out_in) {
    weight.tiles->for_each(weight.row, [&](i64 first, TensorView tile) {
      const i64 n = tile.dim(0);
      ctx.ops.matmul(columns(y, first, n), x, tile, o.bias ? o.bias.rows(first, n) : o.bias,
                     columns(o.preact, first, n), columns(o.residual, first, n), params, ctx.stream);
    });
    return;
  }
  const TensorView sum = sum_of_tiles(ctx, x, weight, params.rowwise);
  if (o.activation == Activation::None) return ctx.ops.bias_residual(y, sum, o.bias, o.residual, ctx.stream);
  const TensorView preact = o.preact ? o.preact : y;
  ctx.ops.bias_residual(preact, sum, o.bias, {}, ctx.stream);
  ctx.ops.activation_fwd(y, preact, o.activation, ctx.stream);
  if (o.residual) ctx.ops.add(y, y, o.residual, ctx.stream);
}

void linear_backward_input(const PassContext& ctx, TensorView dx, TensorView dy, Matrix weight, Orientation orientation,
                           TensorView dx_residual) {
  const MatmulParams params{.trans_b = orientation == Orientation::InOut};
  if (weight.is_whole()) return ctx.ops.matmul(dx, dy, weight.whole, {}, {}, dx_residual, params, ctx.stream);
  if (orientation == Orientation::OutIn)
    return ctx.ops.bias_residual(dx, sum_of_tiles(ctx, dy, weight, false), {}, dx_residual, ctx.stream);
  weight.tiles->for_each(weight.row, [&](i64 first, TensorView tile) {
    const i64 n = tile.dim(0);
    ctx.ops.matmul(columns(dx, first, n), dy, tile, {}, {}, columns(dx_residual, first, n), params, ctx.stream);
  });
}

void linear_backward_weight(const PassContext& ctx, Matrix dw, TensorView db, TensorView dy, TensorView x,
                            Orientation orientation) {
  const auto [a, b] = orientation == Orientation::OutIn ? std::pair(dy, x) : std::pair(x, dy);
  const auto product = [&](TensorView out, TensorView of_rows) {
    if (out)
      ctx.ops.matmul(out, of_rows, b, {}, {}, {}, {.trans_a = true, .accumulate = ctx.adds_gradients()}, ctx.stream);
  };
  if (dw.is_whole()) {
    product(dw.whole, a);
  } else {
    dw.tiles->for_each(dw.row, [&](i64 first, TensorView tile) { product(tile, columns(a, first, tile.dim(0))); });
  }
  if (db) ctx.ops.column_sum(db, dy, ctx.adds_gradients(), ctx.stream);
}

ParamRow equal_row(ParamRow row, const Shard& shard) {
  row.counted = shard.tp_rank == 0;
  return row;
}

ParamRow whole_row(ParamRow row, const Shard& shard) {
  row = equal_row(std::move(row), shard);
  if (shard.sequence) row.also_summed = shard.tp;
  return row;
}

ParamRow cut_row(ParamRow row, const Shard& shard, int dim, i64 fused) {
  if (shard.tp == 1) return row;
  const i64 part = div_exact(row.shape[dim], fused), share = div_exact(part, shard.tp);
  std::vector<std::pair<i64, i64>> ranges;
  for (i64 f = 0; f < fused; ++f) {
    const i64 begin = f * part + shard.tp_rank * share;
    ranges.emplace_back(begin, begin + share);
  }
  return cut(std::move(row), dim, std::move(ranges));
}

ParamRow cut_heads(ParamRow row, const Shard& shard, int dim, i64 heads) {
  if (heads >= shard.tp) return cut_row(std::move(row), shard, dim);
  row.also_summed = narrow<int>(div_exact(i64{shard.tp}, heads));
  row.counted = shard.tp_rank % row.also_summed == 0;
  const i64 size = div_exact(row.shape[dim], heads), head = shard.tp_rank / row.also_summed;
  return cut(std::move(row), dim, {{head * size, (head + 1) * size}});
}

ParamRow cut_vocabulary(ParamRow row, const Shard& shard) {
  if (shard.tp == 1) return row;
  const i64 V = row.shape[0];
  row.room = vocab_begin(V, shard, 1) * (row.numel() / V);  // the first share is the largest
  return cut(std::move(row), 0, {{vocab_begin(V, shard, shard.tp_rank), vocab_begin(V, shard, shard.tp_rank + 1)}});
}

TensorView all_rows(const PassContext& ctx, TensorView stream) {
  const Groups& g = ctx.groups;
  if (!g.shard.sequence) return stream;
  ctx.ops.cast(g.gathered.rows(first_stream_row(ctx), stream.dim(0)), stream, ctx.stream);
  return gather_rows(ctx);
}

TensorView partial_sum(const PassContext& ctx, TensorView out) {
  return ctx.groups.shard.tp == 1 ? out : ctx.groups.partial.rows(0, ctx.B * ctx.T);
}

void sum_partials(const PassContext& ctx, TensorView out, TensorView residual) {
  if (ctx.groups.shard.tp == 1) return;
  finish_sum(ctx, out, [&](const OwnRows& own, TensorView rows, TensorView sum) {
    ctx.ops.bias_residual(rows, sum, {}, own.of(residual), ctx.stream);
  });
}

void finish_row_parallel(const PassContext& ctx, TensorView out, const RowParallel& o) {
  finish_sum(ctx, out, [&](const OwnRows& own, TensorView rows, TensorView sum) {
    const TensorView residual = own.of(o.residual);
    ctx.ops.bias_residual(rows, sum, o.bias, o.dropout > 0 ? TensorView{} : residual, ctx.stream);
    if (o.dropout > 0) {
      dropout_rows(ctx, rows, rows, own.first, o.dropout, o.site);
      if (residual) ctx.ops.add(rows, rows, residual, ctx.stream);
    }
  });
}

void embedding_forward(const PassContext& ctx, TensorView y, TensorView table, i64 vocab) {
  const Shard& shard = ctx.groups.shard;
  ctx.ops.embedding_fwd(partial_sum(ctx, y), table, ctx.ids, vocab_begin(vocab, shard, shard.tp_rank), false,
                        ctx.stream);
  sum_partials(ctx, y);
}

void round_gradient(const PassContext& ctx, TensorView row, TensorView gradient) {
  if (!row) return;
  if (ctx.adds_gradients()) return ctx.ops.fold(row, {&gradient, 1}, true, ctx.stream);
  ctx.ops.cast(row, gradient, ctx.stream);
}

void round_projection_gradient(const PassContext& ctx, TensorView row) {
  if (ctx.term == GradTerm::Alone) round_gradient(ctx, row, ctx.head_weight_grad);
}

void look_up_backward(const PassContext& ctx, TensorView dtable, TensorView dy, TensorView indices) {
  if (dtable) ctx.ops.embedding_bwd(dtable, dy, indices, 0, ctx.adds_gradients(), ctx.stream);
}

void embedding_backward(const PassContext& ctx, TensorView dtable, TensorView dy, i64 vocab, i64 padding) {
  if (!dtable) return;
  const Shard& shard = ctx.groups.shard;
  const i64 first = vocab_begin(vocab, shard, shard.tp_rank), row = padding - first;
  ctx.ops.embedding_bwd(dtable, all_rows(ctx, dy), ctx.ids, first, ctx.adds_gradients(), ctx.stream);
  if (padding < 0 || row < 0 || row >= dtable.dim(0)) return;
  // The sum over no look-ups is zero.
  ctx.ops.embedding_bwd(dtable.rows(row, 1), dy.rows(0, 0), ctx.ids.rows(0, 0), padding, false, ctx.stream);
}

void projection_loss(const PassContext& ctx, TensorView h, const ProjectionLoss& o) {
  const Groups& g = ctx.groups;
  const i64 chunk = ctx.logits.dim(0);
  const CrossEntropyParams params{.grad_scale = ctx.loss_grad,
                                  .chunk_tokens = chunk,
                                  .label_smoothing = ctx.label_smoothing,
                                  .z_loss = ctx.z_loss,
                                  .vocab = o.vocab,
                                  .add_dweight = ctx.adds_gradients(),
                                  .rowwise = ctx.rowwise()};
  if (g.shard.tp == 1) {
    return ctx.ops.linear_cross_entropy(ctx.losses, o.dh, o.dweight, o.dbias, h, o.weight, o.bias, ctx.targets,
                                        ctx.logits, params, ctx.stream);
  }
  const TensorView all = all_rows(ctx, h);
  const i64 R = all.dim(0), V = o.weight.dim(0), first_id = vocab_begin(o.vocab, g.shard, g.shard.tp_rank);
  for (i64 begin = 0; begin < R; begin += chunk) {
    const i64 rows = std::min(chunk, R - begin);
    const auto stat = [&](i64 i) { return TensorView::of(g.stats.as<float>() + i * rows, DType::F32, {rows}); };
    const TensorView z = TensorView::of(ctx.logits.data, ctx.logits.dtype, {rows, V}), max = stat(0), sum = stat(1),
                     at_target = stat(2), targets = ctx.targets.rows(begin, rows);
    ctx.ops.matmul(z, all.rows(begin, rows), o.weight, o.bias, {}, {}, {.trans_b = true, .rowwise = params.rowwise},
                   ctx.stream);
    ctx.ops.vocab_max(max, z, ctx.stream);
    g[Axis::Tp]
        .all_reduce(max.data, rows, DType::F32, ReduceOp::Max, message_text(Axis::Tp, Collective::AllReduce))
        .wait();
    ctx.ops.vocab_sums(sum, at_target, z, max, targets, first_id, params, ctx.stream);
    g[Axis::Tp]
        .all_reduce(sum.data, 2 * rows, DType::F32, ReduceOp::Sum, message_text(Axis::Tp, Collective::AllReduce))
        .wait();
    const TensorView dz = o.dh ? gradient_rows(z, all.dtype) : TensorView{};
    ctx.ops.vocab_grad(ctx.losses.rows(begin, rows), dz, z, sum, at_target, max, targets, first_id, params, ctx.stream);
    if (!o.dh) continue;
    ctx.ops.matmul(g.partial.rows(begin, rows), dz, o.weight, {}, {}, {}, {}, ctx.stream);
    if (o.dweight)
      ctx.ops.matmul(o.dweight, dz, all.rows(begin, rows), {}, {}, {},
                     {.trans_a = true, .accumulate = params.add_dweight || begin > 0}, ctx.stream);
    if (o.dbias) ctx.ops.column_sum(o.dbias, dz, begin > 0, ctx.stream);
  }
  if (o.dh) sum_partials(ctx, o.dh);
}

void wanted_logits(const PassContext& ctx, TensorView h, TensorView rows, TensorView weight, i64 vocab) {
  const Groups& g = ctx.groups;
  const i64 n = ctx.logit_rows.dim(0);
  if (n == 0) return;
  const TensorView wanted = rows.rows(0, n);
  ctx.ops.combine_rows(wanted, h, ctx.logit_rows.reshaped({n, 1}), {}, {}, ctx.stream);
  TensorView own = ctx.logits;
  own.data = ctx.logits.as<float>() + vocab_begin(vocab, g.shard, g.shard.tp_rank);
  own.shape[1] = weight.dim(0);
  ctx.ops.matmul(own, wanted, weight, {}, {}, {}, {.trans_b = true, .rowwise = ctx.rowwise()}, ctx.stream);
  if (g.shard.tp > 1)
    g[Axis::Tp]
        .all_reduce(ctx.logits.data, ctx.logits.numel(), DType::F32, ReduceOp::Sum,
                    message_text(Axis::Tp, Collective::AllReduce))
        .wait();
}

std::unique_ptr<Layer> make_head(NormKind norm, std::string norm_name, std::string projection_name, i64 hidden,
                                 i64 vocab, bool tied, float eps, float init_std, const Shard& shard) {
  return std::make_unique<Head>(norm, std::move(norm_name), std::move(projection_name), hidden, vocab, tied, eps,
                                init_std, shard);
}

}  // namespace ds::model
