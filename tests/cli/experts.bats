#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models with experts with real processes: over ranks they train like one rank, resume at any other number of ranks, write
# text, are predicted and refused with reasons.

bats_require_minimum_version 1.5.0
load tiny

setup() {
  tiny_setup
  cat >cfg.json <<'JSON'
{
  "model": {"type": "qwen3_moe", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "intermediate_size": 48,
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true,
            "mlp_only_layers": [1], "router_aux_loss_coef": 0.01, "output_router_logits": true},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
  "reduce_order": "micro", "bf16": {"enabled": true}, "device": "cpu", "threads": 1,
  "save": {"every": 6}, "steps": 12
}
JSON
}

# With room for all rows that can come.
over() { echo --set expert_parallel.enabled=true --set "expert_parallel.autoep_size=$1" --set expert_parallel.room=8; }

@test "experts over ranks train with the bits of one rank, and resume at any number" {
  ds-train cfg.json --out one
  merged one one.safetensors
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out two $(over 2)
  # shellcheck disable=SC2046
  ds-launch -n 4 ds-train cfg.json --out four --set zero_optimization.stage=3 --set communication.backend=mpi $(over 4)
  for run in two four; do
    assert_equal "$(losses $run)" "$(losses one)"
    merged $run $run.safetensors
    cmp one.safetensors $run.safetensors
  done
  grep -q '"ep.all_to_allv"' two/metrics.jsonl
  # From the middle of each to the end of another.
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out a --resume four/step-00000006 $(over 2)
  ds-launch -n 2 ds-train cfg.json --out b --resume two/step-00000006 --set pipeline.stages=2
  # shellcheck disable=SC2046
  ds-launch -n 4 ds-train cfg.json --out c --resume one/step-00000006 --set use_data_before_expert_parallelism=true $(over 2)
  for run in a b c; do
    assert_equal "$(losses $run)" "$(losses one | tail -n 6)"
    merged $run $run.safetensors
    cmp one.safetensors $run.safetensors
  done
}

@test "steps report the tokens of experts" {
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out run --steps 2 $(over 2)
  run python3 - <<'PY'
import json
steps = [json.loads(line) for line in open("run/metrics.jsonl")]
steps = [s for s in steps if s["type"] == "step"]
assert len(steps) == 2
for s in steps:
    layers = {}
    for name, n in s["expert_tokens"].items():
        layers.setdefault(name.rsplit(".", 1)[0], []).append(n)
    assert set(layers) == {"model.layers.0", "model.layers.2"}, layers
    for tokens in layers.values():
        assert len(tokens) == 8 and sum(tokens) == 2 * s["tokens"], (tokens, s["tokens"])
    loads = [8 * n / sum(t) for t in layers.values() for n in t]
    assert abs(max(loads) - s["experts"]["largest_load"]) < 1e-9
    assert abs(min(loads) - s["experts"]["smallest_load"]) < 1e-9
    assert s["experts"]["unused"] == sum(n == 0 for t in layers.values() for n in t)
    assert s["aux_loss"] > 0
PY
  assert_success
}

@test "ranks that write text have all experts" {
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out run $(over 2)
  one=$(ds-train cfg.json --resume run --generate "The " --max-tokens 12)
  # shellcheck disable=SC2046
  two=$(ds-launch -n 2 ds-train cfg.json --resume run --generate "The " --max-tokens 12 $(over 2))
  assert_equal "$two" "$one"
}

@test "memory of experts over ranks is predicted, and what does not fit is refused" {
  run --separate-stderr ds-memreport cfg.json -n 2 --set expert_parallel.enabled=true --set expert_parallel.autoep_size=2
  assert_success
  [[ $output == *"of which a token uses"*"2 ranks (dp 2, ep 2)"* ]] || fail "$output"
  [[ $output == *"ep.all_to_allv"*", if all experts get as many tokens"* ]] || fail "$output"
  run -2 --separate-stderr ds-launch -n 3 ds-train cfg.json --out refused --set expert_parallel.enabled=true \
    --set expert_parallel.autoep_size=3 --set train_batch_size=6
  [[ $stderr == *"the model's 8 experts cannot be shared by 3 ranks"* ]] || fail "$stderr"
  assert [ ! -e refused ]
}
