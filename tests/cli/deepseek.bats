#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# DeepSeek-V2 and DeepSeek-V3 with real processes: one model over ranks of every kind, published files, text from latents,
# predictions and refusals.

bats_require_minimum_version 1.5.0
load tiny

setup() {
  tiny_setup
  cat >cfg.json <<'JSON'
{
  "model": {"type": "deepseek_v2", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "max_position_embeddings": 64, "intermediate_size": 48, "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
            "router_aux_loss_coef": 0.01,
            "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 32, "mscale_all_dim": 0.7}},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
  "reduce_order": "micro", "bf16": {"enabled": true}, "device": "cpu", "threads": 1,
  "save": {"every": 4}, "steps": 8
}
JSON
}

@test "every layout trains with the bits of one rank, and resumes from any other" {
  ds-train cfg.json --out one
  merged one one.safetensors
  ds-launch -n 2 ds-train cfg.json --out two --set expert_parallel.enabled=true --set expert_parallel.autoep_size=2 \
    --set expert_parallel.room=8
  ds-launch -n 2 ds-train cfg.json --out stages --resume two/step-00000004 --set pipeline.stages=2
  ds-launch -n 2 ds-train cfg.json --out shards --resume stages/step-00000008 --steps 8 --set zero_optimization.stage=3
  for run in two stages; do
    merged $run $run.safetensors
    cmp one.safetensors $run.safetensors
  done
  assert_equal "$(losses two)" "$(losses one)"
}

as_v3() {
  sed -i 's/"deepseek_v2"/"deepseek_v3"/; s/"topk_method": "group_limited_greedy", //; s/"router_aux_loss_coef": 0.01,/"rope_interleave": true,/
          s/"lr": 3e-3}/"lr": 3e-3}, "router_bias_update_rate": 0.01/' cfg.json
}

@test "DeepSeek-V3 trains with the bits of one rank, and biases of its routers with it" {
  as_v3
  run -0 --separate-stderr ds-train cfg.json --check
  ds-train cfg.json --out one
  merged one one.safetensors
  ds-launch -n 2 ds-train cfg.json --out two --set expert_parallel.enabled=true --set expert_parallel.autoep_size=2 \
    --set expert_parallel.room=8
  ds-launch -n 2 ds-train cfg.json --out stages --resume two/step-00000004 --set pipeline.stages=2
  ds-launch -n 2 ds-train cfg.json --out shards --set zero_optimization.stage=3
  for run in two stages shards; do
    merged $run $run.safetensors
    cmp one.safetensors $run.safetensors
  done
  assert_equal "$(losses two)" "$(losses one)"
  run -0 --separate-stderr ds-memreport cfg.json --explain
  [[ $output == *"keys and values made from a latent"* ]] || fail "$output"
  refused 4 topk_method --set model.topk_method=greedy
}

@test "published files of DeepSeek-V3 are read and written, without layers that predict further ahead" {
  as_v3
  ds-train cfg.json --out one
  text=$(ds-train cfg.json --resume one --generate "The " --max-tokens 24)
  [ ${#text} -gt 4 ]
  assert_equal "$(ds-launch -n 2 ds-train cfg.json --resume one --generate "The " --max-tokens 24 --set pipeline.stages=2)" "$text"
  ds-ckpt-merge one -o hf --format hf --quiet
  for name in self_attn.kv_a_proj_with_mqa.weight mlp.experts.7.up_proj.weight mlp.shared_experts.up_proj.weight \
    mlp.gate.weight mlp.gate.e_score_correction_bias; do
    grep -q "model.layers.2.$name" hf/model.safetensors
  done
  grep -q '"topk_method": "noaux_tc"' hf/config.json
  ds-shard hf -o sharded --dp 2 --tp 2 --pp 3 --quiet
  ds-ckpt-merge sharded -o back --format hf --quiet
  cmp hf/model.safetensors back/model.safetensors
  # With the tensors of a fourth layer.
  cp -r hf mtp
  python3 - <<'PY'
import json, struct
path = "mtp/model.safetensors"
with open(path, "rb") as f:
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    data = f.read()
for name in [n for n in header if n.startswith("model.layers.2.")]:
    begin, end = header[name]["data_offsets"]
    header[name.replace("layers.2", "layers.3")] = {**header[name], "data_offsets": [len(data), len(data) + end - begin]}
    data += data[begin:end]
text = json.dumps(header).encode()
with open(path, "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text + data)
config = json.load(open("mtp/config.json"))
config["num_nextn_predict_layers"] = 1
json.dump(config, open("mtp/config.json", "w"))
c = json.load(open("cfg.json"))
for form in ("hf", "mtp"):
    c["model"] = {"path": form}
    json.dump(c, open(f"{form}.json", "w"))
PY
  assert_equal "$(ds-train hf.json --generate "The " --max-tokens 24)" "$text"
  run -0 --separate-stderr ds-train mtp.json --generate "The " --max-tokens 24
  assert_equal "$output" "$text"
  [[ $stderr == *"left out, for they predict tokens further ahead (num_nextn_predict_layers): "*"model.layers.3."* ]] ||
    fail "$stderr"
}

@test "text and published files are those of one rank" {
  ds-train cfg.json --out one
  text=$(ds-train cfg.json --resume one --generate "The " --max-tokens 24)
  [ ${#text} -gt 4 ]
  assert_equal "$(ds-launch -n 2 ds-train cfg.json --resume one --generate "The " --max-tokens 24 --set pipeline.stages=2)" "$text"
  ds-ckpt-merge one -o hf --format hf --quiet
  for name in self_attn.q_a_proj.weight self_attn.q_a_layernorm.weight self_attn.q_b_proj.weight \
    self_attn.kv_a_proj_with_mqa.weight self_attn.kv_a_layernorm.weight self_attn.kv_b_proj.weight \
    self_attn.o_proj.weight mlp.experts.7.up_proj.weight mlp.shared_experts.up_proj.weight mlp.gate.weight; do
    grep -q "model.layers.2.$name" hf/model.safetensors
  done
  ds-shard hf -o sharded --dp 2 --tp 2 --pp 3 --quiet
  ds-ckpt-merge sharded -o back --format hf --quiet
  cmp hf/model.safetensors back/model.safetensors
  assert_equal "$(ds-train cfg.json --weights sharded --generate "The " --max-tokens 24)" "$text"
  # The directory as a model.
  python3 - <<'PY'
import json
c = json.load(open("cfg.json"))
c["model"] = {"path": "hf"}
json.dump(c, open("hf.json", "w"))
PY
  assert_equal "$(ds-train hf.json --generate "The " --max-tokens 24)" "$text"
}

@test "memory is that of the prediction, and what does not fit is refused by its key" {
  ds-train cfg.json --out run --steps 2
  run --separate-stderr ds-memreport cfg.json
  assert_success
  [[ $output == *"of which a token uses"* ]] || fail "$output"
  run --separate-stderr ds-memreport cfg.json --explain
  assert_success
  [[ $output == *"keys and values made from a latent"* ]] || fail "$output"
  run -2 --separate-stderr ds-launch -n 3 ds-train cfg.json --out refused --set tensor_parallel.tp_size=3
  [[ $stderr == *"heads"* ]] || fail "$stderr"
  sed -i 's/"v_head_dim": 10, //' cfg.json
  refused 2 "v_head_dim: is missing"
}
