// SPDX-License-Identifier: Apache-2.0
#include "infer/writing_memory.h"

#include <algorithm>
#include <functional>

#include "model/models.h"

namespace ds::infer {

TensorView WritingMemory::cache_part(i64 positions) const noexcept {
  return TensorView::of(nullptr, work, {1, positions, kv_heads, head_dim});
}

report::TagBytes WritingMemory::bytes() const {
  report::TagBytes sum{};
  const auto tag = [&](Tag t) -> i64& { return sum[static_cast<size_t>(t)]; };
  for (const Tag t : {Tag::Data, Tag::Logits, Tag::Workspace}) tag(t) = pass.bytes(t);
  tag(Tag::Activations) = working_bytes + caches_bytes;
  tag(Tag::Workspace) += temporary_bytes + message_bytes;
  return sum;
}

WritingMemory plan_writing(const ModelConfig& config, const model::Model& model, const report::RunPlan& plan,
                           std::span<const std::vector<i32>> prompts, i64 max_tokens, i64 at_once) {
  WritingMemory w{.at_once = std::clamp<i64>(at_once, 1, std::max<i64>(std::ssize(prompts), 1)),
                  .work = plan.work,
                  .kv_heads = std::max<i64>(model.num_kv_heads / model.shard.tp, 1),
                  .head_dim = model.head_dim};
  std::vector<i64> lengths;
  for (const std::vector<i32>& prompt : prompts) lengths.push_back(std::ssize(prompt));
  std::ranges::sort(lengths, std::greater<>());
  w.longest = lengths.empty() ? 0 : lengths.front();
  w.largest = w.longest + max_tokens;
  for (const report::ChunkPlan& c : plan.chunks) {
    for (const auto& [B, T] : {std::pair{i64{1}, w.longest}, {w.at_once, i64{1}}}) {
      model::ActivationPlanner planner;
      report::plan_acts(model, c, plan, planner, model::Mode::Generate, {B, T, B * T});
      w.working_bytes = std::max(w.working_bytes, planner.working_bytes());
      w.temporary_bytes = std::max(w.temporary_bytes, planner.temporary_bytes());
    }
    for (i64 l = c.chunk.begin; l < c.chunk.end; ++l) w.cache_parts += model.layers[l]->is_block() ? 2 : 0;
  }
  for (i64 i = 0; i < std::min(w.at_once, std::ssize(lengths)); ++i)
    w.caches_bytes += w.cache_bytes(lengths[i] + max_tokens);
  // Rotations are those of the whole text, so that what is written depends neither on the length that the run trains at
  // nor on other texts. (Hugging Face goes by the length so far and keeps keys rotated by what held when they were
  // new.)
  w.rope_apart = config.rope.type == RopeType::Dynamic || config.rope.type == RopeType::LongRope;
  const i64 rows = std::max(w.longest, w.at_once), rope_rows = w.largest * (w.rope_apart ? w.at_once : 1);
  const i64 rope_width = model::rope_table_elems(config, w.largest) / std::max<i64>(w.largest, 1);
  w.pass = model::PassMemory(model, {.B = 1,
                                     .T = rows,
                                     .rope_rows = rope_width > 0 ? rope_rows : 0,
                                     .rope_elems = rope_rows * rope_width,
                                     .losses = false,
                                     .logits_rows = w.at_once,
                                     .tile_cols = plan.tile_cols(),
                                     .work = plan.work});
  if (plan.mesh.pp > 1) w.message_bytes = rows * model.hidden * dtype_bytes(plan.work);
  return w;
}

}  // namespace ds::infer
