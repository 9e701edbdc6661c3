#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# A dense model becomes a mixture of experts that computes the same function, and trains.

bats_require_minimum_version 1.5.0
load tiny

setup() {
  tiny_setup
  cat >cfg.json <<'JSON'
{
  "model": {"type": "qwen3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "intermediate_size": 48},
  "data": {"train": "text.txt", "split": 0.1, "seq_length": 32},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "device": "cpu", "threads": 1, "steps": 12
}
JSON
}

# dense FAMILY [--set...]: a trained model, as a directory "FAMILY".
dense() {
  ds-train cfg.json --out "run-$1" --quiet --set "model.type=\"$1\"" "${@:2}"
  ds-ckpt-merge "run-$1" -o "$1" --format hf --quiet
}
upcycled() { # FROM TO ARGUMENTS: a directory "TO"
  ds-shard "$1" -o "run-$2" --quiet "${@:3}"
  ds-ckpt-merge "run-$2" -o "$2" --format hf --quiet
}
loss_of() { ds-train cfg.json --eval --json --set "model={\"path\": \"$1\"}" --set data.tokenizer=bytes "${@:2}" | python3 -c 'import json, sys; print(json.load(sys.stdin)["val_loss"])'; }
# close TOLERANCE A B
close() { python3 -c "import sys; t, a, b = map(float, sys.argv[1:]); sys.exit(abs(a - b) > t * a)" "$@" || fail "$*"; }

@test "a mixture computes what the dense model does, whatever its router, and trains over ranks" {
  local loss family
  for family in llama qwen2 qwen3; do
    dense $family
    loss=$(loss_of $family)
    upcycled $family $family-8 --upcycle 8
    close 2e-7 "$loss" "$(loss_of $family-8)"
    assert_equal "$(ds-shard $family -o $family-same --json --quiet | python3 -c 'import json, sys; print(json.load(sys.stdin)["step"])')" 0
  done
  run python3 - <<'PY'
import json
for dense, mixture in (("llama", "mixtral"), ("qwen2", "qwen2_moe"), ("qwen3", "qwen3_moe")):
    c = json.load(open(dense + "-8/config.json"))
    assert c["model_type"] == mixture, c
    assert c.get("num_experts", c.get("num_local_experts")) == 8 and c["num_experts_per_tok"] == 2, c
PY
  assert_success
  # Weights that are not normalised, more experts for a token, blocks that stay dense.
  python3 - <<'PY'
import json
c = json.load(open("qwen3-8/config.json"))
for k, v in {"norm_topk_prob": False, "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [1]}.items():
    c[k] = v
json.dump(c, open("mixture.json", "w"))
PY
  upcycled qwen3 plain --upcycle mixture.json
  close 2e-5 "$(loss_of qwen3)" "$(loss_of plain)"
  # Sigmoids, weights that are neither normalised nor balanced at 1, a shared expert without a gate, a dense block first.
  python3 - <<'PY'
import json
dense = json.load(open("qwen2/config.json"))
same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        "intermediate_size", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
c = {key: dense[key] for key in same}
c.update(architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", head_dim=8, partial_rotary_factor=1.0, attention_bias=True,
         use_qk_norm=False, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1,
         first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.5)
json.dump(c, open("glm.json", "w"))
PY
  upcycled qwen2 glm --upcycle glm.json --dp 2
  close 2e-5 "$(loss_of qwen2)" "$(loss_of glm)"
  # The function is the same in a run of several ranks, whose loss then falls.
  ds-launch -n 2 ds-train cfg.json --out more --quiet --set 'model={"path": "qwen3-8"}' --set data.tokenizer=bytes \
    --set expert_parallel.enabled=true --set expert_parallel.autoep_size=2 --set bf16.enabled=true --steps 12
  run python3 - <<'PY'
import json
steps = [json.loads(line) for line in open("more/metrics.jsonl")]
losses = [s["loss"] for s in steps if s["type"] == "step"]
assert losses[-1] < losses[0], losses
used = next(s["expert_tokens"].values() for s in steps if s["type"] == "step")
assert sum(n > 0 for n in used) > 3 * 2, used  # the new routers choose by token
PY
  assert_success
}

@test "a mesh of ranks has the same mixture" {
  dense qwen3
  upcycled qwen3 whole --upcycle 4
  upcycled qwen3 meshed --upcycle 4 --dp 2 --tp 2 --pp 3 --stage 3
  cmp whole/model.safetensors meshed/model.safetensors
  cmp whole/config.json meshed/config.json
}

refuses() { # STATUS TEXT ARGUMENTS
  run "-$1" --separate-stderr ds-shard "${@:3}" -o out
  [[ $stderr == *"$2"* ]] || fail "$stderr"
  assert [ ! -e out ]
}

@test "mixtures that cannot be had" {
  dense qwen3
  upcycled qwen3 experts --upcycle 4
  refuses 2 "has experts already" experts --upcycle 8
  refuses 2 "1 to 4096 experts" qwen3 --upcycle 0
  refuses 2 "1 to 4096 experts" qwen3 --upcycle 4097
  sed 's/"mlp_only_layers": \[\]/"mlp_only_layers": [0, 1, 2]/' experts/config.json >nowhere.json
  refuses 2 "no block of the model has experts" qwen3 --upcycle nowhere.json
  refuses 2 "--experts-per-token 8: there are 4 experts" qwen3 --upcycle 4 --experts-per-token 8
  refuses 2 "needs --upcycle with a number" qwen3 --experts-per-token 2
  refuses 2 "needs --upcycle with a number" qwen3 --upcycle experts --experts-per-token 2
  refuses 2 "the model has no experts" qwen3 --upcycle qwen3
  refuses 2 "absent" qwen3 --upcycle absent
  sed 's/"moe_intermediate_size": 48/"moe_intermediate_size": 40/' experts/config.json >narrow.json
  refuses 3 "an expert is 40 wide, but the MLP that it begins as is 48 wide" qwen3 --upcycle narrow.json
  sed 's/"num_attention_heads": 4/"num_attention_heads": 2/' experts/config.json >heads.json
  refuses 3 "num_attention_heads" qwen3 --upcycle heads.json
  ds-train cfg.json --out gpt --quiet --steps 1 \
    --set 'model={"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}'
  refuses 4 'there is no family of mixtures of "gpt2"' gpt --upcycle 4
  # Properties that the mixture's family lacks, or has otherwise.
  dense llama --set model.mlp_bias=true
  refuses 4 "mlp_bias is true, and experts have no biases" llama --upcycle 4
  sed 's/"use_sliding_window": false/"use_sliding_window": true/; s/"sliding_window": [0-9a-z]*/"sliding_window": 8/;
    s/"max_window_layers": [0-9]*/"max_window_layers": 0/' experts/config.json >window.json
  refuses 3 "window" qwen3 --upcycle window.json
  ds-shard qwen3 -o alone --quiet --upcycle 1 # one is chosen of one
  refuses 2 "exclude each other" gpt --upcycle 4 --positions 128
}
