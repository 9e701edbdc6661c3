// SPDX-License-Identifier: Apache-2.0
#pragma once
// The formulas of the field, each as its source has it, and the sizes that they are functions of. They are what people
// compare with, not what the engine allocates: that is plan/run_plan. Sizes are bytes, or elements where a name says
// so; doubles, since averages over ranks need not be whole.
//   Ψ parameters, N data-parallel ranks; s sequence length, b micro-batch, h hidden, a heads, L layers, V vocabulary;
//   t tensor-parallel ranks, p pipeline stages, v chunks of layers per stage (the interleaved schedule's m in the
//   paper)
// Throws: Errc::Internal for arguments out of range (a stage that is not one of 0 to 3, no ranks).

#include "ds/config.h"

namespace ds::memreport {

// --- ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
// 1910.02054, sections 3.1, 5 (figure 1, table 1) and 7.

// Bytes per parameter, of all ranks together if nothing is kept twice.
struct StateBytes {
  double params, grads, optimizer;
};
inline constexpr StateBytes kMixedAdam{2, 2, 12};  // the paper's: K = 12 is fp32 master, momentum and variance
inline constexpr StateBytes kFp32Adam{4, 4, 8};    // fp32 parameters are their own masters

// Bytes that libds keeps per parameter in 16-bit training, beside the parameter; the defaults are Adam's in fp32.
struct EngineBytes {
  double master = 4;  // 0: it is its own
  double sent = 2;    // of its gradient where it is summed over micro-batches, but for the sum
  double sum = 4;     // of its gradients
  double states = 8;  // of the optimizer
};
// The same by stage, beside buckets and gathered parameters: gradients are summed on the owned slices; whole where a
// rank sums its micro-batches first (reduce_order "boundary", more than one of them). From stage 2 on, 16-bit gradients
// exist in buckets only.
StateBytes engine_state_bytes(int stage, bool sums_locally, const EngineBytes& bytes = {});

// Parameters of a rank's stage and part of tp. Experts over E ranks: a rank has 1/E of theirs, and N/E ranks have the
// same ones, so of their states a rank has 1/N whatever E is (DeepSpeed-MoE: Rajbhandari et al., arXiv 2201.05596).
struct RankParams {
  double all;
  double held;  // by each rank, if nothing is cut
  RankParams(double params) : all(params), held(params) {}
  RankParams(double params, double experts, i64 ep)
      : all(params), held(params - experts * (1 - 1 / static_cast<double>(ep))) {}
};

struct ModelStates {
  double params = 0, grads = 0, optimizer = 0;  // bytes of one rank
  double total() const noexcept { return params + grads + optimizer; }
};

// The paper's three steps: optimizer states are cut from stage 1 on, gradients from stage 2, parameters at stage 3.
ModelStates model_states(const RankParams& params, int stage, i64 dp, const StateBytes& per_param = kMixedAdam);

// Elements that a rank sends in a step, section 7: 2Ψ, and 3Ψ at stage 3. The paper counts N - 1 of N parts as N, and
// one micro-batch per step.
double zero_volume_elems(double params, int stage);

// --- Activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv
// 2205.05198.

struct LayerShape {
  i64 seq = 0, micro_batch = 1, hidden = 0, heads = 0;
  double sbh() const noexcept {
    return static_cast<double>(seq) * static_cast<double>(micro_batch) * static_cast<double>(hidden);
  }
  // 5as/h: what the attention scores (softmax, dropout and its mask) weigh beside the 34 of everything else.
  double scores() const noexcept {
    return 5.0 * static_cast<double>(heads) * static_cast<double>(seq) / static_cast<double>(hidden);
  }
};

// Bytes that a layer of a GPT keeps for its backward pass, table 2: 16-bit activations, dropout masks of one byte, an
// MLP of 4h, scores kept. Selective: the scores are computed again. Layer: everything is, from 2sbh that the paper
// leaves whole on every tensor-parallel rank; the layer that is just computed again comes on top, once.
double layer_activations(const LayerShape& layer, i64 tp, bool sequence_parallel, CheckpointGranularity recompute);

struct PipelineShape {
  i64 layers = 1, stages = 1, chunks = 1;
  i64 micro_batches = 0;  // of a step; 0: at least as many as stages
  i64 v_passes = 0;       // of a V: passes of a chunk that a stage keeps at most (most_kept_passes); 0: none
  bool breadth_first() const noexcept { return stages == 1 && chunks > 1; }
};

// How many layers' activations the first stage holds at most, section 4.2.3: L with 1F1B (p micro-batches of L/p
// layers; fewer if there are fewer micro-batches), L(1 + (p - 1)/(pv)) interleaved; of chunks of one stage, all of all;
// of a V as many passes of L/(2p) layers as it keeps at most.
double layers_in_flight(const PipelineShape& pipeline);

// Beside the layers, section 4.3: the embedding's dropout mask sbh of each micro-batch under way; of a last stage that
// is the first as well, the inputs of norm and output layer, and fp32 logits, 4sbh(1 + V/h). All over t. The paper has
// it for sequence parallelism; without, only logits are cut.
double extra_activations(const LayerShape& layer, const PipelineShape& pipeline, i64 vocab, i64 tp,
                         bool sequence_parallel);

// --- Megatron-LM's report, megatron/training/theoretical_memory_usage.py.

struct ModelShape {
  i64 layers = 0, hidden = 0, heads = 0;
  i64 kv_heads = 0;   // 0: heads
  i64 head_dim = 0;   // 0: hidden / heads
  i64 attention = 0;  // parameters of a layer's attention, with biases, if it is not of q, k, v and o
  i64 ffn = 0;        // 0: 4 hidden
  i64 vocab = 0;
  i64 positions = 0;      // learned ones; Megatron's report counts none
  bool gated = false;     // SwiGLU: three matrices, not two
  bool biases = false;    // of all matrices but the output layer's; Megatron's report counts none
  bool rms_norm = false;  // without bias
  bool tied = true;       // embedding and output layer are one matrix
  i64 more_params = 0;    // of experts, beyond an MLP of `ffn` in each layer

