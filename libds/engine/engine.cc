// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "base/file.h"
#include "comm/message_tag.h"
#include "ds/kernels/thread_pool.h"
#include "mesh/from_config.h"
#include "model/coded_rows.h"
#include "model/slice.h"

namespace ds::engine {

Engine::Engine(const Config& config, Mesh& mesh, MemoryLedger& ledger, Device& device, const EngineParts& parts)
    : config_(config),
      parts_(parts),
      mesh_(mesh),
      ledger_(ledger),
      device_(device),
      ops_(device.ops()),
      stream_(device.stream()),
      planned_(parts.planned ? parts.planned
                             : std::make_shared<plan::Planned>(config_, make_model(mesh.coord(), whole_sequences()),
                                                               mesh.shape(), mesh.rank(), device.kind())),
      model_(planned_->model),
      plan_(planned_->plan),
      offload_(plan_.offload, offload::Offload::For::Run, parts.host_threads, served_rank(), parts.trace),
      shards_(make_shards()),
      stage_(config_, model_, plan_, shards_, mesh, ledger, device,
             offload_.make_inputs(plan_.activations.inputs, device, ledger)),
      laid_out_(whole_sequences()),
      step_length_(plan_.sequence_length),
      results_(device, ledger, plan_.loss_counts()),
      scaler_(config.fp16),
      lr_(config.optimizer, config.scheduler),
      valid_tokens_(static_cast<size_t>(plan_.micro_batches)) {
  if (plan_.trains()) make_update();
  if (plan_.validates_later()) {
    other_results_.emplace(device, ledger, plan_.loss_counts());
    assumed_.emplace(device, ledger, update::LossCounts{.ranks = 0});
  }
  make_pieces();
  offload_.attach();
  if (server() != nullptr) server()->outcome = [this](const GradVerdict& verdict) { return served_outcome(verdict); };
}

// To a server of states; empty where the run has none.
offload::ServerLink::Rank Engine::served_rank() {
  if (plan_.offload.states.device != OffloadDevice::Server) return {};
  std::string run = random_hex64();
  mesh_.world().broadcast(run.data(), std::ssize(run), 0, kStatsText).wait();
  const MeshShape& m = mesh_.shape();
  return {.rank = mesh_.rank(),
          .ranks = mesh_.world_size(),
          .run = run,
          .layout = fmt::format("{} dp {} pp {} tp {} sp {}", plan_.dp().layout.id(), m.dp, m.pp, m.tp, m.sp)};
}

offload::ServedRecord Engine::served_record(const Progress& p, const LossScaler& scaler) const noexcept {
  const LossScaler::State& s = scaler.state();
  return {.step = p.step,
          .optimizer_step = p.optimizer_step,
          .skipped_steps = p.skipped_steps,
          .consumed_samples = p.consumed_samples,
          .scale = s.scale,
          .scaler_iteration = s.iteration,
          .last_overflow = s.last_overflow,
          .hysteresis = s.hysteresis};
}

void Engine::resume_from(const offload::ServedRecord& r) {
  offload_.restore_params();
  publish_params();
  progress_ = {r.step, r.optimizer_step, r.skipped_steps, r.consumed_samples};
  scaler_.restore({r.scale, r.scaler_iteration, r.last_overflow, r.hysteresis});
}

model::Model Engine::make_model(const MeshCoord& coord, const model::PassLengths& lengths) const {
  model::Model model = parts_.model
                           ? parts_.model(config_, mesh_.shape(), coord)
                           : model::make_model(config_, model::shard_of(config_, mesh_.shape(), coord), lengths);
  optim::freeze_groups(model, config_);
  return model;
}

// Lays the stage out for passes of these lengths.
void Engine::shape_to(model::PassLengths wanted) {
  if (wanted.kept >= wanted.sequence) wanted.kept = 0;
  if (std::exchange(laid_out_, wanted) == wanted) return;
  if (wanted == whole_sequences()) return stage_.reshape(model_, plan_);
  if (!shorter_ || shorter_->lengths != wanted) {
    auto shorter = std::make_unique<Shorter>(wanted, make_model(plan_.coord, wanted), plan::RunPlan());
    shorter->plan = plan::plan_of_length(plan_, config_, shorter->model, wanted.sequence);
    stage_.reshape(shorter->model, shorter->plan);
    shorter_ = std::move(shorter);
  } else {
    stage_.reshape(shorter_->model, shorter_->plan);
  }
}

zero::AllShards Engine::make_shards() {
  DS_ASSERT(mesh_splits(config_, model_.splits) == mesh_.splits());
  zero::AllShards all;
  const zero::Tiers& tiers = parts_.tiers.states || parts_.tiers.params ? parts_.tiers : offload_.tiers();
  for (const zero::ShardsPlan& plan : plan_.shards) {
    const bool reduces = all.size() <= model_.splits.size();  // else it has balancing biases, which stay on the device
    zero::GroupRanks ranks{.all = reduces ? mesh_.group(all.size()) : mesh_.dp()};
    if (!plan.zeropp.empty()) ranks.near = mesh_.split("near"), ranks.across = mesh_.split("across");
    all.push_back(std::make_unique<zero::Shards>(plan, plan_.rows, plan_.grad_rows, plan_.trains(), ranks, device_,
                                                 ledger_, reduces ? tiers : zero::Tiers()));
  }
  return all;
}

void Engine::make_update() {
  const auto slices_of = [this](int tp_rank) {
    MeshCoord coord = plan_.coord;
    coord.tp = tp_rank;
    const model::Model model = make_model(coord, whole_sequences());
    std::vector<model::ParamSlice> slices;
    for (const model::ParamRow* row : model.params()) slices.push_back(row->slice);
    return slices;
  };
  update_.emplace(plan_, shards_, update::Axes{mesh_.dp(), mesh_.tp(), mesh_.pp(), mesh_.outer()}, device_, ledger_,
                  slices_of);
}

void Engine::make_pieces() {
  for (const auto& s : shards_) {
    const zero::ShardsPlan& plan = s->plan();
    const std::vector<zero::Piece> held = plan.layout.held_pieces(plan.rank);
    held_.insert(held_.end(), held.begin(), held.end());
    for (const zero::Piece& piece : plan.layout.owned_pieces(plan.rank)) {
      if (plan_.counts(piece)) counted_.push_back(piece);
    }
  }
  for (auto* pieces : {&held_, &counted_}) std::ranges::stable_sort(*pieces, {}, &zero::Piece::param);
  if (plan_.coord.worker > 0) return;
  saved_ = counted_;
  if (!plan_.steps_apart()) return;
  // Ranks that step for themselves have other parameters each: a step holds those of one that reduces them.
  saved_.clear();
  std::ranges::copy_if(held_, std::back_inserter(saved_),
                       [&](const zero::Piece& p) { return plan_.counts(p) && plan_.shards_of(p.param).rank == 0; });
}

// Operations may be under way, and have memory of ours, when a step has failed: they end when all ranks know of the
// failure, which an exception that unwinds us may not have told yet.
Engine::~Engine() {
  // An update that runs beside a step works with what the members behind the shards have.
  for (const auto& s : shards_) {
    try {
      if (plan_.trains()) s->states().finish();
    } catch (...) {  // of an update that nobody will see
    }
  }
  if (std::uncaught_exceptions() > uncaught_at_birth_) mesh_.abort(Error(Errc::Comm, "the training step has failed"));
  mesh_.drain();
}

void Engine::init_values(i64 param, i64 begin, i64 count, float* out) const {
  model::init_values(row_of(param), param, static_cast<u32>(config_.seed), begin, count, out);
}

void Engine::init_weights() {
  set_weights([this](i64 param, i64 begin, i64 count, float* out) { init_values(param, begin, count, out); });
}

// By blocks of rows, so that memory is bounded.
void Engine::set_codes(i64 param, const ValueSource& values, const CodeSource& codes) {
  constexpr i64 kElems = 1 << 18;
  const model::ParamRow& row = row_of(param);
  const CodedForm& form = row.codes;
  const std::vector<i64>& whole = row.whole_shape();
  const i64 K = row.coded_k(), N = row.numel() / K, whole_k = whole.back(), most = std::max<i64>(kElems / K, 1);
  const i64 row_bytes = form.row_bytes(K), whole_bytes = form.row_bytes(whole_k);
  const model::SliceMap map(row.slice, whole);
  std::vector<float> tile(codes ? 0 : static_cast<size_t>(std::min(N, most) * K)), published;
  std::vector<u8> out(static_cast<size_t>(std::min(N, most) * row_bytes)), read;
  const auto read_values = [&](i64 begin, i64 count, float* to) {
    map.for_each_run(begin, count,
                     [&](i64 local, i64 global, i64 run) { values(param, global, run, to + local - begin); });
  };
  const auto read_columns = [&](i64 first, i64 count) {
    if (published.empty()) {  // columns lie across the whole matrix
      published.resize(static_cast<size_t>(row.numel()));
      for (i64 at = 0; at < row.numel(); at += kElems)
        read_values(at, std::min(kElems, row.numel() - at), published.data() + at);
    }
    for (i64 i = 0; i < count * K; ++i) tile[i] = published[i % K * N + first + i / K];
  };
  const auto read_codes = [&](i64 first, i64 count) {
    map.for_each_run(first * K, count * K, [&](i64 local, i64 global, i64 run) {
      // The run in rows of the whole matrix, of which this rank may have a part.
      const i64 first_row = global / whole_k, last_row = (global + run - 1) / whole_k;
      read.resize(static_cast<size_t>((last_row - first_row + 1) * whole_bytes));
      codes(param, first_row, last_row - first_row + 1, read.data());
      const i64 from = first_row * whole_bytes, skipped = global / form.group * form.group_bytes() - from,
                to = local / form.group * form.group_bytes() - first * row_bytes;
      std::copy_n(read.data() + skipped, run / form.group * form.group_bytes(), out.data() + to);
    });
  };
  for (i64 first = 0; first < N; first += most) {
    const i64 count = std::min(most, N - first);
    if (codes) {
      read_codes(first, count);
    } else {
      row.transposed() ? read_columns(first, count) : read_values(first * K, count * K, tile.data());
      const auto encode = [&](i64 r, int) {
        const std::span<const float> x(tile.data() + r * K, static_cast<size_t>(K));
        model::encode_row(form, x, out.data() + r * row_bytes);
      };
      if (stream_.pool != nullptr) {
        stream_.pool->parallel_for(count, encode);
      } else {
        for (i64 r = 0; r < count; ++r) encode(r, 0);
      }
    }
    shards_[row.group]->params().set_codes(param, first, count, out.data());
  }
}

void Engine::set_weights(const ValueSource& values, const CodeSource& codes) {
  constexpr i64 kTile = 1 << 16;  // bounded memory, whatever the size of a parameter
  std::vector<float> tile(kTile);
  for (const zero::Piece& whole : held_) {
    const model::ParamRow& row = row_of(whole.param);
    if (row.codes) continue;
    const model::SliceMap map(row.slice, row.whole_shape());
    zero::for_each_part(whole, kTile, [&](const zero::Piece& piece) {
      const zero::StateLease st = lease(piece);
      const i64 n = piece.count;
      map.for_each_run(piece.begin, n, [&](i64 local, i64 global, i64 run) {
        values(piece.param, global, run, tile.data() + local - piece.begin);
      });
      for (const State s : kOptimizerStates) {
        if (st[s] == nullptr) continue;
        device_.zero(st[s], st.view(s, n).bytes());
        if (st.kept[s].scales != nullptr) device_.zero(st.kept[s].scales, state_blocks(n) * 4);
      }
      const DType work = plan_.work_of(piece.param);
      const TensorView master = st.master(work, n);
      if (master.dtype != DType::F32) {  // nothing keeps them in fp32
        std::vector<u16> rounded;
        for (i64 i = 0; i < n; ++i) {
          const float x = tile[i];
          rounded.push_back(work == DType::BF16 ? std::bit_cast<u16>(to_bf16(x)) : std::bit_cast<u16>(to_f16(x)));
        }
        device_.upload(master.data, rounded.data(), n * 2);
        return;
      }
      device_.upload(master.data, tile.data(), n * 4);
      if (st[State::Master] == nullptr) return;
      ops_.cast(TensorView::of(st[State::Param], work, {n}), master, stream_);
    });
  }
  for (i64 param = 0; param < std::ssize(plan_.params); ++param) {
    if (row_of(param).codes && plan_.shards_of(param).has_param(param)) set_codes(param, values, codes);
  }
  publish_params();
  progress_ = {};
  begin_outer();
}

std::optional<double> Engine::evaluate(i64 batches, const NextBatch& next) {
  DS_ASSERT(plan_.use != ConfigUse::Generate);
  finish_updates();
  shape_to(whole_sequences());
  const i64 R = plan_.B * plan_.T, rows = plan_.B * plan_.sequence_length;
  // Integers, so that the mean does not depend on how the samples lie on ranks: losses in units of 2^-24, tokens that
  // count, losses that are not finite.
  i64 sum[3] = {0, 0, 0};
  std::vector<i32> ids(static_cast<size_t>(rows)), targets(ids.size());
  std::vector<i32> documents(stage_.has_documents() ? ids.size() : 0);
  std::vector<float> losses(static_cast<size_t>(R));
  const i64 at_once = batches_at_once();
  for (i64 first = 0; first < batches; first += at_once) {
    const i64 n = std::min(at_once, batches - first);
    for (i64 b = 0; b < n; ++b) {
      if (!next(first + b, ids, targets, documents)) return std::nullopt;
      stage_.load(b, ids, targets);
      stage_.load_documents(b, documents);
      // Ranks of tp have the same losses; those of sp others of the same samples.
      if (plan_.stage.chunks.back().last && plan_.coord.tp == 0 && plan_.coord.sp == 0)
        sum[1] += rows - std::count(targets.begin(), targets.end(), kIgnoredTarget);
    }
    for (const pipeline::Instr& instr : pipeline::make_eval_schedule(plan_.stage.placement, plan_.coord.pp, n,
                                                                     narrow<int>(std::ssize(plan_.stage.chunks)))) {
      stage_.evaluate(instr);
      const bool has_losses = plan_.stage.chunks[instr.chunk].last && plan_.coord.tp == 0;
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
  mesh_.world().all_reduce(sum, 3, DType::I64, ReduceOp::Sum, kStatsText).wait();
  if (sum[2] > 0) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(static_cast<double>(sum[0]), -24) / static_cast<double>(std::max<i64>(sum[1], 1));
}

void Engine::finish_updates() {
  DS_ASSERT(!has_open_step());
  if (!plan_.trains() || !shards_.front()->states().is_delayed()) return;
  for (const auto& s : shards_) s->states().finish();
  zero::publish_update(shards_);  // saved state, such as errors of codes, belongs to these parameters and stays
}

bool Engine::is_finite() {
  finish_updates();
  // Bits of magnitudes, which are in the order of their bits: of weights and of moments.
  TensorView largest[2];
  for (size_t i = 0; i < 2; ++i) largest[i] = TensorView::of(&results_.scalars().sum.hi + i, DType::I64, {1});
  device_.zero(largest[0].data, 16);
  for (const zero::Piece& whole : counted_) {
    zero::for_each_part(whole, zero::StateStore::kLeaseElems, [&](const zero::Piece& piece) {
      const zero::StateLease st = lease(piece, zero::LeaseTo::Read);
      const auto raise = [&](const TensorView& to, void* data, DType dtype = DType::F32) {
        ops_.max_abs(to, TensorView::of(data, dtype, {piece.count}), stream_);
      };
      if (st[State::Master] != nullptr) {
        raise(largest[0], st[State::Master]);
      } else {
        raise(largest[0], st[State::Param], plan_.work_of(piece.param));
      }
      for (const State s : kOptimizerStates) {
        if (st[s] == nullptr) continue;
        if (st.kept[s].scales != nullptr) {  // which show what of their blocks is no number
          ops_.max_abs(largest[1], TensorView::of(st.kept[s].scales, DType::F32, {state_blocks(piece.count)}), stream_);
        } else {
          raise(largest[1], st[s], st.kept[s].dtype);
        }
      }
    });
  }
  i64 both[2];
  device_.download(both, largest[0].data, 16);
  mesh_.world().all_reduce(both, 2, DType::I64, ReduceOp::Max, kStatsText).wait();
  const auto number = [](i64 bits) { return std::bit_cast<float>(static_cast<u32>(bits)); };
  float rounded = number(both[0]);
  if (plan_.work == DType::BF16) rounded = to_float(to_bf16(rounded));
  if (plan_.work == DType::F16) rounded = to_float(to_f16(rounded));
  return std::isfinite(rounded) && std::isfinite(number(both[1]));
}

void Engine::read_logits(std::vector<float>& out) {
  out.clear();
  const plan::ChunkPlan& last = plan_.stage.chunks.back();
  if (!last.last || plan_.mesh.tp > 1 || plan_.mesh.sp > 1) return;
  const i64 R = plan_.B * plan_.T;
  out.resize(R * model_.vocab);
  const Buffer logits = device_buffer(device_, ledger_, Tag::Logits, R * model_.vocab * 4);
  stage_.logits(TensorView::of(logits.data(), DType::F32, {R, model_.vocab}));
  device_.download(out.data(), logits.data(), logits.bytes());
}

}  // namespace ds::engine
