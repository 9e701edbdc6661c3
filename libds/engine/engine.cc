// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace ds::engine {
namespace {

constexpr i64 kIgnored = -100;

}  // namespace

Engine::Engine(const Config& config, Mesh& mesh, MemoryLedger& ledger, Device& device)
    : config_(config),
      mesh_(mesh),
      ledger_(ledger),
      device_(device),
      ops_(device.ops()),
      stream_(device.stream()),
      model_(model::make_model(config.model, config.data.seq_length)),
      plan_(report::make_run_plan(config_, model_, mesh.dp().size(), device.kind())),
      params_(plan_.layout, plan_.rows, mesh.dp(), device, ledger,
              {.work = plan_.work,
               .allgather_bucket = config.zero.allgather_bucket_size,
               .pool_elems = std::max(plan_.train_gathers.pool_elems, plan_.eval_gathers.pool_elems)}),
      grads_(plan_.layout, plan_.rows, mesh.dp(), device, ledger, plan_.grads),
      schedule_(pipeline::single_stage_schedule(plan_.micro_batches)),
      scaler_(config.fp16),
      lr_(config.optimizer, config.scheduler) {
  const i64 shard_bytes = plan_.layout.shard_elems() * 4;
  const auto buffer = [&](Tag tag, i64 bytes) { return device_buffer(device, ledger, tag, bytes); };
  if (plan_.work != DType::F32) master_ = buffer(Tag::Master, shard_bytes);
  m_ = buffer(Tag::Optimizer, shard_bytes);
  v_ = buffer(Tag::Optimizer, shard_bytes);

  const i64 R = plan_.B * plan_.T, m = plan_.micro_batches;
  saved_ = buffer(Tag::Activations, plan_.saved_bytes);
  temporary_ = buffer(Tag::Workspace, plan_.temporary_bytes);
  residual_grad_ = buffer(Tag::Workspace, R * model_.hidden * dtype_bytes(plan_.work));
  head_weight_grad_ = buffer(Tag::Workspace, model_.vocab * model_.hidden * 4);
  logits_ = buffer(Tag::Logits, plan_.logits_chunk * model_.vocab * 4);
  for (const auto& [mode, acts] : {std::pair{model::Mode::Train, &train_acts_}, {model::Mode::Eval, &eval_acts_}}) {
    model::ActivationPlanner planner(saved_.data(), temporary_.data());
    for (const auto& layer : model_.layers) {
      planner.begin_layer();
      acts->push_back(layer->plan(planner, plan_.work, plan_.B, plan_.T, mode));
    }
    DS_ASSERT(planner.saved_bytes() <= plan_.saved_bytes && planner.temporary_bytes() <= plan_.temporary_bytes);
  }

  data_ = buffer(Tag::Data, plan_.memory[static_cast<size_t>(Tag::Data)]);
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
  if (model_.token_types > 0) {  // packed text is one segment
    token_types_ = take(DType::I32, R);
    device.zero(token_types_.data, token_types_.bytes());
  }
  losses_ = take(DType::F32, R);
  if (plan_.rope_elems > 0) {
    const model::RopeTables rope = model::make_rope_tables(config.model, plan_.T);
    rope_cos_ = take(DType::F32, plan_.rope_elems).reshaped({plan_.T, plan_.rope_elems / plan_.T});
    rope_sin_ = take(DType::F32, plan_.rope_elems).reshaped({plan_.T, plan_.rope_elems / plan_.T});
    device.upload(rope_cos_.data, rope.cos.data(), rope_cos_.bytes());
    device.upload(rope_sin_.data, rope.sin.data(), rope_sin_.bytes());
  }
  at += align_up(at - static_cast<char*>(data_.data()), 8) - (at - static_cast<char*>(data_.data()));
  scalars_ = reinterpret_cast<report::StepScalars*>(at);
  micro_losses_ = reinterpret_cast<double*>(scalars_ + 1);
  results_.resize(sizeof(report::StepScalars) + static_cast<size_t>(m * mesh.dp().size()) * sizeof(double));
  DS_ASSERT(at + results_.size() == static_cast<char*>(data_.data()) + data_.bytes());
  std::vector<i32> positions(static_cast<size_t>(R));
  for (i64 r = 0; r < R; ++r) positions[static_cast<size_t>(r)] = static_cast<i32>(r % plan_.T);
  device.upload(positions_.data, positions.data(), positions_.bytes());
  device.upload(row_positions_.data, positions.data(), row_positions_.bytes());

  held_ = plan_.layout.held_pieces(mesh.dp().rank());
  owned_ = plan_.layout.owned_pieces(mesh.dp().rank());
  std::vector<bool> decays;  // by parameter number
  for (const auto& unit : plan_.rows) {
    for (const model::ParamRow& row : unit) decays.push_back(row.decay);
  }
  for (const zero::Piece& piece : held_) {
    const zero::Segment& s = plan_.layout.segments()[static_cast<size_t>(piece.segment)];
    const PieceState st = state(piece);
    const auto view = [&](void* data, DType dtype) { return TensorView::of(data, dtype, {piece.count}); };
    updated_.push_back({.param = view(st.param, plan_.work),
                        .master = view(st.master != nullptr ? st.master : st.param, DType::F32),
                        .m = view(st.m, DType::F32),
                        .v = view(st.v, DType::F32),
                        .grad = view(grads_.element(s, piece.segment_offset), DType::F32),
                        .weight_decay = decays[static_cast<size_t>(piece.param)]
                                            ? static_cast<float>(config.optimizer.weight_decay)
                                            : 0.0f});
  }
  valid_tokens_.resize(static_cast<size_t>(m));
}

