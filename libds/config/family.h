// SPDX-License-Identifier: Apache-2.0
#pragma once
// Model families: one row for each, with all that rooms ask of a family but its layers (model/models.cc has the table
// of those). A family's row is in families/.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/reader.h"
#include "ds/model_config.h"

namespace ds {

// The default of a missing key depends on where the model is described: in a config.json it is Hugging Face's; inline,
// sizes are required and dropout is 0.
enum class ModelSource { File, Inline };

enum class NoisyGate : u8 { None, Jitter, RSample };

// Keys of DeepSpeed's layer `moe` that are not members of ExpertsConfig themselves.
struct MoeKeys {
  std::vector<i64> num_experts;  // one for all layers with experts, or one for each
  NoisyGate noisy_gate_policy = NoisyGate::None;
  bool second_expert_sampling = false;
  bool use_rts = false;
  i64 expert_interval = 2;
};

// The contents of config.json before they are resolved: 0 and empty stand for a missing key.
struct HfConfig {
  ModelConfig m;
  bool use_sliding_window = false;
  i64 sliding_window = 0;
  i64 max_window_layers = 0;
  std::vector<std::string> layer_types;
  i64 decoder_sparse_step = 1;
  std::vector<i64> mlp_only_layers;
  i64 first_k_dense_replace = 0;
  i64 n_shared_experts = 0;
  i64 qk_nope_head_dim = 0;
  std::string topk_method;
  bool output_router_logits = false;
  float router_aux_loss_coef = 0;
  MoeKeys moe{};
};

// End of the name of a router's balancing bias, which is fp32 wherever it is written.
inline constexpr std::string_view kBalancingBias = ".e_score_correction_bias";

struct KeyValue {
  std::string_view key, value;  // JSON
};

// A position embedding, which can be extended by repeating it.
struct LearnedPositions {
  std::string_view embedding{};                 // its name; empty: the family learns no positions
  std::span<const std::string_view> lengths{};  // keys of config.json with its length; the first is the usual one
  std::string_view derived{};                   // end of the names of buffers that depend on the length alone
};

// Names in published files, in which each expert has matrices of its own: "<block>.<experts>.<number>.<gate>.weight".
// Without `gate`, experts are GPT-2's MLPs.
struct ExpertNames {
  std::string_view block{};  // the part of a transformer block that has the router and the experts; empty: no experts
  std::string_view gate{}, up{}, down{};
  std::string_view experts = "experts", router = "gate.weight";
  std::string_view shared = "shared_expert";  // the part that has the shared expert, if there is one
};

// A family of mixtures of experts whose blocks are, but for their MLPs, those of a dense family.
struct MixtureOf {
  std::optional<Family> of{};  // the dense family
  bool shared = false;         // every block has a shared expert, with a gate
};

// A tensor's name without its end, ".weight" or ".bias"; {} stands for the number of a layer.
struct GgufName {
  std::string_view stored, published;
};

// The family in GGUF files.
struct GgufForm {
  std::string_view architecture{};  // general.architecture; empty: the family is not read from GGUF
  // Rows of queries and keys are in the order of llama.cpp's rotation, which turns neighbours: 0, D/2, 1, D/2 + 1, ...
  bool neighbours_turn = false;
  // Matrices are transposed in published files, and not here.
  bool transposed = false;
  std::span<const KeyValue> implied{};  // keys of config.json that follow from the architecture
  std::span<const GgufName> names{};    // but for those of experts
};

struct FamilySpec {
  Family family{};
  std::string_view name{};          // model_type of config.json
  std::string_view architecture{};  // its only entry of architectures
  std::string_view block{};         // type of its blocks, for partitions by type
  bool causal = true;               // ModelConfig::causal()
  bool rotary = false;              // ModelConfig::rotary()
  bool rms_norm = false;            // its norms have no bias

  // config.json. The root of the keys is an HfConfig.
  std::span<const Key> keys{};
  std::span<const std::string_view> unread{};  // keys among them that only relatives of the family have
  std::string_view hidden{}, layers{}, heads{};
  std::span<const std::string_view> required{};  // of an inline description
  std::span<const KeyValue> neutral{};   // values of other families' keys that ask for what every model of this one is
  std::span<const KeyValue> constant{};  // what it writes in addition
  void (*set_defaults)(HfConfig&, ModelSource) = nullptr;  // Hugging Face's
  // Applies the rules of this family alone to the keys that were read.
  void (*resolve)(HfConfig&, const Json& object, ModelSource, Reader&) = nullptr;

  // Names in weight files.
  std::string_view prefix{};                    // files of the bare model leave it out
  std::span<const std::string_view> buffers{};  // ends of the names of tensors in old files that are no parameters
  LearnedPositions positions{};
  ExpertNames experts{};

  MixtureOf mixture{};
  GgufForm gguf{};
};

// Sorted by the enum.
std::span<const FamilySpec* const> families() noexcept;
inline const FamilySpec& spec_of(Family family) noexcept { return *families()[static_cast<size_t>(family)]; }

}  // namespace ds
