// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ds::engine {
namespace {

constexpr i64 kIgnored = -100;

}  // namespace

Engine::Engine(const Config& config, Mesh& mesh, MemoryLedger& ledger, const OpTable& ops, int num_threads)
    : config_(config),
      mesh_(mesh),
      ledger_(ledger),
      ops_(ops),
      pool_(num_threads),
      stream_{.pool = &pool_},
      model_(model::make_model(config.model, config.data.seq_length)),
      rope_(model::make_rope_tables(config.model, config.data.seq_length)),
      plan_(report::make_run_plan(config_, model_, mesh.dp().size())),
      params_(plan_.layout, plan_.rows, mesh.dp(), ledger,
              {.work = plan_.work,
               .allgather_bucket = config.zero.allgather_bucket_size,
               .pool_elems = std::max(plan_.train_gathers.pool_elems, plan_.eval_gathers.pool_elems)}),
      grads_(plan_.layout, plan_.rows, mesh.dp(), ledger, ops, stream_, plan_.grads),
      schedule_(pipeline::single_stage_schedule(plan_.micro_batches)),
      scaler_(config.fp16),
      lr_(config.optimizer, config.scheduler) {
  const i64 shard_bytes = plan_.layout.shard_elems() * 4;
  if (plan_.work != DType::F32) master_ = Buffer(ledger, Tag::Master, shard_bytes);
  m_ = Buffer(ledger, Tag::Optimizer, shard_bytes);
  v_ = Buffer(ledger, Tag::Optimizer, shard_bytes);

  const i64 R = plan_.B * plan_.T, m = plan_.micro_batches;
  saved_ = Buffer(ledger, Tag::Activations, plan_.saved_bytes);
  temporary_ = Buffer(ledger, Tag::Workspace, plan_.temporary_bytes);
  residual_grad_ = Buffer(ledger, Tag::Workspace, R * model_.hidden * dtype_bytes(plan_.work));
  head_weight_grad_ = Buffer(ledger, Tag::Workspace, model_.vocab * model_.hidden * 4);
  logits_ = Buffer(ledger, Tag::Logits, plan_.logits_chunk * model_.vocab * 4);
  for (const auto& [mode, acts] : {std::pair{model::Mode::Train, &train_acts_}, {model::Mode::Eval, &eval_acts_}}) {
    model::ActivationPlanner planner(saved_.data(), temporary_.data());
    for (const auto& layer : model_.layers) {
      planner.begin_layer();
      acts->push_back(layer->plan(planner, plan_.work, plan_.B, plan_.T, mode));
    }
    DS_ASSERT(planner.saved_bytes() <= plan_.saved_bytes && planner.temporary_bytes() <= plan_.temporary_bytes);
  }

  data_ = Buffer(ledger, Tag::Data, (2 * m * R + plan_.T + R + R) * 4);
  char* at = static_cast<char*>(data_.data());
  const auto take = [&](DType dtype, i64 n) {
    const TensorView v = TensorView::of(at, dtype, {n});
    at += v.bytes();
    return v;
  };
  ids_ = take(DType::I32, m * R);
  targets_ = take(DType::I32, m * R);
  positions_ = take(DType::I32, plan_.T);
  row_positions_ = take(DType::I32, R);
  losses_ = take(DType::F32, R);
  std::iota(positions_.as<i32>(), positions_.as<i32>() + plan_.T, 0);
  for (i64 r = 0; r < R; ++r) row_positions_.as<i32>()[r] = static_cast<i32>(r % plan_.T);

  held_ = plan_.layout.held_pieces(mesh.dp().rank());
  owned_ = plan_.layout.owned_pieces(mesh.dp().rank());
  for (const auto& unit : plan_.rows) {
    for (const model::ParamRow& row : unit) decays_.push_back(row.decay);
  }
  valid_tokens_.resize(static_cast<size_t>(m));
  micro_losses_.resize(static_cast<size_t>(m * mesh.dp().size()));
}

Engine::~Engine() = default;

Engine::PieceState Engine::state(const zero::Piece& piece) const noexcept {
  const zero::Segment& s = plan_.layout.segments()[static_cast<size_t>(piece.segment)];
  const auto shard = [&](const Buffer& b) { return b ? b.as<float>().data() + piece.shard_offset : nullptr; };
  return {params_.element(s, piece.segment_offset), shard(master_), shard(m_), shard(v_)};
}

void Engine::init_weights() {
  std::vector<const model::ParamRow*> rows;
  for (const auto& unit : plan_.rows) {
    for (const model::ParamRow& row : unit) rows.push_back(&row);
  }
  set_weights([&](i64 param, i64 begin, i64 count, float* out) {
    model::init_values(*rows[static_cast<size_t>(param)], param, static_cast<u32>(config_.seed), begin, count, out);
  });
}

