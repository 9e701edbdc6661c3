// SPDX-License-Identifier: Apache-2.0
#include "model/token_dropping.h"

#include <algorithm>

#include "base/check.h"
#include "ds/linear.h"

namespace ds::model {
namespace {

class DroppingBlock final : public Layer {
 public:
  DroppingBlock(std::unique_ptr<Layer> block, const TokenDropping& dropping)
      : Layer(block->name()), block_(std::move(block)), dropping_(dropping) {
    rows_ = block_->rows();
  }

  std::string_view type() const noexcept override { return block_->type(); }
  void freeze(size_t row) override {
    Layer::freeze(row);
    block_->freeze(row);
  }
  void store(size_t row, Storage form, const CodedForm& codes) override {
    Layer::store(row, form, codes);
    block_->store(row, form, codes);
  }
  bool is_block() const noexcept override { return block_->is_block(); }
  std::vector<size_t> products(Products which) const override { return block_->products(which); }
  bool splits() const noexcept override { return block_->splits(); }
  size_t attach(FunctionRef<LowRank(const Linear&)> choose) override {
    const size_t branches = block_->attach(choose);
    rows_ = block_->rows();
    return branches;
  }
  CacheShape cache() const override { return block_->cache(); }
  i64 tokens(i64 T) const noexcept override { return std::min(T, dropping_.kept); }
  i64 product_rows(i64 R) const noexcept override { return block_->product_rows(R); }
  bool adds_loss() const noexcept override { return block_->adds_loss(); }
  i64 num_counts() const noexcept override { return block_->num_counts(); }
  i64 num_step_counts() const noexcept override { return block_->num_step_counts(); }
  i64 num_shared_stats() const noexcept override { return block_->num_shared_stats(); }
  i64 gradient_parts() const noexcept override { return block_->gradient_parts(); }
  bool adds_gradients() const noexcept override { return block_->adds_gradients(); }

  LayerActs plan(ActivationPlanner& p, const PlannedPass& pass) const override {
    if (pass.mode != Mode::Train) return block_->plan(p, pass);
    ActivationPlanner most = p;
    if (const i64 n = std::min(dropping_.most, pass.T - 1); n > 0) plan_some(most, pass, n);
    LayerActs a = drops(pass.T) ? plan_some(p, pass, dropping_.kept) : block_->plan(p, pass);
    p.cover(most);
    return a;
  }

  // Keeps the tokens of each sample with the smallest random numbers.
  void draw(const DrawKey& key, std::span<i32> out) const override {
    const i64 B = key.B, T = key.T, kept = dropping_.kept;
    DS_ASSERT(drops(T) && std::ssize(out) == drawn_elems(B, T, kept) && key.documents.empty() == !dropping_.documents);
    Drawn<i32*> drawn(out.data(), B, T, kept);
    RngKey rng = key.rng;
    rng.site = kSite | static_cast<u32>(dropping_.number);
    numbers_.resize(static_cast<size_t>(T));
    for (i64 b = 0; b < B; ++b) {
      for (i64 t = 0; t < T; ++t)
        numbers_[static_cast<size_t>(t)] = u64{rng.bits(static_cast<u64>(b * T + t))} << 32 | static_cast<u64>(t);
      std::ranges::nth_element(numbers_, numbers_.begin() + kept);
      i32 *const inverse = drawn.inverse + b * T, *const passing = drawn.passing + b * T;
      std::fill_n(inverse, T, -1);
      for (i64 n = 0; n < kept; ++n) inverse[numbers_[static_cast<size_t>(n)] & 0xFFFFFFFFu] = 0;
      i64 next = b * kept;
      for (i64 t = 0; t < T; ++t) {
        const i64 row = b * T + t;
        passing[t] = inverse[t] < 0 ? static_cast<i32>(row) : -1;
        if (inverse[t] < 0) continue;
        inverse[t] = static_cast<i32>(next);
        drawn.rows[next] = static_cast<i32>(row);
        drawn.positions[next] = key.positions.empty() ? static_cast<i32>(t) : key.positions[static_cast<size_t>(row)];
        ++next;
      }
      DS_ASSERT(next == (b + 1) * kept);
    }
    if (!dropping_.documents) return;
    // Borders of documents among the kept tokens.
    for (i64 end = 0; end < 2; ++end) {
      for (i64 n = 0; n < B * kept; ++n) {
        const i64 b = n / kept, row = drawn.rows[n],
                  border = b * T + key.documents[static_cast<size_t>(end * B * T + row)];
        const i32* const first = drawn.rows + b * kept;
        drawn.documents[end * B * kept + n] = static_cast<i32>(std::lower_bound(first, first + kept, border) - first);
      }
    }
  }

