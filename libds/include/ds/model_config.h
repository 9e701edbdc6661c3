// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shape of a model: the contents of a Hugging Face config.json in one struct for all families, with all defaults
// resolved.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/ops.h"

namespace ds {

struct ModelConfig;

namespace model {

struct Model;  // ds/layer.h
struct Shard;  // ds/shard.h

// A model that a program brings. Runs, plans and predictions build it wherever they would build a model of the zoo.
class DS_API Source {
 public:
  virtual ~Source() = default;

  // Names the model in checkpoints: 1 to 64 of [a-zA-Z0-9._-], and no Family's name. A run resumes only from a step
  // whose model has this name and the same sizes, so a change of the code that makes old weights useless needs a new
  // name.
  virtual std::string identity() const = 0;
  // The part of the model that a rank computes: Model::layers (an embedding, config.layers blocks, a head), shared,
  // ties and splits; the caller sets the other members. Parameters depend on the arguments alone. `shard` has passed
  // the checks of the family's models: tp divides config.heads and config.intermediate. Throws Errc::Unavailable for a
  // `shard` that the model does not support. Several threads may call it.
  virtual Model make(const ModelConfig& config, const Shard& shard) const = 0;
};

}  // namespace model

enum class Family : u8 {
  Gpt2,
  Llama,
  Qwen2,
  Qwen3,
  Mixtral,
  Olmoe,
  Qwen2Moe,
  Qwen3Moe,
  Glm4Moe,
  DeepseekV2,
  DeepseekV3,
  Bert
};
// Returns model_type of config.json: "gpt2", "llama", "qwen2", "qwen3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
// "glm4_moe", "deepseek_v2", "deepseek_v3", "bert".
DS_API std::string_view family_name(Family) noexcept;

enum class RopeType : u8 { Default, Linear, Dynamic, Llama3, Yarn, LongRope };

// Scaling of the rotary embedding; a type uses only its own fields. Formulas: Hugging Face's modeling_rope_utils.py.
struct RopeScaling {
  RopeType type = RopeType::Default;
  float factor = 1;
  float low_freq_factor = 1, high_freq_factor = 4;   // llama3
  float beta_fast = 32, beta_slow = 1;               // yarn
  float attention_factor = 0;                        // yarn, longrope: multiplies cos and sin; 0: derived from factor
  float mscale = 0, mscale_all_dim = 0;              // yarn: both nonzero replace attention_factor
  bool truncate = true;                              // yarn: round the ramp's ends outwards
  i64 original_max_positions = 0;                    // llama3, yarn, longrope; 0: ModelConfig::max_positions
  std::vector<float> short_factor{}, long_factor{};  // longrope, head_dim / 2 values each
};

// Which of the choices of an expert are kept if there are more than it has room for.
enum class DropPolicy : u8 {
  Position,  // the first by token; of two choices for each token, all first ones before all second ones
  Probs,     // those with the largest scores
  Random,    // drawn anew in each step
};
// The most choices that an expert takes of a micro-batch of n tokens: max(ceil(n / E * factor * k), least). The others
// are dropped. A micro-batch is that of all ranks of tp and sp together, so that the same choices are dropped in every
// layout. Generation drops nothing.
struct ExpertCapacity {
  bool limited = false;
  double factor = 1, eval_factor = 1;  // in training, in evaluations
  i64 least = 4;
  DropPolicy policy = DropPolicy::Probs;
};
// The tokens over which the loss that balances experts (RouterLossParams::balance) is formed.
enum class BalanceOver : u8 {
  MicroBatch,  // those of a micro-batch; the losses of the blocks are added
  Sequence,    // those of each sequence; the mean over the sequences of a micro-batch; likewise
  Layers,      // those of a micro-batch in all sparse blocks together, not divided by k, as in transformers
  // The shares of experts are those among the tokens of all data-parallel ranks in the step so far, up to the
  // micro-batch of each, the probabilities those of a micro-batch; likewise (Qiu et al., "Demons in the Detail", 2025).
  GlobalBatch,
};
// The type of a router's logits.
enum class RouterDtype : u8 {
  Fp32,  // sums of products of the hidden state and the router's weights in the work dtype
  Work,  // these, rounded to the work dtype, as transformers computes them in most families
};
// The experts of a model's sparse blocks, in which a router sends each token to some of many MLPs.
struct ExpertsConfig {
  i64 count = 0;  // E; 0: the model is dense
  // [ModelConfig::layers]: E of each sparse block, where they differ; `count` is then the largest. Empty: all have
  // `count` (pyramids: Rajbhandari et al., "DeepSpeed-MoE", 2022, section 4.1).
  std::vector<i64> counts{};
  i64 per_token = 0;     // k
  i64 intermediate = 0;  // of one expert
  bool plain = false;    // experts are MLPs as GPT-2's, with biases; else gated ones without
  RouterParams router{};
  RouterDtype router_dtype = RouterDtype::Fp32;
  bool balancing_bias = false;  // added to scores for the choice alone (DeepSeek-V3)
  i64 shared = 0;               // intermediate size of an MLP beside them that sees every token; 0: none
  bool shared_gate = false;     // its output is multiplied by a sigmoid of a linear map of the token
  // The output of that MLP and the sum of the experts' are multiplied by the two numbers of a softmax of a linear map
  // of the token (DeepSpeed-MoE, section 4.1.2). Not together with shared_gate.
  bool residual = false;
  float balance_loss = 0, z_loss = 0;  // coefficients: RouterLossParams
  bool first_choice_loss = false;      // likewise
  BalanceOver balance_over = BalanceOver::MicroBatch;
  bool balances_over(BalanceOver tokens) const noexcept {
    return count > 0 && balance_loss != 0 && balance_over == tokens;
  }
  ExpertCapacity capacity{};
  // Noise in training. Its numbers depend on the token's number in the batch, the layer and the step.
  float input_jitter = 0;      // the input of router and experts is multiplied by uniform numbers between 1 -+ this
  bool router_jitter = false;  // that of the router alone, by numbers between 0.99 and 1.01
  bool noisy_choice = false;   // the last of at most two experts is chosen by its logit plus Gumbel noise
  bool random() const noexcept {
    return input_jitter > 0 || router_jitter || noisy_choice ||
           (capacity.limited && capacity.policy == DropPolicy::Random);
  }
  // router_aux_loss_coef of a config.json whose output_router_logits is false: such a model is trained without that
  // loss, and its config.json is written as it was.
  float unused_balance_loss = 0;
  std::vector<bool> layers{};  // [ModelConfig::layers]: true for sparse blocks
  // [ModelConfig::layers][count_of(layer)], no key: the tokens that chose each expert, of which predictions take the
  // shares of ranks. Empty, or empty for a layer: all experts alike.
  std::vector<std::vector<i64>> loads{};

