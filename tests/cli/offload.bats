#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Offloading changes no results: from the shell, with real processes and files. Also ds-offload.

bats_require_minimum_version 1.5.0

load tiny

nvme='{"device": "nvme", "nvme_path": "disk"}'

setup() {
  tiny_setup
  mkdir disk
  sed -i 's/"train_batch_size"/"bf16": {"enabled": true}, &/' cfg.json
}

@test "states, gradients and parameters in files: losses and merged states are those of memory" {
  for stage in 1 ${DS_SLOW:+2} 3; do
    rm -rf memory away half
    ds-launch -n 2 ds-train cfg.json --out memory --quiet --set zero_optimization.stage=$stage
    set -- --set zero_optimization.stage=$stage --set zero_optimization.sub_group_size=4096 \
      --set "zero_optimization.offload_optimizer=$nvme" --set zero_optimization.offload_optimizer.gradients=true
    ((stage < 3)) || set -- "$@" --set "zero_optimization.offload_param=$nvme" --set aio.checksum=true
    ds-launch -n 2 ds-train cfg.json --out away --quiet "$@"
    assert_equal "$(losses away)" "$(losses memory)"
    merged memory memory.safetensors
    merged away away.safetensors
    cmp memory.safetensors away.safetensors
    run -0 ds-launch -n 2 ds-train cfg.json --resume away --eval --quiet --set zero_optimization.stage=$stage
    local loss=$output
    run -0 ds-launch -n 2 ds-train cfg.json --resume away --eval --quiet "$@"
    assert_equal "$output" "$loss"
    # On from memory in files, of other ranks; and back.
    ds-launch -n 2 ds-train cfg.json --out half --quiet --steps 4 --set zero_optimization.stage=$stage
    ds-launch -n 4 ds-train cfg.json --out half --quiet --steps 8 --resume latest "$@"
    ds-train cfg.json --out half --quiet --resume latest
    assert_equal "$(losses half)" "$(losses memory)"
  done
  assert_equal "$(ls -A disk)" ""
}

@test "what is in files is predicted, counted and shown, step by step" {
  set -- --set "zero_optimization.offload_optimizer=$nvme" --set zero_optimization.sub_group_size=4096
  run -0 --separate-stderr ds-train cfg.json --check "$@"
  assert_line --regexp '^  master +[0-9.]+ .iB in a file$'
  run -0 --separate-stderr ds-memreport cfg.json "$@"
  assert_line --regexp '^  optimizer +[0-9.]+ .iB in a file of each rank$'
  assert_line --regexp '^  [0-9.]+ .iB read and [0-9.]+ .iB written in a step$'
  ds-offload bench --path disk --size 16MiB --params 0 --loops 1 --block-size 1MiB --queue-depth 4 --json >disk.json
  run -0 --separate-stderr ds-memreport cfg.json --device cpu "$@" --peak 1e9 --bandwidth 1e12 --disk disk.json
  assert_line --regexp '^  files +[0-9.]+ ms  of what is offloaded, exposed$'
  run -2 --separate-stderr ds-memreport cfg.json --device cpu "$@" --peak 1e9 --bandwidth 1e12
  [[ $stderr == *"give --disk FILE"* ]]
  run -2 --separate-stderr ds-memreport cfg.json --device cpu "$@" --peak 1e9 --bandwidth 1e12 --disk cfg.json
  [[ $stderr == *"cfg.json: not a document of ds-offload bench"* ]]
  # On a GPU, copies between it and the host are not part of the time; the report states that.
  run -0 --separate-stderr ds-memreport cfg.json --device cuda --gpu h100 --set zero_optimization.offload_optimizer.device=cpu
  assert_line --partial "without what is copied between the GPU and the host"
  run -0 --separate-stderr ds-memreport cfg.json --device cpu --peak 1e9 --bandwidth 1e12 \
    --set 'zero_optimization.offload_optimizer={"device": "server", "name": "any"}'
  assert_line --regexp '^  optimizer +[0-9.]+ .iB of each rank with the server$'
  refute_line --partial "without what is copied"
  run -0 --separate-stderr ds-train cfg.json --out away "$@"
  assert_line --regexp '^offload: [0-9.]+ .iB read and [0-9.]+ .iB written a step, [0-9.]+ ms waited for, [0-9]+ % hidden \(.+\)$'
  python3 - away/metrics.jsonl <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
steps = [line for line in lines if line["type"] == "step"]
assert len(steps) == 12
for s in steps[1:]:
    assert s["offload"]["read_bytes"] > 0 and s["offload"]["written_bytes"] > 0 and s["offload"]["wait_ms"] >= 0
    assert 0 <= s["offload"]["hidden"] <= 1
    assert "master" not in s["memory_bytes"] and "optimizer" not in s["memory_bytes"]
PYTHON
}

