// SPDX-License-Identifier: Apache-2.0
#include "infer/session_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <string>

#include "model/models.h"
#include "plan/dry_run.h"
#include "plan/stage.h"

namespace ds::infer {

namespace {

// More rows of logits than sequences, for those of which all tokens are scored.
constexpr i64 kLogitRows = 32;
constexpr i64 kMostIds = 1 << 23;  // OpTable::sample

CacheSpace& space_of(SessionPlan& p, const model::Model& model, i64 window) {
  const auto found = std::ranges::find(p.spaces, window, &CacheSpace::window);
  if (found != p.spaces.end()) return *found;
  const i64 heads = model.num_heads / model.shard.tp;
  CacheSpace space{.lives = BlockLives(model.layout.get(), heads * model.shard.tp_rank, heads, window, p.sizes.context),
                   .window = window};
  space.all = model.layout == nullptr && space.lives.all();
  const i64 each = space.lives.most(p.rows);
  const i64 most = p.sizes.at_once * each,
            together = align_up(p.sizes.cached, space.lives.block()) / space.lives.block();
  space.blocks = space.all && p.sizes.cached > 0 ? std::clamp(together, each, most) : most;
  return p.spaces.emplace_back(std::move(space));
}

void check_coded_caches(const model::Model& model) {
  const bool makes = std::ranges::any_of(model.layers, [](const auto& layer) { return layer->cache().makes; });
  DS_CHECK(
      !makes, Errc::Unavailable,
      "--cache-dtype int8: multi-head latent attention caches latents, which have no codes; they are small already");
}

}  // namespace

void SequenceArrays::add(i64 fresh, i64 keys, i64 table) {
  begins_.push_back(begins_.back() + narrow<i32>(fresh));
  keys_.push_back(narrow<i32>(keys));
  tables_.push_back(narrow<i32>(table));
}

std::vector<i32> SequenceArrays::joined() const {
  std::vector<i32> all = begins_;
  all.insert(all.end(), keys_.begin(), keys_.end());
  all.insert(all.end(), tables_.begin(), tables_.end());
  return all;
}

std::vector<TensorView> SessionPlan::arrays_of(const model::Layer& layer, const CacheSpace& space, DType work) const {
  std::vector<TensorView> arrays;
  for (const auto& [heads, dim] : layer.cache().arrays)
    arrays.push_back(TensorView::of(nullptr, sizes.codes_cache ? DType::I8 : work,
                                    {1, space.blocks * space.lives.block(), heads, dim}));
  return arrays;
}

i64 SessionPlan::array_bytes(const TensorView& array) noexcept {
  const i64 scales = array.dtype == DType::I8 ? array.numel() / array.dim(3) * i64{sizeof(float)} : 0;
  return align_up(array.bytes(), kAlign) + align_up(scales, kAlign);
}

void SessionPlan::place(TensorView& array, char* memory) noexcept {
  array.data = memory;
  if (array.dtype == DType::I8) array.scale = reinterpret_cast<float*>(memory + align_up(array.bytes(), kAlign));
}

plan::TagBytes SessionPlan::bytes() const {
  plan::TagBytes sum{};
  const auto tag = [&](Tag t) -> i64& { return sum[static_cast<size_t>(t)]; };
  for (const Tag t : {Tag::Data, Tag::Logits, Tag::Workspace}) tag(t) = pass.bytes(t);
  tag(Tag::Data) += draws.bytes() + changes.bytes() + drawn.bytes();
  tag(Tag::Activations) = working_bytes + table_bytes + sequence_bytes + cache_bytes;
  tag(Tag::Workspace) += temporary_bytes + message_bytes + looked_up_bytes;
  return sum;
}

SessionPlan plan_session(const model::Model& model, const plan::RunPlan& plan, const SessionSizes& sizes) {
  DS_CHECK(model.vocab < kMostIds, Errc::Unavailable, "vocab_size {}: tokens are drawn from fewer than {} ids",
           model.vocab, kMostIds);
  SessionPlan p{.sizes = sizes};
  if (sizes.codes_cache) check_coded_caches(model);
  const i64 proposed = sizes.at_once * sizes.draft_tokens;
  p.rows = std::max(sizes.chunk, sizes.at_once) + proposed;
  p.logit_rows = std::max(sizes.at_once + proposed, std::min(p.rows, kLogitRows));
  // Layers of other stages count, too, so that all ranks decide alike.
  for (const auto& layer : model.layers) {
    if (const model::CacheShape shape = layer->cache(); !shape.arrays.empty()) space_of(p, model, shape.window);
  }
  for (const plan::ChunkPlan& c : plan.stage.chunks) {
    model::ActivationPlanner planner;
    plan::plan_acts(model, c, plan, planner, model::Mode::Generate, {1, p.rows, p.rows, sizes.context});
    p.working_bytes = std::max(p.working_bytes, planner.working_bytes());
    p.temporary_bytes = std::max(p.temporary_bytes, planner.temporary_bytes());
    for (i64 l = c.chunk.begin; l < c.chunk.end; ++l) {
      const model::Layer& layer = *model.layers[l];
      const model::CacheShape shape = layer.cache();
      if (shape.arrays.empty()) continue;
      CacheSpace& space = space_of(p, model, shape.window);
      space.layers.push_back(l);
      for (const TensorView& array : p.arrays_of(layer, space, plan.work))
        p.cache_bytes += SessionPlan::array_bytes(array);
    }
  }
  for (const CacheSpace& space : p.spaces)
    p.table_bytes += sizes.at_once * align_up(space.lives.count() * i64{sizeof(i32)}, SessionPlan::kAlign);
  p.sequence_bytes = SequenceArrays::size(sizes.at_once) * i64{sizeof(i32)};
  // Rotations are those of the whole sequence, so the output depends neither on the training length nor on other
  // sequences. (Hugging Face uses the length so far, and keeps keys with the rotations that applied when they were
  // new.)
  p.rope_apart = std::ranges::any_of(model.rotations, &model::Rotation::by_length);
  p.pass = model::PassMemory(model, {.B = 1,
                                     .T = p.rows,
                                     .rope_rows = sizes.context * (p.rope_apart ? sizes.at_once : 1),
                                     .losses = false,
                                     .logits_rows = p.logit_rows,
                                     .context = sizes.context,
                                     .tile_cols = plan.tile_cols(),
                                     .work = plan.work});
  p.draws = TensorView::of(nullptr, DType::U8, {p.logit_rows * i64{sizeof(Draw)}});
  p.changes = TensorView::of(nullptr, DType::U8, {model.vocab * i64{sizeof(LogitChange)}});
  p.drawn = TensorView::of(nullptr, DType::I32, {2, p.logit_rows});
  if (plan.looked_up >= 0) {
    p.looked_up = plan.row_of(plan.looked_up).matrices().cols;
    p.looked_up_bytes = p.rows * (p.looked_up * dtype_bytes(plan.work) + i64{sizeof(i32)});
  }
  if (plan.mesh.pp > 1) p.message_bytes = p.rows * model.hidden * dtype_bytes(plan.work);
  return p;
}

namespace {

// Layers of one kind, with rows and caches of equal shapes, reserve the same.
std::string kind_of(const model::Layer& layer) {
  std::string kind(layer.type());
  for (const auto& [heads, dim] : layer.cache().arrays) kind += fmt::format(" {}x{}", heads, dim);
  kind += fmt::format(" {}", layer.cache().window);
  for (const model::ParamRow& row : layer.rows()) kind += fmt::format(" {}", fmt::join(row.shape, "x"));
  return kind;
}

// Passes of a session, walked with ops that compute nothing.
class SessionWalk {
 public:
  SessionWalk(const model::Model& model, const plan::RunPlan& plan, const SessionPlan& session, const OpTable& ops,
              Stream& stream)
      : model_(model), plan_(plan), session_(session), ops_(ops), stream_(stream), axes_(model.shard) {
    blocks_.resize(static_cast<size_t>(session.sizes.context));
    spaces_.resize(model.layers.size());
    for (const CacheSpace& space : session.spaces) {
      for (const i64 l : space.layers) spaces_[l] = &space;
    }
  }

