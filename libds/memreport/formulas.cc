// SPDX-License-Identifier: Apache-2.0
#include "memreport/formulas.h"

#include <algorithm>

#include "base/check.h"
#include "zero/layout.h"

namespace ds::memreport {
namespace {

double real(i64 x) noexcept { return static_cast<double>(x); }

const zero::StageRow& zero_row(int stage) {
  DS_ASSERT(0 <= stage && stage <= 3);
  return zero::kZero[stage];
}

double share(bool cut, i64 ranks) {
  DS_ASSERT(ranks >= 1);
  return cut ? 1 / real(ranks) : 1;
}

// Micro-batches of 1F1B whose activations the first stage holds at the same time.
double micro_batches_in_flight(const PipelineShape& p) {
  if (p.breadth_first()) return real(std::max<i64>(p.micro_batches, 1));
  return real(p.micro_batches > 0 ? std::min(p.micro_batches, p.stages) : p.stages);
}

i64 embedding_params(const ModelShape& m) { return (m.vocab + m.positions) * m.hidden; }
i64 output_params(const ModelShape& m) { return m.vocab * m.hidden; }
i64 norm_params(const ModelShape& m) { return (m.rms_norm ? 1 : 2) * m.hidden; }

}  // namespace

StateBytes engine_state_bytes(int stage, bool sums_locally, const EngineBytes& bytes) {
  const double kept = bytes.master + bytes.states;
  if (zero_row(stage).shard_grads) return {2, 0, bytes.sum + kept};
  return sums_locally ? StateBytes{2, bytes.sent + bytes.sum, kept} : StateBytes{2, 2, bytes.sum + kept};
}

ModelStates model_states(const RankParams& params, int stage, i64 dp, const StateBytes& per_param) {
  const zero::StageRow& row = zero_row(stage);
  const double owned = params.all * share(true, dp);
  const auto of = [&](bool cut) { return cut ? owned : params.held; };
  return {.params = per_param.params * of(row.shard_params),
          .grads = per_param.grads * of(row.shard_grads),
          .optimizer = per_param.optimizer * of(row.shard_optimizer)};
}

double zero_volume_elems(double params, int stage) { return (zero_row(stage).shard_params ? 3 : 2) * params; }

double layer_activations(const LayerShape& layer, i64 tp, bool sequence_parallel, CheckpointGranularity recompute) {
  if (recompute == CheckpointGranularity::Layer) return 2 * layer.sbh();
  const double cut = share(true, tp);
  const double replicated = 10 * share(sequence_parallel, tp);  // inputs of norms and matrices, masks behind them
  const double scores = recompute == CheckpointGranularity::None ? layer.scores() * cut : 0;
  return layer.sbh() * (replicated + 24 * cut + scores);
}

double layers_in_flight(const PipelineShape& p) {
  DS_ASSERT(p.stages >= 1 && p.chunks >= 1);
  if (p.v_passes > 0) {
    const i64 all = 2 * p.micro_batches;
    return real(p.layers) * real(all > 0 ? std::min(p.v_passes, all) : p.v_passes) / real(2 * p.stages);
  }
  if (p.chunks > 1 && !p.breadth_first()) return real(p.layers) * (1 + real(p.stages - 1) / real(p.stages * p.chunks));
  return real(p.layers) * micro_batches_in_flight(p) / real(p.stages);
}

double extra_activations(const LayerShape& layer, const PipelineShape& pipeline, i64 vocab, i64 tp,
                         bool sequence_parallel) {
  const double rows = share(sequence_parallel, tp);
  double bytes = layer.sbh() * micro_batches_in_flight(pipeline) * rows;
  if (pipeline.stages == 1)
    bytes += 4 * layer.sbh() * rows + 4 * real(layer.seq * layer.micro_batch) * real(vocab) * share(true, tp);
  return bytes;
}

i64 layer_params(const ModelShape& m) {
  const i64 head_dim = m.head_dim > 0 ? m.head_dim : div_exact(m.hidden, m.heads);
  const i64 q = m.heads * head_dim, kv = 2 * m.num_kv_heads() * head_dim;
  const i64 up = (m.gated ? 2 : 1) * m.ffn_size();
  const i64 attention = m.attention > 0 ? m.attention : m.hidden * (q + kv) + q * m.hidden;
  const i64 matrices = attention + m.hidden * up + m.ffn_size() * m.hidden;
  const i64 biases = (m.attention > 0 ? 0 : q + kv + m.hidden) + up + m.hidden;
  return matrices + (m.biases ? biases : 0) + 2 * norm_params(m);
}

i64 block_params(const ModelShape& m) { return m.layers * layer_params(m) + m.more_params + norm_params(m); }

i64 num_params(const ModelShape& m) { return block_params(m) + embedding_params(m) + (m.tied ? 0 : output_params(m)); }

double stage_params(const ModelShape& m, i64 tp, i64 stages, i64 stage) {
  DS_ASSERT(0 <= stage && stage < stages);
  double params = real(block_params(m)) / real(stages);
  if (stage == 0) params += real(embedding_params(m));
  const bool has_it_already = m.tied && stage == 0;
  if (stage == stages - 1 && !has_it_already) params += real(output_params(m));
  return params * share(true, tp);
}

double most_loaded_params(const ModelShape& m, i64 tp, i64 stages) {
  return std::max(stage_params(m, tp, stages, 0), stage_params(m, tp, stages, stages - 1));
}

double megatron_bytes_per_param(bool distributed_optimizer, i64 dp) {
  return 6 + 12 * share(distributed_optimizer, dp);
}

double megatron_bytes(const RankParams& params, bool distributed_optimizer, i64 dp) {
  return 6 * params.held + 12 * (distributed_optimizer ? params.all * share(true, dp) : params.held);
}

double megatron_layer_activations(const LayerShape& layer, i64 ffn, i64 tp) {
  return layer.sbh() * (18 + 4 * real(ffn) / real(layer.hidden)) * share(true, tp);
}

double infinity_params(i64 layers, i64 hidden) { return 12 * real(layers) * real(hidden) * real(hidden); }
double infinity_model_states(i64 layers, i64 hidden) { return 20 * infinity_params(layers, hidden); }

double infinity_checkpoints(const LayerShape& layer, i64 layers, i64 layers_per_checkpoint) {
  return 2 * layer.sbh() * real(layers) * share(true, layers_per_checkpoint);
}

double infinity_model_working(i64 hidden) { return 4 * real(hidden) * 4 * real(hidden); }

double infinity_activation_working(const LayerShape& layer, i64 layers_per_checkpoint) {
  return real(layer.micro_batch * layer.seq * layers_per_checkpoint) *
         (16 * real(layer.hidden) + 2 * real(layer.heads * layer.seq));
}

OffloadSizes offload_sizes(const RankParams& params, i64 dp) {
  const double owned = params.all * share(true, dp);
  return {.device = 2 * params.held, .host = 14 * owned, .moved = 4 * owned};
}

double rule_model_bytes(i64 layers, i64 hidden) { return 4 * real(layers) * real(hidden) * (13 + 12 * real(hidden)); }

double rule_activation_bytes(const LayerShape& layer, i64 num_layers) {
  return real(num_layers) * layer.sbh() * (67 + 9 * real(layer.heads) * real(layer.seq) / real(layer.hidden));
}

}  // namespace ds::memreport
