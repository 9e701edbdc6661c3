#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-memreport as a user meets it: its prediction beside the counts of a run, its sources, its charts and refusals.

bats_require_minimum_version 1.5.0

load tiny

refuses() { # STATUS TEXT ARGUMENTS...
  local status_wanted=$1 text=$2
  shift 2
  run "-$status_wanted" --separate-stderr ds-memreport "$@"
  [[ $stderr == *"$text"* ]] || fail "stderr: $stderr"
  [[ -z $output ]]
}

# The counts of a run and their prediction, by tag: of rank 0.
same_as_counted() { # RUN PREDICTION
  python3 - "$1" "$2" <<'PY'
import json, sys
steps = [json.loads(line) for line in open(sys.argv[1] + "/metrics.jsonl")]
counted = [s for s in steps if s["type"] == "step"][-1]
p = json.load(open(sys.argv[2]))
group = next(g for g in p["groups"] if 0 in g["ranks"])
memory = {tag: n for tag, n in counted["memory_bytes"].items() if n}
evaluation = 8 * p["world_size"]  # its loss, of after the last step, is a third number to sum
if "comm" in memory:
    assert 0 <= group["memory_bytes"]["comm"] - memory.pop("comm") <= evaluation
    del group["memory_bytes"]["comm"]
assert memory == group["memory_bytes"], (memory, group["memory_bytes"])
sent = {name: c["bytes"] for name, c in group["comm_per_step"].items()}
there = {name: n for name, n in counted["comm_bytes"].items() if name in sent}
assert there == sent, (there, sent)
PY
}

@test "no report replaces a file that the configuration names" {
  cp text.txt before
  refuses 2 "--write: text.txt is an input of this run, by data.train" cfg.json --write text.txt
  refuses 2 "--output: text.txt is an input of this run, by data.train" cfg.json --output text.txt
  ln -s text.txt x.svg
  refuses 2 "--plot: x.svg is an input of this run, by data.train" cfg.json --plot x.svg
  cmp before text.txt
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

@test "so does a model whose key and value heads stand on every rank of tp" {
  cat >heads.json <<'JSON'
{"model": {"type": "llama", "vocab_size": 256, "max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 128},
 "data": {"train": "text.txt", "seq_length": 32}, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
 "tensor_parallel": {"tp_size": 2}}
JSON
  ds-launch -n 2 ds-train heads.json --out run --steps 2 --quiet
  ds-memreport heads.json -n 2 --device cpu --json --output p.json
  same_as_counted run p.json
}

# Compares the counts of each rank of a run with the numbers that it shares with others: these are no less anywhere, and
# no more where no bound is named.
no_rank_counts_more() { # RUN PREDICTION
  python3 - "$1" "$2" <<'PY'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1] + "/metrics.jsonl")]
run, ranks = lines[0], lines[-1]["ranks"]
groups = [(g["ranks"], g["memory_bytes"], g.get("memory_bounds", {})) for g in json.load(open(sys.argv[2]))["groups"]]
stages = [(s["ranks"], s["predicted_bytes"], s.get("bounds", {})) for s in run["stages"]]
for rank in ranks:
    for alike in groups, stages:
        members, most, bounds = next(g for g in alike if rank["rank"] in g[0])
        for tag, n in rank["counted_bytes"].items():
            assert n <= most[tag], (rank["rank"], tag, n, most[tag])
            assert n == most[tag] or bounds.get(tag) == "at most", (rank["rank"], tag, n, most[tag])
for members, most, bounds in groups:
    for tag in most:
        assert tag == "comm" or most[tag] == max(ranks[r]["counted_bytes"].get(tag, 0) for r in members), tag
PY
}

@test "no rank counts more than what is predicted of the ranks that are shown as one" {
  set -- --set 'data.split=0' --set steps=2 --set zero_optimization.stage=3
  local -a diloco=(--set diloco.enabled=true --set diloco.workers=2 --set diloco.sync_every=2)
  local -a coded=(--set optimizer.type=AdamW8bit)
  local -A keys=([diloco]="${diloco[*]}" [coded]="${coded[*]}" [matrices]="--set optimizer.type=Muon --set tensor_parallel.tp_size=2")
  for case in "${!keys[@]}"; do
    read -ra more <<< "${keys[$case]}"
    ds-memreport -n 4 --device cpu cfg.json "$@" "${more[@]}" --json --output "$case.json"
    ds-launch -n 4 ds-train cfg.json "$@" "${more[@]}" --out "$case" --quiet
    no_rank_counts_more "$case" "$case.json"
  done
}

