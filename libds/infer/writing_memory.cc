// SPDX-License-Identifier: Apache-2.0
#include "infer/writing_memory.h"

#include <algorithm>
#include <functional>
#include <set>

#include "model/models.h"
#include "plan/dry_run.h"
#include "plan/stage.h"

namespace ds::infer {

std::vector<LayerCaches> WritingMemory::plan_caches(i64 prompt) const {
  std::vector<LayerCaches> caches;
  for (const auto& [shape, of_shape] : layers)
    caches.push_back(
        {KeptKeys(layout.get(), head0, heads, shape.window, prompt, prompt + max_tokens), shape, of_shape});
  return caches;
}

std::vector<TensorView> WritingMemory::arrays_of(const LayerCaches& c) const {
  std::vector<TensorView> arrays;
  for (const auto& [num_heads, dim] : c.shape.arrays)
    arrays.push_back(TensorView::of(nullptr, work, {1, c.keys.rows(), num_heads, dim}));
  return arrays;
}

i64 WritingMemory::array_bytes(const LayerCaches& c) const noexcept {
  i64 sum = 0;
  for (const auto& [num_heads, dim] : c.shape.arrays)
    sum += align_up(c.keys.rows() * num_heads * dim * dtype_bytes(work), kCacheAlign);
  return sum;
}

i64 WritingMemory::bytes_of(const std::vector<LayerCaches>& caches) const noexcept {
  i64 sum = 0;
  for (const LayerCaches& c : caches) sum += pages_bytes(c.keys) + std::ssize(c.layers) * array_bytes(c);
  return sum;
}

i64 WritingMemory::most_made() const noexcept {
  i64 most = 0;
  for (const auto& [shape, of_shape] : layers) most = std::max(most, shape.made);
  return most;
}

plan::TagBytes WritingMemory::bytes() const {
  plan::TagBytes sum{};
  const auto tag = [&](Tag t) -> i64& { return sum[static_cast<size_t>(t)]; };
  for (const Tag t : {Tag::Data, Tag::Logits, Tag::Workspace}) tag(t) = pass.bytes(t);
  tag(Tag::Activations) = working_bytes + caches_bytes;
  tag(Tag::Workspace) += temporary_bytes + message_bytes;
  return sum;
}

WritingMemory plan_writing(const model::Model& model, const plan::RunPlan& plan,
                           std::span<const std::vector<i32>> prompts, i64 max_tokens, i64 at_once) {
  WritingMemory w{.at_once = std::clamp<i64>(at_once, 1, std::max<i64>(std::ssize(prompts), 1)),
                  .work = plan.work,
                  .max_tokens = max_tokens,
                  .heads = model.num_heads / model.shard.tp,
                  .head0 = model.num_heads / model.shard.tp * model.shard.tp_rank,
                  .layout = model.layout};
  std::vector<i64> lengths;
  for (const std::vector<i32>& prompt : prompts) lengths.push_back(std::ssize(prompt));
  std::ranges::sort(lengths, std::greater<>());
  w.longest = lengths.empty() ? 0 : lengths.front();
  w.largest = w.longest + max_tokens;
  for (const plan::ChunkPlan& c : plan.stage.chunks) {
    for (const auto& [B, T] : {std::pair{i64{1}, w.longest}, {w.at_once, i64{1}}}) {
      model::ActivationPlanner planner;
      plan::plan_acts(model, c, plan, planner, model::Mode::Generate, {B, T, B * T});
      w.working_bytes = std::max(w.working_bytes, planner.working_bytes());
      w.temporary_bytes = std::max(w.temporary_bytes, planner.temporary_bytes());
    }
    for (i64 l = c.chunk.begin; l < c.chunk.end; ++l) {
      if (model::CacheShape shape = model.layers[l]->cache(); !shape.arrays.empty())
        w.layers[std::move(shape)].push_back(l);
    }
  }
  std::map<i64, i64> bytes;  // cache size by prompt length
  std::vector<i64> caches;
  for (const i64 length : lengths) {
    const auto [found, is_new] = bytes.try_emplace(length);
    if (is_new) found->second = w.bytes_of(w.plan_caches(length));
    caches.push_back(found->second);
  }
  std::ranges::sort(caches, std::greater<>());
  for (i64 i = 0; i < std::min(w.at_once, std::ssize(caches)); ++i) w.caches_bytes += caches[i];
  // Rotations are those of the whole sequence, so the output depends neither on the training length nor on other
  // sequences. (Hugging Face uses the length so far, and keeps keys with the rotations that applied when they were
  // new.)
  w.rope_apart = std::ranges::any_of(model.rotations, &model::Rotation::by_length);
  const i64 rows = std::max(w.longest, w.at_once);
  w.pass = model::PassMemory(model, {.B = 1,
                                     .T = std::max(rows, std::min(w.most_made(), w.largest)),
                                     .rope_rows = w.largest * (w.rope_apart ? w.at_once : 1),
                                     .losses = false,
                                     .logits_rows = w.at_once,
                                     .tile_cols = plan.tile_cols(),
                                     .work = plan.work});
  if (plan.mesh.pp > 1) w.message_bytes = rows * model.hidden * dtype_bytes(plan.work);
  return w;
}

// The lengths at which sequences of a model with CacheShape::made have other parts of keys to make: a whole part, and
// each rest of one.
std::set<i64> lengths_of_parts(std::span<const std::vector<i32>> prompts, i64 max_tokens, i64 made) {
  std::set<i64> lengths;
  for (const std::vector<i32>& prompt : prompts) {
    for (i64 n = std::ssize(prompt) + 1; made > 0 && n < std::ssize(prompt) + max_tokens; ++n)
      lengths.insert(n <= made ? n : made + n % made);
  }
  return lengths;
}

// Weights are packed first. Then a pass for each prompt length, and one for each number of sequences in progress, at
// the end of the longest sequence, since the parts of keys that a token sees grow with their number. Layers with caches
// of one shape are alike.
std::optional<i64> writing_scratch(const model::Model& model, const plan::RunPlan& plan, const WritingMemory& writing,
                                   std::span<const std::vector<i32>> prompts, const OpTable& backend, int threads) {
  const OpTable* const ops = scratch_ops(backend.name);
  if (ops == nullptr) return std::nullopt;
  const plan::CountingAxes axes(model.shard);
  ScratchMeter meter{.threads = threads};
  Stream stream{.native = &meter};

  std::vector<const LayerCaches*> of_layer(model.layers.size());
  const std::vector<LayerCaches> kept = writing.plan_caches(writing.longest);
  std::set<i64> repeated;
  for (const LayerCaches& c : kept) {
    for (const i64 l : c.layers) of_layer[l] = &c;
    repeated.insert(c.layers.begin() + 1, c.layers.end());
  }
  std::byte there{};  // never read
  const auto walk = [&](i64 B, i64 T, i64 seen) {
    std::vector<model::KvCache> caches(B);
    std::vector<model::KvCache*> of_sequences;
    for (model::KvCache& c : caches) of_sequences.push_back(&c);
    plan::walk_forward(model, plan, writing.pass, {.mode = model::Mode::Generate, .B = B, .T = T},
                       {*ops, stream, axes.comms()}, [&](i64 l, model::PassContext& ctx) {
                         if (repeated.contains(l)) return false;
                         if (of_layer[l] == nullptr) return true;
                         const KeptKeys& keys = of_layer[l]->keys;
                         std::vector<TensorView> arrays = writing.arrays_of(*of_layer[l]);
                         for (TensorView& array : arrays) array.data = &there;
                         for (model::KvCache& c : caches)
                           c = {.arrays = arrays, .length = seen, .page = keys.page(), .places = keys.places()};
                         ctx.caches = of_sequences;
                         return true;
                       });
  };
  plan::walk_packing(plan, *ops, stream);
  std::set<i64> lengths;
  for (const std::vector<i32>& prompt : prompts) lengths.insert(std::ssize(prompt));
  for (const i64 length : lengths) walk(1, length, 0);
  for (const i64 length : lengths_of_parts(prompts, writing.max_tokens, writing.most_made())) walk(1, 1, length - 1);
  // The last token of a sequence is not read.
  if (writing.max_tokens > 1) {
    for (i64 b = 1; b <= writing.at_once; ++b) walk(b, 1, writing.largest - 2);
  }
  return threads * meter.most;
}

}  // namespace ds::infer
