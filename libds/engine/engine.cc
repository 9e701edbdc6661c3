// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace ds::engine {
namespace {

// Of random numbers that states are rounded by: beside those of initial values and dropout.
constexpr u32 kRoundingSites = 0x40000000u;

}  // namespace

Engine::Engine(const Config& config, Mesh& mesh, MemoryLedger& ledger, Device& device)
    : config_(config),
      mesh_(mesh),
      ledger_(ledger),
      device_(device),
      ops_(device.ops()),
      stream_(device.stream()),
      model_(model::make_model(config.model, config.data.seq_length,
                               report::shard_of(config, mesh.shape(), mesh.coord()))),
      plan_(report::make_run_plan(config_, model_, mesh.shape(), mesh.coord(), device.kind())),
      params_(plan_.layout, plan_.rows, mesh.dp(), device, ledger,
              {.work = plan_.work,
               .allgather_bucket = config.zero.allgather_bucket_size,
               .pool_elems = plan_.gather_pool_elems}),
      grads_(plan_.trains() ? std::optional<zero::GradStore>(std::in_place, plan_.grad_layout, plan_.grad_rows,
                                                             mesh.dp(), device, ledger, plan_.grads)
                            : std::nullopt),
      stage_(config_, model_, plan_, params_, mesh, ledger, device),
      scaler_(config.fp16),
      lr_(config.optimizer, config.scheduler) {
  make_buffers();
  make_pieces();
}

void Engine::make_buffers() {
  const auto buffer = [&](Tag tag, i64 bytes) { return device_buffer(device_, ledger_, tag, bytes); };
  for (const State s : kStates) {
    if (plan_.states.bytes(s) > 0)
      states_[s] = buffer(s == State::Master ? Tag::Master : Tag::Optimizer, plan_.states.bytes(s));
  }

  exchange_ = buffer(Tag::Workspace, plan_.exchange_elems * 4);
  optimizer_workspace_ = buffer(Tag::Workspace, plan_.optimizer_workspace);
  matrix_memory_ = buffer(Tag::Workspace, (plan_.matrix_memory.whole + plan_.matrix_memory.slices) * 4);
  const i64 m = plan_.micro_batches;
  results_.resize(sizeof(report::StepScalars) + static_cast<size_t>(m * mesh_.dp().size()) * sizeof(double));
  data_ = buffer(Tag::Data, std::ssize(results_));
  scalars_ = static_cast<report::StepScalars*>(data_.data());
  micro_losses_ = reinterpret_cast<double*>(scalars_ + 1);
  valid_tokens_.resize(static_cast<size_t>(m));
}