@test "on a CPU, offload to the cpu asks for nothing" {
  ds-train cfg.json --out plain --quiet
  for section in '"offload_optimizer": {"device": "cpu", "pin_memory": true}, "sub_group_size": 1e9' \
    '"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": "auto"}'; do
    sed "s/\"zero_optimization\": {/&$section, /; s/\"stage\": 3, \(.*\)\"stage\": 2, /\"stage\": 3, \1/" cfg.json >cpu.json
    rm -rf cpu
    run -0 --separate-stderr ds-train cpu.json --out cpu
    assert_equal "$stderr" ""
    assert_equal "$(losses cpu)" "$(losses plain)"
  done
  rm -rf cpu
  run -0 --separate-stderr ds-train cfg.json --out cpu --set zero_optimization.cpu_offload=true
  assert_equal "$(grep -c warning <<<"$stderr")" 1
  [[ $stderr == *'zero_optimization.cpu_offload: is deprecated; write zero_optimization.offload_optimizer.device "cpu"'* ]]
  assert_equal "$(losses cpu)" "$(losses plain)"
}

@test "what cannot be offloaded is said before anything is written" {
  refused 2 'offload_optimizer.nvme_path: is missing' --set zero_optimization.offload_optimizer.device=nvme
  refused 2 'stage 0 has all states' --set zero_optimization.stage=0 --set "zero_optimization.offload_optimizer=$nvme"
  refused 2 'ZeRO stage 2 keeps whole parameters' --set "zero_optimization.offload_param=$nvme"
  refused 2 'save.async: copies the state' --set save.async=true --set "zero_optimization.offload_optimizer=$nvme"
  refused 2 'no multiple of 4096' --set aio.block_size=5000 --set "zero_optimization.offload_optimizer=$nvme"
  refused 2 'did you mean "nvme"' --set zero_optimization.offload_optimizer.device=nvm
  for check in "" --check; do
    # shellcheck disable=SC2086
    refused 4 'No such file or directory' --set zero_optimization.offload_optimizer.device=nvme \
      --set zero_optimization.offload_optimizer.nvme_path=nowhere $check
  done
  refused 2 'delayed_update: needs' --set zero_optimization.offload_optimizer.delayed_update=true
  refused 4 'LAMB and Muon' --set optimizer.type=Lamb --set "zero_optimization.offload_optimizer=$nvme" \
    --set zero_optimization.offload_optimizer.delayed_update=true
  run -4 --separate-stderr ds-memreport cfg.json --device cuda \
    --set 'zero_optimization.offload_optimizer={"device": "cpu", "delayed_update": true, "ratio": 0.5}'
  [[ $stderr == *"delayed_update: on a GPU it needs ratio 1"* ]]
  run -4 --separate-stderr ds-memreport cfg.json --device cuda --set pipeline.schedule=breadth-first --set pipeline.virtual_stages=2 \
    --set activation_checkpointing.granularity=layer --set activation_checkpointing.cpu_checkpointing=true
  [[ $stderr == *"what is between chunks stays on the device"* ]]
  refused 4 'Muon looks at all gradients' --set optimizer.type=Muon --set "zero_optimization.offload_optimizer=$nvme" \
    --set zero_optimization.offload_optimizer.gradients=true
  refused 4 'super_offload' --set zero_optimization.offload_optimizer.super_offload=true
}

