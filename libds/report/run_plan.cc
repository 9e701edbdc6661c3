// SPDX-License-Identifier: Apache-2.0
#include "report/run_plan.h"

#include <algorithm>
#include <limits>

#include "model/models.h"
#include "pipeline/partition.h"
#include "report/counted_update.h"
#include "report/dry_run.h"
#include "report/plan_traffic.h"

namespace ds::report {
namespace {

using model::Mode;
using pipeline::LayerCall;
using pipeline::Op;

// Rows of logits at a time: about 64 MiB of fp32, so that they stay in caches, or 1 GiB on a GPU, whose products must
// be large; a multiple of 64 rows.
i64 logits_chunk(i64 rows, i64 vocab, DeviceKind device) {
  const i64 target_elems = device == DeviceKind::Cuda ? i64{256} << 20 : i64{16} << 20;
  const i64 chunk = std::min(rows, align_up(std::max<i64>(target_elems / vocab, 1), 64));
  if (device != DeviceKind::Cuda) return chunk;
  // Its kernels want rows of a multiple of eight elements and make that of fewer rows: room for those that this costs,
  // or the last of the micro-batch would be a chunk of their own, which reads the weight and adds to its gradient.
  return chunk + div_ceil(chunk * (align_up(vocab, 8) - vocab), vocab);
}

pipeline::Checkpointing checkpointing_of(const ActivationCheckpointingConfig& c) {
  switch (c.granularity) {
    case CheckpointGranularity::None: return {};
    case CheckpointGranularity::Layer: return {model::Keep::Input, c.interval};
    case CheckpointGranularity::Selective: return {model::Keep::AllButAttention};
  }
  return {};
}

// The units of a group whose parameters a layer uses, and those of its gradients.
zero::Access uses_of(const RunPlan& plan, size_t group, i64 layer, i64 num_layers, i64 shared) {
  const auto in_group = [group](const model::ParamRow& row) { return row.group == group; };
  zero::Access units;
  if (std::ranges::any_of(plan.rows[RunPlan::unit_of(layer)], in_group)) units.push_back(RunPlan::unit_of(layer));
  if (group == 0 && plan.tied() && (layer == 0 || layer + 1 == num_layers)) units.push_back(shared);
  return units;
}

// Which calls an instruction makes.
std::span<const LayerCall> calls_of(const ChunkPlan& chunk, Op op) {
  switch (op) {
    case Op::Forward: return chunk.forward;
    case Op::Backward:
    case Op::BackwardInput: return chunk.backward;
    case Op::BackwardWeight: return chunk.weight;
    default: return {};
  }
}

// Every use of a group's parameters by a schedule, in order; a call of a layer that has none is an empty one. A call
// begins with the layer's units, which stay while its products take tiles in turn.
std::vector<zero::Access> trace_of(const RunPlan& plan, size_t group, std::span<const pipeline::Instr> schedule,
                                   const model::Model& model) {
  std::vector<zero::Access> trace;
  for (const pipeline::Instr& instr : schedule) {
    const ChunkPlan& chunk = plan.chunks[instr.chunk];
    for (const LayerCall& call : calls_of(chunk, instr.op)) {
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

}  // namespace

i64 RunPlan::total_memory() const noexcept {
  return total_of(memory) - (device == DeviceKind::Cpu ? 0 : memory[static_cast<size_t>(Tag::Host)]);
}

i64 RunPlan::tile_cols() const noexcept {
  i64 cols = 0;
  for (const zero::ShardsPlan& s : shards) {
    for (const zero::MatrixTile& tile : s.layout.tiles()) cols = std::max(cols, tile.cols);
  }
  return cols;
}

std::vector<DpSplit> zeropp_splits(const Config& config) {
  std::vector<DpSplit> splits;
  if (!ds::trains(config.use) || config.zero.stage != 3) return splits;
  const int inner = narrow<int>(config.zero.hpz_partition_size);
  if (inner == 1) return splits;
  splits.push_back({.name = "near", .inner = inner, .along = DpSplit::Along::Inner});
  if (config.gradient_code_bits() > 0)
    splits.push_back({.name = "across", .inner = inner, .along = DpSplit::Along::Outer});
  return splits;
}

model::Shard shard_of(const Config& config, const MeshShape& mesh, const MeshCoord& coord) {
  return {.tp = mesh.tp,
          .tp_rank = coord.tp,
          .sequence = config.tensor_parallel.sequence_parallel && mesh.tp > 1,
          .sp = mesh.sp,
          .sp_rank = coord.sp,
          .mode = config.sequence_parallel.mode == SequenceParallelMode::Ring ? model::SequenceMode::Ring
                                                                              : model::SequenceMode::Ulysses};
}

pipeline::ScheduleOptions schedule_of(const Config& config) {
  const PipelineConfig& p = config.pipeline;
  return {.kind = p.stages * p.virtual_stages > 1 ? p.schedule : PipelineSchedule::OneFOneB,
          .stages = narrow<int>(p.stages),
          .micro_batches = config.batch.accumulation,
          .chunks = narrow<int>(p.virtual_stages)};
}

std::vector<i64> pipeline_cuts(const Config& config, const model::Model& model) {
  const PipelineConfig& p = config.pipeline;
  const int parts = narrow<int>(p.stages * p.virtual_stages);
  if (parts == 1) return {0, std::ssize(model.layers)};
  const pipeline::Checkpointing checkpointing = checkpointing_of(config.activation_checkpointing);
  const std::vector<pipeline::LayerCost> layers = pipeline::layer_costs(model);
  std::vector<i64> bytes;
  for (size_t l = 0; l < layers.size(); ++l) {
    const auto& layer = model.layers[l];
    // Weights, gradients and Adam's states, and the activations of a micro-batch.
    model::ActivationPlanner planner;
    planner.begin_layer(layer->is_block() ? checkpointing.keep : model::Keep::All, false);
    layer->plan(planner, config.work_dtype(), config.batch.micro, config.data.seq_length / model.shard.sp, Mode::Train);
    bytes.push_back(layers[l].params * (2 * dtype_bytes(config.work_dtype()) + 12) / model.shard.tp +
                    planner.kept_bytes());
  }
  return p.partition == "memory" ? pipeline::balanced_cuts(bytes, parts)
                                 : pipeline::partition(p.partition, layers, parts);
}

std::vector<model::LayerActs> plan_acts(const model::Model& model, const ChunkPlan& c, const RunPlan& plan,
                                        model::ActivationPlanner& planner, Mode mode, const PassShape& shape,
                                        TensorView input_grad) {
  const pipeline::Chunk& chunk = c.chunk;
  const i64 S = shape.stream_rows, C = model.hidden;
  const auto stream = [&](bool keep) {
    return keep ? planner.kept(plan.work, {S, C}) : planner.working(plan.work, {S, C});
  };
  const bool elsewhere = plan.partition_inputs || plan.offload_inputs;
  const i64 shares = plan.partition_inputs ? plan.mesh.tp : 1, rows = align_up(S, shares);
  // Streams that alternate between the layers: outputs that nobody keeps here, gradients that nobody waits for.
  TensorView turns[2];
  const bool train = mode == Mode::Train;
  if (!train || !plan.split_backward || elsewhere) {
    for (TensorView& t : turns) t = stream(false);
    planner.pin();
  }
  std::vector<model::LayerActs> acts;
  for (i64 l = chunk.begin; l < chunk.end; ++l) {
    const size_t at = static_cast<size_t>(l);
    const bool head = l + 1 == std::ssize(model.layers);
    planner.begin_layer(train ? chunk.keep_of(l) : model::Keep::Input,
                        train && (plan.split_backward || chunk.continues_group(l)));
    if (!acts.empty() && acts.back().stash.rank > 0) acts.back().restored = planner.working(plan.work, {rows, C});
    model::LayerActs& a = acts.emplace_back(model.layers[at]->plan(planner, plan.work, shape.B, shape.T, mode));
    if (!head && train) {
      // The input of layers that are computed again may be kept elsewhere; what goes to the next stage may not.
      const bool input =
          l + 1 < chunk.end && chunk.keep_of(l + 1) == model::Keep::Input && !chunk.continues_group(l + 1);
      if (input && elsewhere) {
        a.output = turns[at % 2];
        a.stash = plan.offload_inputs ? TensorView::of(nullptr, plan.work, {rows / shares, C})
                                      : planner.kept(plan.work, {rows / shares, C});
        if (plan.offload_inputs) a.stash_at = planner.away(a.stash.bytes());
      } else {
        a.output = stream(!chunk.continues_group(l + 1));
      }
    }
    if (!head && !train) a.output = turns[at % 2];
    if (!train || l == 0) continue;
    if (l == chunk.begin) {
      a.input_grad = input_grad;
    } else {
      a.input_grad = plan.split_backward ? stream(false) : turns[at % 2];
    }
  }
  return acts;
}

namespace {

// By unit: whether what is gathered of it travels as codes. All do, or those of which nothing that is gathered is
// trained.
std::vector<bool> coded_units(const zero::Layout& layout, const optim::Groups& groups, bool all) {
  std::vector<bool> coded(layout.units().size(), true);
  if (all) return coded;
  for (const zero::RowPlace& row : layout.places()) {
    if (row.segment < 0 || groups.frozen(row.param)) continue;
    const zero::Segment& s = layout.segments()[row.segment];
    if (!s.persistent) coded[s.unit] = false;
  }
  for (const zero::MatrixTile& tile : layout.tiles()) {
    if (groups.frozen(tile.param)) continue;
    coded[tile.unit] = false;
  }
  return coded;
}

// The units of the look-up of tokens. A matrix has at most as many rows that are not zero as there are tokens.
std::vector<zero::SparseUnit> sparse_units(const RunPlan& plan, const zero::ShardsPlan& shards) {
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
      const bool matrix = rows[r].shape.size() == 2;
      add(unit, matrix ? rows[r].shape[0] : 1, matrix ? rows[r].shape[1] : rows[r].numel(), matrix ? tokens : 1);
    }
  }
  std::vector<zero::SparseUnit> units;
  for (const auto& [unit, most] : blocks) {
    // Of a tied matrix the sum has its use by the head in it.
    const i64 sums = unit == RunPlan::kSharedUnit ? std::numeric_limits<i64>::max() / most
                                                  : layout.num_ranks() * (plan.micro_batches / together);
    units.push_back({.unit = unit, .of_rank = most, .of_sum = most * sums});
  }
  return units;
}

// What the ranks of a group have of a model.
zero::ShardsPlan make_shards(const Config& config, const model::Model& model, const RunPlan& plan, size_t group,
                             zero::LayoutOptions options, std::vector<StateSet> states,
                             std::vector<PerState<DType>> dtypes) {
  zero::ShardsPlan shards;
  const ZeroConfig& z = config.zero;
  const i64 num_layers = std::ssize(model.layers);
  shards.rank = zero::shard_rank(plan.mesh, plan.coord);
  options.num_ranks = zero::num_shards(plan.mesh);
  if (group > 0) {
    const DpSplit& split = model.splits[group - 1];
    shards.axis = split.name;
    shards.rank = split_rank(plan.mesh, split, plan.coord);
    options.num_ranks = split_size(plan.mesh, split);
  }
  options.group = group;
  shards.layout = zero::Layout::make(plan.rows, options);
  const bool averages = std::ranges::any_of(plan.groups.groups, &optim::Group::averages_by_signs);
  shards.states = zero::StateLayout(shards.layout, shards.rank, std::move(states), std::move(dtypes),
                                    averages ? state_set({State::ExpAvg}) : StateSet{});
  options.here[RunPlan::kSharedUnit] = plan.embeds;
  options.here.push_back(plan.projects);
  shards.grad_layout = zero::Layout::make(plan.grad_rows, options);
  shards.shared_grads = plan.shared_grads();
  shards.allgather_bucket = z.allgather_bucket_size;
  if (z.stage == 3 && (z.quantized_weights || z.quantized_nontrainable_weights))
    shards.coded = coded_units(shards.layout, plan.groups, z.quantized_weights);
  if (group == 0) shards.zeropp = zeropp_splits(config);

  shards.grads = {
      .axis = shards.axis,
      .work = plan.work,
      .wire = plan.wire,
      .sums = config.grad_accum_dtype,
      // Of sums in 16 bits a bucket's are there in fp32 while it is reduced.
      .bucket_elems = std::min(z.reduce_bucket_size,
                               config.grad_accum_dtype == DType::F32 ? z.reduce_bucket_size : zero::kMostNarrowBucket),
      .overlap = z.overlap_comm,
      .micro_batches = plan.micro_batches,
      .reduce_each_micro = plan.reduce_each_micro,
      .keeps_own = averages,
      .code_bits = group == 0 ? config.gradient_code_bits() : 0};
  if (shards.grads.code_bits > 0 && z.loco.enabled)
    shards.grads.loco = {.decay = static_cast<float>(z.loco.err_beta), .reset_period = z.loco.reset_period};
  shards.grads.beside = {RunPlan::kSharedUnit, plan.head_use()};
  for (i64 c = std::ssize(plan.chunks); plan.trains() && c-- > 0;) {
    const ChunkPlan& chunk = plan.chunks[c];
    for (const auto* calls : {&chunk.backward, &chunk.weight}) {
      std::vector<i64> units;
      for (const LayerCall& call : *calls) {
        if (call.kind != LayerCall::Kind::BackwardWeight) continue;
        const i64 shared = call.layer == 0 ? RunPlan::kSharedUnit : plan.head_use();
        for (const i64 u : uses_of(plan, group, call.layer, num_layers, shared)) units.push_back(u);
        const i64 own = RunPlan::unit_of(call.layer), first = shards.layout.units()[own].first_param;
        const size_t without_tiles = units.size();
        for (const size_t row : model.layers[call.layer]->products(model::Products::BackwardWeight)) {
          for (const zero::MatrixTile& tile : shards.grad_layout.tiles_of(first + static_cast<i64>(row)))
            units.push_back(tile.unit);
        }
        if (units.size() > without_tiles) shards.grads.open.push_back(own);
      }
      if (!units.empty()) shards.grads.passes.push_back(std::move(units));
    }
  }
  std::ranges::sort(shards.grads.open);
  if (config.sparse_gradients && group == 0 && plan.embeds) shards.grads.sparse = sparse_units(plan, shards);
  shards.buckets = zero::plan_buckets(shards.grad_layout, shards.grads);
  for (i64 u = 0; u < std::ssize(plan.grad_rows); ++u) {
    if (u != plan.head_use() || plan.shared_grads() == u) shards.gathered_grads.push_back(u);
  }

  for (const zero::Segment& s : shards.layout.segments()) {
    const i64 elems = s.slice * options.num_ranks;
    shards.padded += elems;
    if (!shards.layout.states().shard_params || s.persistent) shards.whole += elems;
  }
  return shards;
}

// When they gather it.
void plan_gathers(RunPlan& plan, const ZeroConfig& z, const model::Model& model, size_t group) {
  zero::ShardsPlan& shards = plan.shards[group];
  std::vector<i64> gather_elems(shards.layout.units().size(), 0);
  for (const zero::Segment& s : shards.layout.segments()) {
    if (shards.layout.states().shard_params && !s.persistent)
      gather_elems[s.unit] += s.slice * shards.layout.num_ranks();
  }
  // Breadth first, the next micro-batch goes through the same layer; and what a layer has beside tiles stays meanwhile.
  const zero::GatherKnobs knobs{z.prefetch_bucket_size, z.max_live_parameters, z.max_reuse_distance,
                                plan.breadth_first || plan.has_tiles()};
  // What is whole everywhere is not looked at use by use: a step may have any number of them.
  const bool gathers_any = std::ranges::any_of(gather_elems, [](i64 n) { return n > 0; });
  if (gathers_any && plan.trains()) {
    shards.train_gathers = zero::plan_gathers(trace_of(plan, group, plan.schedule, model), gather_elems, knobs);
    shards.gather_pool_elems = shards.train_gathers.pool_elems;
  }
  for (i64 c = 0; c < std::ssize(plan.chunks); ++c) {
    zero::GatherPlan& gathers = shards.eval_gathers.emplace_back();
    if (!gathers_any) continue;
    const pipeline::Instr forward{Op::Forward, 0, c};
    gathers = zero::plan_gathers(trace_of(plan, group, {&forward, 1}, model), gather_elems, knobs);
    shards.gather_pool_elems = std::max(shards.gather_pool_elems, gathers.pool_elems);
  }
}

// The stage: its instructions and its layers.
void plan_stage(RunPlan& plan, const Config& config, const model::Model& model, std::vector<i64> cuts) {
  const i64 num_layers = std::ssize(model.layers);
  const PipelineConfig& p = config.pipeline;
  const ActivationCheckpointingConfig& checkpoints = config.activation_checkpointing;
  if (checkpoints.granularity == CheckpointGranularity::Layer) {
    // A stream that is cut already has no more to cut.
    plan.partition_inputs = checkpoints.partition_activations && plan.mesh.tp > 1 && !model.shard.sequence;
    plan.offload_inputs = plan.offload.inputs != OffloadDevice::None;
  }
  pipeline::ScheduleOptions schedule = schedule_of(config);
  DS_CHECK(!plan.offload_inputs || schedule.kind != PipelineSchedule::BreadthFirst, Errc::Unavailable,
           "activation_checkpointing.{}: with pipeline.schedule \"breadth-first\" what is between chunks stays on the "
           "device",
           plan.offload.inputs == OffloadDevice::Nvme ? "nvme_path" : "cpu_checkpointing");
  schedule.stage = plan.coord.pp;
  schedule.micro_batches = plan.micro_batches;
  plan.split_backward = schedule.kind == PipelineSchedule::ZeroBubbleH1;
  plan.breadth_first = schedule.kind == PipelineSchedule::BreadthFirst;
  plan.schedule = pipeline::make_schedule(schedule);
  if (cuts.empty()) cuts = pipeline_cuts(config, model);
  for (i64 c = 0; c < p.virtual_stages; ++c) {
    const size_t block = static_cast<size_t>(pipeline::block_of(plan.mesh.pp, plan.coord.pp, c));
    ChunkPlan chunk;
    chunk.chunk =
        pipeline::make_chunk(model, cuts[block], cuts[block + 1], checkpointing_of(config.activation_checkpointing));
    chunk.first = cuts[block] == 0;
    chunk.last = cuts[block + 1] == num_layers;
    chunk.forward = pipeline::forward_calls(chunk.chunk);
    chunk.backward = pipeline::backward_calls(model, chunk.chunk, plan.split_backward);
    if (plan.split_backward) chunk.weight = pipeline::weight_calls(model, chunk.chunk);
    const pipeline::StashSizes stash = pipeline::stash_sizes(plan.schedule, c);
    if (plan.split_backward) {
      // Layers that keep all write no working memory before their gradients.
      chunk.scratch_slots = std::ranges::any_of(chunk.chunk.keep, [](auto k) { return k != model::Keep::All; }) ? 1 : 0;
      chunk.working_slots = chunk.scratch_slots + stash.backward;
    }
    if (plan.breadth_first) {
      chunk.input_slots = 0;
      chunk.grad_slots = plan.micro_batches;
    } else {
      chunk.input_slots = stash.forward + 1;
      chunk.grad_slots = stash.backward + 1;
    }
    plan.chunks.push_back(std::move(chunk));
  }

  plan.embeds = plan.chunks.front().first;
  plan.projects = plan.chunks.back().last;
  plan.kept = pipeline::kept_slots(plan.schedule, p.virtual_stages, plan.micro_batches);
}

// Of the whole model, for a stage of a pipeline may have none that are frozen.
void check_coded_layers(const RunPlan& plan, size_t num_groups, zero::LayoutOptions options) {
  options.here = {};
  options.num_ranks = zero::num_shards(plan.mesh);
  for (options.group = 0; options.group < num_groups; ++options.group) {
    const zero::Layout layout = zero::Layout::make(plan.rows, options);
    const std::vector<bool> coded = coded_units(layout, plan.groups, false);
    if (std::ranges::any_of(layout.segments(), [&](const zero::Segment& s) { return !s.persistent && coded[s.unit]; }))
      return;
  }
  throw Error(Errc::Config,
              "zero_optimization.zero_quantized_nontrainable_weights: of no layer all that is gathered is "
              "frozen; optimizer.param_groups with \"frozen\": true says which are");
}

// Who owns what, and which states there are.
void plan_ownership(RunPlan& plan, const Config& config, const model::Model& model) {
  const ZeroConfig& z = config.zero;
  std::vector<zero::LayerRange> layers;
  for (const ChunkPlan& c : plan.chunks) layers.push_back({c.chunk.begin, c.chunk.end});
  zero::LayoutOptions options{.stage = narrow<int>(z.stage),
                              .persistence_threshold = z.param_persistence_threshold,
                              .model_persistence_threshold = z.model_persistence_threshold,
                              .here = zero::units_here(model, layers),
                              .tile_elems = z.tile_size};
  plan.reduce_each_micro = config.reduce_order == ReduceOrder::Micro;
  plan.params = model.params();
  for (size_t i = 0; i < plan.params.size(); ++i)
    plan.saved.push_back(zero::is_saved(model, *plan.params[i], narrow<i64>(i), plan.embeds));
  // Who only reads weights takes those of any optimizer.
  if (plan.trains()) plan.diloco = config.optimizer.diloco;
  plan.stochastic_masters = config.bf16.stochastic_rounding;
  plan.groups = optim::make_groups(plan.trains() ? config.optimizer : OptimizerConfig{}, model);
  std::vector<StateSet> states;
  std::vector<PerState<DType>> dtypes;
  for (const model::ParamRow* row : plan.params) {
    const optim::Group& group = plan.groups.of(std::ssize(states));
    StateSet& of = states.emplace_back();
    PerState<DType>& kept = dtypes.emplace_back();
    if (!plan.trains()) continue;
    of = group.states();
    of[State::Master] = !config.own_masters();
    for (const State s : kOptimizerStates) {
      if (!of[s]) continue;
      kept[s] = group.state_dtype(s, row->whole_numel());
      if (is_coded(kept[s])) options.block = kStateBlock;
    }
  }
  // Ranks of tp have copies of some rows beside parts of others, and two stages have a tied matrix beside other rows: a
  // block of codes with both would say another thing of the copies on each rank.
  const DilocoConfig& diloco = config.optimizer.diloco;
  const bool codes_gradients = plan.trains() && config.gradient_code_bits() > 0,
             codes_zero =
                 (z.stage == 3 && (z.quantized_weights || z.quantized_nontrainable_weights)) || codes_gradients,
             codes_outer = diloco.workers > 1 && diloco.outer_gradient_bits < 32;
  // Below stage 3 vectors are beside matrices, whose gradients are of another size.
  if (((codes_zero || codes_outer) && plan.mesh.tp > 1) || (codes_outer && plan.mesh.pp > 1 && plan.tied()) ||
      (codes_gradients && z.stage < 3))
    options.block = std::max(options.block, zero::kCodeBlock);
  if (plan.trains() && z.quantized_nontrainable_weights) check_coded_layers(plan, model.splits.size() + 1, options);
  for (size_t g = 0; g <= model.splits.size(); ++g)
    plan.shards.push_back(make_shards(config, model, plan, g, options, states, dtypes));
  i64 tiles = 0;
  for (const zero::ShardsPlan& s : plan.shards) tiles += std::ssize(s.layout.tiles());
  constexpr i64 kMostTiles = 500'000;  // of a step: the order in which they come is kept, some hundred bytes for each
  DS_CHECK(tiles * plan.micro_batches <= kMostTiles, Errc::Unavailable,
           "zero_optimization.stage3_tile_size: {} makes {} tiles, for {} micro-batches; together at most {}",
           z.tile_size, tiles, plan.micro_batches, kMostTiles);
  for (size_t g = 0; g <= model.splits.size(); ++g) plan_gathers(plan, z, model, g);
}

// What a step does with inputs that are kept away from the device: Stage::run_call in short.
void plan_inputs(RunPlan& plan, const model::Model& model) {
  std::vector<std::vector<model::LayerActs>> acts;  // by chunk, in the first slot
  for (const ChunkPlan& chunk : plan.chunks) {
    model::ActivationPlanner planner;
    acts.push_back(plan_acts(model, chunk, plan, planner, Mode::Train, plan.shape()));
  }
  plan.inputs.bytes = plan.kept.count * plan.away_bytes;
  for (const pipeline::Instr& instr : plan.schedule) {
    const ChunkPlan& chunk = plan.chunks[instr.chunk];
    for (const LayerCall& call : calls_of(chunk, instr.op)) {
      const bool write = instr.op == Op::Forward, reads = call.kind == LayerCall::Kind::Forward || call.again;
      const i64 layer = call.layer - chunk.chunk.begin - (write ? 0 : 1);  // whose output it is
      if (layer < 0 || (!write && !reads)) continue;
      const model::LayerActs& a = acts[instr.chunk][layer];
      if (a.stash.rank == 0) continue;
      plan.inputs.part_bytes = align_up(a.stash.bytes(), offload::BlockFile::kPage);
      const i64 slot = plan.kept.of[instr.chunk][instr.micro];
      plan.inputs.uses.push_back({slot * plan.away_bytes + a.stash_at, write});
    }
  }
}

// What the passes of the layers need.
void plan_passes(RunPlan& plan, const Config& config, const model::Model& model) {
  for (ChunkPlan& chunk : plan.chunks) {
    for (const Mode mode : {Mode::Train, Mode::Eval}) {
      // Text is written in memory of its own, whose size depends on the text.
      if (mode == Mode::Train ? !plan.trains() : plan.use == ConfigUse::Generate) continue;
      model::ActivationPlanner planner;
      plan_acts(model, chunk, plan, planner, mode, plan.shape());
      plan.kept_bytes = std::max(plan.kept_bytes, planner.kept_bytes());
      plan.away_bytes = std::max(plan.away_bytes, planner.away_bytes());
      chunk.working_bytes = std::max(chunk.working_bytes, planner.working_bytes());
      plan.temporary_bytes = std::max(plan.temporary_bytes, planner.temporary_bytes());
    }
    if (!plan.trains()) {
      chunk.working_slots = 1;
      chunk.input_slots = plan.use == ConfigUse::Generate || plan.breadth_first ? 0 : 2;
      chunk.grad_slots = 0;
    }
    if (plan.split_backward && plan.trains())
      plan.working_bytes += chunk.working_slots * chunk.working_bytes;
    else
      plan.working_bytes = std::max(plan.working_bytes, chunk.working_bytes);
    if (!plan.breadth_first)
      plan.stream_slots +=
          (chunk.first ? 0 : chunk.input_slots + chunk.grad_slots) + (chunk.last ? 0 : chunk.grad_slots);
  }
  if (plan.offload_inputs && plan.trains()) plan_inputs(plan, model);
  // Gradients between a chunk and the one behind it, and those of the chunk before.
  if (plan.breadth_first && plan.trains())
    plan.stream_slots = std::min<i64>(2, std::ssize(plan.chunks) - 1) * plan.micro_batches;
  if (plan.use != ConfigUse::Generate) {
    model::PassSizes sizes{.B = plan.B,
                           .T = plan.T,
                           .sequence_length = plan.sequence_length,
                           .micro_batches = plan.micro_batches,
                           .rope_elems = model::rope_table_elems(config.model, plan.sequence_length),
                           .projects = plan.projects,
                           .gradients = plan.trains(),
                           .tile_cols = plan.tile_cols(),
                           .documents = config.data.document_token >= 0,
                           .work = plan.work};
    if (sizes.rope_elems > 0) sizes.rope_rows = plan.sequence_length;
    // Of the largest share: the ranks that share a vocabulary meet after every chunk.
    if (sizes.projects) sizes.logits_rows = logits_chunk(plan.B * plan.T, model.largest_vocab_share(), plan.device);
    plan.pass = model::PassMemory(model, sizes);
  }
}

// saves_beside: a copy of what this rank saves is kept for saves in the background.
void count_memory(RunPlan& plan, const MemoryLedger& ledger, const RankLocalBytes& local, i64 hidden,
                  bool saves_beside) {
  const auto tag = [&](Tag t) -> i64& { return plan.memory[static_cast<size_t>(t)]; };
  const i64 work_bytes = dtype_bytes(plan.work);
  for (size_t t = 0; t < plan.memory.size(); ++t) plan.memory[t] = ledger.current(static_cast<Tag>(t));
  i64 saved = 0, part = 0;
  for (const zero::ShardsPlan& s : plan.shards) {
    if (!plan.steps_apart()) {
      saved += s.states.owned_bytes() + s.padded / s.layout.num_ranks() * work_bytes;
    } else if (plan.dp_rank() == 0) {  // all that it has, and the others nothing
      for (const State state : kStates) saved += s.states.bytes(state);
      saved += s.padded * work_bytes;
    }
    const i64 elems = std::min(s.layout.shard_elems(), zero::StateStore::kLeaseElems);
    i64 bytes = elems * work_bytes;
    for (const State state : kStates) {
      if (state != State::Param && plan.trains() && s.states.bytes(state) > 0)
        bytes += align_up(elems * 4, 32) + state_blocks(elems) * 4;
    }
    part = std::max(part, bytes);
  }
  // Of the stage. Temporaries, what is computed again and gradients between layers; messages of the pipeline; the fp32
  // gradient of the output projection; sums over the tensor-parallel group.
  tag(Tag::Activations) = plan.kept.count * plan.kept_bytes;
  tag(Tag::Logits) = plan.pass.bytes(Tag::Logits);
  tag(Tag::Workspace) += plan.temporary_bytes + plan.working_bytes +
                         plan.stream_slots * align_up(plan.shape().stream_rows * hidden * work_bytes, 64) +
                         plan.pass.bytes(Tag::Workspace);
  // Tokens and their like; the numbers of the step.
  tag(Tag::Data) = align_up(plan.pass.bytes(Tag::Data), 8) +
                   update::StepResults::bytes(plan.micro_batches, zero::num_shards(plan.mesh));

  // Checkpoints. A save in the background has a copy of what this rank saves. Beside a GPU one is loaded, and saved
  // where that is waited for, through a part of the host's memory.
  if (saves_beside && plan.trains()) plan.state_bytes = std::max(saved, local.instead) + local.beside;
  if (plan.device == DeviceKind::Cuda) plan.state_part_bytes = part + local.sum();
  tag(Tag::Host) += plan.state_bytes + plan.state_part_bytes;
}

}  // namespace

RunPlan make_run_plan(const Config& config, const model::Model& model, const MeshShape& mesh, const MeshCoord& coord,
                      DeviceKind device, std::vector<i64> cuts) {
  RunPlan plan;
  plan.device = device;
  plan.mesh = mesh;
  plan.coord = coord;
  plan.work = config.work_dtype();
  plan.wire = config.wire_dtype();
  plan.B = config.batch.micro;
  plan.sequence_length = config.data.seq_length;
  plan.T = plan.sequence_length / mesh.sp;
  plan.stream_shares = model.shard.sequence ? mesh.tp : 1;
  plan.use = config.use;
  // Evaluation keeps as many batches under way as a pipeline has use for.
  plan.micro_batches = plan.trains() || mesh.pp > 1 ? config.batch.accumulation : 1;
  plan.offload = offload::settings_of(config, device);
  plan.rows = zero::units_of(model);
  plan.grad_rows = plan.rows;
  plan.grad_rows.emplace_back(model.shared);
  plan.update_number = std::max<i64>(config.steps, 1);

  plan_stage(plan, config, model, std::move(cuts));
  plan_ownership(plan, config, model);
  if (plan.trains()) update::plan_update(plan);
  plan_passes(plan, config, model);
  CountedUpdate update(plan, no_ops());
  for (size_t t = 0; t < plan.files.size(); ++t) plan.files[t] = update.files().current(static_cast<Tag>(t));
  plan.dp_shared = update.dp_allocations();
  plan.zeropp_shared = update.zeropp_allocations();
  plan.outer_shared = update.outer_allocations();
  if (plan.pass.partial.rank > 0) plan.tp_shared = {plan.pass.partial.bytes(), plan.pass.gathered.bytes()};
  count_traffic(plan, update, config, model);
  count_memory(plan, update.ledger(), update.rank_local_bytes(), model.hidden,
               config.save.async);  // and of the step that was counted
  return plan;
}

RunPlan plan_of_length(const RunPlan& whole, const Config& config, const model::Model& model, i64 sequence_length) {
  RunPlan plan = whole;
  plan.sequence_length = sequence_length;
  plan.T = plan.sequence_length / plan.mesh.sp;
  plan.kept_bytes = plan.away_bytes = plan.temporary_bytes = plan.working_bytes = plan.stream_slots = 0;
  for (ChunkPlan& chunk : plan.chunks) chunk.working_bytes = 0;
  plan_passes(plan, config, model);
  return plan;
}

void with_lengths(const RunPlan& plan, const Config& config, const model::Model& model, const PassLengths& lengths,
                  FunctionRef<void(const model::Model&, const RunPlan&)> visit) {
  if (lengths == PassLengths{plan.sequence_length, 0}) return visit(model, plan);
  const model::Model of_length = model::make_model(config, model.shard, lengths);
  visit(of_length, plan_of_length(plan, config, of_length, lengths.sequence));
}

bool evaluates(const Config& config) noexcept { return !config.data.validation.empty() || config.data.split > 0; }

}  // namespace ds::report
