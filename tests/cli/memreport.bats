#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-memreport as a user meets it: its prediction beside what a run counts, its sources, what it draws and refuses.

bats_require_minimum_version 1.5.0

load tiny

refuses() { # STATUS TEXT ARGUMENTS...
  local status_wanted=$1 text=$2
  shift 2
  run "-$status_wanted" --separate-stderr ds-memreport "$@"
  [[ $stderr == *"$text"* ]] || fail "stderr: $stderr"
  [[ -z $output ]]
}

# The counts of a run, and what is predicted of it, by tag: of rank 0, without what is not predicted.
same_as_counted() { # RUN PREDICTION
  python3 - "$1" "$2" <<'PY'
import json, sys
steps = [json.loads(line) for line in open(sys.argv[1] + "/metrics.jsonl")]
counted = [s for s in steps if s["type"] == "step"][-1]
p = json.load(open(sys.argv[2]))
group = next(g for g in p["groups"] if 0 in g["ranks"])
memory = {tag: n for tag, n in counted["memory_bytes"].items() if tag not in ("comm", "scratch") and n}
assert memory == group["memory_bytes"], (memory, group["memory_bytes"])
sent = {name: c["bytes"] for name, c in group["comm_per_step"].items()}
there = {name: n for name, n in counted["comm_bytes"].items() if name in sent}
assert there == sent, (there, sent)
PY
}

@test "a run counts what was predicted, over stages, tensors and pipelines" {
  local keys
  for keys in zero_optimization.stage=0 zero_optimization.stage=3 tensor_parallel.tp_size=2 \
    "pipeline.stages=2 zero_optimization.stage=1" "bf16.enabled=true activation_checkpointing.granularity=layer"; do
    local set=()
    for key in $keys; do set+=(--set "$key"); done
    rm -rf run
    ds-launch -n 2 ds-train cfg.json --out run --steps 2 --quiet "${set[@]}"
    ds-memreport cfg.json -n 2 --device cpu --json --output p.json "${set[@]}"
    same_as_counted run p.json
    # The checkpoint knows its configuration and ranks.
    ds-memreport run --device cpu --json --output of_run.json
    same_as_counted run of_run.json
  done
}

@test "options stand for keys, and batch sizes follow" {
  ds-memreport cfg.json -n 8 --nodes 2 --tp 2 --pp 2 --stage 1 --micro-batch 4 --accumulation 8 --seq 64 --dtype bf16 \
    --checkpointing selective --json --output p.json
  python3 - <<'PY'
import json
p = json.load(open("p.json"))
assert p["schema"] == "ds-memreport/1" and p["device"] == "cuda"
assert p["mesh"] == {"dp": 2, "pp": 2, "tp": 2, "sp": 1} and p["nodes"] == 2
assert p["tokens_per_step"] == 2 * 4 * 8 * 64
assert sorted(r for g in p["groups"] for r in g["ranks"]) == list(range(8))
PY
  run -0 ds-memreport cfg.json -n 4 --batch 32 --accumulation 2 --json
  assert_line --partial '"tokens_per_step": 1024'
}

@test "a published model, a configuration on standard input" {
  mkdir model
  echo '{"model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}' >model/config.json
  run -0 ds-memreport model --stage 3 -n 2
  assert_line --partial "2 ranks (dp 2) on 1 node; cuda"
  assert_line --partial "buckets"
  run -0 ds-memreport model/config.json --json
  assert_line --partial '"num_params": 37120'
  run -0 ds-memreport - -n 2 <cfg.json
  assert_line --partial "2 ranks"
}

@test "--params is the paper's accounting" {
  run -0 ds-memreport --params 7.5e9 -n 64 --stage 2 --json
  assert_line --partial '"model_states_bytes": 16640625000.0'
  run -0 ds-memreport --params 7.5e9 -n 64 --stage 2
  assert_line --regexp '^> 2 .* 16\.6 '
}

@test "--explain has the numbers in the formulas, --plot draws" {
  run -0 ds-memreport cfg.json --explain
  assert_line --partial "s = 32, b = 2, h = 32, a = 2, L = 2"
  run -0 ds-memreport cfg.json -n 4 --pp 2 --plot - --memory 1MiB
  assert_line --regexp '^\* ranks? .*[|]'
  ds-memreport cfg.json -n 4 --plot p.svg --quiet >report
  [[ $(head -c 4 p.svg) == "<svg" ]]
  ds-memreport cfg.json -n 4 --plot p.html >report
  grep -q '<table' p.html
}

@test "what cannot be is refused, all mistakes at once" {
  refuses 2 "give a configuration"
  refuses 2 "must be an integer, 0 to 3, not 4" cfg.json --set zero_optimization.stage=4
  refuses 2 "tensor_parallel.tp_size" cfg.json -n 3 --tp 3 --set zero_optimisation.stage=2
  [[ $stderr == *"zero_optimization"* ]] # the nearest name of the other mistake
  refuses 2 "do not spread evenly over 3 nodes" cfg.json -n 4 --nodes 3
  refuses 2 "ends in neither .svg nor .html" cfg.json --plot x.png
  refuses 2 "excludes --json" cfg.json --plot - --json
  refuses 1 "nothing.json" nothing.json
  echo '{"train_batch_size": 8}' >no_model.json
  refuses 2 "model: is missing" no_model.json
  mkdir -p zero/global_step1
  echo global_step1 >zero/latest
  : >zero/global_step1/mp_rank_00_model_states.pt
  refuses 4 "does not say which model" zero
}