void Engine::make_pieces() {
  for (const auto& unit : plan_.rows) {
    for (const model::ParamRow& row : unit) param_rows_.push_back(&row);
  }
  const int dp_rank = mesh_.dp().rank();
  DS_ASSERT(dp_rank == plan_.dp_rank());
  held_ = plan_.layout.held_pieces(dp_rank);
  char* workspace = static_cast<char*>(optimizer_workspace_.data());
  for (size_t g = 0; plan_.trains() && g < plan_.groups.groups.size(); ++g) {
    const optim::Group& group = plan_.groups.groups[g];
    if (group.frozen) continue;
    optim::GroupTensors tensors = plan_.group_tensors(g, [&](const zero::Piece& piece) {
      const PieceState st = state(piece);
      const auto view = [&](void* data, DType dtype) { return TensorView::of(data, dtype, {piece.count}); };
      UpdateTensor t{.param = view(st[State::Param], plan_.work),
                     .master = view(st.exact(), DType::F32),
                     .states = {},
                     .grad = view(gradient(piece.segment, piece.segment_offset), DType::F32),
                     .weight_decay = row_of(piece.param).decay ? static_cast<float>(group.update.weight_decay) : 0.0f,
                     .site = kRoundingSites + narrow<u32>(piece.param),
                     .first = piece.begin};
      size_t i = 0;
      for (const State s : kOptimizerStates) {
        if (st[s] != nullptr) t.states[i++] = st.view(s, piece.count);
      }
      return t;
    });
    if (tensors.num_params == 0) continue;
    const i64 bytes = optim::workspace_bytes(group, tensors.num_params, tensors.largest);
    trained_.push_back({g,
                        optim::make_optimizer(group, std::move(tensors), std::exchange(workspace, workspace + bytes)),
                        group.needs_matrices() ? make_matrices(g) : nullptr});
  }
  using Parts = model::ParamRow::Parts;
  std::vector<ReplicaSum> group, copies;
  for (const zero::Piece& piece : plan_.layout.owned_pieces(dp_rank)) {
    if (!plan_.trains()) {
      if (plan_.counts(piece)) saved_.push_back(piece);
      continue;
    }
    const model::ParamRow& row = row_of(piece.param);
    const TensorView grad = TensorView::of(gradient(piece.segment, piece.segment_offset), DType::F32, {piece.count});
    if (row.parts != Parts::None && plan_.mesh.tp > 1) {
      std::vector<ReplicaSum>& sums = row.parts == Parts::Group ? group : copies;
      for (i64 begin = 0; begin < piece.count; begin += sums.back().pieces.back().numel()) {
        if (sums.empty() || sums.back().elems == plan_.kExchangeElems)
          sums.push_back({.pieces = {}, .copies = row.parts == Parts::Group ? plan_.mesh.tp : row.copies});
        const i64 n = std::min(piece.count - begin, plan_.kExchangeElems - sums.back().elems);
        sums.back().pieces.push_back(TensorView::of(grad.as<float>() + begin, DType::F32, {n}));
        sums.back().elems += n;
      }
    }
    if (!plan_.counts(piece)) continue;
    saved_.push_back(piece);
    if (!plan_.judges(piece)) continue;
    // Neighbours are one call of the kernels.
    if (!judged_.empty() && judged_.back().as<float>() + judged_.back().numel() == grad.as<float>()) {
      judged_.back().shape[0] += piece.count;
    } else {
      judged_.push_back(grad);
    }
  }
  sums_ = std::move(group);
  sums_.insert(sums_.end(), copies.begin(), copies.end());
}

class Engine::Matrices final : public optim::WholeMatrices {
 public:
  Matrices(Engine& engine, std::span<const zero::MatrixPlace> places,
           const std::vector<std::vector<model::ParamSlice>>& slices, float* memory)
      : engine_(engine),
        exchange_(places, slices, engine.mesh_.dp(), engine.mesh_.tp(), memory,
                  memory + engine.plan_.matrix_memory.whole) {}

  void for_each(FunctionRef<void(TensorView)> body) override {
    exchange_.for_each(
        [&](i64 param, i64 begin) {
          const zero::RowPlace& row = engine_.plan_.layout.rows()[static_cast<size_t>(param)];
          return engine_.gradient(row.segment, row.offset + begin);
        },
        [&](void* to, const void* from, i64 bytes) { engine_.device_.copy(to, from, bytes); }, body);
  }

 private:
  Engine& engine_;
  zero::MatrixExchange exchange_;
};

std::unique_ptr<optim::WholeMatrices> Engine::make_matrices(size_t group) {
  const auto& places = plan_.matrices[group];
  std::vector<std::vector<model::ParamSlice>> slices(places.size());
  for (int r = 0; r < plan_.mesh.tp && plan_.mesh.tp > 1; ++r) {
    MeshCoord coord = plan_.coord;
    coord.tp = r;
    const model::Model model =
        model::make_model(config_.model, config_.data.seq_length, report::shard_of(config_, plan_.mesh, coord));
    const std::vector<const model::ParamRow*> rows = model.params();
    for (size_t i = 0; i < places.size(); ++i) slices[i].push_back(rows[static_cast<size_t>(places[i].param)]->slice);
  }
  return std::make_unique<Matrices>(*this, places, slices, matrix_memory_.as<float>().data());
}

float* Engine::gradient(i64 segment, i64 first) const noexcept {
  return grads_->element(plan_.grad_segment(segment), first);
}

// Operations may be under way, and have memory of ours, when a step has failed: they end when all ranks know of the
// failure, which an exception that unwinds us may not have told yet.
Engine::~Engine() {
  if (std::uncaught_exceptions() > uncaught_at_birth_) mesh_.abort(Error(Errc::Comm, "the training step has failed"));
  mesh_.drain();
}

