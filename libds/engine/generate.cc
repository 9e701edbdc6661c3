// SPDX-License-Identifier: Apache-2.0
// Text generation with a key/value cache: the prompt in one pass, then one token a pass.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/engine.h"

namespace ds::engine {
namespace {

// Softmax sampling at a temperature among the top k logits; the stream depends on the seed and the position alone.
i32 sample(std::span<const float> logits, const GenerateOptions& o, i64 position, std::vector<i32>& order) {
  const auto greater = [&](i32 a, i32 b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  order.resize(logits.size());
  std::iota(order.begin(), order.end(), 0);
  if (o.temperature == 0) return *std::min_element(order.begin(), order.end(), greater);
  const size_t k = o.top_k > 0 ? std::min(static_cast<size_t>(o.top_k), logits.size()) : logits.size();
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(), greater);
  const double top = static_cast<double>(logits[static_cast<size_t>(order[0])]);
  const auto weight = [&](size_t i) {
    return std::exp((static_cast<double>(logits[static_cast<size_t>(order[i])]) - top) / o.temperature);
  };
  double total = 0;
  for (size_t i = 0; i < k; ++i) total += weight(i);
  constexpr u32 kSamplingSite = 0x40000000u;
  const RngKey key{o.seed, kSamplingSite, 0};
  double left = total * static_cast<double>(RngKey::uniform(key.bits(static_cast<u64>(position))));
  for (size_t i = 0; i < k; ++i) {
    left -= weight(i);
    if (left <= 0) return order[i];
  }
  return order[k - 1];
}

}  // namespace

void Engine::generate(std::span<const i32> prompt, const GenerateOptions& o, const std::function<bool(i32)>& token) {
  const i64 length = narrow<i64>(prompt.size()), capacity = length + o.max_tokens;
  DS_CHECK(length >= 1, Errc::Config, "the prompt is empty");
  DS_CHECK(capacity <= model_.max_positions || config_.model.any_length(), Errc::Config,
           "prompt ({} tokens) and {} new tokens exceed the model's {} positions", length, o.max_tokens,
           model_.max_positions);
  const model::Shard& shard = model_.shard;
  const i64 kv_heads = std::max<i64>(model_.num_kv_heads / shard.tp, 1), C = model_.hidden;
  const i64 work_bytes = dtype_bytes(plan_.work), cache_bytes = capacity * kv_heads * model_.head_dim * work_bytes;
  const auto buffer = [&](Tag tag, i64 bytes) { return device_buffer(device_, ledger_, tag, bytes); };
  std::vector<Buffer> memory;
  std::vector<model::KvCache> caches(model_.layers.size());
  for (const report::ChunkPlan& c : plan_.chunks) {
    for (i64 l = c.chunk.begin; l < c.chunk.end; ++l) {
      if (!model_.layers[static_cast<size_t>(l)]->is_block()) continue;
      model::KvCache& cache = caches[static_cast<size_t>(l)];
      for (TensorView* v : {&cache.k, &cache.v}) {
        memory.push_back(buffer(Tag::Activations, cache_bytes));
        *v = TensorView::of(memory.back().data(), plan_.work, {1, capacity, kv_heads, model_.head_dim});
      }
    }
  }

  // Activations for T tokens at once: the prompt's, then, planned anew in the same memory, those of one token.
  using Acts = std::vector<model::LayerActs>;
  const auto plan_acts = [&](const report::ChunkPlan& c, const model::ActivationPlanner::Memory& at, i64 T,
                             Acts& acts) {
    model::ActivationPlanner planner(at);
    acts = report::plan_acts(model_, c, plan_, planner, model::Mode::Generate, {1, T, T});
    return std::pair{planner.working_bytes(), planner.temporary_bytes()};
  };
  i64 working_bytes = 0, temporary_bytes = 0;
  Acts acts;
  for (const report::ChunkPlan& c : plan_.chunks) {
    const auto [w, t] = plan_acts(c, {}, length, acts);
    working_bytes = std::max(working_bytes, w);
    temporary_bytes = std::max(temporary_bytes, t);
  }
  const Buffer working = buffer(Tag::Activations, working_bytes), temporary = buffer(Tag::Workspace, temporary_bytes);
  const i64 rows = shard.padded_rows(length);
  const Buffer message = buffer(Tag::Workspace, plan_.mesh.pp > 1 ? length * C * work_bytes : 0);
  const i64 sum_bytes = shard.tp > 1 ? rows * C * work_bytes : 0;
  const Buffer partial = buffer(Tag::Workspace, sum_bytes), gathered = buffer(Tag::Workspace, sum_bytes),
               sum = buffer(Tag::Workspace, shard.tp > 1 ? rows / shard.tp * C * 4 : 0);
  const Buffer logits_memory = buffer(Tag::Logits, model_.vocab * 4);
  const TensorView logits_view = TensorView::of(logits_memory.data(), DType::F32, {1, model_.vocab});
  std::vector<float> logits(static_cast<size_t>(model_.vocab));
  // Of the whole text, so that what is written does not depend on the length that the run trains at. (Hugging Face goes
  // by the length so far and keeps keys rotated by what held when they were new.)
  const model::RopeTables rope = model::make_rope_tables(config_.model, capacity);
  std::vector<i32> tokens(prompt.begin(), prompt.end()), positions(static_cast<size_t>(capacity)), order;
  tokens.reserve(static_cast<size_t>(capacity));
  std::iota(positions.begin(), positions.end(), 0);
  const i64 rope_elems = narrow<i64>(rope.cos.size());
  const Buffer input = buffer(Tag::Data, (2 * capacity + 2 * rope_elems) * 4);
  i32* const device_tokens = input.as<i32>().data();
  i32* const device_positions = device_tokens + capacity;
  device_.upload(device_positions, positions.data(), capacity * 4);
  TensorView cos{}, sin{};
  if (rope_elems > 0) {
    cos = TensorView::of(device_positions + capacity, DType::F32, {capacity, rope_elems / capacity});
    sin = TensorView::of(device_positions + capacity + rope_elems, DType::F32, {capacity, rope_elems / capacity});
    device_.upload(cos.data, rope.cos.data(), rope_elems * 4);
    device_.upload(sin.data, rope.sin.data(), rope_elems * 4);
  }

  for (i64 done = 0; narrow<i64>(tokens.size()) < capacity;) {
    const i64 T = narrow<i64>(tokens.size()) - done;
    model::PassContext ctx{.ops = ops_, .stream = stream_, .mode = model::Mode::Generate, .B = 1, .T = T};
    device_.upload(device_tokens, tokens.data() + done, T * 4);
    ctx.ids = TensorView::of(device_tokens, DType::I32, {T});
    ctx.positions = ctx.row_positions = TensorView::of(device_positions + done, DType::I32, {T});
    ctx.rope_cos = cos;
    ctx.rope_sin = sin;
    ctx.logits = logits_view;
    // Each rank has all positions of its layers: what cuts sequences does nothing here.
    model::Groups& g = ctx.groups;
    g.shard = {.tp = shard.tp, .tp_rank = shard.tp_rank};
    g.sequence_length = T;
    g.tp = &mesh_.tp();
    const i64 T_rows = g.shard.padded_rows(T);
    g.partial = TensorView::of(partial.data(), plan_.work, {T_rows, C});
    g.gathered = TensorView::of(gathered.data(), plan_.work, {T_rows, C});
    g.sum = TensorView::of(sum.data(), DType::F32, {T_rows / shard.tp, C});
    if (shard.tp > 1) device_.zero(logits_memory.data(), logits_memory.bytes());  // the ranks' parts are added

    for (size_t c = 0; c < plan_.chunks.size(); ++c) {
      const report::ChunkPlan& chunk = plan_.chunks[c];
      plan_acts(chunk, {nullptr, working.data(), temporary.data()}, T, acts);
      params_.begin(plan_.eval_gathers[c]);
      TensorView x{};
      if (!chunk.first) {
        x = TensorView::of(message.data(), plan_.work, {T, C});
        mesh_.activations().recv(x.data, x.bytes(), previous_stage(), "pp.recv").wait();
      }
      for (i64 l = chunk.chunk.begin; l < chunk.chunk.end; ++l) {
        ctx.cache = &caches[static_cast<size_t>(l)];
        const model::LayerActs& layer = acts[static_cast<size_t>(l - chunk.chunk.begin)];
        const zero::ParamLease lease = params_.acquire();
        model_.layers[static_cast<size_t>(l)]->forward(ctx, param_views(lease, l), x, layer);
        x = layer.output;
      }
      if (!chunk.last) mesh_.activations().send(x.data, x.bytes(), next_stage(), "pp.send").wait();
    }
    done += T;
    mesh_.pp().broadcast(logits_view.data, logits_view.bytes(), plan_.mesh.pp - 1, "pp.broadcast").wait();
    device_.download(logits.data(), logits_view.data, logits_view.bytes());
    DS_CHECK(std::ranges::all_of(logits, [](float y) { return std::isfinite(y); }), Errc::Numeric,
             "the logits of token {} are not finite: weights or activations are beyond the range of {}", done,
             dtype_name(plan_.work));
    tokens.push_back(sample(logits, o, done, order));
    if (!token(tokens.back())) return;
  }
}

}  // namespace ds::engine