@test "delayed updates: the same losses wherever states are, on any ranks, and after a kill" {
  set -- --set save.every=5 --set zero_optimization.offload_optimizer.delayed_update=true \
    --set zero_optimization.offload_optimizer.delayed_update_start=3
  ds-train cfg.json --out plain --quiet --set save.every=5
  ds-train cfg.json --out memory --quiet --set zero_optimization.offload_optimizer.device=cpu "$@"
  assert_equal "$(losses memory | head -3)" "$(losses plain | head -3)" # the update of step 3 is the first that is late
  [[ "$(losses memory | sed -n 4p)" != "$(losses plain | sed -n 4p)" ]]
  set -- --set "zero_optimization.offload_optimizer=$nvme" --set zero_optimization.sub_group_size=4096 "$@"
  for ranks in 1 2 4; do
    ds-launch -n "$ranks" ds-train cfg.json --out "file$ranks" --quiet --set zero_optimization.stage=$((ranks == 4 ? 3 : ranks)) "$@"
    assert_equal "$(losses "file$ranks")" "$(losses memory)"
  done
  # Time that a save waits is counted, too, in the step after it.
  ds-train cfg.json --out saves --quiet "$@" --set save.every=1 --set zero_optimization.offload_optimizer.pipeline_read=false
  ds-train cfg.json --out late --quiet "$@" --set zero_optimization.offload_optimizer.pipeline_read=false
  python3 - saves/metrics.jsonl late/metrics.jsonl <<'PYTHON'
import json, sys
steps = [[s for s in map(json.loads, open(f)) if s["type"] == "step"] for f in sys.argv[1:]]
moved = [[s["offload"]["read_bytes"] + s["offload"]["written_bytes"] for s in run[5:]] for run in steps]
assert min(moved[0]) >= min(moved[1]) > 0, moved  # a save leaves other tiles in memory
for s in steps[0] + steps[1]:
    assert s["offload"]["wait_ms"] <= s["step_ms"] and 0 <= s["offload"].get("hidden", 0) <= 1, s
PYTHON
  merged memory memory.safetensors
  merged file4 file.safetensors
  cmp memory.safetensors file.safetensors
  ds-launch -n 2 ds-train cfg.json --out killed --quiet --set steps=100000 "$@" &
  until_true 60 steps_at_least killed 17
  ranks_here | xargs kill -9
  wait || true
  assert_equal "$(ls -A disk)" ""
  steps=$(($(losses killed | wc -l) + 12))
  ds-train cfg.json --out killed --quiet --resume latest --steps "$steps" --set steps=100000 "$@"
  ds-train cfg.json --out whole --quiet --set steps="$steps" "$@"
  assert_equal "$(losses killed | head -n $((steps - 1)))" "$(losses whole | head -n $((steps - 1)))"
}

@test "a run that is killed leaves no file" {
  ds-train cfg.json --out killed --quiet --set steps=100000 --set save.every=10 \
    --set "zero_optimization.offload_optimizer=$nvme" --set "zero_optimization.stage=3" \
    --set "zero_optimization.offload_param=$nvme" &
  until_true 60 steps_at_least killed 30
  ranks_here | xargs kill -9
  wait || true
  assert_equal "$(ls -A disk)" ""
  ds-train cfg.json --out whole --quiet --set steps=40 --set zero_optimization.stage=3
  ds-train cfg.json --out killed --quiet --resume latest --set steps=100000 --steps "$(($(losses killed | wc -l) + 20))" \
    --set zero_optimization.stage=3
  assert_equal "$(losses killed | head -40)" "$(losses whole)"
}

# A run whose N-th write to the disk goes wrong: mode, N, further settings; its status is in $status.
run_broken() {
  local mode=$1 at=$2
  shift 2
  head -c 64 /dev/zero >log
  run --separate-stderr env LD_PRELOAD="$DS_BIN/../lib/libds_crash_shim.so" DS_CRASH_LOG="$PWD/log" \
    DS_CRASH_DIR="$(realpath disk)" DS_CRASH_AT="$at" DS_CRASH_MODE="$mode" DS_CRASH_ERRNO=5 DS_CRASH_RANK=0 \
    ds-launch -n 2 ds-train cfg.json --quiet --set aio.method=threads --set aio.block_size=8192 \
    --set zero_optimization.stage=3 "$@"
}

