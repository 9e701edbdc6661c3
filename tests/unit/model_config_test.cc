// SPDX-License-Identifier: Apache-2.0
// Model configurations: the published ones are read as they are, open settings are resolved as Hugging Face does, and
// sizes that contradict each other are refused.
#include "ds/model_config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/json.h"
#include "config/model_config.h"

namespace ds {
namespace model_config_test {

using ::testing::HasSubstr;

// A directory with a config.json that goes away with the test.
class ModelDir {
 public:
  explicit ModelDir(std::string_view config) {
    std::string name = (std::filesystem::temp_directory_path() / "ds-model-XXXXXX").string();
    path_ = mkdtemp(name.data());
    std::ofstream(path_ / "config.json") << config;
  }
  ~ModelDir() { std::filesystem::remove_all(path_); }
  std::string dir() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

ModelConfig load(std::string_view config) { return load_model_config(ModelDir(config).dir()); }

std::string failure(std::string_view config, Errc code) {
  try {
    load(config);
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.code()), static_cast<int>(code)) << e.what();
    return e.what();
  }
  return "accepted";
}

// As published for gpt2.
TEST(ModelConfig, ReadsGpt2) {
  const ModelConfig m = load(R"({
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
    "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
    "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
    "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
    "vocab_size": 50257})");
  EXPECT_EQ(m.family, Family::Gpt2);
  EXPECT_EQ(m.hidden, 768);
  EXPECT_EQ(m.intermediate, 3072);
  EXPECT_EQ(m.kv_heads, 12);
  EXPECT_EQ(m.head_dim, 64);
  EXPECT_EQ(m.activation, Activation::GeluTanh);
  EXPECT_EQ(m.norm_eps, 1e-5f);
  EXPECT_EQ(m.attn_dropout, 0.1f);
  EXPECT_TRUE(m.tie_embeddings && m.attention_bias && m.output_bias && m.mlp_bias && m.scale_attn_weights);
}

// As published for Llama 3.1 8B.
TEST(ModelConfig, ReadsLlama) {
  const ModelConfig m = load(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256})");
  EXPECT_EQ(m.kv_heads, 8);
  EXPECT_EQ(m.head_dim, 128);
  EXPECT_EQ(m.activation, Activation::Silu);
  EXPECT_EQ(m.rope_theta, 5e5f);
  EXPECT_EQ(m.rope.type, RopeType::Llama3);
  EXPECT_EQ(m.rope.factor, 8);
  EXPECT_EQ(m.rope.original_max_positions, 8192);
  EXPECT_FALSE(m.tie_embeddings || m.attention_bias || m.output_bias || m.mlp_bias || m.qk_norm);
}

// As published for Qwen2.5 0.5B, and Qwen3 0.6B in the newer spelling of the rotary parameters.
TEST(ModelConfig, ReadsQwen) {
  const ModelConfig q2 = load(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936})");
  EXPECT_TRUE(q2.attention_bias && q2.tie_embeddings);
  EXPECT_FALSE(q2.output_bias || q2.qk_norm || q2.mlp_bias);
  EXPECT_EQ(q2.window(23), 0);
  const ModelConfig q3 = load(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "layer_types": null, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": null,
    "tie_word_embeddings": true, "dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936})");
  EXPECT_TRUE(q3.qk_norm);
  EXPECT_FALSE(q3.attention_bias || q3.output_bias);
  EXPECT_EQ(q3.heads * q3.head_dim, 2048);  // wider than hidden
  EXPECT_EQ(q3.rope_theta, 1e6f);
  EXPECT_EQ(q3.norm_eps, 1e-6f);
}

// As published for bert-base-uncased, and with what Google's multilingual one adds.
TEST(ModelConfig, ReadsBert) {
  const ModelConfig m = load(R"({
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "directionality": "bidi",
    "gradient_checkpointing": false, "hidden_act": "gelu", "hidden_dropout_prob": 0.2, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
    "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
    "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform", "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2, "use_cache": true, "vocab_size": 30522})");
  EXPECT_EQ(m.family, Family::Bert);
  EXPECT_FALSE(m.causal());
  EXPECT_EQ(m.head_dim, 64);
  EXPECT_EQ(m.activation, Activation::GeluErf);
  EXPECT_EQ(m.norm_eps, 1e-12f);
  EXPECT_EQ(m.token_types, 2);
  EXPECT_EQ(m.embd_dropout, 0.2f);
  EXPECT_EQ(m.resid_dropout, 0.2f);
  EXPECT_EQ(m.attn_dropout, 0.1f);
  EXPECT_TRUE(m.tie_embeddings);
  EXPECT_EQ(load(R"({"model_type": "bert", "pad_token_id": null})").pad_token_id, -1);
}

// As published for Mixtral 8x7B and OLMoE-1B-7B.
TEST(ModelConfig, ReadsMixtralAndOlmoe) {
  const ModelConfig mixtral = load(R"({
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true,
    "vocab_size": 32000})");
  EXPECT_EQ(mixtral.experts.count, 8);
  EXPECT_EQ(mixtral.experts.per_token, 2);
  EXPECT_EQ(mixtral.experts.intermediate, 14336);
  EXPECT_TRUE(mixtral.experts.router.normalise && !mixtral.experts.router.sigmoid);
  EXPECT_EQ(mixtral.experts.layers, std::vector<bool>(32, true));
  EXPECT_EQ(mixtral.experts.balance_loss, 0);  // off, as in transformers
  EXPECT_FALSE(mixtral.attention_bias || mixtral.output_bias || mixtral.mlp_bias || mixtral.qk_norm);
  EXPECT_EQ(mixtral.window(0), 0);
  EXPECT_EQ(mixtral.head_dim, 128);

  const ModelConfig olmoe = load(R"({
    "architectures": ["OlmoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "clip_qkv": null,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": false,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": true, "pad_token_id": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 50304})");
  EXPECT_EQ(olmoe.experts.count, 64);
  EXPECT_EQ(olmoe.experts.per_token, 8);
  EXPECT_EQ(olmoe.experts.intermediate, 1024);
  EXPECT_FALSE(olmoe.experts.router.normalise);
  EXPECT_TRUE(olmoe.whole_qk_norm && !olmoe.qk_norm);
  EXPECT_EQ(olmoe.experts.balance_loss, 0.01f);
  EXPECT_EQ(olmoe.experts.z_loss, 0);
}

// As published for Qwen1.5-MoE-A2.7B and Qwen3-Coder-30B-A3B.
TEST(ModelConfig, ReadsQwenWithExperts) {
  const ModelConfig q2 = load(R"({
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
    "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe", "num_attention_heads": 16,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.39.0",
    "use_cache": true, "use_sliding_window": false, "vocab_size": 151936, "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
    "norm_topk_prob": false, "output_router_logits": false, "router_aux_loss_coef": 0.001})");
  EXPECT_EQ(q2.experts.count, 60);
  EXPECT_EQ(q2.experts.per_token, 4);
  EXPECT_EQ(q2.experts.intermediate, 1408);
  EXPECT_EQ(q2.experts.shared, 5632);
  EXPECT_TRUE(q2.experts.shared_gate && q2.attention_bias && !q2.output_bias && !q2.experts.router.normalise);
  EXPECT_EQ(q2.window(0), 0);

  std::vector<Diagnostic> diagnostics;
  const ModelDir dir(R"({
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": false, "qkv_bias": false, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.52.3",
    "use_cache": true, "use_qk_norm": true, "use_sliding_window": false, "vocab_size": 151936})");
  const ModelConfig q3 = read_model_file(dir.dir(), diagnostics);
  ASSERT_EQ(diagnostics.size(), 1u);
  EXPECT_EQ(diagnostics[0].key, "use_qk_norm");
  EXPECT_EQ(diagnostics[0].severity, Severity::Warning);
  EXPECT_EQ(q3.experts.count, 128);
  EXPECT_EQ(q3.experts.intermediate, 768);
  EXPECT_EQ(q3.experts.shared, 0);
  EXPECT_TRUE(q3.qk_norm && q3.experts.router.normalise);
  EXPECT_FALSE(q3.attention_bias || q3.output_bias || q3.experts.shared_gate || q3.whole_qk_norm);
  EXPECT_EQ(q3.heads * q3.head_dim, 4096);
  EXPECT_EQ(load(R"({"model_type": "qwen3_moe", "num_local_experts": 16})").experts.count,
            16);  // as transformers 5 may
}

