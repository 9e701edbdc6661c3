// SPDX-License-Identifier: Apache-2.0
#include "model/pass_memory.h"

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "model/attention_pattern.h"
#include "model/models.h"

namespace ds::model {

Communicator& Groups::operator[](Axis axis) const {
  DS_ASSERT(comms[axis] != nullptr);
  return *comms[axis];
}

Groups Groups::over(i64 R) const {
  DS_ASSERT(R <= most_rows);
  Groups g = *this;
  const i64 rows = shard.padded_rows(R);
  for (TensorView* v : {&g.partial, &g.gathered}) v->shape[0] = v->rank > 0 ? rows : 0;
  g.sum.shape[0] = g.sum.rank > 0 ? rows / shard.tp : 0;
  return g;
}

PassMemory::PassMemory(const Model& model, const PassSizes& s) : sizes(s) {
  const i64 R = s.B * s.T, C = model.hidden, tp = model.shard.tp;
  sizes.product_rows = model.product_rows(R);
  if (std::ranges::any_of(model.layers, [](const auto& layer) { return layer->cache().makes; }))
    sizes.product_rows = std::max(sizes.product_rows, s.context);
  const auto view = [](DType dtype, std::initializer_list<i64> shape) { return TensorView::of(nullptr, dtype, shape); };
  ids = view(DType::I32, {s.micro_batches * R});
  positions = view(DType::I32, {s.T});
  row_positions = view(DType::I32, {R});
  if (s.documents) {
    row_positions = ids;
    documents = view(DType::I32, {s.micro_batches * 2 * s.B * s.sequence_length});
  }
  if (s.losses) {
    targets = ids;
    if (model.token_types > 0) token_types = view(DType::I32, {R});
    losses = view(DType::F32, {R});
  } else {
    logit_rows = targets = view(DType::I32, {s.logits_rows});
    losses = view(DType::F32, {s.logits_rows});
    stats = view(DType::F32, {3, s.logits_rows});
  }
  if (s.gradients && model.num_aux_losses() > 0) aux_loss = aux_grad = view(DType::F32, {1});
  if (s.gradients) {
    i64 most = 0;
    for (const auto& layer : model.layers) most = std::max(most, layer->num_counts());
    if (most > 0) counts = view(DType::F32, {most});
    if (const i64 n = model.num_step_counts(); n > 0) step_counts = view(DType::F32, {n});
  }
  if (model.layout != nullptr) {
    layout_keys = view(DType::I32, {2 * std::ssize(model.layout->keys())});
    if (s.gradients) layout_queries = layout_keys;
  }
  for (const Rotation& r : model.rotations) {
    const TensorView table = view(DType::F32, {s.rope_rows, r.dim / 2});
    rotations.push_back({table, table});
  }
  const i64 vocab = s.losses ? model.vocab_share() : model.vocab;
  if (s.logits_rows > 0) logits = view(s.logits, {s.logits_rows, vocab});
  if (s.projects && s.gradients && !s.fused && model.trains_projection())
    head_weight_grad = view(DType::F32, {vocab, C});
  if (s.tile_cols > 0) tile_sum = view(DType::F32, {sizes.product_rows, s.tile_cols});
  if (const i64 bytes = model.fp8_bytes(sizes.product_rows); bytes > 0) fp8 = view(DType::U8, {bytes});
  if (tp == 1) return;
  const i64 rows = model.shard.padded_rows(sizes.product_rows);
  partial = gathered = view(s.work, {rows, C});
  sum = view(DType::F32, {rows / tp, C});
  if (s.losses) stats = view(DType::F32, {3, s.logits_rows});
}

i64 PassMemory::bytes(Tag tag) const {
  i64 sum_of_tag = 0;
  PassMemory copy = *this;
  copy.for_each([&](Tag t, const TensorView& v) { sum_of_tag += t == tag && v.rank > 0 ? v.bytes() : 0; });
  return sum_of_tag;
}

namespace {

TensorView first_rows(const TensorView& v, i64 rows) { return v.rank > 0 ? v.rows(0, rows) : v; }

// Kernels read the bits of a layout in 64-bit words; the views in Tag::Data have 32-bit elements.
const u64* layout_words(const TensorView& v) {
  DS_ASSERT(reinterpret_cast<std::uintptr_t>(v.data) % alignof(u64) == 0);
  return static_cast<const u64*>(v.data);
}

}  // namespace

void upload_layout(const PassMemory& m, const Model& model, Device& device) {
  for (const TensorView& words : {m.layout_keys, m.layout_queries})
    DS_ASSERT(reinterpret_cast<std::uintptr_t>(words.data) % alignof(u64) == 0);  // kernels read 64-bit words
  if (m.layout_keys) device.upload(m.layout_keys.data, model.layout->keys().data(), m.layout_keys.bytes());
  if (m.layout_queries) device.upload(m.layout_queries.data, model.layout->queries().data(), m.layout_queries.bytes());
}

void upload_rotations(const PassMemory& m, const Model& model, i64 first_row, i64 length, Device& device) {
  for (size_t n = 0; n < m.rotations.size(); ++n) {
    const RopeTables tables = make_rope_tables(model.rotations[n], length);
    const TensorView cos = m.rotations[n].cos.rows(first_row, length), sin = m.rotations[n].sin.rows(first_row, length);
    device.upload(cos.data, tables.cos.data(), cos.bytes());
    device.upload(sin.data, tables.sin.data(), sin.bytes());
  }
}

PassContext make_context(const PassMemory& m, const Pass& pass, const Model& model, const OpTable& ops, Stream& stream,
                         const AxisComms& comms) {
  const i64 R = pass.B * pass.T;
  const bool asks = pass.mode == Mode::Generate;
  PassContext ctx{.ops = ops, .stream = stream, .mode = pass.mode, .B = pass.B, .T = pass.T};
  ctx.ids = m.ids.rows(pass.micro * R, R);
  ctx.positions = m.positions.rows(0, pass.T);
  ctx.row_positions = m.row_positions.rows(0, R);
  if (m.documents) {
    ctx.positions = ctx.row_positions = m.row_positions.rows(pass.micro * R, R);
    const i64 n = 2 * pass.B * m.sizes.sequence_length;
    ctx.documents = m.documents.rows(pass.micro * n, n);
  }
  ctx.rotations = m.rotations;
  ctx.tile_sum = m.tile_sum;
  ctx.fp8 = m.fp8;
  if (const AttentionLayout* const layout = model.layout.get(); layout != nullptr) {
    ctx.blocks = {.block = layout->block(),
                  .count = layout->count(),
                  .layouts = layout->layouts(),
                  .keys = layout_words(m.layout_keys),
                  .queries = layout_words(m.layout_queries)};
  }
  ctx.logits = asks ? first_rows(m.logits, pass.logit_rows) : m.logits;
  if (asks) ctx.logit_rows = m.logit_rows.rows(0, pass.logit_rows);
  Groups& g = ctx.groups;
  g.shard = model.shard;
  // Generation has all positions on each rank, so it ignores sequence parallelism.
  if (asks) g.shard.sequence = false, g.shard.sp = 1, g.shard.sp_rank = 0, g.shard.mode = SequenceMode::Ulysses;
  g.comms = comms;
  g.sequence_length = asks ? pass.T : m.sizes.sequence_length;
  g.partial = m.partial;
  g.gathered = m.gathered;
  g.sum = m.sum;
  g.stats = m.stats;
  g.most_rows = m.sizes.product_rows;
  g = g.over(R);
  if (asks) return ctx;
  ctx.targets = m.targets.rows(pass.micro * R, R);
  ctx.token_types = m.token_types;
  ctx.losses = m.losses;
  ctx.head_weight_grad = m.head_weight_grad;
  if (pass.mode == Mode::Train)
    ctx.aux_loss = m.aux_loss, ctx.aux_grad = m.aux_grad, ctx.counts = m.counts, ctx.step_counts = m.step_counts;
  return ctx;
}

PassContext forward_context(PassContext ctx, const Model& model, i64 layer, bool again) {
  const i64 n = model.layers[static_cast<size_t>(layer)]->num_step_counts();
  if (again) ctx.counts = {};
  ctx.step_counts = again || n == 0 ? TensorView{} : ctx.step_counts.rows(model.step_counts_before(layer), n);
  return ctx;
}

}  // namespace ds::model