@test "a disk that fails ends the run with an error, and the checkpoint before is whole" {
  sed -i 's/"steps": 12/"steps": 12, "save": {"every": 2}/' cfg.json
  set -- --set "zero_optimization.offload_optimizer=$nvme" --set zero_optimization.offload_optimizer.buffer_count=1 \
    --set zero_optimization.sub_group_size=4096
  ds-launch -n 2 ds-train cfg.json --out whole --quiet --set zero_optimization.stage=3
  for mode in once sticky; do
    for at in 10 40 300; do
      [[ -n ${DS_SLOW-} || $mode$at == @(once40|sticky10|sticky300) ]] || continue
      rm -rf broken
      run_broken $mode $at --out broken "$@"
      assert_equal "$status" 1
      [[ $stderr == *"disk: cannot write offloaded data: Input/output error"* ]] || fail "$stderr"
      assert_equal "$(ls -A disk)" ""
      ds-launch -n 2 ds-train cfg.json --out broken --quiet --resume latest --set zero_optimization.stage=3
      assert_equal "$(losses broken)" "$(losses whole)"
    done
  done
  # A write that stores half its bytes is continued from there.
  for at in ${DS_SLOW:+10 300} 41; do
    rm -rf broken
    run_broken short $at --out broken "$@"
    assert_equal "$status" 0
    grep -q ' short ' log
    assert_equal "$(losses broken)" "$(losses whole)"
  done
}

@test "inputs of layers in a file: the same losses, and what goes is predicted, counted and shown" {
  ds-train cfg.json --out memory --quiet
  set -- --set activation_checkpointing.nvme_path=disk --set activation_checkpointing.buffer_count=1
  run -0 --separate-stderr ds-train cfg.json --check "$@"
  assert_line --regexp '^    "granularity": "layer",$'
  assert_line --regexp '^  activations +[0-9.]+ .iB in a file$'
  run -0 --separate-stderr ds-train cfg.json --out away "$@"
  assert_equal "$(losses away)" "$(losses memory)"
  assert_line --regexp '^  activations +([0-9.]+ .iB) +\1 in a file$'
  assert_line --regexp '^offload: [0-9.]+ .iB read and [0-9.]+ .iB written a step, [0-9.]+ ms waited for, [0-9]+ % hidden \(.+\)$'
  run -0 --separate-stderr ds-memreport cfg.json "$@" --json
  python3 - away/metrics.jsonl "$output" <<'PYTHON'
import json, sys
group = json.loads(sys.argv[2])["groups"][0]
assert group["file_bytes"]["activations"] > 0, group
for s in map(json.loads, open(sys.argv[1])):
    if s["type"] != "step":
        continue
    assert s["offload"]["read_bytes"] == s["offload"]["written_bytes"] == group["file_read_bytes"] > 0, (s, group)
    assert group["file_written_bytes"] == group["file_read_bytes"] and 0 <= s["offload"]["hidden"] <= 1
PYTHON
  # On ranks of every kind; and data that fits in the buffers is not written.
  ds-launch -n 2 ds-train cfg.json --out tp --quiet --set tensor_parallel.tp_size=2
  ds-launch -n 2 ds-train cfg.json --out cut --quiet --set tensor_parallel.tp_size=2 "$@" \
    --set activation_checkpointing.partition_activations=true
  assert_equal "$(losses cut)" "$(losses tp)"
  ds-launch -n 2 ds-train cfg.json --out pp --quiet --set pipeline.stages=2 "$@"
  assert_equal "$(losses pp)" "$(losses memory)"
  run -0 --separate-stderr ds-train cfg.json --out fits "$@" --set activation_checkpointing.buffer_count=100
  assert_line --partial "all of it fits in its buffers"
  assert_equal "$(ls -A disk)" ""
  refused 2 'nvme_path: excludes activation_checkpointing.cpu_checkpointing' "$@" \
    --set activation_checkpointing.cpu_checkpointing=true
  refused 2 'nvme_path: is about inputs of layers' "$@" --set activation_checkpointing.granularity=selective
  refused 4 'activation_checkpointing.nvme_path: with pipeline.schedule "breadth-first"' "$@" \
    --set pipeline.schedule=breadth-first --set pipeline.virtual_stages=2
  for check in "" --check; do
    # shellcheck disable=SC2086
    refused 4 'activation_checkpointing.nvme_path: nowhere: cannot offload to this directory: No such file' \
      --set activation_checkpointing.nvme_path=nowhere $check
  done
}