void Engine::set_weights(const ValueSource& values) {
  constexpr i64 kTile = 1 << 16;  // bounded memory, whatever the size of a parameter
  std::vector<float> tile(kTile);
  for (const zero::Piece& piece : held_) {
    const PieceState st = state(piece);
    for (i64 first = 0; first < piece.count; first += kTile) {
      const i64 n = std::min(kTile, piece.count - first);
      values(piece.param, piece.begin + first, n, tile.data());
      if (st.master != nullptr) std::copy_n(tile.data(), n, st.master + first);
      const TensorView to =
          TensorView::of(static_cast<char*>(st.param) + first * dtype_bytes(plan_.work), plan_.work, {n});
      ops_.cast(to, TensorView::of(tile.data(), DType::F32, {n}), stream_);
    }
    std::fill_n(st.m, piece.count, 0.0f);
    std::fill_n(st.v, piece.count, 0.0f);
  }
  params_.publish();
  progress_ = {};
}

model::PassContext Engine::context(model::Mode mode) {
  model::PassContext ctx{.ops = ops_, .stream = stream_, .mode = mode, .B = plan_.B, .T = plan_.T};
  ctx.positions = positions_;
  ctx.row_positions = row_positions_;
  ctx.rope = &rope_;
  ctx.losses = losses_;
  ctx.logits = TensorView::of(logits_.data(), DType::F32, {plan_.logits_chunk, model_.vocab});
  ctx.head_weight_grad = TensorView::of(head_weight_grad_.data(), DType::F32, {model_.vocab, model_.hidden});
  return ctx;
}

model::RowViews Engine::param_views(const zero::ParamLease& lease, i64 layer) const {
  const bool uses_tied = model_.tied && layer + 1 == static_cast<i64>(model_.layers.size());
  return {lease.rows(layer), uses_tied ? lease.rows(0)[0] : TensorView{}};
}

std::optional<double> Engine::evaluate(i64 batches,
                                       const std::function<bool(i64, std::span<i32>, std::span<i32>)>& next) {
  const i64 R = plan_.B * plan_.T;
  // Integers, so that the mean does not depend on how the samples lie on ranks: losses in units of 2^-24, tokens that
  // count, losses that are not finite.
  i64 sum[3] = {0, 0, 0};
  for (i64 b = 0; b < batches; ++b) {
    model::PassContext ctx = context(model::Mode::Eval);
    ctx.ids = TensorView::of(ids_.data, DType::I32, {R});
    ctx.targets = TensorView::of(targets_.data, DType::I32, {R});
    const std::span<i32> targets(targets_.as<i32>(), static_cast<size_t>(R));
    if (!next(b, {ids_.as<i32>(), static_cast<size_t>(R)}, targets)) return std::nullopt;
    params_.begin(plan_.eval_gathers);
    TensorView x{};
    for (size_t l = 0; l < model_.layers.size(); ++l) {
      const zero::ParamLease lease = params_.acquire();
      model_.layers[l]->forward(ctx, param_views(lease, static_cast<i64>(l)), x, eval_acts_[l]);
      x = eval_acts_[l].output;
    }
    for (i64 i = 0; i < R; ++i) {
      const float loss = losses_.as<float>()[i];
      const bool finite = std::fabs(loss) < 0x1p20f;
      sum[0] += finite ? std::llround(std::ldexp(static_cast<double>(loss), 24)) : 0;
      sum[2] += finite ? 0 : 1;
    }
    sum[1] += R - std::count(targets.begin(), targets.end(), kIgnored);
  }
  mesh_.dp().all_reduce(sum, 3, DType::I64, ReduceOp::Sum, "dp.stats").wait();
  if (sum[2] > 0) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(static_cast<double>(sum[0]), -24) / static_cast<double>(std::max<i64>(sum[1], 1));
}

bool Engine::is_finite() {
  const auto largest = [&](float* data, i64 count) {
    return static_cast<i64>(ops_.max_abs_bits(TensorView::of(data, DType::F32, {count}), stream_));
  };
  i64 weight = 0, moment = 0;  // bits of magnitudes, which are in the order of their bits
  for (const zero::Piece& piece : owned_) {
    const PieceState st = state(piece);
    weight = std::max(weight, largest(st.master != nullptr ? st.master : static_cast<float*>(st.param), piece.count));
    moment = std::max({moment, largest(st.m, piece.count), largest(st.v, piece.count)});
  }
  i64 both[2] = {weight, moment};
  mesh_.dp().all_reduce(both, 2, DType::I64, ReduceOp::Max, "dp.stats").wait();
  const auto number = [](i64 bits) { return std::bit_cast<float>(static_cast<u32>(bits)); };
  float rounded = number(both[0]);
  if (plan_.work == DType::BF16) rounded = to_float(to_bf16(rounded));
  if (plan_.work == DType::F16) rounded = to_float(to_f16(rounded));
  return std::isfinite(rounded) && std::isfinite(number(both[1]));
}

void Engine::read_logits(std::vector<float>& out) {
  const i64 R = plan_.B * plan_.T, last = static_cast<i64>(model_.layers.size()) - 1;
  out.resize(static_cast<size_t>(R * model_.vocab));
  params_.begin(plan_.eval_gathers);
  for (i64 l = 0; l <= last; ++l) {
    const zero::ParamLease lease = params_.acquire();
    if (l < last) continue;
    const model::RowViews params = param_views(lease, l);
    ops_.matmul(TensorView::of(out.data(), DType::F32, {R, model_.vocab}), eval_acts_.back().output,
                model_.tied ? params.tied : params.own.back(), {}, {}, {}, {.trans_b = true}, stream_);
  }
}

}  // namespace ds::engine
