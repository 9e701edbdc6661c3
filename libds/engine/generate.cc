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
  const size_t num_layers = model_.layers.size();
  const i64 cache_bytes = capacity * model_.num_kv_heads * model_.head_dim * dtype_bytes(plan_.work);
  std::vector<Buffer> memory;
  std::vector<model::KvCache> caches(num_layers);
  for (size_t l = 1; l + 1 < num_layers; ++l) {
    for (TensorView* v : {&caches[l].k, &caches[l].v}) {
      memory.push_back(device_buffer(device_, ledger_, Tag::Activations, cache_bytes));
      *v = TensorView::of(memory.back().data(), plan_.work, {1, capacity, model_.num_kv_heads, model_.head_dim});
    }
  }

  // Activations for T tokens at once: the prompt's, then, planned anew in the same memory, those of one token.
  std::vector<model::LayerActs> acts;
  const auto plan_acts = [&](void* saved, void* temporary, i64 T) {
    model::ActivationPlanner planner(saved, temporary);
    acts.clear();
    for (const auto& layer : model_.layers) {
      planner.begin_layer();
      acts.push_back(layer->plan(planner, plan_.work, 1, T, model::Mode::Generate));
    }
    return std::pair{planner.saved_bytes(), planner.temporary_bytes()};
  };
  const auto [saved_bytes, temporary_bytes] = plan_acts(nullptr, nullptr, length);
  const auto buffer = [&](Tag tag, i64 bytes) { return device_buffer(device_, ledger_, tag, bytes); };
  const Buffer saved = buffer(Tag::Activations, saved_bytes), temporary = buffer(Tag::Workspace, temporary_bytes);
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
    plan_acts(saved.data(), temporary.data(), T);
    model::PassContext ctx{.ops = ops_, .stream = stream_, .mode = model::Mode::Generate, .B = 1, .T = T};
    device_.upload(device_tokens, tokens.data() + done, T * 4);
    ctx.ids = TensorView::of(device_tokens, DType::I32, {T});
    ctx.positions = ctx.row_positions = TensorView::of(device_positions + done, DType::I32, {T});
    ctx.rope_cos = cos;
    ctx.rope_sin = sin;
    ctx.logits = logits_view;
    params_.begin(plan_.eval_gathers);
    TensorView x{};
    for (size_t l = 0; l < num_layers; ++l) {
      ctx.cache = &caches[l];
      const zero::ParamLease lease = params_.acquire();
      model_.layers[l]->forward(ctx, param_views(lease, static_cast<i64>(l)), x, acts[l]);
      x = acts[l].output;
    }
    done += T;
    device_.download(logits.data(), logits_view.data, logits_view.bytes());
    DS_CHECK(std::ranges::all_of(logits, [](float y) { return std::isfinite(y); }), Errc::Numeric,
             "the logits of token {} are not finite: weights or activations are beyond the range of {}", done,
             dtype_name(plan_.work));
    tokens.push_back(sample(logits, o, done, order));
    if (!token(tokens.back())) return;
  }
}

}  // namespace ds::engine