@test "inputs of layers and a disk that fails: an error that names it, and no rank waits" {
  ds-launch -n 2 ds-train cfg.json --out whole --quiet --set zero_optimization.stage=3 \
    --set train_micro_batch_size_per_gpu=4
  set -- --set activation_checkpointing.nvme_path=disk --set activation_checkpointing.buffer_count=1
  for mode in once sticky; do
    rm -rf broken
    run_broken $mode 5 --out broken "$@"
    assert_equal "$status" 1
    [[ $stderr == *"disk: cannot write offloaded data: Input/output error"* ]] || fail "$stderr"
    assert_equal "$(ls -A disk)" ""
  done
  # A write that stores half its bytes, two pages here, is continued from there.
  rm -rf broken
  run_broken short 5 --out broken "$@" --set train_micro_batch_size_per_gpu=4
  assert_equal "$status" 0
  grep -q ' short ' log
  assert_equal "$(losses broken)" "$(losses whole)"
}

@test "inputs of layers that are more than the limit of memory leaves wait in a file" {
  slow_only
  cat >long.json <<'JSON'
{"model": {"type": "gpt2", "vocab_size": 256, "n_positions": 128, "n_embd": 32, "n_layer": 150, "n_head": 1},
 "data": {"train": "text.txt", "seq_length": 128}, "bf16": {"enabled": true}, "train_batch_size": 256,
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "activation_checkpointing": {"granularity": "layer"}, "steps": 1}
JSON
  limit=450000 # KiB, of which half is programs and libraries
  (ulimit -v $limit && ds-train long.json --out inside --quiet --set activation_checkpointing.nvme_path=disk)
  (ulimit -v $limit && run -4 ds-train long.json --out memory)
  assert [ ! -e memory ]
  ds-train long.json --out memory --quiet
  assert_equal "$(losses inside)" "$(losses memory)"
}

@test "too little memory may be locked: said, and the numbers are the same" {
  if [[ $(id -u) != 0 ]] || ! setpriv --bounding-set -ipc_lock true 2>/dev/null; then skip "needs to give up a capability"; fi
  ds-train cfg.json --out plain --quiet
  run -0 bash -c 'ulimit -l 64; setpriv --bounding-set -ipc_lock ds-train cfg.json --out locked \
    --set zero_optimization.offload_optimizer.device=nvme --set zero_optimization.offload_optimizer.nvme_path=disk \
    --set zero_optimization.sub_group_size=4096'
  [[ $output == *"without registered memory"* || $output == *" thread"* ]] || fail "$output"
  assert_equal "$(losses locked)" "$(losses plain)"
}

@test "a disk without room is told before the first step" {
  [[ $(id -u) == 0 ]] || skip "needs root, to mount a small file system"
  mkdir small
  mount -t tmpfs -o size=64K tmpfs small || skip "cannot mount here"
  local small='{"device": "nvme", "nvme_path": "small"}'
  run -4 --separate-stderr ds-train cfg.json --out refused --set "zero_optimization.offload_optimizer=$small"
  [[ $stderr == *"small: cannot reserve 420.000 KiB for offloading: No space left on device (64.000 KiB are free)"* ]] || fail "$stderr"
  # The sum of all that is there.
  mount -o remount,size=424K small
  run -4 --separate-stderr ds-train cfg.json --out refused --set "zero_optimization.offload_optimizer=$small" \
    --set activation_checkpointing.nvme_path=small
  [[ $stderr == *"small: cannot reserve 4"*" KiB for offloading: No space left on device (424.000 KiB are free)"* ]] || fail "$stderr"
  umount small
  assert [ ! -e refused ]
}

# DS_SLOW=1: ten times.
@test "a model whose state is more than the limit of memory trains and saves inside it" {
  local layers=12 times=1
  if [[ -n ${DS_SLOW-} ]]; then layers=110 times=10; fi
  cat >big.json <<'JSON'
{"model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 512, "n_layer": 12, "n_head": 8},
 "data": {"train": "text.txt", "seq_length": 64}, "bf16": {"enabled": true}, "train_batch_size": 1,
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "activation_checkpointing": {"granularity": "layer"},
 "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000000,
   "stage3_prefetch_bucket_size": 4000000, "stage3_max_live_parameters": 8000000, "stage3_max_reuse_distance": 0},
 "steps": 2}