@test "what a backend of several parts keeps is not predicted, on one node too" {
  run -0 ds-memreport cfg.json -n 2 --device cpu
  assert_line --regexp '^ +comm +2[.]'
  run -0 ds-memreport cfg.json -n 2 --device cpu --set communication.backend=shm+mpi
  refute_line --regexp '^ +comm '
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

@test "what a run took stands beside what was predicted, by rank" {
  ds-launch -n 2 ds-train cfg.json --out run --steps 2 --quiet
  run -0 ds-memreport run/metrics.jsonl --all-ranks
  assert_line --regexp '^memory of rank 0 +predicted +counted +difference$'
  assert_line --regexp '^memory of rank 1 '
  assert_line --regexp '^  what is predicted .* exact$'
  refute_line --regexp '^  (params|optimizer|activations|buckets) .* [-+][0-9.]+ %$'
  ds-memreport run/metrics.jsonl --json --output m.json --plot m.svg
  python3 -c 'import json; m = json.load(open("m.json")); assert len(m["ranks"]) == 2 and m["step"] == 2, m
for r in m["ranks"]: assert r["counted_bytes"]["params"] == r["predicted_bytes"]["params"] > 0, r'
  grep -q "rank" m.svg
}

# Tests beside this one have runs, too.
watching() { grep -q '/live (process' seen && grep -q '^memory of rank 1' seen; }

@test "--running shows a run while it trains, --watch until it ends" {
  ds-launch -n 2 ds-train cfg.json --out live --steps 100000 --quiet >log 2>&1 &
  local launched=$!
  until_true 60 some_rank_here
  : >seen
  for _ in {1..100}; do
    ds-memreport --running --all-ranks >seen 2>/dev/null || true
    watching && break
    sleep 0.1
  done
  run -0 cat seen
  assert_line --regexp '/live \(process [0-9]+\): 2 ranks on cpu[^;]*; step [0-9]+ of 100000$'
  assert_line --regexp '^memory of rank 1 '
  run -0 ds-memreport --running live --all-ranks
  assert_line --regexp '/live \(process [0-9]+\): 2 ranks on cpu'
  run -2 --separate-stderr ds-memreport --running .
  [[ $stderr == *"you have no run in progress in ."* ]] || fail "$stderr"
  timeout 60 ds-memreport --watch 0.2 live >watched &
  local watcher=$!
  sleep 1
  kill "$launched"
  wait "$launched" || true
  wait "$watcher"
  [[ $(grep -c "/live (process" watched) -ge 2 ]]
}

@test "times follow from measured rates or data sheets, and are needed to rank" {
  ds-memreport --measure machine.json --quiet
  grep -q '"ds-machine/1"' machine.json
  run -0 ds-memreport cfg.json --device cpu --machine machine.json
  assert_line --regexp '^  step +[0-9.]+ ms$'
  run -0 ds-memreport cfg.json --device cpu --machine machine.json --dtype fp16
  assert_line --regexp '^  tokens/s +[0-9.e+]+$'
  run -0 ds-memreport cfg.json -n 2 --gpu h100 --json
  assert_line --partial '"tokens_per_s"'
  refuses 2 "nothing is known of links" cfg.json -n 2 --device cpu --machine machine.json
  ds-commbench --ranks 2 --op all_reduce,all_gather,reduce_scatter,sendrecv -b 1K -e 64K -f 8 -n 3 --save links.json --quiet >table
  ds-memreport cfg.json -n 2 --device cpu --machine machine.json --links links.json --json --output p.json
  python3 -c 'import json; t = json.load(open("p.json"))["time"]; assert t["step_s"] > 0 and "dp.reduce_scatter" in t["messages_s"], t'
  refuses 2 "no such document" cfg.json --machine cfg.json || refuses 2 "ds-machine/1" cfg.json --machine cfg.json
  refuses 2 "times need" cfg.json --bandwidth 1e12
  # A peak alone: products take their time, and ops that only move bytes none.
  run -0 --separate-stderr ds-memreport cfg.json --peak 1e12
  [[ $stderr == *"move bytes take no time"* ]]
  local products=$(grep -o "step  *[0-9.]* ms" <<<"$output")
  run -0 --separate-stderr ds-memreport cfg.json --peak 1e12 --bandwidth 1e9
  [[ -z $stderr && $(grep -o "step  *[0-9.]* ms" <<<"$output") != "$products" ]]
}

@test "--fit ranks what fits, --write gives a configuration that trains so" {
  refuses 2 "--fit compares times" cfg.json -n 4 --fit 1GiB
  ds-memreport cfg.json -n 4 --device cpu --gpu h100 --fit 4MiB --json --output f.json --write best.json
  python3 - <<'PY'
import json
f = json.load(open("f.json"))["fit"]
assert f["num_fitting"] >= len(f["fitting"]) > 0
speeds = [a["tokens_per_s"] for a in f["fitting"]]
assert speeds == sorted(speeds, reverse=True)
for a in f["fitting"]:
    assert a["device_bytes"] <= 4 << 20 and a["tp"] * a["pp"] * a["sp"] * a["dp"] == 4
    assert a["micro_batch"] * a["accumulation"] * a["dp"] == 8
PY
  ds-launch -n 4 ds-train best.json --out run --steps 1 --quiet
  ds-memreport best.json -n 4 --device cpu --json --output p.json
  same_as_counted run p.json
  python3 -c 'import json
best = json.load(open("f.json"))["fit"]["fitting"][0]; p = json.load(open("p.json"))
assert max(g["device_bytes"] for g in p["groups"]) == best["device_bytes"], (best, p)'
  run -0 ds-memreport cfg.json -n 4 --gpu h100 --fit 1kib
  assert_line --partial "nothing fits"
  refuses 2 "--plot: nothing fits" cfg.json -n 4 --gpu h100 --fit 1KiB --plot none.svg
  refuses 2 "nothing fits" cfg.json -n 4 --gpu h100 --fit 1KiB --write none.json
  [[ ! -e none.json ]]
}

@test "--fit puts into files of a measured disk what does not fit otherwise" {
  slow_only
  mkdir disk
  ds-offload bench --path disk --size 16MiB --params 0 --loops 1 --block-size 1MiB --queue-depth 4 --json >disk.json
  local -a search=(cfg.json -n 2 --device cpu --peak 1e11 --bandwidth 1e10 --link 1e10 --set zero_optimization.sub_group_size=1024 --most 100000)
  ds-memreport "${search[@]}" --fit 1GiB --disk disk.json --json --output with.json
  python3 - <<'PY'
import json
found = json.load(open("with.json"))["fit"]["fitting"]
assert {a.get("offloaded") for a in found} == {None, "states nvme", "all nvme"}
assert {a["schedule"] for a in found if a.get("offloaded") == "all nvme"} >= {"1f1b", "breadth-first"}
speeds = [a["tokens_per_s"] for a in found]
assert speeds == sorted(speeds, reverse=True)
PY
  local less=1073741824
  while ds-memreport "${search[@]}" --fit "$less" --json --output without.json; do
    less=$(python3 -c 'import json
found = json.load(open("without.json"))["fit"]["fitting"]
assert all("offloaded" not in a for a in found)
print(min((a["device_bytes"] for a in found), default=0) - 1)')
    ((less > 0)) || break
    local enough=$less
  done
  less=$enough
  run -0 ds-memreport "${search[@]}" --fit "$less"
  assert_line --partial "nothing fits"
  ds-memreport "${search[@]}" --fit "$less" --disk disk.json --json --output f.json --write best.json
  ds-launch -n 2 ds-train best.json --out run --steps 1 --quiet
  ds-memreport best.json -n 2 --device cpu --json --output p.json
  same_as_counted run p.json
  python3 -c 'import json, sys
best = json.load(open("f.json"))["fit"]["fitting"][0]; p = json.load(open("p.json"))
assert max(g["device_bytes"] for g in p["groups"]) == best["device_bytes"] <= int(sys.argv[1]), (best, p)' "$less"
  run -0 ds-memreport "${search[@]}" --fit "$less" --disk disk.json
  assert_line --regexp '^  --set zero_optimization.offload_optimizer.device=nvme$'
}

@test "--fit finds what fits where a schedule keeps all micro-batches" {
  local -a as=(cfg.json -n 2 --device cpu --peak 1e11 --bandwidth 1e10 --link 1e10 --set train_batch_size=256
    --set train_micro_batch_size_per_gpu=1 --set pipeline.schedule=breadth-first --set pipeline.virtual_stages=4)
  ds-memreport "${as[@]}" --set zero_optimization.overlap_comm=true --set activation_checkpointing.granularity=layer --json --output layer.json
  local bytes
  bytes=$(python3 -c 'import json; print(max(g["device_bytes"] for g in json.load(open("layer.json"))["groups"]))')
  ds-memreport "${as[@]}" --fit "$bytes" --most 10000 --json --output fit.json
  python3 - "$bytes" <<'PY'
import json, sys
found = json.load(open("fit.json"))["fit"]["fitting"]
assert any(a["schedule"] == "breadth-first" and a["micro_batch"] == 1 and a["checkpointing"] == "layer" and
           a["device_bytes"] == int(sys.argv[1]) for a in found)
PY
}

@test "--fit for GPUs puts into host memory and files what they make room for" {
  slow_only
  mkdir disk
  ds-offload bench --path disk --size 16MiB --params 100000 --loops 1 --block-size 1MiB --queue-depth 4 --json >disk.json
  local -a search=(cfg.json -n 2 --device cuda --set bf16.enabled=true --fit 1GiB --disk disk.json --json --most 100000)
  ds-memreport "${search[@]}" --gpu h100 --output sheet.json
  ds-memreport "${search[@]}" --peak 1e12 --bandwidth 1e12 --link 1e10 --host-link 1e10 --output rates.json
  ds-memreport "${search[@]}" --peak 1e12 --bandwidth 1e12 --link 1e10 --output unknown.json
  python3 - <<'PY'
import json
def found(name):
    return json.load(open(name))["fit"]["fitting"]
for name in "sheet.json", "rates.json":
    assert {a.get("offloaded") for a in found(name)} == {None, "states nvme", "all nvme", "states cpu", "all cpu"}
    host = [a for a in found(name) if a.get("offloaded") == "states cpu"]
    assert all(a["host_bytes"] > 0 for a in host)
assert all("offloaded" not in a for a in found("unknown.json"))
PY
  refuses 2 "times need --machine, --gpu or --peak" cfg.json --host-link 1e10
}

@test "--fit shows on a terminal what it looks at" {
  local -a search=("$DS_SOURCE/configs/gpt2-124m.json" --gpu h100 --fit 80GiB --output fit.txt)
  run -0 env TERM=xterm script -qec "stty cols 100; $(printf '%q ' "$DS_BIN/ds-memreport" "${search[@]}" -n 8 --batch 32)" /dev/null </dev/null
  assert_output --regexp $'\r''arrangements: [0-9]+ of [0-9]+'
  run -0 ds-memreport "${search[@]}" -n 2 --batch 4
  assert_output ""
}

@test "--fit rearranges what cannot be on these ranks, and says why it cannot" {
  slow_only
  refuses 2 "cannot be shared" cfg.json -n 3 --device cpu
  run -0 ds-memreport cfg.json -n 3 --device cpu --gpu h100 --fit 1GiB --write three.json --plot -
  assert_line --partial "as it is: it cannot be"
  assert_line --partial "train_batch_size: 8 cannot be shared"
  assert_line --partial "with the fewest changes it fits so"
  assert_line --partial "the largest model of this width"
  ds-launch -n 3 ds-train three.json --out three --steps 1 --quiet
  ds-memreport cfg.json -n 3 --device cpu --gpu h100 --fit 1GiB --json --output f.json
  python3 -c 'import json; f = json.load(open("f.json"))["fit"]
assert f["present"] is None and len(f["why_not"]) == 1 and f["nearest"]["dp"] * f["nearest"]["pp"] * f["nearest"]["tp"] == 3, f
assert {"1f1b", "zb-h1"} <= {a["schedule"] for a in f["fitting"]}, f'
  # A checkpoint of two ranks knows all three sizes of its batch.
  ds-launch -n 2 ds-train cfg.json --out two --steps 1 --quiet
  run -0 ds-memreport two -n 4 --device cpu --gpu h100 --fit 1GiB
  assert_line --partial "as it is: it cannot be"
  # Every pipeline that is not simulated must be slower than what is listed.
  ds-memreport "$DS_SOURCE/configs/gpt2-124m.json" -n 8 --batch 32 --gpu h100 --fit 80GiB --most 2000 --json --output f.json
  python3 -c 'import json; speeds = [a["tokens_per_s"] for a in json.load(open("f.json"))["fit"]["fitting"]]
assert len(speeds) > 1000 and speeds == sorted(speeds, reverse=True)'
  run -0 ds-memreport cfg.json -n 7 --gpu h100 --fit 1GiB
  assert_line --partial "neither the batch nor the model can be cut"
  refuses 2 "seq_length" cfg.json -n 4 --gpu h100 --fit 1GiB --set data.seq_length=0
}

@test "what cannot be is refused, all mistakes at once" {
  refuses 2 "give one of a configuration"
  refuses 2 "cfg.json is not the directory of a run" cfg.json --running
  refuses 2 "--gpu has no effect with --params" --params 7.5e9 --gpu h100
  refuses 2 "--most requires --fit" cfg.json --most 3
  refuses 2 "--memory needs --plot or --use infer" cfg.json --memory 1GiB
  refuses 2 "do not divide 64 ranks" --params 7.5e9 -n 64 --tp 3
  refuses 2 "would share" --measure m.json -n 100000
  : >metrics.jsonl
  refuses 3 "no line of a run" metrics.jsonl
  refuses 2 "--stage has no effect with what was measured" metrics.jsonl --stage 3
  refuses 2 "must be an integer, 0 to 3, not 4" cfg.json --set zero_optimization.stage=4
  refuses 2 "tensor_parallel.tp_size" cfg.json -n 3 --tp 3 --set zero_optimisation.stage=2
  [[ $stderr == *"zero_optimization"* ]] # the nearest name of the other mistake
  refuses 2 "do not spread evenly over 3 nodes" cfg.json -n 4 --nodes 3
  refuses 2 "give a name that ends in .svg or .html" cfg.json --plot x.png
  refuses 2 "excludes --json" cfg.json --plot - --json
  refuses 1 "nothing.json" nothing.json
  echo '{"train_batch_size": 8}' >no_model.json
  refuses 2 "model: is missing" no_model.json
  echo '{}' >nothing_in_it.json
  refuses 2 "train_batch_size: is missing" nothing_in_it.json
  [[ $stderr == *"model: is missing"* ]]
  mkdir -p empty
  refuses 1 "nor a config.json" empty
  refuses 2 "'80gib6' is not a size" cfg.json --gpu h100 --fit 80gib6
  mkdir -p zero/global_step1
  echo global_step1 >zero/latest
  : >zero/global_step1/mp_rank_00_model_states.pt
  refuses 4 "does not say which model" zero
}

@test "predictions are those that were kept: memory, traffic, ops, times, what fits" {
  local kept=$DS_SOURCE/tests/golden/predictions
  "$kept/make" >predicted.jsonl
  diff "$kept/expected.jsonl" predicted.jsonl | cut -c1-4000 | head -4 >&2
  cmp "$kept/expected.jsonl" predicted.jsonl >&2
}

@test "--use says what an evaluation and a generation need, as ds-train --check does" {
  memory() { python3 -c 'import json, sys; d = json.load(sys.stdin); print(json.dumps(d["memory_bytes"] if "memory_bytes" in d else d["groups"][0]["memory_bytes"], sort_keys=True))'; }
  cat >small.json <<'END'
{"model": {"type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_positions": 64},
 "data": {"train": "text", "validation": "text", "tokenizer": "bytes", "seq_length": 32}, "train_batch_size": 2, "steps": 1}
END
  for i in {1..200}; do echo "some words, and number $i"; done >text
  ds-train small.json --out run --quiet
  eval_memory=$(ds-memreport small.json --use eval --device cpu --json | memory)
  assert_equal "$eval_memory" "$(ds-train small.json --eval --resume run --check --json | memory)"
  ds-train small.json --eval --resume run --check --json | grep -q '"momentary_bytes": 0,'  # it saves nothing
  refute [ "$eval_memory" = "$(ds-memreport small.json --device cpu --json | memory)" ]
  # A run of ds-infer, streamed or not.
  of_check() { python3 -c 'import json, sys; d = json.load(sys.stdin); print({t: m["predicted_bytes"] for t, m in d["memory"].items() if m["predicted_bytes"]}, d["total_bytes"], d["file_bytes"], d["streamed_bytes_per_pass"])'; }
  of_report() { python3 -c 'import json, sys; d = json.load(sys.stdin); print(d["memory_bytes"], d["device_bytes"], d["file_bytes"], d["streamed_bytes_per_pass"])'; }
  for options in "" "--stream . --set zero_optimization.stage3_param_persistence_threshold=0"; do
    # shellcheck disable=SC2086
    infer_memory=$(ds-infer run --check --json --batch 4 --context 50 --chunk 9 $options | of_check)
    # shellcheck disable=SC2086
    assert_equal "$(ds-memreport run --use infer --device cpu --json --batch 4 --context 50 --chunk 9 $options | of_report)" "$infer_memory"
  done
  # What is read, over the disk's rate, times the rate of products, over the FLOPs of a token.
  ds-memreport run --use infer --device cpu --json --stream . --peak 1e12 --disk-rate 1e9 --memory 100MiB \
    --set zero_optimization.stage3_param_persistence_threshold=0 >infer.json
  python3 -c 'import json, math; d = json.load(open("infer.json"))
assert d["read_s"] == d["streamed_bytes_per_pass"] / 1e9, d
assert d["tokens_to_hide"] == math.ceil(d["read_s"] * 1e12 / d["flops_per_token"]), d
assert d["largest_batch"] > 64, d'
  batch=$(python3 -c 'import json; print(json.load(open("infer.json"))["largest_batch"])')
  needs() { ds-infer run --check --json --stream . --set zero_optimization.stage3_param_persistence_threshold=0 --batch "$1" | python3 -c 'import json, sys; d = json.load(sys.stdin); print(d["total_bytes"] + d["process_bytes"])'; }
  assert [ "$(needs "$batch")" -le $((100 << 20)) ]
  assert [ "$(needs $((batch + 1)))" -gt $((100 << 20)) ]
  ds-memreport run --use infer --device cpu --stream . --peak 1e12 --disk-rate 1e9 \
    --set zero_optimization.stage3_param_persistence_threshold=0 >infer.txt
  grep -q "weights are streamed" infer.txt
  run -2 ds-memreport run --use infer --device cpu --stream . --peak 1e12 \
    --set zero_optimization.stage3_param_persistence_threshold=0
  assert_output --partial "give --disk or --disk-rate"
  run -2 ds-memreport run --use infer --device cpu --stream . --peak 1e12 --disk-rate 1e9
  assert_output --partial "nothing is streamed"
  run -2 ds-memreport run --use infer --device cpu --peak 1e12 --bandwidth 1e9 --disk-rate 1e9
  assert_output --partial "have no effect with --use infer without --stream"
  # A pass of decoding: the FLOPs are those of a token for each text, and its time is that of its bytes here.
  ds-memreport run --use infer --device cpu --batch 3 --context 20 --peak 1e12 --bandwidth 1e9 --json >infer.json
  python3 -c 'import json; d = json.load(open("infer.json")); ops = d["decoding"].values()
assert sum(o["flops"] for o in ops) == 3 * d["flops_per_token"], d
assert abs(d["decoding_s"] - sum(o["bytes"] for o in ops) / 1e9) < 1e-12, d
assert d["decoding"]["attention_fwd"]["calls"] in (2, 6), d'
  ds-memreport run --use infer --device cpu --batch 3 --context 20 --peak 1e12 --bandwidth 1e9 >infer.txt
  grep -q "^3 tokens of 3 texts at the end of their context, by op of rank 0" infer.txt
  grep -q "^at least .* s: .* tokens/s" infer.txt
  run -2 ds-memreport run --use infer --device cpu --fit 1GiB --peak 1e12
  run -2 ds-memreport run --context 20
  assert_output --partial "are for --use infer"
  run -2 ds-memreport run --memory 1GiB
  assert_output --partial "--memory needs --plot or --use infer"
  run -2 ds-memreport small.json --use generate --explain
  run -2 ds-memreport small.json --use nothing
}
