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
  run --separate-stderr ds-memreport cfg.json -n 2 --set model.output_router_logits=false
  [[ $stderr == *"model.router_aux_loss_coef: has no effect, since output_router_logits is false"* ]] || fail "$stderr"
  run --separate-stderr ds-memreport cfg.json -n 2 --set expert_parallel.enabled=true --set expert_parallel.autoep_size=2
  [[ $output == *"of which a token uses"*"2 ranks (dp 2, ep 2)"* ]] || fail "$output"
  [[ $output == *"ep.all_to_allv"*", if all experts get as many tokens"* ]] || fail "$output"
  run -2 --separate-stderr ds-launch -n 3 ds-train cfg.json --out refused --set expert_parallel.enabled=true \
    --set expert_parallel.autoep_size=3 --set train_batch_size=6
  [[ $stderr == *"the model's 8 experts cannot be shared by 3 ranks"* ]] || fail "$stderr"
  assert [ ! -e refused ]
}

@test "rounds are counted once, however much is computed again" {
  # shellcheck disable=SC2046
  for interval in 1 2; do
    ds-launch -n 2 ds-train cfg.json --out every$interval --steps 2 $(over 2) --set expert_parallel.room=1 \
      --set activation_checkpointing.granularity=layer --set activation_checkpointing.interval=$interval
  done
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out kept --steps 2 $(over 2) --set expert_parallel.room=1
  rounds() { grep -o '"extra_rounds":[0-9]*' "$1/metrics.jsonl"; }
  [[ $(rounds kept) == *:[1-9]* ]] || fail "no layer went in rounds"
  assert_equal "$(rounds every1)" "$(rounds kept)"
  assert_equal "$(rounds every2)" "$(rounds kept)"
  # What is counted is what was predicted, whatever the rows were.
  run -0 python3 - <<'PY'
import json
memory = [line for line in map(json.loads, open("kept/metrics.jsonl")) if line["type"] == "memory"][-1]
for rank in memory["ranks"]:
    assert rank["counted_bytes"] == rank["predicted_bytes"], rank
PY
}

@test "times of experts over ranks follow from loads that a run counted" {
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out run --steps 2 $(over 2)
  # All tokens of the second step go to the last two experts: in the sum of the steps, more than half.
  python3 - <<'PY'
import json
lines = [json.loads(line) for line in open('run/metrics.jsonl')]
for line in lines:
    if line['type'] == 'step' and line['step'] == 2:
        for name in line['expert_tokens']:
            line['expert_tokens'][name] = 10**6 if name.endswith(('.6', '.7')) else 0
open('uneven.jsonl', 'w').writelines(json.dumps(line) + '\n' for line in lines)
PY
  time_of() {
    ds-memreport cfg.json -n 2 --peak 1e12 --bandwidth 1e11 --link 1e10 --json "$@" | python3 -c '
import json, sys
report = json.load(sys.stdin)
print(report.get("expert_loads"), report["time"]["compute_s"])'
  }
  # shellcheck disable=SC2046
  read -r _ even < <(time_of $(over 2))
  # shellcheck disable=SC2046
  read -r how counted < <(time_of $(over 2) --expert-load run)
  # shellcheck disable=SC2046
  read -r _ uneven < <(time_of $(over 2) --expert-load uneven.jsonl)
  assert_equal "$how" measured
  # shellcheck disable=SC2046
  ds-memreport cfg.json -n 2 --json $(over 2) | grep -q '"ep": 2'
  run python3 -c "assert $even <= $counted < $uneven, ($even, $counted, $uneven)"
  assert_success
  # shellcheck disable=SC2046
  run -0 ds-memreport cfg.json -n 2 $(over 2) --expert-load run
  assert_output --partial 'with the measured loads of experts'
  run -0 ds-memreport cfg.json -n 2 --peak 1e12 --bandwidth 1e11 --link 1e10 --fit 1GiB --expert-load run
  assert_output --partial 'fit'

  run -2 ds-memreport cfg.json -n 2 --expert-load run
  assert_output --partial -- '--expert-load has no effect: each rank has all experts'
  # shellcheck disable=SC2046
  run -2 ds-memreport cfg.json -n 2 $(over 2) --set model.num_experts=4 --expert-load run
  assert_output --partial 'run/metrics.jsonl: model.layers.0 has 8 experts, and the model has 4'
  # shellcheck disable=SC2046
  run -2 ds-memreport cfg.json -n 2 $(over 2) --set 'model.mlp_only_layers=[]' --expert-load run
  assert_output --partial 'counts of experts in 2 layers, and the model has 3'
  sed 's/"model.layers.0.3"/"model.layers.0.x"/' run/metrics.jsonl >wrong.jsonl
  # shellcheck disable=SC2046
  run ds-memreport cfg.json -n 2 $(over 2) --expert-load wrong.jsonl
  assert_failure
  assert_output --partial '"x" is no number of an expert'
  run -2 ds-memreport run/metrics.jsonl --expert-load run
  assert_output --partial -- '--expert-load has no effect'
}

