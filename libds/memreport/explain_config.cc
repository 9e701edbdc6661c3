// SPDX-License-Identifier: Apache-2.0
// The formulas of the field for a configuration.

#include <algorithm>

#include "config/family.h"
#include "config/parallel.h"
#include "ds/memreport.h"
#include "memreport/explain.h"
#include "mesh/from_config.h"
#include "optim/optimizer.h"
#include "plan/planned.h"
#include "plan/run_plan.h"

namespace ds::memreport {

namespace {

double optimizer_bytes(const Config& config, const model::Model& model) {
  const optim::ParamGroups groups = optim::make_groups(config.optimizer, model);
  double bytes = 0;
  i64 number = 0;
  for (const model::ParamRow* row : model.params()) {
    const optim::ParamGroup& group = groups.of(number++);
    const StateSet states = group.states();
    for (const State s : kOptimizerStates) {
      if (!states[s]) continue;
      const i64 n = row->whole_numel();
      const DType t = group.state_dtype(s, n);
      bytes += static_cast<double>(n * dtype_bytes(t) + (is_coded(t) ? 4 * state_blocks(n) : 0));
    }
  }
  return bytes;
}

}  // namespace

PaperStates paper_states(double params, int stage, int ranks) {
  const ModelStates s = model_states(params, stage, ranks);
  return {s.params, s.grads, s.optimizer, ranks > 1 ? zero_volume_elems(params, stage) : 0};
}

std::string explain(double params, int stage, int ranks) {
  return explain(Subject{.params = params, .dp = ranks, .stage = stage});
}

namespace {

// Parameters of sparse blocks beyond an MLP of m.intermediate in each, of the same form.
i64 params_of_experts(const ModelConfig& m) {
  const ExpertsConfig& x = m.experts;
  if (x.plain) {
    const i64 of_one = 2 * m.hidden * x.intermediate + x.intermediate + m.hidden, parts = 2 * m.hidden + 2;
    i64 all = 0;
    for (i64 l = 0; l < std::ssize(x.layers); ++l) {
      if (!x.sparse(l)) continue;
      const i64 n = x.count_of(l);
      all += (n - 1) * of_one + n * m.hidden + (x.residual ? of_one + parts : 0);
    }
    return all;
  }
  const i64 inner = 3 * (x.count * x.intermediate + x.shared - m.intermediate) + x.count + (x.shared_gate ? 1 : 0);
  return std::ranges::count(x.layers, true) * (inner * m.hidden + (x.balancing_bias ? x.count : 0));
}

// Parameters of all experts that are divided over ranks; shared ones are not.
double params_of_divided(const ModelConfig& m) {
  const ExpertsConfig& x = m.experts;
  const i64 matrices = x.plain ? 2 : 3, biases = x.plain ? x.intermediate + m.hidden : 0;
  return static_cast<double>(std::ranges::count(x.layers, true) * x.count *
                             (matrices * m.hidden * x.intermediate + biases));
}

// Parameters of a layer's multi-head latent attention; 0: it has another.
i64 params_of_latent(const ModelConfig& m) {
  const LatentConfig& x = m.latent;
  if (!x.on()) return 0;
  const i64 q = m.heads * m.head_dim, kv_a = x.rank + x.rope_dim, values = m.heads * x.value_dim,
            queries = x.query_rank > 0 ? x.query_rank * (m.hidden + 1 + q) : m.hidden * q,
            biases = (m.attention_bias ? kv_a + x.query_rank : 0) + (m.output_bias ? m.hidden : 0);
  return queries + m.hidden * kv_a + x.rank * (1 + q - m.heads * x.rope_dim + values) + values * m.hidden + biases;
}

}  // namespace

std::string explain(const Config& config, const World& world) {
  const ModelConfig& m = config.model;
  const MeshShape mesh = mesh_shape(config, world.ranks);
  const bool learned = !m.rotary();
  Subject s;
  const model::Model model = model::make_model(config);
  s.params = static_cast<double>(model.num_params());
  // Where products add to fp32 sums, one data-parallel rank has no other gradients.
  Config boundary = config;
  boundary.reduce_order = ReduceOrder::Boundary;
  const bool unrounded = mesh.dp == 1 && plan::fuses_gradients(boundary, model);
  s.bytes = {.master = config.work_dtype() != DType::F32 && config.own_masters() ? 0.0 : 4.0,
             .sent = !unrounded    ? 2.0
                     : mesh.sp > 1 ? 4.0
                                   : 0.0,
             .sum = static_cast<double>(dtype_bytes(config.grad_accum_dtype)),
             .states = optimizer_bytes(config, model) / s.params};
  s.model = {.layers = m.layers,
             .hidden = m.hidden,
             .heads = m.heads,
             .kv_heads = m.kv_heads,
             .head_dim = m.head_dim,
             .attention = params_of_latent(m),
             .ffn = m.intermediate,
             .vocab = m.vocab_size,
             .positions = learned ? m.max_positions : 0,
             .gated = m.activation == Activation::Silu,
             .biases = m.mlp_bias,
             .rms_norm = spec_of(m.family).rms_norm,
             .tied = m.tie_embeddings,
             .more_params = params_of_experts(m)};
  s.seq = config.data.seq_length;
  s.micro_batch = config.batch.micro;
  s.micro_batches = config.batch.accumulation;
  s.dp = mesh.dp * mesh.sp;
  s.tp = mesh.tp;
  s.pp = mesh.pp;
  if (s.ep = config.expert_parallel.size; s.ep > 1) s.experts = params_of_divided(m);
  s.sparse_layers = std::ranges::count(m.experts.layers, true);
  s.experts_per_token = m.experts.per_token;
  s.chunks = config.pipeline.virtual_stages;
  if (config.pipeline.schedule == PipelineSchedule::ZeroBubbleV) s.v_passes = most_kept_passes(config.pipeline);
  s.sequence_parallel = config.tensor_parallel.sequence_parallel;
  s.stage = static_cast<int>(config.zero.stage);
  s.recompute = config.activation_checkpointing.granularity;
  s.layers_per_checkpoint = config.activation_checkpointing.interval;
  return explain(s);
}

}  // namespace ds::memreport