Engine::~Engine() { drop_graphs(); }

void Engine::drop_graphs() noexcept {
  for (Device::Graph& graph : graphs_) {
    if (graph != nullptr) device_.destroy_graph(std::exchange(graph, nullptr));
  }
}

void Engine::enqueue_static(size_t key, FunctionRef<void()> body) {
  if (!config_.cuda.graphs || !warm_) return body();
  if (device_.scratch_bytes() != graphs_scratch_) {
    drop_graphs();
    graphs_scratch_ = device_.scratch_bytes();
  }
  if (graphs_.size() <= key) graphs_.resize(key + 1);
  if (graphs_[key] == nullptr) {
    DS_CHECK(device_.begin_capture(), Errc::Config, "cuda.graphs: {} has none", device_.name());
    body();
    graphs_[key] = device_.end_capture();
  }
  device_.launch(graphs_[key]);
}

Engine::PieceState Engine::state(const zero::Piece& piece) const noexcept {
  const zero::Segment& s = plan_.layout.segments()[static_cast<size_t>(piece.segment)];
  const auto shard = [&](const Buffer& b) { return b ? b.as<float>().data() + piece.shard_offset : nullptr; };
  return {params_.element(s, piece.segment_offset), shard(master_), shard(m_), shard(v_)};
}

HostState::HostState(const Engine& engine, std::vector<zero::Piece> pieces, Memory memory)
    : engine_(engine), where_(std::move(pieces)) {
  for (const zero::Piece& piece : where_) {
    const Engine::PieceState st = engine.state(piece);
    pieces_.push_back({piece.param, piece.begin, piece.count, st.param, st.master, st.m, st.v});
  }
  if (engine.device().is_host() && memory == Memory::InPlace) return;
  memory_ = Buffer(engine.ledger(), Tag::Host, engine.plan().memory[static_cast<size_t>(Tag::Host)]);
  char* at = static_cast<char*>(memory_.data());
  const auto take = [&](i64 bytes) { return std::exchange(at, at + bytes); };
  for (StatePiece& p : pieces_) {
    for (float** part : {&p.master, &p.exp_avg, &p.exp_avg_sq}) {
      if (*part != nullptr) *part = reinterpret_cast<float*>(take(p.count * 4));
    }
  }
  for (StatePiece& p : pieces_) p.param_data = take(p.count * dtype_bytes(engine.plan().work));  // last: two bytes each
  DS_ASSERT(at <= static_cast<char*>(memory_.data()) + memory_.bytes());
}

namespace {

// Calls move(host, device, bytes) for each part of a piece's state.
template <class Move>
void for_each_part(const StatePiece& host, const Engine::PieceState& device, i64 work_bytes, Move move) {
  move(host.param_data, device.param, host.count * work_bytes);
  if (host.master != nullptr) move(host.master, device.master, host.count * 4);
  move(host.exp_avg, device.m, host.count * 4);
  move(host.exp_avg_sq, device.v, host.count * 4);
}

}  // namespace

void HostState::download() {
  if (!memory_) return;
  for (size_t i = 0; i < where_.size(); ++i) {
    for_each_part(pieces_[i], engine_.state(where_[i]), dtype_bytes(engine_.plan().work),
                  [&](void* host, void* device, i64 bytes) { engine_.device().download(host, device, bytes); });
  }
}

void HostState::upload() {
  if (!memory_) return;
  for (size_t i = 0; i < where_.size(); ++i) {
    for_each_part(pieces_[i], engine_.state(where_[i]), dtype_bytes(engine_.plan().work),
                  [&](void* host, void* device, i64 bytes) { engine_.device().upload(device, host, bytes); });
  }
}

void Engine::init_values(i64 param, i64 begin, i64 count, float* out) const {
  i64 first = 0;  // parameter of the unit
  for (const auto& unit : plan_.rows) {
    if (param < first + std::ssize(unit)) {
      const model::ParamRow& row = unit[static_cast<size_t>(param - first)];
      return model::init_values(row, param, static_cast<u32>(config_.seed), begin, count, out);
    }
    first += std::ssize(unit);
  }
  DS_ASSERT(false);
}