// As published for DeepSeek-V2 and DeepSeek-V2-Lite. Keys of DeepSeek's own code are passed over, with warnings.
TEST(ModelConfig, ReadsDeepseekV2) {
  constexpr std::string_view kText = R"({{
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1536, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 128,
    "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128, "pretraining_tp": 1,
    "q_lora_rank": {}, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"}},
    "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": true,
    "tie_word_embeddings": false, "topk_group": 3, "topk_method": "{}", "torch_dtype": "bfloat16",
    "transformers_version": "4.39.3", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}})";
  const ModelConfig m = load(fmt::format(kText, "1536", "group_limited_greedy"));
  EXPECT_EQ(m.head_dim, 192);
  EXPECT_EQ(m.rotary_dim(), 64);
  EXPECT_EQ(m.value_dim(), 128);
  EXPECT_EQ(m.kv_heads, 128);
  EXPECT_EQ(m.latent.rank, 512);
  EXPECT_EQ(m.latent.query_rank, 1536);
  EXPECT_TRUE(m.latent.interleaved && !m.attention_bias && !m.output_bias && !m.qk_norm);
  EXPECT_EQ(m.experts.count, 160);
  EXPECT_EQ(m.experts.shared, 3072);
  EXPECT_FALSE(m.experts.sparse(0));
  EXPECT_TRUE(m.experts.sparse(1) && m.experts.sparse(59));
  const RouterParams& r = m.experts.router;
  EXPECT_TRUE(!r.sigmoid && !r.normalise && !r.group_by_two && !m.experts.balancing_bias);
  EXPECT_EQ(r.scale, 16);
  EXPECT_EQ(r.groups, 8);
  EXPECT_EQ(r.chosen_groups, 3);
  EXPECT_EQ(m.experts.balance_loss, 0);
  const Json written = Json::parse(model_config_json(m));
  EXPECT_EQ(written["q_lora_rank"], 1536);
  EXPECT_EQ(written["qk_nope_head_dim"], 128);
  EXPECT_EQ(written["head_dim"], 64);  // as transformers writes it
  EXPECT_EQ(written["topk_method"], "group_limited_greedy");
  EXPECT_EQ(written["rope_scaling"]["mscale_all_dim"], 0.707);
  EXPECT_FALSE(written.contains("mlp_only_layers"));
  const ModelConfig lite = load(fmt::format(kText, "null", "greedy"));
  EXPECT_EQ(lite.latent.query_rank, 0);
  EXPECT_EQ(lite.experts.router.groups, 1);
  EXPECT_TRUE(Json::parse(model_config_json(lite))["q_lora_rank"].is_null());
}

// As published for DeepSeek-V3, but for the form of its weights, and as transformers 5 writes it.
TEST(ModelConfig, ReadsDeepseekV3) {
  constexpr std::string_view kText = R"({{
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": {}, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "quantization_config": {{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                             "weight_block_size": [128, 128]}},
    "rope_scaling": {{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"}},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true, {}
    "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280}})";
  const ModelConfig m = load(fmt::format(kText, "1536", ""));
  EXPECT_EQ(m.head_dim, 192);
  EXPECT_EQ(m.latent.rank, 512);
  EXPECT_EQ(m.latent.query_rank, 1536);
  EXPECT_TRUE(m.latent.interleaved && !m.attention_bias && !m.mlp_bias && !m.qk_norm);
  EXPECT_EQ(m.experts.count, 256);
  EXPECT_EQ(m.experts.per_token, 8);
  EXPECT_EQ(m.experts.shared, 2048);
  EXPECT_FALSE(m.experts.sparse(2));
  EXPECT_TRUE(m.experts.sparse(3) && m.experts.sparse(60));
  const RouterParams& r = m.experts.router;
  EXPECT_TRUE(r.sigmoid && r.normalise && r.group_by_two && m.experts.balancing_bias && !m.experts.shared_gate);
  EXPECT_EQ(r.scale, 2.5f);
  EXPECT_EQ(r.groups, 8);
  EXPECT_EQ(r.chosen_groups, 4);
  EXPECT_EQ(m.later_predictors, 1);
  const Json written = Json::parse(model_config_json(m));
  EXPECT_EQ(written["topk_method"], "noaux_tc");
  EXPECT_EQ(written["scoring_func"], "sigmoid");
  EXPECT_EQ(written["num_nextn_predict_layers"], 0);
  EXPECT_EQ(written["first_k_dense_replace"], 3);
  EXPECT_EQ(written["head_dim"], 64);
  const ModelConfig other = load(fmt::format(kText, "null", R"("rope_interleave": false, "head_dim": 64,
    "qk_head_dim": 192,)"));
  EXPECT_EQ(other.latent.query_rank, 0);
  EXPECT_FALSE(other.latent.interleaved);
  // Without these keys it has transformers' sizes, which are DeepSeek's.
  EXPECT_EQ(model_config_json(load(R"({"model_type": "deepseek_v3"})")),
            model_config_json(load(R"({"model_type": "deepseek_v3", "n_group": 8, "topk_group": 4,
              "n_routed_experts": 256, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3})")));
}

// As published for GLM-4.5, whose rope_parameters are as transformers 5 writes them.
TEST(ModelConfig, ReadsGlmWithExperts) {
  constexpr std::string_view kGlm = R"({{
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    {}, "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1536, "norm_topk_prob": true, "num_attention_heads": 96,
    "n_group": 1, "topk_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_hidden_layers": 92, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": true, "use_qk_norm": true, "vocab_size": 151552}})";
  for (const std::string_view rope :
       {R"("partial_rotary_factor": 0.5, "rope_scaling": null, "rope_theta": 1000000)",
        R"("rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5})"}) {
    const ModelConfig m = load(fmt::format(kGlm, rope));
    EXPECT_EQ(m.experts.count, 160);
    EXPECT_EQ(m.experts.shared, 1536);
    EXPECT_FALSE(m.experts.sparse(2));
    EXPECT_TRUE(m.experts.sparse(3) && m.experts.sparse(91));
    const RouterParams& r = m.experts.router;
    EXPECT_TRUE(r.sigmoid && r.normalise && r.group_by_two && m.experts.balancing_bias);
    EXPECT_EQ(r.scale, 2.5f);
    EXPECT_TRUE(m.qk_norm && m.attention_bias && !m.output_bias && !m.experts.shared_gate);
    EXPECT_EQ(m.rotary_dim(), 64);
    EXPECT_EQ(m.rope_theta, 1e6f);
    EXPECT_EQ(m.later_predictors, 1);
    EXPECT_EQ(m.experts.balance_loss, 0);
    const Json written = Json::parse(model_config_json(m));
    EXPECT_EQ(written["num_nextn_predict_layers"], 0);
    EXPECT_EQ(written["first_k_dense_replace"], 3);
    EXPECT_EQ(written["partial_rotary_factor"], 0.5);
  }
}

// Weights in blocks of 128 x 128 are decoded when they are read; any other form is refused by its name, and no written
// config.json has a word of either.
TEST(ModelConfig, Fp8OfPublishedWeights) {
  const auto with = [](std::string_view members) {
    return fmt::format(R"({{"model_type": "llama", "quantization_config": {{"quant_method": "fp8"{}}}}})", members);
  };
  constexpr std::string_view kBlocks = R"(, "weight_block_size": [128, 128])";
  for (const std::string_view more :
       {"", R"(, "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"])",
        R"(, "scale_fmt": "float", "expert_dtype": "fp8", "dequantize": false, "modules_to_convert": null)"})
    EXPECT_EQ(load(with(fmt::format("{}{}", kBlocks, more))).layers, 32);
  for (const auto& [members, why] :
       {std::pair{"", "without a weight_block_size"},
        {R"(, "weight_block_size": null)", "\"weight_block_size\" null"},
        {R"(, "weight_block_size": [1, 128])", "\"weight_block_size\" [1,128]"},
        {R"(, "weight_block_size": [128, 128], "fmt": "e5m2")", "\"fmt\" \"e5m2\""},
        {R"(, "weight_block_size": [128, 128], "activation_scheme": "static")", "\"activation_scheme\" \"static\""},
        {R"(, "weight_block_size": [128, 128], "expert_dtype": "fp4")", "\"expert_dtype\" \"fp4\""},
        {R"(, "weight_block_size": [128, 128], "scale_fmt": "e4m3")", "\"scale_fmt\" \"e4m3\""},
        {R"(, "weight_block_size": [128, 128], "scale_fmt": "ue8m0")",
         "\"scale_fmt\" \"ue8m0\" of weights in \"fp8\": scales of type E8M0 are not read; if the file has its "
         "weight_scale_inv in fp32, remove the key"}}) {
    try {
      load(with(members));
      ADD_FAILURE() << members;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Unavailable) << members;
      EXPECT_THAT(e.what(), HasSubstr(why));
      EXPECT_THAT(e.what(), HasSubstr("quantization_config"));
    }
  }
  Json published = Json::parse(with(kBlocks));
  published["num_nextn_predict_layers"] = 1;
  const Json written = publish_model(published, load(with(kBlocks)));
  EXPECT_FALSE(written.contains("quantization_config"));
  EXPECT_EQ(written["num_nextn_predict_layers"], 0);
}

TEST(ModelConfig, SparseBlocksFollowTheStepAndTheExceptions) {
  const auto layers = [](std::string_view more) {
    return load(fmt::format(R"({{"model_type": "qwen3_moe", "num_hidden_layers": 6, {}}})", more)).experts.layers;
  };
  using Layers = std::vector<bool>;
  EXPECT_EQ(layers(R"("mlp_only_layers": null)"), Layers(6, true));
  EXPECT_EQ(layers(R"("mlp_only_layers": [0, 5])"), (Layers{false, true, true, true, true, false}));
  EXPECT_EQ(layers(R"("decoder_sparse_step": 2)"), (Layers{false, true, false, true, false, true}));
  EXPECT_EQ(layers(R"("decoder_sparse_step": 3, "mlp_only_layers": [2])"),
            (Layers{false, false, false, false, false, true}));
  EXPECT_EQ(layers(R"("decoder_sparse_step": 7)"), Layers(6, false));
}

TEST(ModelConfig, AModelWithExpertsInNoBlockIsWarnedOf) {
  const auto warned = [](std::string_view more) {
    std::vector<Diagnostic> diagnostics;
    read_model_file(ModelDir(fmt::format(R"({{"num_hidden_layers": 2, "num_experts_per_tok": 2, {}}})", more)).dir(),
                    diagnostics);
    for (const Diagnostic& d : diagnostics) {
      EXPECT_EQ(d.severity, Severity::Warning) << to_string(d);
      if (d.message.starts_with("leaves no block with experts")) return d.key;
    }
    return std::string();
  };
  EXPECT_EQ(warned(R"("model_type": "qwen3_moe", "mlp_only_layers": [0, 1], "output_router_logits": true)"),
            "mlp_only_layers");
  EXPECT_EQ(warned(R"("model_type": "qwen3_moe", "decoder_sparse_step": 3, "router_z_loss_coef": 0.1)"),
            "decoder_sparse_step");
  EXPECT_EQ(warned(R"("model_type": "deepseek_v2", "first_k_dense_replace": 2, "router_z_loss_coef": 0.1)"),
            "first_k_dense_replace");
  EXPECT_EQ(warned(R"("model_type": "deepseek_v2", "first_k_dense_replace": 2)"), "");  // nothing is lost
  EXPECT_EQ(warned(R"("model_type": "deepseek_v2", "first_k_dense_replace": 1, "router_z_loss_coef": 0.1)"), "");
  EXPECT_EQ(warned(R"("model_type": "qwen3_moe", "decoder_sparse_step": 2, "output_router_logits": true)"), "");
  EXPECT_EQ(warned(R"("model_type": "qwen3")"), "");
}

// transformers 5: Mixtral and Qwen3-MoE have a window in every layer, Qwen2-MoE in every second one of the first.
TEST(ModelConfig, WindowsOfModelsWithExperts) {
  const ModelConfig mixtral = load(R"({"model_type": "mixtral", "num_hidden_layers": 2, "sliding_window": 64})");
  EXPECT_TRUE(mixtral.window(0) == 64 && mixtral.window(1) == 64);
  const ModelConfig q3 = load(R"({"model_type": "qwen3_moe", "num_hidden_layers": 2, "use_sliding_window": true,
    "sliding_window": 64})");
  EXPECT_TRUE(q3.window(0) == 64 && q3.window(1) == 64);
  const ModelConfig q2 = load(R"({"model_type": "qwen2_moe", "num_hidden_layers": 5, "use_sliding_window": true,
    "sliding_window": 64, "max_window_layers": 3})");
  EXPECT_EQ(q2.sliding_layers, (std::vector<bool>{true, false, true, false, false}));
  EXPECT_EQ(load(R"({"model_type": "qwen2_moe", "use_sliding_window": false, "sliding_window": 0})").window(0), 0);
}