  i64 num_kv_heads() const noexcept { return kv_heads > 0 ? kv_heads : heads; }
  i64 ffn_size() const noexcept { return ffn > 0 ? ffn : 4 * hidden; }
};

// With positions and biases these are the parameters of the published models: 12h² + 13h in a layer of GPT-2.
i64 layer_params(const ModelShape& model);
i64 block_params(const ModelShape& model);  // all layers, with more_params, and the final norm
i64 num_params(const ModelShape& model);

// Parameters of each rank of a pipeline stage, which holds 1/p of the block: the first has the embedding as well, the
// last the output layer, a copy if it is tied. Megatron's "most loaded shard" is the largest: the first.
double stage_params(const ModelShape& model, i64 tp, i64 stages, i64 stage);
double most_loaded_params(const ModelShape& model, i64 tp, i64 stages);

// 16-bit parameters, fp32 gradients, master and moments: 18, or 6 + 12/N with the distributed optimizer.
double megatron_bytes_per_param(bool distributed_optimizer, i64 dp);
double megatron_bytes(const RankParams& params, bool distributed_optimizer, i64 dp);

// sbh(18 + 4 ffn/h)/t: sequence parallelism and selective recomputation; 34sbh/t where ffn is 4h.
double megatron_layer_activations(const LayerShape& layer, i64 ffn, i64 tp);

// --- Offloading. ZeRO-Infinity: Rajbhandari et al., arXiv 2104.07857, section 3, equations 1 to 5. ZeRO-Offload: Ren
// et al., arXiv 2101.06840, section 4.1 and table 1.

double infinity_params(i64 layers, i64 hidden);        // 12Lh²
double infinity_model_states(i64 layers, i64 hidden);  // 240Lh²: 20 bytes each, with an fp32 gradient
// Inputs of every ci-th layer, 2sbhL/ci, and what stays on the GPU when all else has left it: the largest operator
// (MSWM, 4h·4h) and the activations between two checkpoints (AWM, sb·ci(16h + 2as)).
double infinity_checkpoints(const LayerShape& layer, i64 layers, i64 layers_per_checkpoint);
double infinity_model_working(i64 hidden);
double infinity_activation_working(const LayerShape& layer, i64 layers_per_checkpoint);

struct OffloadSizes {
  double device = 0, host = 0;  // bytes of one rank
  double moved = 0;             // bytes between them in a step: gradients down, parameters up
};
// 16-bit parameters stay on the device; gradients and optimizer states lie in host memory, cut as in stage 2.
OffloadSizes offload_sizes(const RankParams& params, i64 dp);

// --- Rules of thumb in fp32 for a GPT, without embeddings. Our own count of the same tensors gives 66 for the 67.

double rule_model_bytes(i64 layers, i64 hidden);                        // 4Lh(13 + 12h): exactly its layers' weights
double rule_activation_bytes(const LayerShape& layer, i64 num_layers);  // Lbsh(67 + 9as/h)

}  // namespace ds::memreport