  bool sparse(i64 layer) const { return count > 0 && layers[static_cast<size_t>(layer)]; }
  i64 count_of(i64 layer) const { return counts.empty() ? count : counts[static_cast<size_t>(layer)]; }
};

// Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): keys and values are made from a latent
// vector of the token, and from a rotary key that all heads share.
struct LatentConfig {
  i64 rank = 0;             // of the latent of keys and values; 0: the model's attention is an ordinary one
  i64 query_rank = 0;       // of that of queries; 0: they are made from the stream
  i64 rope_dim = 0;         // the last dims of a head of queries and keys, which are turned, and of the shared key
  i64 value_dim = 0;        // of a head of values
  bool interleaved = true;  // RopeParams

  bool on() const noexcept { return rank > 0; }
};

struct ModelConfig {
  Family family = Family::Gpt2;
  i64 vocab_size = 0;
  i64 hidden = 0;
  i64 layers = 0;
  i64 heads = 0;
  i64 kv_heads = 0;  // divides heads
  i64 head_dim = 0;  // of queries and keys: even, 2..256; heads * head_dim may differ from hidden (Qwen3)
  i64 intermediate = 0;
  i64 max_positions = 0;
  float norm_eps = 1e-5f;
  float initializer_range = 0.02f;
  Activation activation = Activation::GeluTanh;  // Silu: the gated MLP of Llama and Qwen; others: a plain one

  float rope_theta = 1e4f;  // Llama, Qwen
  RopeScaling rope = {};
  float rotary_share = 1;  // the share of a head's dimensions that turn, the first ones; the others stay
  // True if sequences may be longer than max_positions, because dynamic scaling stretches the positions.
  bool any_length() const noexcept { return rope.type == RopeType::Dynamic; }
  DS_API bool rotary() const noexcept;  // positions turn queries and keys; else they are learnt

  i64 token_types = 0;  // BERT: number of segment types; text is read as a single segment
  // BERT: looking up this token gives its row no gradient, as with padding_idx in PyTorch; -1: none.
  i64 pad_token_id = 0;
  // True if each position sees only those before it and predicts the next token; else it sees all, and the model is
  // trained by masking (data.mlm).
  DS_API bool causal() const noexcept;

  bool tie_embeddings = true;
  bool attention_bias = true;  // on q, k and v
  bool output_bias = true;     // on the attention's output projection
  bool mlp_bias = true;
  bool qk_norm = false;        // RMSNorm over each head of q and k before the rotary embedding
  bool whole_qk_norm = false;  // RMSNorm over all heads of q, and of k, instead (OLMoE)

  float embd_dropout = 0;
  float resid_dropout = 0;
  float attn_dropout = 0;

  bool scale_attn_weights = true;  // by head_dim^-1/2
  bool scale_attn_by_inverse_layer_idx = false;

  i64 sliding_window = 0;  // number of keys that a query sees in the layers of sliding_layers; 0: no layer has a window
  std::vector<bool> sliding_layers = {};  // [layers], empty when sliding_window is 0
  i64 window(i64 layer) const { return sliding_window > 0 && sliding_layers[layer] ? sliding_window : 0; }

  LatentConfig latent{};
  // The dimensions of a head that turn.
  i64 rotary_dim() const noexcept {
    return latent.on() ? latent.rope_dim : static_cast<i64>(static_cast<float>(head_dim) * rotary_share);
  }
  i64 value_dim() const noexcept { return latent.on() ? latent.value_dim : head_dim; }

  ExpertsConfig experts{};

  // Layers after the last one that predict tokens further ahead (multi-token prediction, DeepSeek-V3). Weight files may
  // contain them; they are left out.
  i64 later_predictors = 0;

  // Whether linear maps of the same input are one product where their shapes allow it (ds/linear.h, LinearGroup).
  bool joined_products = true;

  // Null: the zoo builds the family's model. Else `source` builds it from these sizes, and `family` only says how it is
  // used: with learned or rotary positions, trained on the next token or on masks.
  std::shared_ptr<const model::Source> source = {};
};

// Reads a config.json, given by its path or its directory. Missing keys take Hugging Face's defaults. Throws
// Errc::Config, which lists every mistake (unknown keys, wrong types, sizes that contradict each other) with file, line
// and column; Errc::Unavailable if the only problem is an unsupported feature.
DS_API ModelConfig load_model_config(const std::string& dir_or_file);

// Returns a config.json that Hugging Face transformers loads and load_model_config reads back unchanged.
DS_API std::string model_config_json(const ModelConfig&);

}  // namespace ds