  // A pass over so many rows: the last ones of sequences of `length` tokens, at most `each` of a sequence. Through the
  // layers for which wanted(l).
  void run(i64 rows, i64 length, i64 each, FunctionRef<bool(i64)> wanted) {
    std::vector<i64> fresh;
    for (i64 left = rows; left > 0; left -= fresh.back()) fresh.push_back(std::min(left, each));
    std::vector<model::KvCache> caches(fresh.size());
    std::vector<model::KvCache*> pointers;
    for (model::KvCache& cache : caches) pointers.push_back(&cache);
    SequenceArrays sequences;
    for (const i64 n : fresh) sequences.add(n, length, 0);
    const std::vector<i32> joined = sequences.joined();
    const model::Pass pass{
        .mode = model::Mode::Generate, .B = 1, .T = rows, .logit_rows = std::min(rows, session_.logit_rows)};
    std::byte there{};  // never read
    std::vector<TensorView> arrays;
    plan::walk_forward(model_, plan_, session_.pass, pass, {ops_, stream_, axes_.comms()},
                       [&](i64 l, model::PassContext& ctx) {
                         if (!wanted(l)) return false;
                         if (spaces_[l] == nullptr) return true;
                         arrays = session_.arrays_of(*model_.layers[l], *spaces_[l], plan_.work);
                         for (TensorView& array : arrays) array.data = &there;
                         for (size_t i = 0; i < caches.size(); ++i)
                           caches[i] = {.arrays = arrays,
                                        .length = length - fresh[i],
                                        .block = spaces_[l]->lives.block(),
                                        .blocks = blocks_,
                                        .pages = blocks_.data(),
                                        .table = std::ssize(blocks_)};
                         ctx.caches = pointers;
                         ctx.fresh = fresh;
                         ctx.sequences = SequenceArrays::over(joined.data(), std::ssize(fresh));
                         return true;
                       });
  }