@test "DeepSpeed's layers of experts in GPT-2: capacity, noise, names in files" {
  python3 - <<'PY'
import json
c = json.load(open("cfg.json"))
c["model"] = {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 2,
              "moe": {"num_experts": 4, "k": 2, "capacity_factor": 0.75, "min_capacity": 1, "loss_coeff": 0.01}}
json.dump(c, open("cfg.json", "w"))
PY
  ds-train cfg.json --out one
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out two $(over 2)
  assert_equal "$(losses two)" "$(losses one)"
  merged one one.safetensors
  merged two two.safetensors
  cmp one.safetensors two.safetensors
  run python3 - <<'PY'
import json
steps = {run: [json.loads(line) for line in open(f"{run}/metrics.jsonl")] for run in ("one", "two")}
experts = {run: [s["experts"] for s in lines if s["type"] == "step"] for run, lines in steps.items()}
assert len(experts["one"]) == 12
for a, b in zip(experts["one"], experts["two"]):
    assert 0 < a["dropped"] < 0.5, a
    assert 0 < a["entropy"] <= 1.3863, a  # ln 4
    assert all(a[key] == b[key] for key in ("dropped", "entropy", "largest_load", "smallest_load")), (a, b)
PY
  assert_success

  run -0 --separate-stderr ds-ckpt-merge one -o model --format hf
  [[ $stderr == *"transformers has no GPT-2 with experts"* ]] || fail "$stderr"
  python3 - <<'PY'
import json, struct
config = json.load(open("model/config.json"))
assert config["moe"]["num_experts"] == 4 and config["moe"]["capacity_factor"] == 0.75, config
f = open("model/model.safetensors", "rb")
names = set(json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))) - {"__metadata__"}
layer = "transformer.h.1.mlp.deepspeed_moe."
assert layer + "gate.wg.weight" in names, names
for e in range(4):
    for end in ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"):
        assert f"{layer}experts.deepspeed_experts.{e}.{end}" in names, names
assert "transformer.h.0.mlp.c_fc.weight" in names
assert not any("mlp.experts" in n for n in names)
PY
  # Back from there: the same evaluation, and a run with another capacity.
  one=$(ds-train cfg.json --resume one --generate "The " --max-tokens 8)
  assert_equal "$(ds-train cfg.json --set 'model={"path": "model"}' --generate "The " --max-tokens 8)" "$one"
  ds-train cfg.json --out more --resume one/step-00000006 --set model.moe.capacity_factor=4
  [[ $(losses more) != "$(losses one | tail -n 6)" ]] || fail "another capacity changes nothing"
  run -2 --separate-stderr ds-train cfg.json --out refused --set device=cuda --set cuda.graphs=true
  [[ $stderr == *"routers with noise draw other numbers in every step"* ]] || fail "$stderr"
}