// A configuration of ours that gives a coefficient wants the loss, and needs the sizes.
TEST(ModelConfig, InlineModelsWithExperts) {
  const auto read = [](std::string_view more, std::vector<Diagnostic>& diagnostics) {
    const std::string text = fmt::format(R"({{"type": "qwen2_moe", "vocab_size": 64, "hidden_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "num_experts": 6{}}})",
                                         more);
    const ConfigText parsed(text, "cfg", diagnostics);
    return read_model(parsed.root(), ModelSource::Inline, parsed, "model", diagnostics);
  };
  constexpr std::string_view kSizes = R"(, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24)";
  std::vector<Diagnostic> diagnostics;
  const ModelConfig m =
      read(fmt::format(R"({}, "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001)", kSizes), diagnostics);
  EXPECT_TRUE(diagnostics.empty());
  EXPECT_EQ(m.experts.balance_loss, 0.02f);
  EXPECT_EQ(m.experts.z_loss, 0.001f);
  EXPECT_EQ(m.kv_heads, 2);
  EXPECT_EQ(read(kSizes, diagnostics).experts.balance_loss, 0);
  EXPECT_EQ(read(fmt::format(R"({}, "output_router_logits": false, "router_aux_loss_coef": 0.02)", kSizes), diagnostics)
                .experts.balance_loss,
            0);
  ASSERT_EQ(diagnostics.size(), 1u);
  EXPECT_EQ(to_string(diagnostics[0]),
            "cfg: model.router_aux_loss_coef: has no effect, since output_router_logits is false");
  diagnostics.clear();
  read("", diagnostics);
  ASSERT_EQ(diagnostics.size(), 3u);
  EXPECT_EQ(to_string(diagnostics[0]), "cfg: model.num_experts_per_tok: is missing");
}

