// SPDX-License-Identifier: Apache-2.0
#include "plan/ownership.h"

#include <algorithm>
#include <limits>

#include "comm/nonzero_blocks.h"
#include "config/parallel.h"
#include "mesh/from_config.h"
#include "zero/stored_params.h"
#include "zero/tier_array.h"

namespace ds::plan {
namespace {

using pipeline::LayerCall;

// The parameter of RunPlan::looked_up.
i64 looked_up_table(const RunPlan& plan, const model::Model& model) {
  if (!plan.streams || !plan.embeds || model.layers.front()->type() != kEmbeddingType) return -1;
  const i64 unit = plan.tied() ? RunPlan::kSharedUnit : RunPlan::unit_of(0);
  if (plan.rows[unit].size() != 1 || plan.rows[unit][0].group != 0) return -1;
  const i64 param = plan.dp().layout.units()[unit].first_param;
  return plan.dp().gathers(plan.dp().layout.segments()[plan.dp().layout.rows()[param].segment]) ? param : -1;
}

// The units of a group that a layer uses: its own, and where it uses a tied matrix the unit `shared`.
zero::Access uses_of(const RunPlan& plan, size_t group, i64 layer, i64 num_layers, i64 shared) {
  const auto in_group = [group](const model::ParamRow& row) { return row.group == group; };
  zero::Access units;
  const bool looks_up = layer == 0 && plan.looked_up >= 0;
  if (std::ranges::any_of(plan.rows[RunPlan::unit_of(layer)], in_group) && !(looks_up && !plan.tied()))
    units.push_back(RunPlan::unit_of(layer));
  if (looks_up && plan.tied()) return units;
  if (group == 0 && plan.tied() && (layer == 0 || layer + 1 == num_layers)) units.push_back(shared);
  return units;
}

// Every use of a group's parameters by a schedule, in order. A call of a layer without any is an empty use. A call
// begins with the layer's units, which stay while its products take tiles in turn.
std::vector<zero::Access> trace_of(const RunPlan& plan, size_t group, std::span<const pipeline::Instr> schedule,
                                   const model::Model& model) {
  std::vector<zero::Access> trace;
  for (const pipeline::Instr& instr : schedule) {
    const ChunkPlan& chunk = plan.stage.chunks[instr.chunk];
    for (const LayerCall& call : chunk.calls(instr.op)) {
      if (call.kind == LayerCall::Kind::BackwardWeight) continue;
      const zero::Access own = uses_of(plan, group, call.layer, std::ssize(model.layers), RunPlan::kSharedUnit);
      trace.push_back(own);
      if (!plan.has_tiles()) continue;
      for (const model::Products products : pipeline::products_of(chunk.chunk, call)) {
        for (const size_t row : model.layers[call.layer]->products(products)) {
          for (const zero::MatrixTile& tile : plan.tiles_of(call.layer, row)) {
            zero::Access& access = trace.emplace_back(own);
            if (plan.rows[RunPlan::unit_of(call.layer)][row].group == group) access.push_back(tile.unit);
          }
        }
      }
    }
  }
  return trace;
}

// By unit: whether its gathered parameters travel as codes. Those of all units do, or only those of units in which no
// gathered parameter is trained.
std::vector<bool> coded_units(const zero::Layout& layout, bool all) {
  std::vector<bool> coded(layout.units().size(), true);
  if (all) return coded;
  for (const zero::RowPlace& row : layout.places()) {
    const zero::Segment& s = layout.segments()[row.segment];
    if (s.trained && !s.persistent) coded[s.unit] = false;
  }
  return coded;
}

// The units of the token embedding, whose gradients are sparse: at most as many rows as there are tokens are not zero.
std::vector<zero::SparseUnit> sparse_units(const Config& config, const RunPlan& plan, const zero::ShardsPlan& shards) {
  if (!config.sparse_gradients || !plan.embeds) return {};
  constexpr i64 kBlock = NonzeroBlocks::kBlock;
  const i64 together = shards.grads.accumulates_locally() ? plan.micro_batches : 1, tokens = plan.B * plan.T * together;
  const zero::Layout& layout = shards.grad_layout;
  std::map<i64, i64> blocks;  // by unit
  const auto add = [&](i64 unit, i64 rows, i64 cols, i64 most_rows) {
    // Rows may begin within a block.
    blocks[unit] += std::min(rows * cols / kBlock + 2, std::min(rows, most_rows) * ((cols - 1) / kBlock + 2));
  };
  for (const i64 unit : {RunPlan::kSharedUnit, RunPlan::unit_of(0)}) {
    const std::span<const model::ParamRow> rows = plan.grad_rows[unit];
    for (size_t r = 0; r < rows.size(); ++r) {
      const i64 param = layout.units()[unit].first_param + static_cast<i64>(r);
      for (const zero::MatrixTile& tile : layout.tiles_of(param)) add(tile.unit, tile.rows, tile.cols, tokens);
      const zero::RowPlace& place = layout.rows()[param];
      if (place.segment < 0 || layout.segments()[place.segment].unit != unit) continue;
      if (layout.segments()[place.segment].persistent) continue;
      const model::MatrixShape m = rows[r].matrices();
      if (m.count == 0) {
        add(unit, 1, rows[r].numel(), 1);
      } else {
        add(unit, m.count * m.rows, m.cols, tokens);
      }
    }
  }
  std::vector<zero::SparseUnit> units;
  for (const auto& [unit, most] : blocks) {
    // The sum of a tied matrix includes its use by the head, which is dense.
    const i64 sums = unit == RunPlan::kSharedUnit ? std::numeric_limits<i64>::max() / most
                                                  : layout.num_ranks() * (plan.micro_batches / together);
    units.push_back({.unit = unit, .of_rank = most, .of_sum = most * sums});
  }
  return units;
}

// The ways to reduce gradients over dp, other than densely.
std::vector<zero::ReductionKind> reductions_of(const Config& config, const std::vector<zero::SparseUnit>& sparse) {
  std::vector<zero::ReductionKind> kinds;
  if (!sparse.empty()) kinds.push_back(zero::sparse_reduction(sparse));
  if (const int bits = config.gradient_code_bits(); bits > 0) {
    const auto& l = config.zero.loco;
    const LocoOptions loco{.decay = static_cast<float>(l.err_beta), .reset_period = l.reset_period};
    kinds.push_back(zero::coded_reduction(bits, l.enabled ? std::optional(loco) : std::nullopt));
  }
  return kinds;
}

// The units whose gradients each pass of the backward schedule writes, in order. A layer's own unit is open while its
// matrices in tiles are written.
void plan_grad_passes(zero::ShardsPlan& shards, const RunPlan& plan, const model::Model& model, size_t group) {
  for (i64 c = std::ssize(plan.stage.chunks); c-- > 0;) {
    const ChunkPlan& chunk = plan.stage.chunks[c];
    for (const auto* calls : {&chunk.backward, &chunk.weight}) {
      std::vector<i64> units;
      for (const LayerCall& call : *calls) {
        if (call.kind != LayerCall::Kind::BackwardWeight) continue;
        const i64 shared = call.layer == 0 ? RunPlan::kSharedUnit : plan.head_use();
        for (const i64 u : uses_of(plan, group, call.layer, std::ssize(model.layers), shared)) {
          if (shards.has_grads(u)) units.push_back(u);
        }
        const i64 own = RunPlan::unit_of(call.layer), first = shards.layout.units()[own].first_param;
        const size_t without_tiles = units.size();
        for (const size_t row : model.layers[call.layer]->products(model::Products::BackwardWeight)) {
          for (const zero::MatrixTile& tile : shards.grad_layout.tiles_of(first + static_cast<i64>(row)))
            units.push_back(tile.unit);
        }
        if (units.size() > without_tiles && shards.has_grads(own)) shards.grads.open.push_back(own);
      }
      if (!units.empty()) shards.grads.passes.push_back(std::move(units));
    }
  }
  std::ranges::sort(shards.grads.open);
}

// The shards of a rank in a reduction group: layouts, states, how gradients are reduced.
zero::ShardsPlan make_shards(const Config& config, const model::Model& model, const RunPlan& plan, size_t group,
                             zero::LayoutOptions options, std::vector<StateSet> states,
                             std::vector<PerState<DType>> dtypes) {
  zero::ShardsPlan shards;
  const ZeroConfig& z = config.zero;
  shards.rank = zero::shard_rank(plan.mesh, plan.coord);
  options.num_ranks = zero::num_shards(plan.mesh);
  const bool reduces = group <= model.splits.size();
  if (!reduces) options = zero::balance_options(options, model);
  if (group > 0 && reduces) {
    const DpSplit& split = model.splits[group - 1];
    shards.axis = split.name;
    shards.rank = split_rank(plan.mesh, split, plan.coord);
    options.num_ranks = split_size(plan.mesh, split);
  }
  options.group = group;
  options.fp8 = options.stage == 3 && config.fp8.enabled && config.fp8.gathers && options.num_ranks > 1;
  const bool streams = plan.streams && options.stage == 3;
  if (streams) {
    options.width = dtype_bytes(plan.work);
    options.page = zero::TierArray::kReadPage / options.width;
    const bool codes =
        std::ranges::any_of(plan.params, [](const model::ParamRow* row) { return static_cast<bool>(row->codes); });
    DS_CHECK(!codes || options.num_ranks == 1, Errc::Unavailable,
             "--stream: codes are streamed whole, not in parts by {} data-parallel ranks; --weights work decodes them",
             options.num_ranks);
  }
  shards.layout = zero::Layout::make(plan.rows, options);
  const bool averages = std::ranges::any_of(plan.groups.groups, &optim::ParamGroup::averages_by_signs);
  shards.states = zero::StateLayout(shards.layout, shards.rank, std::move(states), std::move(dtypes),
                                    averages ? state_set({State::ExpAvg}) : StateSet{});
  options.here[RunPlan::kSharedUnit] = plan.embeds;
  options.here.push_back(plan.projects);
  options.of_gradients = true;
  shards.grad_layout = zero::Layout::make(plan.grad_rows, options);
  shards.shared_grads = plan.shared_grads();
  shards.allgather_bucket = z.allgather_bucket_size;
  if (options.stage == 3 && (z.quantized_weights || z.quantized_nontrainable_weights))
    shards.coded = coded_units(shards.layout, z.quantized_weights);
  if (group == 0) shards.zeropp = zeropp_splits(config);
  shards.reads_directly =
      streams && plan.offload.params.device == OffloadDevice::Nvme && plan.device == DeviceKind::Cpu;
  shards.undoes = config.pipeline.post_validate;

  // Sums that are kept in 16 bits are in fp32 while their bucket is reduced.
  const i64 parts = group > 0 && plan.reduce_each_micro ? model.gradient_parts() : 1,
            bucket_elems = config.grad_accum_dtype == DType::F32
                               ? z.reduce_bucket_size
                               : std::min(z.reduce_bucket_size, zero::kMostNarrowBucket);
  shards.grads = {
      .axis = shards.axis,
      .work = reduces ? plan.work : DType::F32,
      .wire = plan.wire,
      .sums = config.grad_accum_dtype,
      .bucket_elems = parts > 1 ? 0 : bucket_elems,  // the next part of a unit is written when one is committed
      .overlap = z.overlap_comm,
      .micro_batches = plan.micro_batches * parts,
      .parts = parts,
      .reduce_each_micro = plan.reduce_each_micro,
      .keeps_own = averages,
      .fused = plan.fused};
  shards.grads.beside = {RunPlan::kSharedUnit, plan.head_use()};
  if (plan.sends_use_ahead && plan.projects) shards.grads.ahead = plan.head_use();
  if (plan.trains()) plan_grad_passes(shards, plan, model, group);
  if (group == 0) shards.grads.sparse = sparse_units(config, plan, shards);
  if (group == 0) shards.grads.reductions = reductions_of(config, shards.grads.sparse);
  shards.buckets = zero::plan_buckets(shards.grad_layout, shards.grads);
  for (i64 u = 0; u < std::ssize(plan.grad_rows); ++u) {
    if (u != plan.head_use() || plan.shared_grads() == u) shards.gathered_grads.push_back(u);
  }

  for (const zero::Segment& s : shards.layout.segments()) {
    const i64 elems = s.slice * options.num_ranks;
    shards.padded += elems;
    if (!shards.gathers(s)) shards.whole += elems;
  }
  return shards;
}

// When the group gathers its parameters.
void plan_gathers(RunPlan& plan, const ZeroConfig& z, const model::Model& model, size_t group) {
  zero::ShardsPlan& shards = plan.shards[group];
  std::vector<i64> gather_elems(shards.layout.units().size(), 0);
  for (const zero::Segment& s : shards.layout.segments()) {
    if (shards.gathers(s)) gather_elems[s.unit] += s.slice * shards.layout.num_ranks();
  }
  // Breadth first, the next micro-batch goes through the same layer; and a layer's own units stay while tiles come.
  zero::GatherKnobs knobs{z.prefetch_bucket_size, z.max_live_parameters, z.max_reuse_distance,
                          plan.stage.breadth_first || plan.has_tiles()};
  // Below stage 3 nothing is sent: a unit is decoded for each use, and no decoded copy outlives it.
  if (!shards.layout.states().shard_params) knobs.prefetch_bucket = knobs.max_reuse_distance = 0;
  // Without gathers no uses are listed: a step may have any number of them.
  const bool gathers_any = std::ranges::any_of(gather_elems, [](i64 n) { return n > 0; });
  if (gathers_any && plan.trains()) {
    shards.train_gathers = zero::plan_gathers(trace_of(plan, group, plan.stage.schedule, model), gather_elems, knobs);
    shards.gather_pool_elems = shards.train_gathers.pool_elems;
  }
  for (i64 c = 0; c < std::ssize(plan.stage.chunks); ++c) {
    zero::GatherPlan& gathers = shards.eval_gathers.emplace_back();
    if (!gathers_any) continue;
    const pipeline::Instr forward{pipeline::Op::Forward, 0, c};
    std::vector<zero::Access> trace = trace_of(plan, group, {&forward, 1}, model);
    gathers = plan.streams ? zero::plan_stream(std::move(trace), gather_elems, RunPlan::kStreamedAhead,
                                               plan.stage.chunks.size() == 1)
                           : zero::plan_gathers(std::move(trace), gather_elems, knobs);
    shards.gather_pool_elems = std::max(shards.gather_pool_elems, gathers.pool_elems);
  }
}

// The biases of this rank's layers that steps move.
void plan_balance(RunPlan& plan, const Config& config, const model::Model& model) {
  plan.router_bias_rate = config.optimizer.router_bias_update_rate;
  if (plan.router_bias_rate == 0 || plan.shards.size() == model.splits.size() + 1) return;
  const zero::Layout& layout = plan.shards.back().layout;
  for (i64 l = 0; l < std::ssize(model.layers); ++l) {
    const std::vector<model::ParamRow>& rows = model.layers[static_cast<size_t>(l)]->rows();
    for (const zero::Piece& piece : layout.whole_pieces()) {
      const i64 row = piece.param - plan.param_of(l, 0);
      if (row < 0 || row >= std::ssize(rows)) continue;
      const i64 router = rows[static_cast<size_t>(row)].balances;
      if (rows[static_cast<size_t>(router)].trained) plan.balances.push_back({piece, model.counts_before(l)});
    }
  }
}

// Throws if no layer of the whole model would travel as codes. A single stage may have no frozen layer.
void check_coded_layers(const RunPlan& plan, size_t num_groups, zero::LayoutOptions options) {
  options.here = {};
  options.num_ranks = zero::num_shards(plan.mesh);
  for (options.group = 0; options.group < num_groups; ++options.group) {
    const zero::Layout layout = zero::Layout::make(plan.rows, options);
    const std::vector<bool> coded = coded_units(layout, false);
    if (std::ranges::any_of(layout.segments(), [&](const zero::Segment& s) { return !s.persistent && coded[s.unit]; }))
      return;
  }
  throw Error(Errc::Config,
              "zero_optimization.zero_quantized_nontrainable_weights: of no layer all that is gathered is "
              "frozen; optimizer.param_groups with \"frozen\": true says which are");
}

}  // namespace

void plan_ownership(RunPlan& plan, const Config& config, const model::Model& model) {
  const ZeroConfig& z = config.zero;
  std::vector<zero::LayerRange> layers;
  for (const ChunkPlan& c : plan.stage.chunks) layers.push_back({c.chunk.begin, c.chunk.end});
  zero::LayoutOptions options{.stage = narrow<int>(z.stage),
                              .persistence_threshold = z.param_persistence_threshold,
                              .model_persistence_threshold = z.model_persistence_threshold,
                              .here = zero::units_here(model, layers),
                              .tile_elems = z.tile_size};
  plan.reduce_each_micro = config.reduce_order == ReduceOrder::Micro;
  plan.params = model.params();
  for (size_t i = 0; i < plan.params.size(); ++i)
    plan.saved.push_back(zero::is_saved(model, *plan.params[i], narrow<i64>(i), plan.embeds));
  // A run that only reads weights takes those of any optimizer.
  if (plan.trains()) plan.diloco = config.optimizer.diloco;
  plan.stochastic_masters = config.bf16.stochastic_rounding;
  plan.groups = optim::make_groups(plan.trains() ? config.optimizer : OptimizerConfig{}, model);
  std::vector<StateSet> states;
  std::vector<PerState<DType>> dtypes;
  for (const model::ParamRow* row : plan.params) {
    if (row->storage != model::Storage::Work && !row->codes) options.block = zero::StoredParams::kBlock;
    const optim::ParamGroup& group = plan.groups.of(std::ssize(states));
    StateSet& of = states.emplace_back();
    PerState<DType>& kept = dtypes.emplace_back();
    if (!plan.trains()) continue;
    DS_ASSERT(group.frozen != row->trained);  // optim::freeze_groups
    if (group.frozen) continue;
    of = group.states();
    of[State::Master] = !config.own_masters();
    for (const State s : kOptimizerStates) {
      if (!of[s]) continue;
      kept[s] = group.state_dtype(s, row->whole_numel());
      if (is_coded(kept[s])) options.block = std::max(options.block, kStateBlock);
    }
  }
  // Ranks of tp hold copies of some rows next to parts of others, and two stages hold a tied matrix next to other rows.
  // A block of codes over both would round the copies differently on each rank.
  const DilocoConfig& diloco = config.optimizer.diloco;
  const bool codes_gradients = plan.trains() && config.gradient_code_bits() > 0,
             codes_zero =
                 (z.stage == 3 && (z.quantized_weights || z.quantized_nontrainable_weights)) || codes_gradients,
             codes_outer = diloco.workers > 1 && diloco.outer_gradient_bits < 32;
  // Below stage 3 vectors lie next to matrices, whose gradients differ in size.
  if (((codes_zero || codes_outer) && plan.mesh.tp > 1) || (codes_outer && plan.mesh.pp > 1 && plan.tied()) ||
      (codes_gradients && z.stage < 3))
    options.block = std::max(options.block, zero::kCodeBlock);
  if (plan.trains() && z.quantized_nontrainable_weights) check_coded_layers(plan, model.splits.size() + 1, options);
  const size_t groups = model.splits.size() + 1 + (zero::has_balances(model) ? 1 : 0);
  for (size_t g = 0; g < groups; ++g)
    plan.shards.push_back(make_shards(config, model, plan, g, options, states, dtypes));
  plan.looked_up = looked_up_table(plan, model);
  i64 tiles = 0;
  for (const zero::ShardsPlan& s : plan.shards) tiles += std::ssize(s.layout.tiles());
  constexpr i64 kMostTiles = 500'000;  // of a step; the list of their uses takes some hundred bytes for each
  DS_CHECK(tiles * plan.micro_batches <= kMostTiles, Errc::Unavailable,
           "zero_optimization.stage3_tile_size: {} makes {} tiles, for {} micro-batches; together at most {}",
           z.tile_size, tiles, plan.micro_batches, kMostTiles);
  for (size_t g = 0; g < groups; ++g) plan_gathers(plan, z, model, g);
  if (plan.trains()) plan_balance(plan, config, model);
}

}  // namespace ds::plan