JSON
  sed -i "s/\"n_layer\": 12/\"n_layer\": $layers/" big.json
  set -- --set "zero_optimization.offload_optimizer=$nvme" --set zero_optimization.offload_optimizer.gradients=true \
    --set "zero_optimization.offload_param=$nvme" --set zero_optimization.offload_param.buffer_count=2
  limit=560000 # KiB, of which half is programs and libraries
  state=$(ds-train big.json --check --json "$@" | python3 -c 'import json, sys; print(sum(json.load(sys.stdin)["file_bytes"].values()))')
  assert [ "$state" -gt $((times * limit * 1024)) ]
  (ulimit -v $limit && ds-train big.json --out inside --quiet "$@")
  (ulimit -v $limit && run -4 ds-train big.json --out memory)
  assert [ ! -e memory ]
  ds-train big.json --out memory --quiet
  assert_equal "$(losses inside)" "$(losses memory)"
  merged inside inside.safetensors
  merged memory memory.safetensors
  cmp inside.safetensors memory.safetensors
}

@test "a model whose one layer does not fit in the limit of memory trains in tiles inside it" {
  slow_only
  cat >wide.json <<'JSON'
{"model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 1536, "n_layer": 1, "n_head": 12},
 "data": {"train": "text.txt", "seq_length": 32}, "bf16": {"enabled": true}, "train_batch_size": 2,
 "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
 "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1,
   "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
 "steps": 2}
JSON
  set -- --set "zero_optimization.offload_optimizer=$nvme" --set zero_optimization.offload_optimizer.gradients=true \
    --set "zero_optimization.offload_param=$nvme"
  limit=560000 # KiB, of which half is programs and libraries
  (ulimit -v $limit && run -4 ds-train wide.json --out whole "$@")
  assert [ ! -e whole ]
  (ulimit -v $limit && ds-train wide.json --out inside --quiet "$@" --set zero_optimization.stage3_tile_size=300000)
  ds-launch -n 2 ds-train wide.json --out memory --quiet --set zero_optimization.stage3_tile_size=300000
  assert_equal "$(losses inside)" "$(losses memory)"
  merged inside inside.safetensors
  merged memory memory.safetensors
  cmp inside.safetensors memory.safetensors
}

@test "ds-offload bench: files and updates, a section for configurations" {
  run -0 --separate-stderr ds-offload bench --path disk --size 16MiB --block-size 64KiB,1MiB --queue-depth 1,4 --params 100000 --loops 1
  assert_equal "$stderr" ""
  assert_line --regexp '^method +block +depth +read GB/s +write GB/s$'
  assert_equal "$(grep -c '^threads ' <<<"$output")" 4
  assert_line --regexp '^  "aio": \{"method":"(io_uring|threads)","block_size":(65536|1048576),"(queue_depth|intra_op_parallelism)":[14]\}$'
  assert_line --regexp '^AdamW +[0-9.e+]+ +30.00 +[0-9.]+ +[0-9]+ %$'
  assert_line --regexp '^AdamW8bit +[0-9.e+]+ +18.06 '
  sed "s/\"steps\"/$(grep '"aio"' <<<"$output" | tr -d '\n'), &/" cfg.json >tuned.json
  ds-train tuned.json --quiet --steps 2 --out tuned --set "zero_optimization.offload_optimizer=$nvme"
  assert_equal "$(ls -A disk)" ""
  run -0 --separate-stderr ds-offload bench --path disk --size 16MiB --params 1000 --optimizer Lion --loops 1 --json
  python3 -c 'import json, sys; d = json.load(sys.stdin); assert d["schema"] == "ds-offload/1" and d["files"] and d["updates"][0]["optimizer"] == "Lion"' <<<"$output"
  run -2 --separate-stderr ds-offload bench --params 0
  for bad in "--method threads --queue-depth 512" "--block-size 2GiB" "--block-size 5000" "--method aio" "--optimizer Muon" "--queue-depth 0" "--size 1"; do
    # shellcheck disable=SC2086
    run -2 --separate-stderr ds-offload bench --path disk --params 1000 $bad
  done
  run -4 --separate-stderr ds-offload bench --path nowhere --params 0
  run -2 --separate-stderr ds-offload
}