// Defaults are those of DeepSpeed's layer and of Megatron-DeepSpeed.
TEST(ModelConfig, LayersOfExpertsOfDeepSpeed) {
  const ModelConfig one = load(R"({"model_type": "gpt2", "moe": {"num_experts": 8}})");
  const ExpertsConfig& x = one.experts;
  EXPECT_TRUE(x.plain && x.count == 8 && x.per_token == 1 && x.intermediate == 4 * 768);
  EXPECT_TRUE(!x.router.normalise && !x.first_choice_loss && !x.noisy_choice && !x.router_jitter);
  EXPECT_EQ(x.balance_loss, 0.1f);
  EXPECT_TRUE(x.capacity.limited && x.capacity.factor == 1 && x.capacity.eval_factor == 1 && x.capacity.least == 4);
  EXPECT_EQ(x.capacity.policy, DropPolicy::Random);
  for (i64 l = 0; l < 12; ++l) EXPECT_EQ(x.sparse(l), l % 2 == 1);

  const auto moe = [](std::string_view keys) {
    return load(fmt::format(R"({{"model_type": "gpt2", "moe": {{"num_experts": 8, {}}}}})", keys)).experts;
  };
  EXPECT_EQ(moe(R"("use_rts": false)").capacity.policy, DropPolicy::Position);
  const ExpertsConfig two = moe(R"("k": 2)"), three = moe(R"("k": 3, "drop_tokens": false)");
  EXPECT_TRUE(two.router.normalise && two.first_choice_loss && two.noisy_choice);
  EXPECT_EQ(two.capacity.policy, DropPolicy::Position);
  EXPECT_FALSE(moe(R"("k": 2, "top2_2nd_expert_sampling": false)").noisy_choice);
  EXPECT_TRUE(three.router.normalise && !three.first_choice_loss && !three.noisy_choice && !three.capacity.limited);
  EXPECT_EQ(moe(R"("k": 3)").capacity.policy, DropPolicy::Probs);
  EXPECT_TRUE(moe(R"("noisy_gate_policy": "RSample")").noisy_choice);
  EXPECT_TRUE(moe(R"("noisy_gate_policy": "Jitter")").router_jitter);
  EXPECT_FALSE(moe(R"("noisy_gate_policy": null)").router_jitter);
  EXPECT_TRUE(!x.residual && x.shared == 0 && x.router_dtype == RouterDtype::Fp32);
  const ExpertsConfig residual = moe(R"("use_residual": true, "router_dtype": "work")");
  EXPECT_TRUE(residual.residual && residual.shared == 4 * 768 && !residual.shared_gate);
  EXPECT_EQ(residual.router_dtype, RouterDtype::Work);

  // A list has a number for each layer with experts.
  const ExpertsConfig pyramid = load(R"({"model_type": "gpt2", "moe": {"num_experts": [2, 2, 2, 4, 4, 8]}})").experts;
  EXPECT_EQ(pyramid.count, 8);
  EXPECT_EQ(pyramid.counts, (std::vector<i64>{0, 2, 0, 2, 0, 2, 0, 4, 0, 4, 0, 8}));
  EXPECT_EQ(pyramid.count_of(7), 4);
  for (const char* same : {"[8]", "[8, 8, 8, 8, 8, 8]"}) {
    const ModelConfig m = load(fmt::format(R"({{"model_type": "gpt2", "moe": {{"num_experts": {}}}}})", same));
    EXPECT_EQ(model_config_json(m), model_config_json(one)) << same;
  }
  EXPECT_EQ(load(R"({"model_type": "gpt2"})").experts.count, 0);
  EXPECT_EQ(load(R"({"model_type": "gpt2", "moe": null})").experts.count, 0);

  // In other families nothing is dropped unless drop_tokens asks for it.
  const ExpertsConfig plain = load(R"({"model_type": "mixtral"})").experts;
  EXPECT_TRUE(!plain.plain && !plain.random() && !plain.capacity.limited);
  const ExpertsConfig dropping = load(R"({"model_type": "mixtral", "router_jitter_noise": 0.25,
               "moe": {"drop_tokens": true, "capacity_factor": 1.25, "top2_2nd_expert_sampling": true}})")
                                     .experts;
  EXPECT_TRUE(dropping.capacity.limited && dropping.noisy_choice && dropping.random());
  EXPECT_EQ(dropping.capacity.factor, 1.25);
  EXPECT_EQ(dropping.capacity.policy, DropPolicy::Probs);
  EXPECT_EQ(dropping.input_jitter, 0.25f);
}

TEST(ModelConfig, MissingKeysTakeHuggingFacesDefaults) {
  const ModelConfig gpt2 = load(R"({"model_type": "gpt2"})");
  EXPECT_EQ(gpt2.vocab_size, 50257);
  EXPECT_EQ(gpt2.resid_dropout, 0.1f);
  EXPECT_TRUE(gpt2.tie_embeddings);
  const ModelConfig llama = load(R"({"model_type": "llama"})");
  EXPECT_EQ(llama.intermediate, 11008);
  EXPECT_EQ(llama.norm_eps, 1e-6f);
  EXPECT_FALSE(llama.tie_embeddings);
  EXPECT_EQ(load(R"({"model_type": "qwen3"})").head_dim, 128);
  EXPECT_TRUE(load(R"({"model_type": "llama", "attention_bias": true})").output_bias);
  const ModelConfig mixtral = load(R"({"model_type": "mixtral"})");
  EXPECT_EQ(mixtral.kv_heads, 8);
  EXPECT_EQ(mixtral.rope_theta, 1e6f);
  EXPECT_EQ(mixtral.max_positions, 131072);
  EXPECT_EQ(mixtral.norm_eps, 1e-5f);
  EXPECT_EQ(load(R"({"model_type": "mixtral", "num_key_value_heads": null})").kv_heads, 32);
  const ModelConfig olmoe = load(R"({"model_type": "olmoe"})");
  EXPECT_EQ(olmoe.kv_heads, 16);
  EXPECT_EQ(olmoe.experts.intermediate, 2048);
  EXPECT_TRUE(load(R"({"model_type": "olmoe", "attention_bias": true})").output_bias);
  const ModelConfig q2 = load(R"({"model_type": "qwen2_moe"})");
  EXPECT_EQ(q2.kv_heads, 16);
  EXPECT_EQ(q2.layers, 24);
  EXPECT_EQ(q2.experts.shared, 5632);
  EXPECT_FALSE(load(R"({"model_type": "qwen2_moe", "qkv_bias": false})").attention_bias);
  const ModelConfig q3 = load(R"({"model_type": "qwen3_moe"})");
  EXPECT_EQ(q3.kv_heads, 4);
  EXPECT_EQ(q3.head_dim, 64);
  EXPECT_EQ(q3.intermediate, 6144);
  EXPECT_TRUE(load(R"({"model_type": "qwen3_moe", "attention_bias": true})").output_bias);
}

// transformers uses a number for a missing key, and reads null as the number of heads.
TEST(ModelConfig, QwensKeyValueHeadsAreThirtyTwoWhereTheyAreNotSaid) {
  const char* shape = R"({"model_type": "qwen2", "hidden_size": 256, "num_attention_heads": 64)";
  EXPECT_EQ(load(fmt::format("{}}}", shape)).kv_heads, 32);
  EXPECT_EQ(load(fmt::format("{}, \"num_key_value_heads\": null}}", shape)).kv_heads, 64);
  EXPECT_EQ(load(fmt::format("{}, \"num_key_value_heads\": 8}}", shape)).kv_heads, 8);
}

TEST(ModelConfig, SlidingWindowsFollowTheLayers) {
  const ModelConfig by_count = load(R"({"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": true,
    "sliding_window": 100, "max_window_layers": 3})");
  EXPECT_EQ(by_count.window(2), 0);
  EXPECT_EQ(by_count.window(3), 100);
  const ModelConfig by_type = load(R"({"model_type": "qwen3", "num_hidden_layers": 2, "use_sliding_window": true,
    "sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]})");
  EXPECT_EQ(by_type.window(0), 100);
  EXPECT_EQ(by_type.window(1), 0);
}

