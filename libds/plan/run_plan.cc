// SPDX-License-Identifier: Apache-2.0
#include "plan/run_plan.h"

#include <algorithm>

#include "config/offload.h"
#include "model/models.h"
#include "plan/counted_update.h"
#include "plan/memory.h"
#include "plan/ownership.h"
#include "plan/stage.h"
#include "plan/traffic.h"

namespace ds::plan {

std::span<const pipeline::LayerCall> ChunkPlan::calls(pipeline::Op op) const noexcept {
  using pipeline::Op;
  switch (op) {
    case Op::Forward: return forward;
    case Op::Backward:
    case Op::BackwardInput: return backward;
    case Op::BackwardWeight: return weight;
    default: return {};
  }
}

RunPlan::Kept RunPlan::kept_for_undo() const noexcept {
  Kept kept;
  if (!validates_later()) return kept;
  for (const zero::ShardsPlan& s : shards) {
    for (const State state : kStates) kept.states += s.states.bytes(state);
    for (const zero::Piece& piece : s.layout.held_pieces(s.rank))
      kept.params += s.layout.is_trained(piece) ? piece.count * dtype_bytes(work) : 0;
  }
  for (const update::BalancedRouter& router : balances) kept.params += router.bias.count * dtype_bytes(DType::F32);
  return kept;
}

TagBytes bytes_of(const MemoryLedger& ledger) noexcept {
  TagBytes bytes{};
  for (size_t t = 0; t < bytes.size(); ++t) bytes[t] = ledger.current(static_cast<Tag>(t));
  return bytes;
}

i64 RunPlan::total_memory() const noexcept {
  return total_of(memory.by_tag) - (device == DeviceKind::Cpu ? 0 : memory.by_tag[static_cast<size_t>(Tag::Host)]);
}

i64 RunPlan::tile_cols() const noexcept {
  i64 cols = 0;
  for (const zero::ShardsPlan& s : shards) {
    for (const zero::MatrixTile& tile : s.layout.tiles()) cols = std::max(cols, tile.cols);
  }
  return cols;
}

i64 RunPlan::streamed_bytes() const noexcept {
  i64 elems = 0;
  for (const zero::ShardsPlan& s : shards) {
    for (const zero::GatherPlan& pass : s.eval_gathers) elems += pass.gathered_elems / s.layout.num_ranks();
  }
  return streams ? elems * dtype_bytes(work) : 0;
}

RunPlan make_run_plan(const Config& config, const model::Model& model, const MeshShape& mesh, const MeshCoord& coord,
                      DeviceKind device, std::vector<i64> cuts) {
  RunPlan plan;
  plan.device = device;
  plan.mesh = mesh;
  plan.coord = coord;
  plan.work = config.work_dtype();
  plan.invariant = config.cuda.invariant_forward || config.use == ConfigUse::Generate;
  plan.fused = fuses_gradients(config, model);
  // With one data-parallel rank sums are not rounded: ranks of sp exchange them in fp32. A split of one rank among
  // several data-parallel ones rounds like a larger one, so that the sizes of splits change no bit.
  plan.wire = plan.fused && mesh.dp == 1 ? DType::F32 : config.wire_dtype();
  plan.B = config.batch.micro;
  plan.sequence_length = config.data.seq_length;
  plan.T = plan.sequence_length / mesh.sp;
  plan.stream_shares = model.shard.sequence ? mesh.tp : 1;
  plan.aux_losses = model.num_aux_losses();
  plan.expert_counts = model.num_counts();
  plan.use = config.use;
  // Evaluation keeps as many batches under way as a pipeline has use for.
  plan.micro_batches = plan.trains() || mesh.pp > 1 ? config.batch.accumulation : 1;
  plan.offload = offload::settings_of(config, device);
  plan.streams = streams_params(config);
  DS_CHECK(!plan.streams || device != DeviceKind::Cpu || config.zero.offload_param.device == OffloadDevice::Nvme,
           Errc::Config,
           "--stream cpu: a run on the CPU has its weights in host memory anyway; --stream DIR reads them from a disk");
  plan.rows = zero::units_of(model);
  plan.grad_rows = plan.rows;
  plan.grad_rows.emplace_back(model.shared);
  plan.update_number = std::max<i64>(config.steps, 1);

  plan_stage(plan, config, model, std::move(cuts));
  plan_ownership(plan, config, model);
  if (plan.trains()) update::plan_update(plan);
  plan_passes(plan, config, model);
  CountedUpdate update(plan, no_ops());
  count_traffic(plan, update, config, model);
  count_memory(plan, update, config.save.async);
  DS_CHECK(!plan.streams || mesh.pp > 1 || plan.streamed_bytes() > 0, Errc::Config,
           "--stream: nothing is streamed, since no matrix has more elements than "
           "zero_optimization.stage3_param_persistence_threshold ({})",
           config.zero.param_persistence_threshold);
  return plan;
}

RunPlan plan_of_length(const RunPlan& whole, const Config& config, const model::Model& model, i64 sequence_length) {
  RunPlan plan = whole;
  plan.sequence_length = sequence_length;
  plan.T = plan.sequence_length / plan.mesh.sp;
  plan_passes(plan, config, model);
  return plan;
}

void with_lengths(const RunPlan& plan, const Config& config, const model::Model& model, const PassLengths& lengths,
                  FunctionRef<void(const model::Model&, const RunPlan&)> visit) {
  if (lengths == PassLengths{plan.sequence_length, 0}) return visit(model, plan);
  model::Model of_length = model::make_model(config, model.shard, lengths);
  optim::freeze_groups(of_length, config);
  visit(of_length, plan_of_length(plan, config, of_length, lengths.sequence));
}

bool fuses_gradients(const Config& config, const model::Model& model) noexcept {
  return trains(config.use) && config.gradient_accumulation_fusion && config.reduce_order == ReduceOrder::Boundary &&
         config.batch.accumulation > 1 && config.grad_accum_dtype == DType::F32 && model.adds_gradients();
}

bool evaluates(const Config& config) noexcept {
  const DataConfig& data = config.data;
  return data.samples ? data.validation_samples != nullptr : !data.validation.empty() || data.split > 0;
}

}  // namespace ds::plan
