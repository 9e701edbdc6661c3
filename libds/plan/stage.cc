// SPDX-License-Identifier: Apache-2.0
#include "plan/stage.h"

#include <algorithm>

#include "model/models.h"
#include "pipeline/partition.h"

namespace ds::plan {
namespace {

static_assert(model::ActivationPlanner::kAwayPage % offload::BlockFile::kPage == 0);

using model::Mode;
using pipeline::LayerCall;

// Rows of logits that are computed at a time, a multiple of 64: about 64 MiB of fp32, so that they stay in caches, or
// 1 GiB on a GPU, whose products must be large.
i64 logits_chunk(i64 rows, i64 vocab, DeviceKind device) {
  const i64 target_elems = device == DeviceKind::Cuda ? i64{256} << 20 : i64{16} << 20;
  const i64 chunk = std::min(rows, align_up(std::max<i64>(target_elems / vocab, 1), 64));
  if (device != DeviceKind::Cuda) return chunk;
  // Kernels pad the vocabulary to a multiple of eight and fit fewer rows into the same memory. Without room for these,
  // the last rows of a micro-batch would be a chunk of their own, which reads the weight and adds to its gradient.
  return chunk + div_ceil(chunk * (align_up(vocab, 8) - vocab), vocab);
}

// The uses that a step's layer calls make of inputs of layers that are kept away from the device.
offload::OrderedUses input_uses(const RunPlan& plan, const model::Model& model) {
  const ActivationPlan& a = plan.activations;
  std::vector<std::vector<model::LayerActs>> acts;  // by chunk, in the first slot
  for (const ChunkPlan& chunk : plan.stage.chunks) {
    model::ActivationPlanner planner;
    acts.push_back(plan_acts(model, chunk, plan, planner, Mode::Train, plan.shape()));
  }
  offload::OrderedUses inputs{.bytes = a.kept.count * a.away_bytes};
  for (const pipeline::Instr& instr : plan.stage.schedule) {
    const ChunkPlan& chunk = plan.stage.chunks[instr.chunk];
    for (const LayerCall& call : chunk.calls(instr.op)) {
      if (!call.stash && !call.restore) continue;
      const i64 output_of = call.layer - chunk.chunk.begin - (call.stash ? 0 : 1);
      const model::LayerActs& stashed = acts[instr.chunk][output_of];
      inputs.part_bytes = align_up(stashed.stash.bytes(), offload::BlockFile::kPage);
      const i64 slot = a.kept.of[instr.chunk][instr.micro];
      inputs.uses.push_back({slot * a.away_bytes + stashed.stash_at, call.stash});
    }
  }
  return inputs;
}

}  // namespace

std::vector<model::LayerActs> plan_acts(const model::Model& model, const ChunkPlan& c, const RunPlan& plan,
                                        model::ActivationPlanner& planner, Mode mode, const PassShape& shape,
                                        TensorView input_grad) {
  const pipeline::Chunk& chunk = c.chunk;
  const i64 S = shape.stream_rows, C = model.hidden;
  const auto stream = [&](bool keep) {
    return keep ? planner.kept(plan.work, {S, C}) : planner.working(plan.work, {S, C});
  };
  const bool partition = plan.activations.partition_inputs, offload = plan.activations.offload_inputs;
  const bool elsewhere = partition || offload;
  const i64 shares = partition ? plan.mesh.tp : 1, rows = align_up(S, shares);
  // Streams that layers use in turn: outputs that are not kept here, gradients that nothing waits for.
  TensorView turns[2];
  const bool train = mode == Mode::Train;
  if (!train || !plan.stage.split_backward || elsewhere || chunk.begin < model.backward_end()) {
    for (TensorView& t : turns) t = stream(false);
    planner.pin();
  }
  std::vector<model::LayerActs> acts;
  for (i64 l = chunk.begin; l < chunk.end; ++l) {
    const size_t at = static_cast<size_t>(l);
    const bool head = l + 1 == std::ssize(model.layers);
    // Layers without a backward pass leave nothing behind but the last one's output.
    const bool backward = train && chunk.keep_of(l) != model::Keep::Nothing;
    planner.begin_layer(
        train ? chunk.keep_of(l) : model::Keep::Input,
        backward && l > model.backward_end() && (plan.stage.split_backward || chunk.continues_group(l)));
    if (!acts.empty() && acts.back().stash.rank > 0) acts.back().restored = planner.working(plan.work, {rows, C});
    model::LayerActs& a = acts.emplace_back(
        model.layers[at]->plan(planner, {plan.work, mode, shape.B, shape.T, shape.context, shape.largest}));
    if (!head && train) {
      // The input of layers that are computed again may be kept elsewhere; what goes to the next stage may not.
      if (chunk.restarts_at(l + 1) && elsewhere) {
        a.output = turns[at % 2];
        a.stash = offload ? TensorView::of(nullptr, plan.work, {rows / shares, C})
                          : planner.kept(plan.work, {rows / shares, C});
        if (offload) a.stash_at = planner.away(a.stash.bytes());
      } else if (l + 1 < chunk.end && chunk.keep_of(l + 1) == model::Keep::Nothing) {
        a.output = turns[at % 2];
      } else {
        a.output = stream(!chunk.continues_group(l + 1));
      }
    }
    if (!head && !train) a.output = turns[at % 2];
    if (const i64 n = model.num_shared_stats(); n > 0 && train && l + 1 == chunk.end)
      a.shared_stats = planner.kept(DType::F32, {n});
    if (!backward || l == 0) continue;
    if (l == chunk.begin && c.sends_gradient) {
      a.input_grad = input_grad;
    } else {
      a.input_grad = plan.stage.split_backward ? stream(false) : turns[at % 2];
    }
  }
  return acts;
}

void plan_stage(RunPlan& plan, const Config& config, const model::Model& model, std::vector<i64> cuts) {
  const i64 num_layers = std::ssize(model.layers);
  const PipelineConfig& p = config.pipeline;
  const ActivationCheckpointingConfig& checkpoints = config.activation_checkpointing;
  if (checkpoints.granularity == CheckpointGranularity::Layer) {
    // A stream that is cut already has no more to cut.
    plan.activations.partition_inputs = checkpoints.partition_activations && plan.mesh.tp > 1 && !model.shard.sequence;
    plan.activations.offload_inputs = plan.offload.inputs != OffloadDevice::None;
  }
  if (cuts.empty()) cuts = pipeline::cuts_of(config, model);
  pipeline::ScheduleOptions schedule = pipeline::schedule_of(config, model, cuts);
  DS_CHECK(!plan.activations.offload_inputs || schedule.kind != PipelineSchedule::BreadthFirst, Errc::Unavailable,
           "activation_checkpointing.{}: with pipeline.schedule \"breadth-first\" what is between chunks stays on the "
           "device",
           plan.offload.inputs == OffloadDevice::Nvme ? "nvme_path" : "cpu_checkpointing");
  schedule.stage = plan.coord.pp;
  schedule.micro_batches = plan.micro_batches;
  plan.stage.placement = schedule.placement();
  plan.stage.split_backward = pipeline::splits_backward(schedule.kind) && plan.trains();
  plan.stage.breadth_first = schedule.kind == PipelineSchedule::BreadthFirst;
  plan.stage.schedule = pipeline::make_schedule(schedule);
  for (i64 c = 0; c < p.virtual_stages; ++c) {
    const size_t block = static_cast<size_t>(plan.stage.placement.block_of(plan.coord.pp, c));
    ChunkPlan chunk;
    chunk.chunk = pipeline::make_chunk(model, cuts[block], cuts[block + 1], pipeline::checkpointing_of(config));
    chunk.first = cuts[block] == 0;
    chunk.last = cuts[block + 1] == num_layers;
    chunk.continues = block > 0 && plan.stage.placement.stays(static_cast<i64>(block) - 1);
    chunk.sends_gradient = static_cast<i64>(block) > schedule.backward_end;
    chunk.gets_gradient = static_cast<i64>(block) >= schedule.backward_end && !chunk.last;
    chunk.forward = pipeline::forward_calls(chunk.chunk);
    chunk.backward = pipeline::backward_calls(model, chunk.chunk, plan.stage.split_backward);
    if (plan.stage.split_backward) chunk.weight = pipeline::weight_calls(model, chunk.chunk);
    const pipeline::StashSizes stash = pipeline::stash_sizes(plan.stage.schedule, c);
    if (plan.stage.split_backward) {
      // Layers that keep all write no working memory before their gradients.
      chunk.scratch_slots = std::ranges::any_of(chunk.chunk.keep, [](auto k) { return k != model::Keep::All; }) ? 1 : 0;
      chunk.working_slots = chunk.scratch_slots + (chunk.chunk.has_backward() ? stash.backward : 0);
    }
    chunk.input_slots = chunk.continues ? 0 : stash.forward + 1;
    chunk.grad_in_slots = chunk.grad_out_slots = plan.stage.breadth_first ? plan.micro_batches : stash.backward + 1;
    if (chunk.continues && !plan.stage.breadth_first)
      chunk.grad_out_slots = plan.stage.chunks.back().grad_in_slots =
          pipeline::gradient_slots_before(plan.stage.schedule, c);
    plan.stage.chunks.push_back(std::move(chunk));
  }

  plan.first_stage = plan.stage.placement.stage_of(0);
  plan.last_stage = plan.stage.placement.stage_of(i64{plan.mesh.pp} * p.virtual_stages - 1);
  plan.embeds = plan.stage.chunks.front().first;
  plan.projects = plan.stage.chunks.back().last;
  plan.sends_use_ahead = plan.trains() && schedule.post_validate && schedule.tied && schedule.sends_use_ahead;
  if (plan.sends_use_ahead && plan.projects)
    plan.stage.use_complete_after = pipeline::use_complete_after(plan.stage.schedule);
  plan.activations.kept = pipeline::kept_slots(plan.stage.schedule, p.virtual_stages, plan.micro_batches);
}

void plan_passes(RunPlan& plan, const Config& config, const model::Model& model) {
  ActivationPlan& a = plan.activations;
  a.kept_bytes = a.away_bytes = a.temporary_bytes = a.working_bytes = a.stream_slots = 0;
  a.message_bytes = plan.shape().stream_rows * model.hidden * dtype_bytes(plan.work);
  if (const i64 n = model.num_shared_stats(); n > 0 && plan.trains())
    a.message_bytes = align_up(a.message_bytes, ActivationPlan::kMessageAlign) + n * dtype_bytes(DType::F32);
  for (ChunkPlan& chunk : plan.stage.chunks) {
    chunk.working_bytes = 0;
    for (const Mode mode : {Mode::Train, Mode::Eval}) {
      // Text is written in memory of its own, whose size depends on the text.
      if (mode == Mode::Train ? !plan.trains() : plan.use == ConfigUse::Generate) continue;
      model::ActivationPlanner planner;
      plan_acts(model, chunk, plan, planner, mode, plan.shape());
      a.kept_bytes = std::max(a.kept_bytes, planner.kept_bytes());
      a.away_bytes = std::max(a.away_bytes, planner.away_bytes());
      a.temporary_bytes = std::max(a.temporary_bytes, planner.temporary_bytes());
      chunk.working_bytes = std::max(chunk.working_bytes, planner.working_bytes());
    }
    if (!plan.trains()) {
      chunk.working_slots = 1;
      chunk.input_slots = plan.use == ConfigUse::Generate || !chunk.receives() ? 0 : 2;
      chunk.grad_in_slots = chunk.grad_out_slots = 0;
    }
    if (plan.stage.split_backward && plan.trains())
      a.working_bytes += chunk.working_slots * chunk.working_bytes;
    else
      a.working_bytes = std::max(a.working_bytes, chunk.working_bytes);
    if (!plan.stage.breadth_first)
      a.stream_slots += (chunk.receives() ? chunk.input_slots : 0) +
                        (chunk.sends_gradient && !chunk.continues ? chunk.grad_out_slots : 0) +
                        (chunk.gets_gradient ? chunk.grad_in_slots : 0);
  }
  if (a.offload_inputs && plan.trains()) a.inputs = input_uses(plan, model);
  // Gradients between a chunk and the next one, and between it and the one before.
  if (plan.stage.breadth_first && plan.trains())
    a.stream_slots =
        std::min<i64>(2, std::ranges::count(plan.stage.chunks, true, &ChunkPlan::gets_gradient)) * plan.micro_batches;
  if (plan.use == ConfigUse::Generate) return;
  model::PassSizes sizes{.B = plan.B,
                         .T = plan.T,
                         .sequence_length = plan.sequence_length,
                         .micro_batches = plan.micro_batches,
                         .rope_rows = plan.sequence_length,
                         .projects = plan.projects,
                         .gradients = plan.trains(),
                         .fused = plan.fused,
                         .logits = config.loss.logits,
                         .tile_cols = plan.tile_cols(),
                         .documents = config.data.separate_documents,
                         .work = plan.work};
  // By the largest share of the vocabulary: the ranks that share it meet after every chunk of rows.
  if (sizes.projects) sizes.logits_rows = logits_chunk(plan.B * plan.T, model.largest_vocab_share(), plan.device);
  a.pass = model::PassMemory(model, sizes);
}

}  // namespace ds::plan