TEST(ModelConfig, RefusesWhatContradictsItself) {
  struct Case {
    std::string_view config, message;
    Errc code = Errc::Config;
  };
  for (const Case& c : {
           Case{R"({"model_type": "gpt2", "n_head": 5})", "config.json:1:24: n_head: 5 heads do not divide n_embd 768"},
           Case{R"({"model_type": "gpt2", "n_embd": 36, "n_head": 12})", "3 dimensions, which must be even"},
           Case{R"({"model_type": "llama", "num_key_value_heads": 5})", "5 key/value heads do not divide 32 heads"},
           Case{R"({"model_type": "qwen3", "head_dim": 7})", "head_dim: a head has 7 dimensions"},
           Case{R"({"model_type": "llama", "hidden_size": 0})", "hidden_size: must be an integer"},
           Case{R"({"model_type": "llama", "rms_norm_eps": 1e300})", "must be a number that fits fp32"},
           Case{R"({"model_type": "llama", "rms_norm_eps": 1e-300})", "must be a number that fits fp32"},
           Case{R"({"model_type": "llama", "hiden_size": 64})", "did you mean hidden_size?"},
           Case{R"({"model_type": "qwen2", "mlp_bias": true})",
                "mlp_bias: unknown key: no model of type \"qwen2\" has it, but those of type \"llama\" and "
                "\"deepseek_v2\" do"},
           Case{R"({"model_type": "llama", "layer_types": ["sliding_attention"]})",
                "layer_types: unknown key: no model of type \"llama\" has it, but those of type \"qwen2\" and "
                "\"qwen3\" and \"qwen2_moe\" do"},
           Case{R"({"model_type": "llama", "sliding_window": 4096})",
                "sliding_window: unknown key: no model of type \"llama\" has it, but those of type \"qwen2\" and "
                "\"qwen3\" and \"mixtral\" and \"qwen2_moe\" and \"qwen3_moe\" do"},
           Case{R"({"model_type": "gpt2", "layer_norm_eps": 1e-5})",
                "no model of type \"gpt2\" has it, but those of type \"bert\" do; did you mean layer_norm_epsilon?"},
           Case{R"({"hidden_size": 64})", "model_type: is missing"},
           Case{R"({"model_type": 3})", "must be one of"},
           Case{R"({"model_type": "llama", "rope_scaling": {"type": "linear"}})", "needs it"},
           Case{R"({"model_type": "llama", "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}})",
                "contradicts"},
           Case{R"({"model_type": "llama", "rope_scaling": {"rope_type": "linaer", "factor": 2}})",
                "did you mean \"linear\"?"},
           Case{R"({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
               "high_freq_factor": 1}})",
                "greater than low_freq_factor"},
           Case{R"({"model_type": "llama", "rope_scaling": {"rope_type": "longrope", "factor": 8, "short_factor": [1],
               "long_factor": [1]}})",
                "has 1 numbers; head_dim / 2 is 64"},
           Case{R"({"model_type": "llama", "hidden_size": 4, "num_attention_heads": 2, "rope_scaling": {"type":
               "longrope", "short_factor": [1], "long_factor": [1], "original_max_position_embeddings": 1}})",
                "original_max_position_embeddings: must be at least 2"},
           Case{R"({"model_type": "llama", "hidden_size": 4, "num_attention_heads": 2, "rope_scaling": {"type":
               "dynamic", "factor": 2}})",
                "not defined for heads of 2 dimensions"},
           Case{R"({"model_type": "llama", "original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn",
               "factor": 2, "original_max_position_embeddings": 32}})",
                "contradicts"},
           Case{R"({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": []})", "accepted"},
           Case{R"({"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention"]})",
                "1 entries for 2 layers"},
           Case{R"({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]})", "is off"},
           Case{R"({"model_type": "t5"})", "\"t5\"", Errc::Unavailable},
           Case{R"({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 0})",
                "sliding_window: must be at least 1; null turns windows off"},
           Case{R"({"model_type": "mixtral", "sliding_window": 0})", "sliding_window: must be at least 1"},
           Case{R"({"model_type": "mixtral", "num_experts_per_tok": 9})",
                "num_experts_per_tok: a token cannot choose 9 of 8 experts"},
           Case{R"({"model_type": "mixtral", "num_local_experts": 4, "num_experts": 6})", "contradicts"},
           Case{R"({"model_type": "olmoe", "num_experts": 0})", "num_experts: must be an integer"},
           Case{R"({"model_type": "olmoe", "head_dim": 64})",
                "head_dim: 16 heads of 64 are not the hidden_size of 2048, over which queries are normalised"},
           Case{R"({"model_type": "qwen3_moe", "num_experts": 4096, "moe_intermediate_size": 8192})",
                "num_experts: 4096 experts with moe_intermediate_size 8192 are 33554432 wide together"},
           Case{R"({"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [1, 4]})",
                "mlp_only_layers: there is no layer 4; they are 0 to 3"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "norm_topk_prob": true})", "norm_topk_prob",
                Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "moe_layer_freq": 2})", "moe_layer_freq",
                Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "noaux_tc"})",
                "topk_method: \"noaux_tc\" is the method of models of type \"deepseek_v3\"", Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v3", "topk_method": "greedy"})", "topk_method", Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v3", "scoring_func": "softmax"})", "scoring_func", Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v3", "n_routed_experts": 60})", "n_group: 60 experts cannot be 8 groups"},
           Case{R"({"model_type": "deepseek_v3", "mlp_bias": true})",
                "mlp_bias: unknown key: no model of type \"deepseek_v3\" has it"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "rope_interleave": false})", "accepted"},
           Case{R"({"model_type": "glm4_moe", "rope_interleave": true})",
                "no model of type \"glm4_moe\" has it, but those of type \"deepseek_v3\" do"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "best"})",
                "topk_method: must be \"greedy\" or \"group_limited_greedy\""},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "group_limited_greedy"})",
                "needs n_group and topk_group"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "group_limited_greedy",
                    "n_group": 5})",
                "n_group: 64 experts cannot be 5 groups of as many each"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 17, "topk_method": "group_limited_greedy",
                    "n_group": 8, "topk_group": 2})",
                "topk_group: the 2 groups that are chosen have 16 experts, and a token chooses 17"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "num_key_value_heads": 4})",
                "num_key_value_heads: is 4, and each of the 32 heads has keys and values of its own"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "head_dim": 100})",
                "head_dim: is 100, and a head has 64 dimensions that are turned (qk_rope_head_dim) and 128 others"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "v_head_dim": 300})", "v_head_dim",
                Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "qk_nope_head_dim": 256})",
                "qk_nope_head_dim: a head of 320 dimensions", Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "qk_nope_head_dim": 63})",
                "qk_nope_head_dim: a head has 127 dimensions, which must be even"},
           Case{R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "qk_head_dim": 190})",
                "qk_head_dim: is 190, and qk_nope_head_dim 128 and qk_rope_head_dim 64 are 192 together"},
           Case{R"({"model_type": "deepseek_v2"})", "num_experts_per_tok"},
           Case{R"({"model_type": "qwen3_moe", "decoder_sparse_step": 0})", "decoder_sparse_step: must be an integer"},
           Case{R"({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 32})",
                "no model of type \"qwen3_moe\" has it, but those of type \"qwen2_moe\" do"},
           Case{R"({"model_type": "mixtral", "norm_topk_prob": false, "output_router_logits": 3})",
                "output_router_logits: must be"},
           Case{R"({"model_type": "llama", "num_experts": 8})",
                "no model of type \"llama\" has it, but those of type \"mixtral\""},
           Case{R"({"model_type": "mixtral", "router_jitter_noise": 1})", "router_jitter_noise: must be a number"},
           Case{R"({"model_type": "mixtral", "router_jitter_noise": 0.1, "moe": {"noisy_gate_policy": "Jitter"}})",
                "moe.noisy_gate_policy: router_jitter_noise already multiplies"},
           Case{R"({"model_type": "mixtral", "moe": {"noisy_gate_policy": "RSample"}})",
                "moe.noisy_gate_policy: \"RSample\" is for num_experts_per_tok 1, not 2"},
           Case{R"({"model_type": "mixtral", "moe": {"loss_over": "batch"}})", "moe.loss_over: must be"},
           Case{R"({"model_type": "gpt2", "moe": {"k": 1}})", "moe.num_experts: is missing"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4, "k": 5}})",
                "moe.k: a token cannot choose 5 of 4 experts"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4, "capacity_factor": 0}})",
                "moe.capacity_factor: must be a number"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4, "drop_policy": "position", "use_rts": true}})",
                "moe.use_rts: contradicts moe.drop_policy"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4, "expert_interval": 13}})",
                "moe.expert_interval: no layer has experts"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4096, "expert_interval": 1}, "n_inner": 8192})",
                "moe.num_experts: 4096 experts of size 8192 are 33554432 wide together"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4, "ep_size": 2}})",
                "1 is accepted: expert_parallel.autoep_size of the run", Errc::Unavailable},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4, "use_tutel": true}})", "moe.use_tutel",
                Errc::Unavailable},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": 4, "ep_size": 1, "use_tutel": false}})", "accepted"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": [4, 8, 4]}})",
                "moe.num_experts: has 3 numbers for 6 layers with experts: give one, or one for each"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": [4, 0, 4, 4, 4, 4]}})",
                "moe.num_experts: must be an integer or an array of integers, 1 to 4096"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": []}})",
                "moe.num_experts: must be an integer or an array"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": [4, 4, 4, 2, 4, 4], "k": 3}})",
                "moe.k: a token cannot choose 3 of 2 experts"},
           Case{R"({"model_type": "gpt2", "moe": {"num_experts": [4, 4, 4, 8, 8, 8], "loss_over": "layers"}})",
                "moe.loss_over: \"layers\" adds the tokens of experts by their numbers", Errc::Unavailable},
           Case{R"({"model_type": "mixtral", "moe": {"router_dtype": "bf16"}})",
                "moe.router_dtype: must be one of \"fp32\", \"work\""},
           Case{R"({"model_type": "llama", "moe": {"num_experts": 4}})",
                "no model of type \"llama\" has it, but those of type \"gpt2\" and"},
           Case{R"({"model_type": "olmoe", "clip_qkv": 8.0})", "clip_qkv", Errc::Unavailable},
           Case{R"({"model_type": "glm4_moe", "n_routed_experts": 12, "n_group": 5})",
                "n_group: 12 experts cannot be 5 groups of two experts or more, as many in each"},
           Case{R"({"model_type": "glm4_moe", "n_routed_experts": 8, "n_group": 8})", "n_group: 8 experts cannot be"},
           Case{R"({"model_type": "glm4_moe", "topk_group": 2})", "topk_group: 2 of 1 groups cannot be chosen"},
           Case{R"({"model_type": "glm4_moe", "n_routed_experts": 16, "n_group": 4, "topk_group": 1})",
                "topk_group: the 1 groups that are chosen have 4 experts, and a token chooses 8"},
           Case{R"({"model_type": "glm4_moe", "head_dim": 6})",
                "partial_rotary_factor: turns 3 of the 6 dimensions of a head"},
           Case{R"({"model_type": "llama", "num_nextn_predict_layers": 1})",
                "no model of type \"llama\" has it, but those of type \"glm4_moe\" and \"deepseek_v3\" do"},
           Case{R"({"model_type": "llama", "num_nextn_predict_layers": 0})", "accepted"},
           Case{R"({"model_type": "gpt_oss"})", "a model of type \"gpt_oss\" (there are \"gpt2\"", Errc::Unavailable},
           Case{R"({"model_type": "deepseek_v32"})", "a model of type \"deepseek_v32\"", Errc::Unavailable},
           Case{R"({"model_type": "qwen3_next"})", "a model of type \"qwen3_next\"", Errc::Unavailable},
           Case{R"({"model_type": "qwen3_5_moe"})", "a model of type \"qwen3_5_moe\"", Errc::Unavailable},
           Case{R"({"model_type": "bert", "position_embedding_type": "relative_key"})", "position_embedding_type",
                Errc::Unavailable},
           Case{R"({"model_type": "bert", "tie_word_embeddings": false})", "tie_word_embeddings", Errc::Unavailable},
           Case{R"({"model_type": "bert", "is_decoder": true})", "is_decoder", Errc::Unavailable},
           Case{R"({"model_type": "bert", "hidden_act": "relu"})", "\"relu\" is not supported yet", Errc::Unavailable},
           Case{R"({"model_type": "bert", "pad_token_id": 30522})", "pad_token_id: 30522 is outside the vocabulary"},
           Case{R"({"model_type": "bert", "num_attention_heads": 7})", "7 heads do not divide hidden_size 768"},
           Case{R"({"model_type": "bert", "type_vocab_sise": 2})", "did you mean type_vocab_size?"},
           Case{R"({"model_type": "gpt2", "type_vocab_size": 2})", "type_vocab_size: unknown key"},
           Case{R"({"model_type": "gpt2", "reorder_and_upcast_attn": true})", "reorder_and_upcast_attn",
                Errc::Unavailable},
           Case{R"({"model_type": "gpt2", "activation_function": "relu"})", "\"relu\" is not supported yet",
                Errc::Unavailable},
           Case{R"({"model_type": "llama", "hidden_act": "gelu"})", "\"gelu\" is not supported yet", Errc::Unavailable},
           Case{R"({"model_type": "llama", "num_attention_heads": 8})", "512 dimensions (at most 256)",
                Errc::Unavailable},
           Case{R"({"model_type": "llama", "quantization_config": {"bits": 4}})", "quantization_config",
                Errc::Unavailable},
           Case{R"({"model_type": "llama", "rope_scaling": {"type": "mrope", "factor": 1}})", "\"mrope\"",
                Errc::Unavailable},
       })
    EXPECT_THAT(failure(c.config, c.code), HasSubstr(c.message)) << c.config;
}