 private:
  const model::Model& model_;
  const plan::RunPlan& plan_;
  const SessionPlan& session_;
  const OpTable& ops_;
  Stream& stream_;
  const plan::CountingAxes axes_;
  std::vector<i32> blocks_;
  std::vector<const CacheSpace*> spaces_;
};

}  // namespace

plan::OpTally decoding_work(const model::Model& model, const plan::RunPlan& plan, const SessionPlan& session) {
  plan::OpTally tally;
  Stream stream{.native = &tally};
  SessionWalk(model, plan, session, plan::counting_ops(), stream)
      .run(session.sizes.at_once, session.sizes.context, 1, [](i64) { return true; });
  return tally;
}

// Weights are packed first. Then passes over each number of rows, by sequences at the end of their context, where there
// is most to attend to. Where keys and values are made, each length of a sequence has products of its own.
std::optional<i64> session_scratch(const model::Model& model, const plan::RunPlan& plan, const SessionPlan& session,
                                   const OpTable& backend, int threads) {
  const OpTable* const ops = scratch_ops(backend.name);
  if (ops == nullptr) return std::nullopt;
  ScratchMeter meter{.threads = threads};
  Stream stream{.native = &meter};
  plan::walk_packing(plan, *ops, stream);
  std::set<std::string> kinds;
  std::vector<bool> first_of_kind(model.layers.size());
  for (const plan::ChunkPlan& c : plan.stage.chunks) {
    for (i64 l = c.chunk.begin; l < c.chunk.end; ++l) first_of_kind[l] = kinds.insert(kind_of(*model.layers[l])).second;
  }
  SessionWalk passes(model, plan, session, *ops, stream);
  const auto walk = [&](i64 rows, i64 length) {
    passes.run(rows, length, length, [&](i64 l) { return first_of_kind[l]; });
  };
  const i64 context = session.sizes.context;
  // From some thousand rows on, tiles have their largest sizes.
  constexpr i64 kEach = 2048, kStep = 512;
  for (i64 rows = 1; rows < session.rows; rows += rows < kEach ? 1 : kStep) walk(rows, context);
  walk(session.rows, context);
  for (i64 length = 1;
       std::ranges::any_of(model.layers, [](const auto& layer) { return layer->cache().makes; }) && length < context;
       ++length)
    walk(1, length);
  return threads * meter.most;
}

}  // namespace ds::infer
