// SPDX-License-Identifier: Apache-2.0
#include "model/gating.h"

#include <algorithm>
#include <cmath>

#include "comm/message_tag.h"
#include "ds/communicator.h"

namespace ds::model {
namespace {

// N: the tokens of all ranks of sp.
enum GatingArray : size_t {
  kJittered,  // [R,C], or a stream
  kNoisy,     // [R,E]
  kPriority,  // [R,k]
  kGatheredChosen,
  kGatheredPriority,  // [sp,R,k]
  kAllChosen,
  kAllPriority,
  kAllKept,  // [N,k], in the order of the micro-batch
  kRounded,  // [R,E]
};

constexpr float kRouterJitter = 0.01f;
// Uses of dropout_site; attention and branches have the first three.
constexpr u32 kJitterSite = 3, kNoiseSite = 4, kPrioritySite = 5;

// The tokens of `range` among B sequences of `length` tokens with k numbers each; they begin at token `first`.
TensorView tokens_of(TensorView all, i64 B, i64 length, i64 first, i64 count, i64 k) {
  TensorView v = all;
  v.data = static_cast<char*>(all.data) + first * k * dtype_bytes(all.dtype);
  v.rank = 4;
  v.shape = {B, count, 1, k};
  v.stride = {length * k, k, k, 1};
  return v;
}

// Calls f(part, whole) for the tokens of a rank of sp, in its rows [R,k] and in those of all ranks [N,k].
template <class F>
void for_tokens(const PassContext& ctx, int sp_rank, TensorView rows, TensorView all, F&& f) {
  Shard shard = ctx.groups.shard;
  shard.sp_rank = sp_rank;
  const i64 k = all.dim(1), length = ctx.T * shard.sp;
  i64 first = 0;
  for (const TokenRange& range : shard.tokens(length)) {
    f(tokens_of(rows, ctx.B, ctx.T, first, range.count, k), tokens_of(all, ctx.B, length, range.begin, range.count, k));
    first += range.count;
  }
}

}  // namespace

Gating::Gating(const ModelConfig& c, const Shard& shard, i64 layer)
    : config_(c.experts), shard_(shard), C_(c.hidden), layer_(layer) {}

LayerActs Gating::plan(ActivationPlanner& p, const PlannedPass& pass) const {
  const i64 R = pass.rows(), E = config_.count, k = config_.per_token, sp = shard_.sp, N = R * sp;
  const bool train = pass.mode == Mode::Train, limited = limits(pass.mode),
             has_priority = config_.capacity.policy != DropPolicy::Position;
  LayerActs a;
  if (limited) a.saved.push_back(train ? p.kept(DType::I32, {R, k}) : p.saved(DType::I32, {R, k}));
  const auto temporary = [&](bool wanted, DType dtype, std::initializer_list<i64> shape) {
    a.temporary.push_back(wanted ? p.temporary(dtype, shape) : TensorView{});
  };
  temporary(train && (config_.input_jitter > 0 || config_.router_jitter), pass.work, {R, C_});
  temporary(train && config_.noisy_choice, DType::F32, {R, E});
  temporary(limited && has_priority, DType::F32, {R, k});
  temporary(limited && sp > 1, DType::I32, {N, k});
  temporary(limited && sp > 1 && has_priority, DType::F32, {N, k});
  temporary(limited && sp > 1, DType::I32, {N, k});
  temporary(limited && sp > 1 && has_priority, DType::F32, {N, k});
  temporary(limited && sp > 1, DType::I32, {N, k});
  temporary(config_.router_dtype == RouterDtype::Work && pass.work != DType::F32, pass.work, {R, E});
  return a;
}

void Gating::jitter(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, float amount) const {
  noise_rows(ctx, y, x, first_row, NoiseKind::Jitter, amount, dropout_site(ctx, layer_, kJitterSite));
}

TensorView Gating::input(const PassContext& ctx, TensorView x, const LayerActs& acts) const {
  if (!jitters_input(ctx.mode)) return x;
  const TensorView y = acts.temporary[kJittered].rows(0, x.dim(0));
  jitter(ctx, y, x, first_stream_row(ctx), config_.input_jitter);
  return y;
}
void Gating::input_grad(const PassContext& ctx, TensorView dx, TensorView residual) const {
  jitter(ctx, dx, dx, first_stream_row(ctx), config_.input_jitter);
  if (residual) ctx.ops.add(dx, dx, residual, ctx.stream);
}

TensorView Gating::router_input(const PassContext& ctx, TensorView all, const LayerActs& acts) const {
  if (ctx.mode != Mode::Train || !config_.router_jitter) return all;
  jitter(ctx, acts.temporary[kJittered], all, 0, kRouterJitter);
  return acts.temporary[kJittered];
}
void Gating::router_input_grad(const PassContext& ctx, TensorView dall) const {
  if (config_.router_jitter) jitter(ctx, dall, dall, 0, kRouterJitter);
}

void Gating::round(const PassContext& ctx, TensorView logits, const LayerActs& acts) const {
  const TensorView rounded = acts.temporary[kRounded];
  if (!rounded) return;
  ctx.ops.cast(rounded, logits, ctx.stream);
  ctx.ops.cast(logits, rounded, ctx.stream);
}

void Gating::choose(const PassContext& ctx, TensorView chosen, TensorView weights, TensorView scores, TensorView logits,
                    TensorView bias, const LayerActs& acts) const {
  TensorView noisy{};
  RouterParams params = config_.router;
  params.noisy_second = config_.per_token == 2;
  if (ctx.mode == Mode::Train && config_.noisy_choice) {
    noisy = acts.temporary[kNoisy];
    noise_rows(ctx, noisy, logits, 0, NoiseKind::Gumbel, 1, dropout_site(ctx, layer_, kNoiseSite));
  }
  const bool limited = limits(ctx.mode), by_score = limited && config_.capacity.policy == DropPolicy::Probs;
  if (by_score) params.normalise = false, params.scale = 1;  // weights are then the scores
  ctx.ops.route(chosen, by_score ? acts.temporary[kPriority] : weights, scores, logits, bias, noisy, params,
                ctx.stream);
  if (!limited) return;
  drop(ctx, chosen, acts);
  ctx.ops.weigh_choices(weights, dropped(acts), scores, config_.router, ctx.stream);
}

// In fp32, as DeepSpeed rounds it.
i64 Gating::capacity(Mode mode, i64 tokens) const noexcept {
  const ExpertCapacity& c = config_.capacity;
  const double factor = mode == Mode::Train ? c.factor : c.eval_factor;
  const auto each = static_cast<float>(static_cast<double>(tokens) / static_cast<double>(config_.count));
  const float room = std::ceil(each * static_cast<float>(factor * static_cast<double>(config_.per_token)));
  return std::max(static_cast<i64>(std::min(room, 1e9f)), c.least);
}

void Gating::drop(const PassContext& ctx, TensorView chosen, const LayerActs& acts) const {
  const auto& t = acts.temporary;
  const i64 k = config_.per_token, N = ctx.B * ctx.T * shard_.sp;
  const DropPolicy policy = config_.capacity.policy;
  const CapacityParams params{
      .experts = config_.count, .capacity = capacity(ctx.mode, N), .by_rank = policy == DropPolicy::Position && k == 2};
  const TensorView kept = dropped(acts), priority = policy == DropPolicy::Position ? TensorView{} : t[kPriority];
  if (policy == DropPolicy::Random) {
    noise_rows(ctx, priority, priority, 0, NoiseKind::Uniform, 1, dropout_site(ctx, layer_, kPrioritySite));
  }
  if (shard_.sp == 1) return ctx.ops.drop_choices(kept, chosen, priority, params, ctx.stream);

  const i64 R = ctx.B * ctx.T;
  const auto gather = [&](TensorView all, TensorView gathered, TensorView mine) {
    ctx.ops.cast(gathered.rows(shard_.sp_rank * R, R), mine, ctx.stream);
    const AllGatherSegment segment{gathered.data, mine.bytes()};
    ctx.groups[Axis::Sp].all_gather({&segment, 1}, message_text(Axis::Sp, Collective::AllGather)).wait();
    for (int q = 0; q < shard_.sp; ++q) {
      for_tokens(ctx, q, gathered.rows(q * R, R), all,
                 [&](TensorView part, TensorView whole) { ctx.ops.copy_heads(whole, part, ctx.stream); });
    }
  };
  gather(t[kAllChosen], t[kGatheredChosen], chosen);
  if (priority) gather(t[kAllPriority], t[kGatheredPriority], priority);
  ctx.ops.drop_choices(t[kAllKept], t[kAllChosen], priority ? t[kAllPriority] : priority, params, ctx.stream);
  for_tokens(ctx, shard_.sp_rank, kept, t[kAllKept],
             [&](TensorView part, TensorView whole) { ctx.ops.copy_heads(part, whole, ctx.stream); });
}

}  // namespace ds::model