// Marks that fine-tuning tools and old versions left in published files.
TEST(ModelConfig, PassesOverWhatOtherProgramsLeft) {
  const ModelDir dir(R"({"model_type": "gpt2", "n_special": 0, "predict_special_tokens": true, "_num_labels": 1,
    "output_past": true, "unsloth_fixed": true, "transformers.js_config": {"dtype": "q4"}})");
  std::vector<Diagnostic> diagnostics;
  read_model_file(dir.dir(), diagnostics);
  ASSERT_EQ(diagnostics.size(), 2u);
  for (const Diagnostic& d : diagnostics) {
    EXPECT_EQ(d.severity, Severity::Warning);
    EXPECT_THAT(d.message, HasSubstr("passed over"));
  }
  EXPECT_THAT(failure(R"({"model_type": "gpt2", "n_layers": 6})", Errc::Config), HasSubstr("did you mean n_layer?"));
}

// Values that turn nothing on, whatever family reads the key, and keys that transformers ignores inside of objects.
TEST(ModelConfig, WhatAsksForNothingIsTakenFromAnyTool) {
  const std::string
      llama = R"("model_type": "llama", "hidden_size": 32, "num_attention_heads": 4)",
      qwen2 = R"("model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4)",
      gpt2 = R"("model_type": "gpt2", "n_embd": 32, "n_head": 4)",
      bert = R"("model_type": "bert", "hidden_size": 32, "num_attention_heads": 4)",
      mixtral = R"("model_type": "mixtral", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4)";
  const struct {
    const std::string& model;
    const char* more;
    const char* warned;  // the one key with a warning; empty: none
  } cases[] = {
      {llama, R"("use_sliding_window": false, "sliding_window": null)", ""},
      {llama, R"("use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28)", ""},
      {llama, R"("layer_types": ["full_attention", "full_attention"])", ""},
      {llama, R"("rope_scaling": null, "rope_parameters": null, "head_dim": null, "num_key_value_heads": null)", ""},
      {llama, R"("rope_scaling": false, "quantization_config": {}, "quantization": null)", ""},
      {llama, R"("rope_scaling": {})", ""},
      {llama, R"("rope_scaling": null, "rope_parameters": {"rope_type": "default", "rope_theta": 500000})", ""},
      {llama, R"("rope_parameters": {"rope_type": "default"}, "rope_scaling": null)", ""},
      {llama, R"("attention_bias": null, "mlp_bias": null, "tie_word_embeddings": null, "attention_dropout": null)",
       ""},
      {llama, R"("pretraining_tp": null)", ""},
      {llama, R"("pretraining_tp": 0, "is_causal": true, "use_bidirectional_attention": null)", ""},
      {llama, R"("hidden_dropout_prob": 0.0, "resid_pdrop": 0, "embd_pdrop": null, "n_inner": null)", ""},
      {llama, R"("quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": false, "load_in_8bit": false,
                 "llm_int8_threshold": 6.0})",
       ""},
      {llama, R"("rope_scaling": {"rope_type": null, "type": null, "factor": null, "low_freq_factor": null,
                 "high_freq_factor": null, "original_max_position_embeddings": null, "attention_factor": null,
                 "beta_fast": null, "beta_slow": null, "mscale": null, "mscale_all_dim": null, "truncate": null,
                 "short_factor": null, "long_factor": null, "rope_theta": 10000, "partial_rotary_factor": 1.0})",
       ""},
      {llama, R"("rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32,
                 "finetuned": true})",
       "rope_scaling.finetuned"},
      {llama, R"("rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"})",
       "rope_scaling.mrope_section"},
      {llama, R"("hidden_activation": null)", "hidden_activation"},  // as Gemma's, which resembles hidden_act
      {llama, R"("unsloth_version": "2025.1.1")", "unsloth_version"},
      {llama, R"("attention_out_bias": false)", "attention_out_bias"},
      {llama, R"("summary_type": "cls_index", "n_ctx": 64, "classifier_dropout": 0.1, "tokenizer_class": "x")", ""},
      {bert, R"("hidden_dropout": 0.0)", "hidden_dropout"},
      {llama, R"("quantization_config": {"quant_method": "none", "modules_to_not_convert": null})", ""},
      {llama, R"("scale_attn_weights": true)", ""},
      {bert, R"("scale_attn_weights": true)", ""},
      {gpt2, R"("position_embedding_type": "absolute")", ""},
      {qwen2, R"("attention_bias": true, "mlp_bias": false, "pretraining_tp": 1)", ""},
      {qwen2, R"("attention_bias": false, "sliding_window": false, "use_sliding_window": null)", ""},
      {qwen2, R"("max_window_layers": null, "layer_types": null)", ""},
      {gpt2, R"("scale_attn_by_inverse_layer_idx": null, "rope_scaling": null, "attention_bias": false)", ""},
      {gpt2, R"("reorder_and_upcast_attn": null, "add_cross_attention": null, "sliding_window": null)", ""},
      {bert, R"("classifier_dropout": null, "position_embedding_type": null, "is_decoder": null, "is_causal": false)",
       ""},
      {bert, R"("use_sliding_window": false, "attention_dropout": 0.0, "rope_scaling": null)", ""},
      {llama, R"("num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0, "norm_topk_prob": true)", ""},
      {llama, R"("num_local_experts": 0, "router_aux_loss_coef": 0.001, "output_router_logits": false)", ""},
      {qwen2, R"("decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 0)", ""},
      {mixtral, R"("norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "clip_qkv": null)", ""},
      {mixtral, R"("max_window_layers": 28, "use_sliding_window": false, "sliding_window": null)", ""}};
  for (const auto& c : cases) {
    const ModelDir dir(fmt::format("{{{}, {}}}", c.model, c.more));
    std::vector<Diagnostic> diagnostics;
    const ModelConfig read = read_model_file(dir.dir(), diagnostics);
    for (const Diagnostic& d : diagnostics) EXPECT_EQ(d.severity, Severity::Warning) << to_string(d);
    ASSERT_EQ(diagnostics.size(), *c.warned == '\0' ? 0u : 1u)
        << c.more << (diagnostics.empty() ? "" : to_string(diagnostics.front()));
    if (!diagnostics.empty()) {
      EXPECT_EQ(diagnostics.front().key, c.warned);
    }
    if (*c.warned != '\0') continue;
    const bool theta = std::string_view(c.more).find("500000") != std::string_view::npos;
    ModelConfig plain = load(fmt::format("{{{}{}}}", c.model, theta ? R"(, "rope_theta": 500000)" : ""));
    EXPECT_EQ(model_config_json(read), model_config_json(plain)) << c.more;
  }
}