@test "the balance loss over all layers works on any stages, that over the global batch on any number of ranks" {
  ds-train cfg.json --out one --set model.moe.loss_over=layers
  merged one one.safetensors
  ds-launch -n 4 ds-train cfg.json --out two --set model.moe.loss_over=layers --set pipeline.stages=2
  assert_equal "$(losses two)" "$(losses one)"
  merged two two.safetensors
  cmp one.safetensors two.safetensors

  # Of two ranks, with two micro-batches in a row each; from the middle to the end with experts over ranks.
  local over=(--set model.moe.loss_over=global_batch)
  ds-launch -n 2 ds-train cfg.json --out all "${over[@]}"
  merged all all.safetensors
  # shellcheck disable=SC2046
  ds-launch -n 4 ds-train cfg.json --out stages --resume all/step-00000006 "${over[@]}" --set pipeline.stages=2 \
    --set communication.backend=mpi $(over 2)
  assert_equal "$(losses stages)" "$(losses all | tail -n 6)"
  merged stages stages.safetensors
  cmp all.safetensors stages.safetensors
  ds-train cfg.json --out alone "${over[@]}"
  [[ $(losses alone) != "$(losses all)" ]] || fail "four micro-batches in a row are as two"
  # Another number of micro-batches in a row is another loss; the loss over a micro-batch does not depend on it.
  local step=all/step-00000006
  run --separate-stderr -0 ds-train cfg.json --out again --resume $step "${over[@]}" --steps 7
  [[ $stderr == *"$step was trained with gradient_accumulation_steps 2, and this run has 4: "*"another loss is minimised; \
gradient_accumulation_steps 2 keeps it"* ]] || fail "$stderr"
  run --separate-stderr -0 ds-train cfg.json --out kept --resume $step "${over[@]}" --steps 7 --set train_batch_size=4
  [[ $stderr != *"another loss is minimised"* ]] || fail "$stderr"
  run --separate-stderr -0 ds-train cfg.json --out micro --resume $step --steps 7
  [[ $stderr != *"another loss is minimised"* ]] || fail "$stderr"
  run --separate-stderr ds-memreport cfg.json -n 2 "${over[@]}"
  [[ $output == *"dp.all_reduce"* ]] || fail "$output"
  # 2 sparse blocks, 2 micro-batches, 4 bytes for each of 8 experts.
  grep -q '"dp.all_reduce":128[,}]' all/metrics.jsonl || fail "$(tail -n 2 all/metrics.jsonl)"
}

@test "residual layers of experts, and layers with different numbers of them" {
  python3 - <<'PY'
import json
c = json.load(open("cfg.json"))
c["model"] = {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 2,
              "moe": {"num_experts": [2, 4], "use_residual": True, "router_dtype": "work", "loss_coeff": 0.01}}
c["bf16"] = {"enabled": True}
json.dump(c, open("cfg.json", "w"))
PY
  ds-train cfg.json --out one
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out two $(over 2)
  ds-launch -n 2 ds-train cfg.json --out stages --set pipeline.stages=2
  merged one one.safetensors
  for run in two stages; do
    assert_equal "$(losses $run)" "$(losses one)"
    merged $run $run.safetensors
    cmp one.safetensors $run.safetensors
  done
  ds-train cfg.json --out other --set model.moe.router_dtype=fp32
  [[ $(losses other) != "$(losses one)" ]] || fail "logits were not rounded"
  run -2 --separate-stderr ds-launch -n 4 ds-train cfg.json --out refused --set expert_parallel.enabled=true \
    --set expert_parallel.autoep_size=4
  [[ $stderr == *"a layer's 2 experts cannot be shared by 4 ranks"* ]] || fail "$stderr"

  ds-ckpt-merge one -o model --format hf --quiet
  python3 - <<'PY'
import json, struct
config = json.load(open("model/config.json"))
assert config["moe"]["num_experts"] == [2, 4] and config["moe"]["use_residual"], config
f = open("model/model.safetensors", "rb")
names = set(json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))) - {"__metadata__"}
for layer, experts in ((1, 2), (3, 4)):
    mlp = f"transformer.h.{layer}.mlp."
    for end in ("mlp.c_fc.weight", "mlp.c_proj.bias", "coefficient.weight", "coefficient.bias"):
        assert mlp + end in names, names
    there = {n.split(".")[7] for n in names if n.startswith(mlp + "deepspeed_moe.experts.")}
    assert there == {str(e) for e in range(experts)}, there
PY
  text=$(ds-train cfg.json --resume one --generate "The " --max-tokens 8)
  assert_equal "$(ds-train cfg.json --set 'model={"path": "model"}' --generate "The " --max-tokens 8)" "$text"
  ds-shard model -o sharded --dp 2 --tp 2 --pp 2 --quiet
  ds-ckpt-merge sharded -o back --format hf --quiet
  cmp model/model.safetensors back/model.safetensors
}

@test "more rows than there is room for end a run only if they are to" {
  local set=(--set expert_parallel.enabled=true --set expert_parallel.autoep_size=4 --set expert_parallel.room=1)
  ds-launch -n 4 ds-train cfg.json --out rounds --quiet "${set[@]}"
  grep -q '"extra_rounds":[1-9]' rounds/metrics.jsonl
  run -4 --separate-stderr ds-launch -n 4 ds-train cfg.json --out ends --quiet "${set[@]}" --set expert_parallel.further_rounds=false
  [[ $stderr == *"rows of tokens go to the experts of one rank, which has room for "*"raise expert_parallel.room"* ]] || fail "$stderr"
}