Engine::PieceState Engine::state(const zero::Piece& piece) const noexcept {
  const zero::Segment& s = plan_.layout.segments()[static_cast<size_t>(piece.segment)];
  PieceState st;
  st[State::Param] = params_.element(s, piece.segment_offset);
  for (const State state : kStates) {
    if (plan_.states.bytes(state) == 0 || !plan_.states.has(state, piece.param)) continue;
    char* const array = states_[state].as<char>().data();
    st[state] = array + plan_.states.offset(state, piece);
    st.kept[state].dtype = plan_.states.dtype(state, piece.param);
    if (is_coded(st.kept[state].dtype))
      st.kept[state].scales = reinterpret_cast<float*>(array + plan_.states.scales_offset(state, piece));
  }
  return st;
}

HostState::HostState(const Engine& engine, std::vector<zero::Piece> pieces, Memory memory)
    : engine_(engine), where_(std::move(pieces)) {
  for (const zero::Piece& piece : where_) {
    const Engine::PieceState st = engine.state(piece);
    const model::ParamSlice& slice = engine.row_of(piece.param).slice;
    pieces_.push_back({.param = piece.param,
                       .begin = piece.begin,
                       .count = piece.count,
                       .data = st,
                       .slice = slice.whole() ? nullptr : &slice,
                       .kept = st.kept});
  }
  if (engine.device().is_host() && memory == Memory::InPlace) return;
  memory_ = Buffer(engine.ledger(), Tag::Host, engine.plan().state_bytes);
  char* at = static_cast<char*>(memory_.data());
  const auto take = [&](i64 bytes) { return std::exchange(at, at + bytes); };
  for (StatePiece& p : pieces_) {
    for (const State s : kStates) {
      if (s == State::Param || p.data[s] == nullptr) continue;
      const i64 bytes = p.count * dtype_bytes(p.kept[s].dtype);
      p.data[s] = take(p.kept[s].dtype == DType::F32 ? bytes : align_up(bytes, 32));  // floats follow
      if (p.kept[s].scales != nullptr) p.kept[s].scales = reinterpret_cast<float*>(take(state_blocks(p.count) * 4));
    }
  }
  for (StatePiece& p : pieces_)
    p.data[State::Param] = take(p.count * dtype_bytes(engine.plan().work));  // two bytes each
  DS_ASSERT(at <= static_cast<char*>(memory_.data()) + memory_.bytes());
}