// Keys for which Python takes null for false, and false is not the default.
TEST(ModelConfig, NullIsFalse) {
  const ModelConfig m = load(R"({"model_type": "gpt2", "tie_word_embeddings": null, "scale_attn_weights": null})");
  EXPECT_FALSE(m.tie_embeddings);
  EXPECT_FALSE(m.scale_attn_weights);
  for (const char* off : {"null", "false"}) {
    const ModelConfig gpt2 =
        load(fmt::format(R"({{"model_type": "gpt2", "embd_pdrop": {0}, "resid_pdrop": {0}, "attn_pdrop": {0}}})", off));
    EXPECT_EQ(gpt2.embd_dropout, 0);
    EXPECT_EQ(gpt2.resid_dropout, 0);
    EXPECT_EQ(gpt2.attn_dropout, 0);
    const ModelConfig bert = load(fmt::format(
        R"({{"model_type": "bert", "hidden_dropout_prob": {0}, "attention_probs_dropout_prob": {0}}})", off));
    EXPECT_EQ(bert.embd_dropout, 0);
    EXPECT_EQ(bert.resid_dropout, 0);
    EXPECT_EQ(bert.attn_dropout, 0);
    EXPECT_EQ(load(fmt::format(R"({{"model_type": "llama", "attention_dropout": {}}})", off)).attn_dropout, 0);
  }
}

// Values that would change the computation are errors.
TEST(ModelConfig, WhatChangesTheComputationIsRefused) {
  const std::string llama = R"({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, )";
  for (const char* more :
       {R"("sliding_window": 4096)", R"("use_sliding_window": true)", R"("hidden_dropout_prob": 0.1)",
        R"("layer_types": ["sliding_attention"])", R"("n_embd": 32)", R"("rope_scaling": true)",
        R"("rope_scaling": 2.0)", R"("atention_bias": true)", R"("rope_theta": null)",
        R"("rope_scaling": {"rope_type": "linear", "factor": 2, "factr": 3})",
        R"("rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 2}})"})
    EXPECT_NE(failure(llama + more + "}", Errc::Config), "accepted") << more;
  for (const char* more :
       {R"("is_causal": false)", R"("use_bidirectional_attention": true)", R"("partial_rotary_factor": 0.5)",
        R"("quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false})",
        R"("quantization_config": {"quant_method": "hqq", "bits": 4})",
        R"("quantization_config": {"quant_method": "none", "bits": 4})",
        R"("quantization": {"group_size": 64, "bits": 4})", R"("pretraining_tp": 2)"})
    EXPECT_NE(failure(llama + more + "}", Errc::Unavailable), "accepted") << more;
}

TEST(ModelConfig, IsPublishedWithWhatWasPassedOverInSections) {
  const Json published = Json::parse(R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 4, "rope_scaling": {"type": "yarn", "factor": 2, "finetuned": true}})");
  const Json again = publish_model(published, load_model_config(ModelDir(published.dump()).dir()));
  EXPECT_EQ(again["rope_scaling"]["finetuned"], true);
  EXPECT_EQ(again["rope_scaling"]["rope_type"], "yarn");
  EXPECT_FALSE(again["rope_scaling"].contains("type"));
}

TEST(ModelConfig, IsPublishedWithoutOneKeyUnderTwoNames) {
  const Json published = Json::parse(R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 4, "mark": 7, "bos_token_id": 5,
    "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e6}})");
  const ModelDir dir(published.dump());
  const ModelConfig model = load_model_config(dir.dir());
  const Json again = publish_model(published, model);
  EXPECT_FALSE(again.contains("rope_parameters"));
  EXPECT_EQ(again["rope_scaling"]["factor"], 2);
  EXPECT_EQ(again["mark"], 7);
  EXPECT_EQ(again["bos_token_id"], 5);
  EXPECT_EQ(model_config_json(load(again.dump())), model_config_json(model));
}

TEST(ModelConfig, MissingFileSaysSo) {
  try {
    load_model_config("/nonexistent/config.json");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    EXPECT_STREQ(e.what(), "/nonexistent/config.json: cannot be opened: No such file or directory");
  }
}

TEST(ModelConfig, OldSpellingsAndRepeatedOnesAgree) {
  const ModelConfig m = load(R"({"model_type": "llama", "rope_theta": 7e3, "rope_parameters": {"rope_theta": 7000,
    "type": "linear", "rope_type": "linear", "factor": 2}})");
  EXPECT_EQ(m.rope_theta, 7e3f);
  EXPECT_EQ(m.rope.type, RopeType::Linear);
}

// As transformers: Phi-3's way for longrope, and the place of original_max_position_embeddings in old configurations.
TEST(ModelConfig, LongRopesFactorFollowsFromThePositions) {
  const std::string_view rest = R"("model_type": "llama", "hidden_size": 8, "num_attention_heads": 2,
    "max_position_embeddings": 4096)";
  const auto scaling = [&](std::string_view original, std::string_view more) {
    return load(fmt::format(R"({{{}, {} "rope_scaling": {{"type": "longrope", "short_factor": [1, 1.1],
      "long_factor": [2, 3] {}}}}})",
                            rest, original, more))
        .rope;
  };
  EXPECT_EQ(scaling("", R"(, "original_max_position_embeddings": 1024)").factor, 4);
  EXPECT_EQ(scaling("", R"(, "original_max_position_embeddings": 1024, "factor": null)").factor, 4);
  EXPECT_EQ(scaling("", R"(, "original_max_position_embeddings": 1024, "factor": 2)").factor, 2);
  EXPECT_EQ(scaling(R"("original_max_position_embeddings": 512,)", "").factor, 8);
  EXPECT_EQ(scaling(R"("original_max_position_embeddings": 512,)", "").original_max_positions, 512);
  EXPECT_EQ(scaling("", "").factor, 1);
}