  void forward(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& a) const override {
    if (a.drawn.rank == 0) return block_->forward(ctx, params, x, a);
    keep(ctx, a.saved[0], x, a);
    block_->forward(of_kept(ctx, a), params, a.saved[0], a.inner[0]);
    merge(ctx, a.output, a.inner[0].output, x, a);
  }
  void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& a, Keep kept) const override {
    if (a.drawn.rank == 0) return block_->recompute(ctx, params, x, a, kept);
    if (kept == Keep::Input) keep(ctx, a.saved[0], x, a);
    block_->recompute(of_kept(ctx, a), params, a.saved[0], a.inner[0], kept);
  }
  void backward_input(const PassContext& ctx, RowViews params, TensorView x, TensorView dy,
                      const LayerActs& a) const override {
    if (a.drawn.rank == 0) return block_->backward_input(ctx, params, x, dy, a);
    keep(ctx, a.gradients[0], dy, a);
    block_->backward_input(of_kept(ctx, a), params, a.saved[0], a.gradients[0], a.inner[0]);
    merge(ctx, a.input_grad, a.inner[0].input_grad, dy, a);
  }
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView x, TensorView dy,
                       const LayerActs& a) const override {
    if (a.drawn.rank == 0) return block_->backward_weight(ctx, grads, x, dy, a);
    block_->backward_weight(of_kept(ctx, a), grads, a.saved[0], a.gradients[0], a.inner[0]);
  }

 private:
  static constexpr u32 kSite = 0x40000000u;  // distinct from those of dropout

  // Pointers to the parts of the drawn values.
  template <class Pointer>
  struct Drawn {
    Drawn(Pointer data, i64 B, i64 T, i64 kept)
        : rows(data),
          positions(rows + B * kept),
          inverse(positions + B * kept),
          passing(inverse + B * T),
          documents(passing + B * T) {}
    Pointer rows;       // [B * kept]: rows of the residual stream
    Pointer positions;  // [B * kept]: positions in their sequence
    Pointer inverse;    // [B * T]: index of the kept row, or -1
    Pointer passing;    // [B * T]: the row itself if it is not kept, else -1
    Pointer documents;  // [2, B, kept]: AttentionParams::documents, if there are any
  };
  i64 drawn_elems(i64 B, i64 T, i64 kept) const noexcept {
    return 2 * B * kept + 2 * B * T + (dropping_.documents ? 2 * B * kept : 0);
  }
  bool drops(i64 T) const noexcept { return dropping_.kept < T; }

  LayerActs plan_some(ActivationPlanner& p, const PlannedPass& pass, i64 kept) const {
    const PlannedPass some = pass.over(pass.B, kept);
    const i64 n = some.rows(), C = dropping_.hidden;
    LayerActs a;
    a.drawn = p.kept(DType::I32, {drawn_elems(pass.B, pass.T, kept)});
    a.saved = {p.saved(pass.work, {n, C})};
    a.gradients = {p.gradient(pass.work, {n, C})};
    a.temporary = {p.temporary(pass.work, {n, C})};
    LayerActs& inner = a.inner.emplace_back(block_->plan(p, some));
    inner.output = inner.input_grad = a.temporary[0];  // neither outlives its call
    return a;
  }

  Drawn<const i32*> drawn_of(const PassContext& ctx, const LayerActs& a) const {
    return {a.drawn.as<const i32>(), ctx.B, ctx.T, dropping_.kept};
  }
  static TensorView indices(const i32* first, i64 n) {
    return TensorView::of(const_cast<i32*>(first), DType::I32, {n});
  }
  // some [B * kept, C] = the kept rows of all [B * T, C].
  void keep(const PassContext& ctx, TensorView some, TensorView all, const LayerActs& a) const {
    ctx.ops.embedding_fwd(some, all, indices(drawn_of(ctx, a).rows, some.dim(0)), 0, false, ctx.stream);
  }
  // out = `some` for kept rows, `all` for the others.
  void merge(const PassContext& ctx, TensorView out, TensorView some, TensorView all, const LayerActs& a) const {
    const Drawn<const i32*> drawn = drawn_of(ctx, a);
    ctx.ops.embedding_fwd(out, some, indices(drawn.inverse, out.dim(0)), 0, false, ctx.stream);
    ctx.ops.embedding_fwd(out, all, indices(drawn.passing, out.dim(0)), 0, true, ctx.stream);
  }
  PassContext of_kept(const PassContext& all, const LayerActs& a) const {
    const Drawn<const i32*> drawn = drawn_of(all, a);
    const i64 n = all.B * dropping_.kept;
    PassContext ctx = all.over(all.B, dropping_.kept);
    ctx.ids = ctx.targets = ctx.token_types = {};
    ctx.positions = ctx.row_positions = indices(drawn.positions, n);
    if (dropping_.documents) ctx.documents = indices(drawn.documents, 2 * n);
    ctx.groups.sequence_length = dropping_.kept;
    return ctx;
  }

  std::unique_ptr<Layer> block_;
  TokenDropping dropping_;
  mutable std::vector<u64> numbers_;  // for one sample; its tokens are chosen by them
};

}  // namespace

std::unique_ptr<Layer> drop_tokens(std::unique_ptr<Layer> block, const TokenDropping& dropping) {
  DS_ASSERT(block->is_block() && dropping.kept > 0);
  return std::make_unique<DroppingBlock>(std::move(block), dropping);
}

}  // namespace ds::model