namespace {

// Calls move(host, device, bytes) for each part of a piece's state.
template <class Move>
void for_each_part(const StatePiece& host, const Engine::PieceState& device, i64 work_bytes, Move move) {
  for (const State s : kStates) {
    if (host.data[s] == nullptr) continue;
    move(host.data[s], device[s], host.count * (s == State::Param ? work_bytes : dtype_bytes(host.kept[s].dtype)));
    if (host.kept[s].scales != nullptr) move(host.kept[s].scales, device.kept[s].scales, state_blocks(host.count) * 4);
  }
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
  model::init_values(row_of(param), param, static_cast<u32>(config_.seed), begin, count, out);
}

void Engine::init_weights() {
  set_weights([this](i64 param, i64 begin, i64 count, float* out) { init_values(param, begin, count, out); });
}

void Engine::set_weights(const ValueSource& values) {
  constexpr i64 kTile = 1 << 16;  // bounded memory, whatever the size of a parameter
  std::vector<float> tile(kTile);
  for (const zero::Piece& piece : held_) {
    const PieceState st = state(piece);
    const model::ParamRow& row = row_of(piece.param);
    const model::SliceMap map(row.slice, row.whole_shape());
    for (i64 first = 0; first < piece.count; first += kTile) {
      const i64 n = std::min(kTile, piece.count - first);
      map.for_each_run(piece.begin + first, n, [&](i64 local, i64 global, i64 run) {
        values(piece.param, global, run, tile.data() + local - piece.begin - first);
      });
      char* const param = static_cast<char*>(st[State::Param]) + first * dtype_bytes(plan_.work);
      if (plan_.work != DType::F32 && st[State::Master] == nullptr) {  // nothing keeps them in fp32
        std::vector<u16> rounded;
        for (i64 i = 0; i < n; ++i) {
          const float x = tile[static_cast<size_t>(i)];
          rounded.push_back(plan_.work == DType::BF16 ? std::bit_cast<u16>(to_bf16(x)) : std::bit_cast<u16>(to_f16(x)));
        }
        device_.upload(param, rounded.data(), n * 2);
        continue;
      }
      float* exact = st.exact() + first;
      device_.upload(exact, tile.data(), n * 4);
      if (st[State::Master] == nullptr) continue;
      const TensorView rounded = TensorView::of(param, plan_.work, {n});
      ops_.cast(rounded, TensorView::of(exact, DType::F32, {n}), stream_);
    }
    for (const State s : kOptimizerStates) {
      if (st[s] == nullptr) continue;
      device_.zero(st[s], st.view(s, piece.count).bytes());
      if (st.kept[s].scales != nullptr) device_.zero(st.kept[s].scales, state_blocks(piece.count) * 4);
    }
  }
  params_.publish();
  progress_ = {};
}

std::optional<double> Engine::evaluate(i64 batches,
                                       const std::function<bool(i64, std::span<i32>, std::span<i32>)>& next) {
  DS_ASSERT(plan_.use != ConfigUse::Generate);
  const i64 R = plan_.B * plan_.T, rows = plan_.B * plan_.sequence_length;
  // Integers, so that the mean does not depend on how the samples lie on ranks: losses in units of 2^-24, tokens that
  // count, losses that are not finite.
  i64 sum[3] = {0, 0, 0};
  std::vector<i32> ids(static_cast<size_t>(rows)), targets(ids.size());
  std::vector<float> losses(static_cast<size_t>(R));
  const i64 at_once = batches_at_once();
  for (i64 first = 0; first < batches; first += at_once) {
    const i64 n = std::min(at_once, batches - first);
    for (i64 b = 0; b < n; ++b) {
      if (!next(first + b, ids, targets)) return std::nullopt;
      stage_.load(b, ids, targets);
      // Ranks of tp have the same losses; those of sp others of the same samples.
      if (plan_.chunks.back().last && plan_.coord.tp == 0 && plan_.coord.sp == 0)
        sum[1] += rows - std::count(targets.begin(), targets.end(), kIgnoredTarget);
    }
    for (const pipeline::Instr& instr :
         pipeline::make_eval_schedule(plan_.mesh.pp, plan_.coord.pp, n, narrow<int>(std::ssize(plan_.chunks)))) {
      stage_.evaluate(instr);
      const bool has_losses = plan_.chunks[static_cast<size_t>(instr.chunk)].last && plan_.coord.tp == 0;
      if (instr.op != pipeline::Op::Forward || !has_losses) continue;
      device_.download(losses.data(), stage_.losses().data, R * 4);
      for (const float loss : losses) {
        const bool finite = std::fabs(loss) < 0x1p20f;
        sum[0] += finite ? std::llround(std::ldexp(static_cast<double>(loss), 24)) : 0;
        sum[2] += finite ? 0 : 1;
      }
    }
    stage_.end_evaluation();
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
  for (const zero::Piece& piece : saved_) {
    const PieceState st = state(piece);
    const auto raise = [&](const TensorView& to, void* data, DType dtype = DType::F32) {
      ops_.max_abs(to, TensorView::of(data, dtype, {piece.count}), stream_);
    };
    if (st[State::Master] != nullptr) {
      raise(largest[0], st[State::Master]);
    } else {
      raise(largest[0], st[State::Param], plan_.work);
    }
    for (const State s : kOptimizerStates) {
      if (st[s] == nullptr) continue;
      if (st.kept[s].scales != nullptr) {  // which show what of their blocks is no number
        ops_.max_abs(largest[1], TensorView::of(st.kept[s].scales, DType::F32, {state_blocks(piece.count)}), stream_);
      } else {
        raise(largest[1], st[s], st.kept[s].dtype);
      }
    }
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
  out.clear();
  const report::ChunkPlan& last = plan_.chunks.back();
  if (!last.last || plan_.mesh.tp > 1 || plan_.mesh.sp > 1) return;
  const i64 R = plan_.B * plan_.T;
  out.resize(static_cast<size_t>(R * model_.vocab));
  const Buffer logits = device_buffer(device_, ledger_, Tag::Logits, R * model_.vocab * 4);
  stage_.logits(TensorView::of(logits.data(), DType::F32, {R, model_.vocab}));
  device_.download(out.data(), logits.data(), logits.bytes());
}

}  // namespace ds::engine