TEST(ModelConfig, RoundTripsThroughConfigJson) {
  for (
      std::string_view text : {
          R"({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "activation_function": "gelu", "layer_norm_epsilon": 1e-6,
               "scale_attn_by_inverse_layer_idx": true, "n_inner": 100, "tie_word_embeddings": false, "embd_pdrop": 0.3})",
          R"({"model_type": "llama", "attention_bias": true, "num_key_value_heads": 4, "attention_dropout": 0.25,
               "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                                "original_max_position_embeddings": 8192}})",
          R"({"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8, "rope_scaling": {"rope_type": "longrope",
               "attention_factor": 1.25, "short_factor": [1, 1.1], "long_factor": [2, 3.3],
               "original_max_position_embeddings": 1024}})",
          R"({"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 4096,
               "rope_scaling": {"rope_type": "longrope", "factor": 1, "short_factor": [1, 1.1], "long_factor": [2, 3.3],
               "original_max_position_embeddings": 1024}})",
          R"({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2}})",
          R"({"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": true, "sliding_window": 9,
               "max_window_layers": 1})",
          R"({"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 16, "mscale": 0.5,
               "mscale_all_dim": 0.25, "truncate": false}})",
          R"({"model_type": "bert", "hidden_size": 96, "hidden_act": "gelu_new", "hidden_dropout_prob": 0.3,
               "attention_probs_dropout_prob": 0.25, "type_vocab_size": 3, "layer_norm_eps": 1e-7, "pad_token_id": 5})",
          R"({"model_type": "bert", "pad_token_id": null})",
          R"({"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 100,
               "output_router_logits": true, "router_aux_loss_coef": 0.25})",
          R"({"model_type": "mixtral", "sliding_window": null, "router_aux_loss_coef": 0.25})",
          R"({"model_type": "mixtral", "router_jitter_noise": 0.25,
               "moe": {"drop_tokens": true, "capacity_factor": 1.5, "min_capacity": 7, "drop_policy": "position"}})",
          R"({"model_type": "qwen3_moe", "moe": {"noisy_gate_policy": "Jitter"}})",
          R"({"model_type": "gpt2", "moe": {"num_experts": 4, "k": 2, "top2_2nd_expert_sampling": false}})",
          R"({"model_type": "gpt2", "moe": {"num_experts": 4, "use_rts": false, "noisy_gate_policy": "RSample",
               "expert_interval": 3, "loss_coeff": 0.5, "z_loss_coeff": 0.25, "eval_capacity_factor": 2}})",
          R"({"model_type": "gpt2", "moe": {"num_experts": 4, "k": 3, "drop_tokens": false}})",
          R"({"model_type": "olmoe", "num_experts": 16, "norm_topk_prob": true, "attention_bias": true,
               "output_router_logits": false, "router_aux_loss_coef": 0.25})",
          R"({"model_type": "qwen2_moe", "num_hidden_layers": 4, "mlp_only_layers": [2], "qkv_bias": false,
               "moe_intermediate_size": 96, "shared_expert_intermediate_size": 100, "use_sliding_window": true,
               "sliding_window": 9})",
          R"({"model_type": "deepseek_v2", "num_hidden_layers": 4, "first_k_dense_replace": 2, "num_experts_per_tok": 4,
               "n_routed_experts": 24, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
               "n_shared_experts": 3, "q_lora_rank": null, "routed_scaling_factor": 1.5, "head_dim": 64,
               "rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": 0.5}})",
          R"({"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 2, "num_experts_per_tok": 4,
               "n_routed_experts": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": false, "rope_interleave": false,
               "n_shared_experts": 3, "q_lora_rank": null, "routed_scaling_factor": 1.5, "head_dim": 64,
               "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.5, "mscale_all_dim": 0.5}})",
          R"({"model_type": "mixtral", "moe": {"router_dtype": "work"}})",
          R"({"model_type": "gpt2", "moe": {"num_experts": 4, "use_residual": true, "router_dtype": "work"}})",
          R"({"model_type": "gpt2", "moe": {"num_experts": [4, 4, 4, 8, 8, 16], "k": 2}})",
          R"({"model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0],
               "head_dim": 128, "router_z_loss_coef": 0.5})",
          R"({"model_type": "glm4_moe", "head_dim": 128, "num_hidden_layers": 4, "first_k_dense_replace": 2, "n_routed_experts": 24,
               "n_group": 4, "topk_group": 2, "n_shared_experts": 3, "moe_intermediate_size": 96, "use_qk_norm": true,
               "partial_rotary_factor": 0.25, "routed_scaling_factor": 1.5, "norm_topk_prob": false,
               "num_nextn_predict_layers": 0, "router_aux_loss_coef": 0.25, "output_router_logits": true})",
          R"({"model_type": "glm4_moe", "head_dim": 128, "num_hidden_layers": 2, "first_k_dense_replace": 2,
               "n_shared_experts": 0})",
      }) {
    const std::string once = model_config_json(load(text));
    EXPECT_EQ(model_config_json(load(once)), once) << text;
    std::vector<Diagnostic> diagnostics;
    read_model_file(ModelDir(once).dir(), diagnostics);
    EXPECT_TRUE(diagnostics.empty()) << to_string(diagnostics[0]);
    const Json json = Json::parse(once);  // everything given is written again, under the same names
    const Json said = Json::parse(text);
    for (const auto& [key, value] : said.items())
      if (value.is_number() || value.is_boolean()) {
        EXPECT_EQ(json[key], value) << key;
      }
    const ExpertsConfig here = load(text).experts, again = load(once).experts;
    EXPECT_TRUE(here.capacity.limited == again.capacity.limited && here.random() == again.random() &&
                here.noisy_choice == again.noisy_choice && here.layers == again.layers)
        << once;
    if (here.capacity.limited) {
      EXPECT_EQ(here.capacity.policy, again.capacity.policy) << once;
    }
  }
  EXPECT_THAT(model_config_json(load(R"({"model_type": "gpt2"})")), HasSubstr("GPT2LMHeadModel"));
  const Json bert = Json::parse(model_config_json(load(R"({"model_type": "bert", "pad_token_id": null})")));
  EXPECT_EQ(bert["architectures"], Json({"BertForMaskedLM"}));
  EXPECT_EQ(bert["position_embedding_type"], "absolute");
  EXPECT_TRUE(bert["pad_token_id"].is_null());
}

// One spelling of the blocks that are sparse is written, and no key that transformers does not know.
TEST(ModelConfig, ExpertsAreWrittenAsTransformersReadsThem) {
  const ModelConfig m = load(R"({"model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2})");
  const Json json = Json::parse(model_config_json(m));
  EXPECT_EQ(json["architectures"], Json({"Qwen3MoeForCausalLM"}));
  EXPECT_EQ(json["decoder_sparse_step"], 1);
  EXPECT_EQ(json["mlp_only_layers"], Json({0, 2}));
  EXPECT_FALSE(json.contains("router_z_loss_coef") || json.contains("num_local_experts"));
  const Json mixtral = Json::parse(model_config_json(load(R"({"model_type": "mixtral"})")));
  EXPECT_TRUE(mixtral["sliding_window"].is_null());
  EXPECT_FALSE(mixtral.contains("use_sliding_window") || mixtral.contains("norm_topk_prob"));
}

TEST(ModelConfig, InlineModelsHaveNoDropoutAndSayTheirSizes) {
  const std::string text = R"({"type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8})";
  std::vector<Diagnostic> diagnostics;
  const ConfigText parsed(text, "cfg", diagnostics);
  const ModelConfig m = read_model(parsed.root(), ModelSource::Inline, parsed, "model", diagnostics);
  EXPECT_EQ(m.resid_dropout, 0);
  ASSERT_EQ(diagnostics.size(), 1u);
  EXPECT_EQ(to_string(diagnostics[0]), "cfg: model.vocab_size: is missing");
}

std::string difference(const Json& saved, const ModelConfig& now) {
  try {
    check_same_model(saved, now, "step");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Mismatch);
    return e.what();
  }
  return "";
}

TEST(SameModel, ComparesWhatShapesDoNotTell) {
  const ModelConfig gpt2 = load(R"({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2})");
  const Json saved = Json::parse(model_config_json(gpt2));
  EXPECT_EQ(difference(saved, gpt2), "");
  Json other = saved;
  other["resid_pdrop"] = 0.5;  // a run's own business
  EXPECT_EQ(difference(other, gpt2), "");
  other["n_head"] = 2;
  EXPECT_EQ(difference(other, gpt2), "step: a checkpoint of another model: model.n_head is 2 there and 4 here");
  other = saved;
  other["activation_function"] = "gelu";
  EXPECT_THAT(difference(other, gpt2), HasSubstr("model.activation_function is \"gelu\" there and \"gelu_new\" here"));
}

TEST(SameModel, LossesOfRoutersAreARunsOwn) {
  const ModelConfig m = load(R"({"model_type": "mixtral", "num_hidden_layers": 2})");
  Json other = Json::parse(model_config_json(m));
  other["output_router_logits"] = true;
  other["router_aux_loss_coef"] = 0.5;
  other["router_z_loss_coef"] = 0.5;
  EXPECT_EQ(difference(other, m), "");
  other["num_experts_per_tok"] = 1;
  EXPECT_THAT(difference(other, m), HasSubstr("model.num_experts_per_tok is 1 there and 2 here"));
}

TEST(SameModel, WhatTheLibraryCannotBuildIsAnotherModel) {
  const ModelConfig gpt2 = load(R"({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2})");
  Json other = Json::parse(model_config_json(gpt2));
  other["activation_function"] = "relu";
  EXPECT_THAT(difference(other, gpt2), HasSubstr("step: a checkpoint of another model: "));
  EXPECT_THAT(difference(other, gpt2), HasSubstr("activation_function"));
  other["architectures"] = {"SomebodysModel"};  // nothing is known of it
  EXPECT_EQ(difference(other, gpt2), "");
}

}  // namespace model_config_test
}  // namespace ds
