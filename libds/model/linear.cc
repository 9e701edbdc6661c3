// SPDX-License-Identifier: Apache-2.0
#include "ds/linear.h"

#include <cmath>

#include <fmt/format.h>

#include "base/check.h"
#include "model/fp8.h"

namespace ds::model {
namespace {

// A row that each rank has, with gradients that are partial sums over all of them.
ParamRow partial_row(ParamRow row, const Shard& shard) {
  row = whole_row(std::move(row), shard);
  row.also_summed = shard.tp;
  return row;
}

// The products of a map, or of joined ones; fp8: the format of gradients if they are in FP8.
void multiply(std::optional<DType> fp8, const PassContext& ctx, TensorView y, TensorView x, Matrix weight,
              const LinearForward& o) {
  fp8 ? fp8_forward(ctx, y, x, weight, o) : linear_forward(ctx, y, x, weight, o);
}
void multiply_back(std::optional<DType> fp8, const PassContext& ctx, TensorView dx, TensorView dy, Matrix weight,
                   Orientation orientation, TensorView dx_residual) {
  fp8 ? fp8_backward_input(ctx, *fp8, dx, dy, weight, orientation, dx_residual)
      : linear_backward_input(ctx, dx, dy, weight, orientation, dx_residual);
}
void multiply_for_weight(std::optional<DType> fp8, const PassContext& ctx, Matrix dw, TensorView db, TensorView dy,
                         TensorView x, Orientation orientation) {
  fp8 ? fp8_backward_weight(ctx, *fp8, dw, db, dy, x, orientation)
      : linear_backward_weight(ctx, dw, db, dy, x, orientation);
}

}  // namespace

Linear::Linear(std::vector<ParamRow>& rows, LinearSpec spec, const Shard& shard)
    : spec_(std::move(spec)), shard_(shard), weight_(rows.size()) {
  const bool out_in = spec_.orientation == Orientation::OutIn;
  const int in_dim = out_in ? 1 : 0, out_dim = 1 - in_dim;
  ParamRow weight{.name = spec_.name + ".weight",
                  .shape = {out_in ? spec_.out : spec_.in, out_in ? spec_.in : spec_.out},
                  .std = spec_.std,
                  .decay = true,
                  .packs = out_in,
                  .in_out = !out_in};
  ParamRow bias{.name = spec_.name + ".bias", .shape = {spec_.out}, .init = Init::Zeros};
  switch (spec_.split) {
    case Split::Whole:
      weight = whole_row(std::move(weight), shard);
      bias = whole_row(std::move(bias), shard);
      break;
    case Split::Column:
      weight = cut_outputs(std::move(weight), out_dim);
      bias = cut_outputs(std::move(bias), 0);
      break;
    case Split::Row:
      weight = cut_inputs(std::move(weight), in_dim);
      bias = equal_row(std::move(bias), shard);
      break;
    case Split::Shared:
      weight = partial_row(std::move(weight), shard);
      bias = partial_row(std::move(bias), shard);
      break;
  }
  in_ = weight.shape[in_dim];
  out_ = weight.shape[out_dim];
  rows.push_back(std::move(weight));
  if (spec_.bias) rows.push_back(std::move(bias));
}

ParamRow Linear::cut_inputs(ParamRow row, int dim) const { return cut_row(std::move(row), shard_, dim); }

ParamRow Linear::cut_outputs(ParamRow row, int dim) const {
  if (spec_.heads > 0) return cut_heads(std::move(row), shard_, dim, spec_.heads);
  return cut_row(std::move(row), shard_, dim, spec_.fused);
}

// Nothing travels for the branch: with cut inputs x A^T is a partial sum, which B maps to partial sums of y; with cut
// outputs the gradient of x A^T is one, which A maps to partial sums of dx. The gradients of the matrix that every rank
// has are then partial sums, too.
void Linear::attach(std::vector<ParamRow>& rows, const LowRank& branch, size_t number) {
  DS_ASSERT(branch.rank > 0 && branch_.rank == 0);
  branch_ = branch;
  branch_rows_ = rows.size();
  number_ = number;
  ParamRow a{.name = spec_.name + ".lora_A.weight",
             .shape = {branch.rank, spec_.in},
             .std = 1 / std::sqrt(static_cast<float>(spec_.in)),
             .decay = true};
  ParamRow b{
      .name = spec_.name + ".lora_B.weight", .shape = {spec_.out, branch.rank}, .init = Init::Zeros, .decay = true};
  switch (spec_.split) {
    case Split::Whole:
      a = whole_row(std::move(a), shard_);
      b = whole_row(std::move(b), shard_);
      break;
    case Split::Column:
      a = partial_row(std::move(a), shard_);
      b = cut_outputs(std::move(b), 0);
      break;
    case Split::Row:
      a = cut_inputs(std::move(a), 1);
      b = partial_row(std::move(b), shard_);
      break;
    case Split::Shared:
      a = partial_row(std::move(a), shard_);
      b = partial_row(std::move(b), shard_);
      break;
  }
  rows.push_back(std::move(a));
  rows.push_back(std::move(b));
}

void Linear::plan(LayerActs& acts, ActivationPlanner& p, DType work, i64 R, Mode mode, bool attention) const {
  const i64 rank = branch_.rank;
  if (rank == 0) return;
  acts.branches.resize(std::max(acts.branches.size(), number_ + 1));
  BranchActs& a = acts.branches[number_];
  a.inner = attention ? p.attention(work, {R, rank}) : p.saved(work, {R, rank});
  if (mode == Mode::Train) a.inner_grad = p.gradient(work, {R, rank});
  a.product = p.temporary(DType::F32, {R, rank});
}

// out = scale * (x w), rounded once.
void Linear::scaled(const PassContext& ctx, const BranchActs& acts, TensorView out, TensorView x, TensorView w,
                    bool trans_w) const {
  ctx.ops.matmul(acts.product, x, w, {}, {}, {}, {.trans_b = trans_w, .rowwise = ctx.rowwise()}, ctx.stream);
  ctx.ops.scaled_sum(acts.product, acts.product, 0, branch_.scale, nullptr, ctx.stream);
  ctx.ops.cast(out, acts.product, ctx.stream);
}

void Linear::recompute(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView x) const {
  if (branch_.rank == 0) return;
  const BranchActs& a = acts.branches[number_];
  scaled(ctx, a, a.inner, x, params.own[branch_rows_], true);
}

// The branch comes first, with the residual, and is the residual of the product: a branch of zeros changes no bit.
void Linear::product(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView y, TensorView x,
                     LinearForward o) const {
  const Matrix weight = params.matrix(weight_);
  o.orientation = spec_.orientation;
  if (branch_.rank == 0) return multiply(fp8_gradients_, ctx, y, x, weight, o);
  recompute(ctx, params, acts, x);
  const auto branch = [&](TensorView out, TensorView residual) {
    ctx.ops.matmul(out, acts.branches[number_].inner, params.own[branch_rows_ + 1], {}, {}, residual,
                   {.trans_b = true, .rowwise = ctx.rowwise()}, ctx.stream);
  };
  if (o.activation == Activation::None) {
    branch(y, o.residual);
    o.residual = y;
    return multiply(fp8_gradients_, ctx, y, x, weight, o);
  }
  const TensorView preact = o.preact ? o.preact : y;
  branch(preact, {});
  multiply(fp8_gradients_, ctx, preact, x, weight, {.orientation = o.orientation, .bias = o.bias, .residual = preact});
  ctx.ops.activation_fwd(y, preact, o.activation, ctx.stream);
  if (o.residual) ctx.ops.add(y, y, o.residual, ctx.stream);
}

void Linear::forward(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView y, TensorView x,
                     const Epilogue& o) const {
  const bool drops = o.dropout > 0;
  DS_ASSERT(spec_.split == Split::Row ? o.activation == Activation::None : !drops);
  if (spec_.split == Split::Row && ctx.groups.shard.tp > 1) {
    product(ctx, params, acts, partial_sum(ctx, y), x, {});
    return finish_row_parallel(ctx, y,
                               {.bias = bias(params), .residual = o.residual, .dropout = o.dropout, .site = o.site});
  }
  product(ctx, params, acts, y, x,
          {.bias = bias(params),
           .activation = o.activation,
           .preact = o.preact,
           .residual = drops ? TensorView{} : o.residual});
  if (!drops) return;
  dropout_rows(ctx, y, y, 0, o.dropout, o.site);
  if (o.residual) ctx.ops.add(y, y, o.residual, ctx.stream);
}

void Linear::backward_input(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView dx,
                            TensorView dy, TensorView dx_residual) const {
  if (branch_.rank > 0) {
    const BranchActs& a = acts.branches[number_];
    scaled(ctx, a, a.inner_grad, dy, params.own[branch_rows_ + 1], false);
    ctx.ops.matmul(dx, a.inner_grad, params.own[branch_rows_], {}, {}, dx_residual, {}, ctx.stream);
    dx_residual = dx;
  }
  multiply_back(fp8_gradients_, ctx, dx, dy, params.matrix(weight_), spec_.orientation, dx_residual);
}

void Linear::backward_weight(const PassContext& ctx, RowViews grads, const LayerActs& acts, TensorView dy,
                             TensorView x) const {
  const auto weight = [&](size_t row, TensorView d, TensorView in, Orientation orientation) {
    linear_backward_weight(ctx, grads.matrix(row), {}, d, in, orientation);
  };
  multiply_for_weight(fp8_gradients_, ctx, grads.matrix(weight_), {}, dy, x, spec_.orientation);
  if (const TensorView db = bias(grads)) ctx.ops.column_sum(db, dy, ctx.adds_gradients(), ctx.stream);
  if (branch_.rank == 0) return;
  const BranchActs& a = acts.branches[number_];
  weight(branch_rows_, a.inner_grad, x, Orientation::OutIn);
  weight(branch_rows_ + 1, dy, a.inner, Orientation::OutIn);
}

LinearGroup::LinearGroup(std::vector<ParamRow>& rows, std::span<const LinearSpec> specs, const Shard& shard, bool join)
    : rows_(&rows) {
  for (const LinearSpec& spec : specs) maps_.emplace_back(rows, spec, shard);
  for (size_t i = 0; i < specs.size(); ++i) {
    join &= specs[i].orientation == Orientation::OutIn && specs[i].bias == specs[0].bias && out(i) % 8 == 0;
    const size_t weight = maps_[i].weight(), last = weight + (specs[i].bias ? 1 : 0);
    for (size_t row = weight; row <= last && i + 1 < specs.size(); ++row) join &= rows[row].numel() % kRowBlock == 0;
  }
  for (size_t i = 1; i < specs.size() && join; ++i) {
    for (size_t row = 0; row <= (specs[i].bias ? 1 : 0); ++row)
      rows[maps_[i].weight() + row].after = narrow<i64>(maps_[i - 1].weight() + row);
  }
  if (join) maps_[0].joined_out_ = out();
}

bool LinearGroup::joined() const noexcept {
  const std::vector<ParamRow>& rows = *rows_;
  for (size_t i = 0; i < maps_.size(); ++i) {
    if (maps_[i].has_branch()) return false;
    for (size_t row = 0; row <= (maps_[i].spec().bias ? 1 : 0) && i > 0; ++row) {
      if (!rows[maps_[i].weight() + row].lies_after(rows)) return false;
    }
  }
  return true;
}

// Rows in tiles have no data. A layer around this one may have moved rows to other memory. In a dry run all views are
// of one place. Matrices in panels are one if none but the last ends within a panel.
bool LinearGroup::joined(RowViews views) const noexcept {
  if (!joined()) return false;
  const auto lies_after = [&](size_t map, size_t row) {
    const TensorView &other = views.own[maps_[map - 1].weight() + row], &v = views.own[maps_[map].weight() + row];
    return v.data == static_cast<char*>(other.data) + other.bytes() || v.data == other.data;
  };
  for (size_t i = 0; i < maps_.size(); ++i) {
    const TensorView& weight = views.own[maps_[i].weight()];
    if (!weight || (weight.panels && i + 1 < maps_.size() && out(i) % weight.panels.rows != 0)) return false;
    for (size_t row = 0; row <= (maps_[i].spec().bias ? 1 : 0) && i > 0; ++row) {
      if (!lies_after(i, row)) return false;
    }
  }
  return true;
}

i64 LinearGroup::out() const noexcept {
  i64 n = 0;
  for (size_t i = 0; i < maps_.size(); ++i) n += out(i);
  return n;
}

// The matrices of all maps (row 0), or their biases (row 1), as one.
TensorView LinearGroup::all(RowViews views, size_t row) const noexcept {
  TensorView v = views.own[maps_[0].weight() + row];
  v.shape[0] = out();
  return v;
}

TensorView LinearGroup::all(std::span<const TensorView> outputs) const noexcept {
  TensorView v = outputs[0];
  v.shape[1] = out();
  return v;
}

void LinearGroup::add_outputs(std::vector<TensorView>& views, FunctionRef<TensorView(i64)> take) const {
  TensorView whole = joined() ? take(out()) : TensorView{};
  for (size_t i = 0; i < maps_.size(); ++i) {
    TensorView v = joined() ? whole : take(out(i));
    v.shape[1] = out(i);
    views.push_back(v);
    if (whole) whole.data = static_cast<char*>(whole.data) + out(i) * dtype_bytes(whole.dtype);
  }
}

void LinearGroup::plan(LayerActs& acts, ActivationPlanner& planner, DType work, i64 R, Mode mode,
                       bool attention) const {
  for (const Linear& map : maps_) map.plan(acts, planner, work, R, mode, attention);
}

void LinearGroup::forward(const PassContext& ctx, RowViews params, const LayerActs& acts, std::span<const TensorView> y,
                          TensorView x) const {
  if (joined(params))
    return multiply(maps_[0].fp8(), ctx, all(y), x, all(params, 0),
                    {.bias = maps_[0].spec().bias ? all(params, 1) : TensorView{}});
  for (size_t i = 0; i < maps_.size(); ++i) maps_[i].forward(ctx, params, acts, y[i], x);
}

void LinearGroup::backward_input(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView dx,
                                 std::span<const TensorView> dy, TensorView dx_residual) const {
  if (joined(params))
    return multiply_back(maps_[0].fp8(), ctx, dx, all(dy), all(params, 0), Orientation::OutIn, dx_residual);
  for (size_t i = 0; i < maps_.size(); ++i) {
    maps_[i].backward_input(ctx, params, acts, dx, dy[i], dx_residual);
    dx_residual = dx;
  }
}

void LinearGroup::backward_weight(const PassContext& ctx, RowViews grads, const LayerActs& acts,
                                  std::span<const TensorView> dy, TensorView x) const {
  if (!joined(grads)) {
    for (size_t i = 0; i < maps_.size(); ++i) maps_[i].backward_weight(ctx, grads, acts, dy[i], x);
    return;
  }
  const bool bias = maps_[0].spec().bias && grads.own[maps_[0].weight() + 1];
  multiply_for_weight(maps_[0].fp8(), ctx, all(grads, 0), bias ? all(grads, 1) : TensorView{}, all(dy), x,
                      Orientation::OutIn);
}

std::string Linear::fp8_problem() const {
  if (in_ % kFp8Block == 0 && out_ / spec_.fused % kFp8Block == 0) return {};
  return fmt::format("{} [{}, {}]", spec_.name, in_, out_);
}

void Layer::multiply_in_fp8(DType gradients, std::vector<Fp8Map>& maps, std::vector<std::string>& problems) {
  for (Linear* linear : linears()) {
    linear->multiply_in_fp8(gradients);
    rows_[linear->weight()].fp8 = true;
    maps.push_back(linear->fp8_map());
    if (std::string problem = linear->fp8_problem(); !problem.empty()) problems.push_back(std::move(problem));
  }
}

size_t Layer::attach(FunctionRef<LowRank(const Linear&)> choose) {
  size_t number = 0;  // of branches
  for (Linear* linear : linears()) {
    if (const LowRank branch = choose(*linear); branch.rank > 0) linear->attach(rows_, branch, number++);
  }
  return number;
}

}  // namespace ds::model