void Engine::init_weights() {
  set_weights([this](i64 param, i64 begin, i64 count, float* out) { init_values(param, begin, count, out); });
}

void Engine::set_weights(const ValueSource& values) {
  constexpr i64 kTile = 1 << 16;  // bounded memory, whatever the size of a parameter
  std::vector<float> tile(kTile);
  for (const zero::Piece& piece : held_) {
    const PieceState st = state(piece);
    for (i64 first = 0; first < piece.count; first += kTile) {
      const i64 n = std::min(kTile, piece.count - first);
      values(piece.param, piece.begin + first, n, tile.data());
      float* exact = (st.master != nullptr ? st.master : static_cast<float*>(st.param)) + first;
      device_.upload(exact, tile.data(), n * 4);
      if (st.master == nullptr) continue;
      const TensorView rounded =
          TensorView::of(static_cast<char*>(st.param) + first * dtype_bytes(plan_.work), plan_.work, {n});
      ops_.cast(rounded, TensorView::of(exact, DType::F32, {n}), stream_);
    }
    device_.zero(st.m, piece.count * 4);
    device_.zero(st.v, piece.count * 4);
  }
  params_.publish();
  progress_ = {};
}

model::PassContext Engine::context(model::Mode mode) {
  model::PassContext ctx{.ops = ops_, .stream = stream_, .mode = mode, .B = plan_.B, .T = plan_.T};
  ctx.positions = positions_;
  ctx.row_positions = row_positions_;
  ctx.token_types = token_types_;
  ctx.rope_cos = rope_cos_;
  ctx.rope_sin = rope_sin_;
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
  std::vector<i32> ids(static_cast<size_t>(R)), targets(ids.size());
  std::vector<float> losses(ids.size());
  for (i64 b = 0; b < batches; ++b) {
    model::PassContext ctx = context(model::Mode::Eval);
    ctx.ids = TensorView::of(ids_.data, DType::I32, {R});
    ctx.targets = TensorView::of(targets_.data, DType::I32, {R});
    if (!next(b, ids, targets)) return std::nullopt;
    device_.upload(ids_.data, ids.data(), R * 4);
    device_.upload(targets_.data, targets.data(), R * 4);
    params_.begin(plan_.eval_gathers);
    TensorView x{};
    for (size_t l = 0; l < model_.layers.size(); ++l) {
      const zero::ParamLease lease = params_.acquire();
      model_.layers[l]->forward(ctx, param_views(lease, static_cast<i64>(l)), x, eval_acts_[l]);
      x = eval_acts_[l].output;
    }
    device_.download(losses.data(), losses_.data, R * 4);
    for (const float loss : losses) {
      const bool finite = std::fabs(loss) < 0x1p20f;
      sum[0] += finite ? std::llround(std::ldexp(static_cast<double>(loss), 24)) : 0;
      sum[2] += finite ? 0 : 1;
    }
    sum[1] += R - std::count(targets.begin(), targets.end(), kIgnored);
  }
  mesh_.world().all_reduce(sum, 3, DType::I64, ReduceOp::Sum, "dp.stats").wait();
  if (sum[2] > 0) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(static_cast<double>(sum[0]), -24) / static_cast<double>(std::max<i64>(sum[1], 1));
}

bool Engine::is_finite() {
  // Bits of magnitudes, which are in the order of their bits: of weights and of moments.
  TensorView largest[2];
  for (size_t i = 0; i < 2; ++i) largest[i] = TensorView::of(&scalars_->sum.hi + i, DType::I64, {1});
  device_.zero(largest[0].data, 16);
  for (const zero::Piece& piece : owned_) {
    const PieceState st = state(piece);
    const auto raise = [&](const TensorView& to, void* data) {
      ops_.max_abs(to, TensorView::of(data, DType::F32, {piece.count}), stream_);
    };
    raise(largest[0], st.master != nullptr ? st.master : st.param);
    raise(largest[1], st.m);
    raise(largest[1], st.v);
  }
  i64 both[2];
  device_.download(both, largest[0].data, 16);
  mesh_.world().all_reduce(both, 2, DType::I64, ReduceOp::Max, "dp.stats").wait();
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
    const Buffer logits = device_buffer(device_, ledger_, Tag::Logits, R * model_.vocab * 4);
    model_.layers.back()->logits(context(model::Mode::Eval), params, eval_acts_.back(),
                                 TensorView::of(logits.data(), DType::F32, {R, model_.vocab}));
    device_.download(out.data(), logits.data(), logits.bytes());
  }
}

}  // namespace ds::engine
