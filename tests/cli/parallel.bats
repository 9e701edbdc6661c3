#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Pipeline, tensor and sequence parallelism with real processes: they train like one rank, resume anywhere, and are
# planned.

bats_require_minimum_version 1.5.0

setup() {
  export PATH="$DS_BIN:$PATH"
  cd "$BATS_TEST_TMPDIR" || return
  for i in {1..300}; do echo "line $i of a text that can be learnt, number $((i * 7 % 31))"; done >text.txt
  cat >cfg.json <<'JSON'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "steps": 6,
  "device": "cpu", "threads": 1, "reduce_order": "micro", "save": {"every": 3}
}
JSON
}

losses() { grep -o '"loss":[^,]*' "$1/metrics.jsonl"; }

# near RUN1 RUN2: the losses of the same steps agree to 1e-5.
near() {
  paste <(losses "$1" | cut -d: -f2) <(losses "$2" | cut -d: -f2) |
    awk '{ d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-5 * $1) exit 1 }'
}

@test "stages and schedules give the bits of one rank, over shared memory and MPI" {
  ds-train cfg.json --out one
  ds-launch -n 2 ds-train cfg.json --out two --set pipeline.stages=2
  [ "$(losses one)" = "$(losses two)" ]
  ds-launch -n 4 ds-train cfg.json --out zb --set pipeline.stages=2 --set pipeline.schedule=zb-h1 \
    --set zero_optimization.stage=3 --set communication.backend=mpi
  [ "$(losses one)" = "$(losses zb)" ]
  ds-ckpt-merge one -o one.safetensors
  ds-ckpt-merge zb -o zb.safetensors --verify
  cmp one.safetensors zb.safetensors
}

@test "a V gives the bits of one rank, resumes at other schedules, and is planned" {
  ds-train cfg.json --out one
  v=(--set pipeline.stages=3 --set pipeline.schedule=zb-v)
  ds-launch -n 3 ds-train cfg.json --out v "${v[@]}" --set pipeline.memory_limit=0.67
  [ "$(losses one)" = "$(losses v)" ]
  ds-launch -n 4 ds-train cfg.json --out mpi --set pipeline.stages=2 --set pipeline.schedule=zb-v \
    --set zero_optimization.stage=2 --set communication.backend=mpi
  [ "$(losses one)" = "$(losses mpi)" ]
  for run in one v mpi; do ds-ckpt-merge $run -o $run.safetensors; done
  cmp one.safetensors v.safetensors
  cmp one.safetensors mpi.safetensors
  # From the middle of one to the end of the other.
  ds-launch -n 3 ds-train cfg.json --out a --resume one/step-00000003 "${v[@]}"
  ds-launch -n 2 ds-train cfg.json --out b --resume v/step-00000003 --set pipeline.stages=2
  for run in a b; do
    [ "$(losses one | tail -n 3)" = "$(losses $run)" ]
    ds-ckpt-merge $run -o $run.safetensors
    cmp one.safetensors $run.safetensors
  done
  text=$(ds-train cfg.json --resume one --generate "line 7" --max-tokens 20 --temperature 0)
  run -0 --separate-stderr ds-launch -n 3 ds-train cfg.json --resume v --generate "line 7" --max-tokens 20 --temperature 0 "${v[@]}"
  [ "$output" = "$text" ]
  # Idle until the last stage has its first input: two forward passes of the 8 * 6 that a stage has.
  run -0 --separate-stderr ds-launch -n 3 ds-train cfg.json --check "${v[@]}"
  [[ $output == *"zb-v: 3 stages, 2 chunks each, 8 micro-batches; bubble 4.0 % (formula 4.0 %)"* ]]
}

# record RUN [KEY...]: the steps of a run's metrics, without times and the given keys.
record() {
  python3 - "$@" <<'PY'
import json, sys
gone = {"step_ms", "tokens_per_s", "mfu", "memory_bytes", "time", *sys.argv[2:]}
for line in open(sys.argv[1] + "/metrics.jsonl"):
    entry = json.loads(line)
    if entry.get("type") in ("step", "validation") or entry.get("event") == "skipped":
        print({k: v for k, v in sorted(entry.items()) if k not in gone})
PY
}

@test "post-validated steps leave the record and the checkpoints of steps that wait, undone or not" {
  sed -i 's/"seq_length": 32}/"seq_length": 32, "split": 0.9}, "eval": {"every": 2, "batches": 1}/' cfg.json
  post=(--set pipeline.post_validate=true)
  two=(--set pipeline.stages=2 --set gradient_clipping=0)
  ds-launch -n 2 ds-train cfg.json --out waits "${two[@]}"
  ds-launch -n 2 ds-train cfg.json --out post "${two[@]}" --set pipeline.schedule=zb-h2 "${post[@]}"
  diff <(record waits) <(record post)
  # Overflows and clipping; passes that run again are sent again.
  hard=(--set fp16.enabled=true --set fp16.initial_scale_power=19 --set fp16.loss_scale_window=2
    --set gradient_clipping=1.5 --set steps=10)
  ds-launch -n 4 ds-train cfg.json --out waits16 --set pipeline.stages=2 --set zero_optimization.stage=2 "${hard[@]}"
  ds-launch -n 4 ds-train cfg.json --out post16 --set pipeline.stages=2 --set zero_optimization.stage=2 "${hard[@]}" \
    "${post[@]}"
  grep -q '"skipped":true' post16/metrics.jsonl
  diff <(record waits16 comm_bytes) <(record post16 comm_bytes)
  for run in waits post waits16 post16; do ds-ckpt-merge $run -o $run.safetensors; done
  cmp waits.safetensors post.safetensors
  cmp waits16.safetensors post16.safetensors
  # From the middle of one to the end of the other.
  ds-launch -n 4 ds-train cfg.json --out again --resume waits16/step-00000006 --set pipeline.stages=2 \
    --set zero_optimization.stage=2 "${hard[@]}" "${post[@]}"
  [ "$(losses waits16 | tail -n 4)" = "$(losses again)" ]
  ds-ckpt-merge again -o again.safetensors
  cmp waits16.safetensors again.safetensors
  text=$(ds-train cfg.json --resume waits --generate "line 7" --max-tokens 20 --temperature 0)
  run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --resume post --generate "line 7" --max-tokens 20 \
    --temperature 0 "${two[@]}" --set pipeline.schedule=zb-h2 "${post[@]}"
  [ "$output" = "$text" ]
  run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --check --set pipeline.stages=2 \
    --set pipeline.schedule=zb-h2 "${post[@]}"
  [[ $output == *"zb-h2: 2 stages, 8 micro-batches; bubble 0.0 % (formula 0.0 %)"* ]]
}

@test "a signal finishes a post-validated step, saves it, and the resumed run has the bits of one that went on" {
  post=(--set pipeline.stages=2 --set pipeline.post_validate=true --set steps=40 --set save.every=0
    --set gradient_clipping=1.0)
  ds-launch -n 2 ds-train cfg.json --out whole "${post[@]}"
  ds-launch -n 2 ds-train cfg.json --out stopped "${post[@]}" &
  until [ "$(grep -c '"type":"step"' stopped/metrics.jsonl 2>/dev/null)" -ge 3 ] 2>/dev/null; do sleep 0.05; done
  kill -TERM $!
  wait $! || true
  ds-launch -n 2 ds-train cfg.json --out stopped --resume stopped "${post[@]}"
  [ "$(losses whole)" = "$(losses stopped)" ]
  for run in whole stopped; do ds-ckpt-merge $run -o $run.safetensors; done
  cmp whole.safetensors stopped.safetensors
}

@test "updates that cannot be undone are refused with post-validated steps, and zb-h2 without them" {
  run -2 --separate-stderr ds-launch -n 2 ds-train cfg.json --set pipeline.stages=2 --set pipeline.schedule=zb-h2
  [[ $stderr == *"pipeline.schedule: zb-h2: pipeline.post_validate is false"* ]]
  refused() {
    run -4 --separate-stderr ds-train cfg.json --set pipeline.post_validate=true "${@:2}"
    [[ $stderr == *"pipeline.post_validate: "*"$1"* ]]
  }
  refused "updates of LAMB and Muon overwrite gradients" --set optimizer.type=Lamb
  refused "updates of LAMB and Muon overwrite gradients" --set optimizer.type=Muon
  refused "1-bit optimizers send signs" --set optimizer.type=OneBitAdam --set optimizer.params.freeze_step=2
  refused "a meeting of diloco's workers" --set diloco.enabled=true
  refused 'offload_optimizer.device "nvme" keeps one version' --set zero_optimization.stage=1 \
    --set zero_optimization.offload_optimizer.device=nvme --set zero_optimization.offload_optimizer.nvme_path=.
  refused "delayed_update steps later" --set zero_optimization.stage=1 \
    --set zero_optimization.offload_optimizer.device=cpu --set zero_optimization.offload_optimizer.delayed_update=true
  refused 'offload_param.device "nvme" keeps one version' --set zero_optimization.stage=3 \
    --set zero_optimization.offload_param.device=nvme --set zero_optimization.offload_param.nvme_path=.
  refused "activation_checkpointing.nvme_path is read and written in one order" \
    --set activation_checkpointing.nvme_path=.
}

@test "tensor and sequence parallelism follow one rank, and a checkpoint loads at any arrangement" {
  ds-train cfg.json --out one
  ds-launch -n 4 ds-train cfg.json --out cut --set pipeline.stages=2 --set tensor_parallel.tp_size=2 \
    --set zero_optimization.stage=1
  near one cut
  ds-launch -n 4 ds-train cfg.json --out mpi --set sequence_parallel_size=2 --set tensor_parallel.tp_size=2 \
    --set tensor_parallel.sequence_parallel=true --set communication.backend=mpi --set zero_optimization.stage=2
  near one mpi
  # From the middle of the one to the end of others.
  ds-train cfg.json --out a --resume cut/step-00000003
  ds-launch -n 2 ds-train cfg.json --out b --resume cut/step-00000003 --set sequence_parallel_size=2 \
    --set sequence_parallel_mode=ring
  ds-launch -n 3 ds-train cfg.json --out c --resume mpi/step-00000003 --set pipeline.stages=3 \
    --set activation_checkpointing.granularity=layer
  for run in a b c; do
    [ "$(losses $run | wc -l)" -eq 3 ]
    paste <(losses one | tail -n 3 | cut -d: -f2) <(losses $run | cut -d: -f2) |
      awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-5 * $1) exit 1 }'
  done
  h5dump -H cut/step-00000006/model.h5 | grep -q 'DATASET "transformer.h.0.attn.c_attn.weight"'
  ds-ckpt-merge cut -o cut.safetensors --verify
  ds-launch -n 2 ds-train cfg.json --set tensor_parallel.tp_size=2 --weights cut.safetensors --out on --steps 1
}

@test "evaluation and text from a cut model are those of a whole one" {
  ds-train cfg.json --out one
  whole=$(ds-train cfg.json --resume one --eval)
  for set in pipeline.stages=2 tensor_parallel.tp_size=2 sequence_parallel_size=2; do
    run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --resume one --eval --set "$set"
    awk -v a="${whole##* }" -v b="${output##* }" 'BEGIN { d = a - b; if (d < 0) d = -d; exit d > 2e-6 }'
  done
  text=$(ds-train cfg.json --resume one --generate "line 7" --max-tokens 20 --temperature 0)
  for set in pipeline.stages=2 tensor_parallel.tp_size=2 sequence_parallel_size=2; do
    run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --resume one --generate "line 7" --max-tokens 20 \
      --temperature 0 --set "$set"
    [ "$output" = "$text" ]
  done
}

@test "text is written with the configuration that trains interleaved, and cut rows" {
  ds-train cfg.json --out one
  text=$(ds-train cfg.json --resume one --generate "line 7" --max-tokens 5 --temperature 0)
  run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --resume one --generate "line 7" --max-tokens 5 \
    --temperature 0 --set pipeline.stages=2 --set pipeline.schedule=interleaved --set pipeline.virtual_stages=2
  [ "$output" = "$text" ]
  run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --resume one --generate "line 7" --max-tokens 5 \
    --temperature 0 --set tensor_parallel.tp_size=2 --set tensor_parallel.sequence_parallel=true
  [ "$output" = "$text" ]
}

@test "--check draws the plan, and --plan the picture" {
  run -0 --separate-stderr ds-launch -n 4 ds-train cfg.json --check --set pipeline.stages=2 \
    --set tensor_parallel.tp_size=2 --plan plan.svg
  [[ $output == *"transformer.wte"* && $output == *F0* && $output == *B7* && $output == *"bubble"* ]]
  head -c 5 plan.svg | grep -q '<svg\|<?xml'
  grep -q '</svg>' plan.svg
  run -0 --separate-stderr ds-launch -n 4 ds-train cfg.json --check --set pipeline.stages=4 --json
  python3 - "$output" <<'PY' || false
import json, sys
plan = json.loads(sys.argv[1])
assert [s["ranks"] for s in plan["stages"]] == [[0], [1], [2], [3]], plan["stages"]
assert abs(plan["bubble_fraction"] - 3 / (8 + 3)) < 1e-9, plan["bubble_fraction"]
PY
  chart=$(DS_STDOUT_COLUMNS=50 ds-launch -n 2 ds-train cfg.json --check --set pipeline.stages=2 | sed -n '/^1f1b/,$p')
  [ "$(grep '^    0' <<<"$chart" | tail -1 | wc -L)" -le 50 ]
  run -2 --separate-stderr ds-train cfg.json --plan plan.svg # only with --check
  run -2 --separate-stderr ds-train cfg.json --check --plan cfg.json
  [[ $stderr == *"--plan cfg.json: is also CFG"* ]]
  run -2 --separate-stderr ds-train cfg.json --check --plan both --output both
  [[ $stderr == *"--output both: is also --plan"* ]]
  [ ! -e both ]
  grep -q '"model"' cfg.json
}

@test "a run of many ranks is evaluated and writes text on one" {
  ds-launch -n 4 ds-train cfg.json --out run --set pipeline.stages=2 --set tensor_parallel.tp_size=2 --quiet
  parts=(--set pipeline.stages=2 --set tensor_parallel.tp_size=2 --resume run)
  many=$(ds-launch -n 4 ds-train cfg.json --generate 'line 1' --temperature 0 --max-tokens 20 "${parts[@]}")
  run -0 --separate-stderr ds-train cfg.json --generate 'line 1' --temperature 0 --max-tokens 20 "${parts[@]}"
  [ "$output" = "$many" ]
  [[ $stderr == *"pipeline.stages: pipeline.stages 2 x tensor_parallel.tp_size 2 has no effect"* ]]
  run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --eval "${parts[@]}"
}

@test "a checkpoint of a model that differs where shapes do not tell is refused" {
  ds-train cfg.json --out run --quiet
  run -3 --separate-stderr ds-train cfg.json --resume run --eval --set data.validation=text.txt --set model.n_head=2
  [[ $stderr == *"a checkpoint of another model: model.n_head is 4 there and 2 here"* ]]
  run -3 --separate-stderr ds-train cfg.json --resume run --check --set model.layer_norm_epsilon=0.1
  [[ $stderr == *"model.layer_norm_epsilon"* ]]
  ds-train cfg.json --resume run --check --set model.attn_pdrop=0.1
}

@test "what does not fit is said with the key and what would" {
  run -2 --separate-stderr ds-launch -n 3 ds-train cfg.json --set pipeline.stages=2
  [[ $stderr == *"pipeline.stages: 2 does not divide the 3 ranks that there are; with 2 or 4 ranks it works"* ]]
  run -2 --separate-stderr ds-launch -n 3 ds-train cfg.json --set tensor_parallel.tp_size=3
  [[ $stderr == *"tensor_parallel.tp_size: the model's 4 heads cannot be shared by 3 ranks; 1, 2 or 4 would do"* ]]
  run -2 --separate-stderr ds-launch -n 2 ds-train cfg.json --set sequence_parallel_size=2 --set data.seq_length=31
  [[ $stderr == *"data.seq_length: 31 tokens cannot be cut in 2 parts"*"30 or 32 would do"* ]]
  run -2 --separate-stderr ds-launch -n 7 ds-train cfg.json --set pipeline.stages=7 --set 'train_batch_size=16'
  [[ $stderr == *"7 parts are more than the 6 layers"* ]]
  run -2 --separate-stderr ds-launch -n 2 ds-train cfg.json --set pipeline.stages=2 --set 'pipeline.partition=type:Mamba'
  [[ $stderr == *"--set pipeline.partition=type:Mamba: pipeline.partition: \"Mamba\" matches no layer"*"Gpt2Block"* ]]
  [ "$(grep -c '^ds-train: error' <<<"$stderr")" -eq 1 ]
  run -2 --separate-stderr ds-launch -n 2 ds-train cfg.json --set pipeline.stages=2 \
    --set pipeline.schedule=interleaved --set pipeline.virtual_stages=5
  [[ $stderr == *"pipeline.virtual_stages: 5 on each of 2 stages"*"at most 3 have a layer each"* ]]
  run -2 --separate-stderr ds-launch -n 2 ds-train cfg.json --set pipeline.stages=2 \
    --set pipeline.schedule=interleaved --set pipeline.virtual_stages=9223372036854775807
  [[ $stderr == *"pipeline.virtual_stages"*"must be an integer, 1 to 1024"* ]]
  run -2 --separate-stderr ds-launch -n 3 ds-train cfg.json --set pipeline.stages=3 --set pipeline.schedule=zb-v \
    --set pipeline.memory_limit=0.5 --set pipeline.partition=blocks
  [[ $stderr == *"pipeline.memory_limit: 0.5: pipeline.schedule zb-v of 3 stages takes 0.6667 or more"* ]]
  [[ $stderr == *"pipeline.partition: must be"*'"compute"'* ]]
  run -2 --separate-stderr ds-train cfg.json --set pipeline.stage=2
  [[ $stderr == *"did you mean pipeline.stages?"* ]]
  [ ! -e runs ]
}

@test "ranks with different configurations or data are told, with the key" {
  differ() {
    run -2 --separate-stderr timeout 60 ds-launch -n 2 bash -c '
      own=(); [ "$RANK" = 1 ] && own=(--set "$0")
      exec ds-train cfg.json --set pipeline.stages=2 --set save.every=0 "${own[@]}"' "$1"
  }
  differ gradient_clipping=0.5
  [[ $stderr == *"gradient_clipping is 1.0 on rank 0 and 0.5 on rank 1"* ]]
  differ pipeline.schedule=gpipe
  [[ $stderr == *'pipeline.schedule is "1f1b" on rank 0 and "gpipe" on rank 1'* ]]
  (cat text.txt; echo x) >other.txt
  differ data.train=other.txt
  [[ $stderr == *"data.train"* ]]
  mkdir -p a b
  cp text.txt a
  cp other.txt b/text.txt
  run -2 --separate-stderr timeout 60 ds-launch -n 2 bash -c '
    d=a; [ "$RANK" = 1 ] && d=b; cd "$d"
    exec ds-train ../cfg.json --set pipeline.stages=2 --set save.every=0'
  [[ $stderr == *"data.train: rank 1 reads other data than rank 0"* ]]
}

@test "a rank of a pipeline that dies takes the run with it, named" {
  run ! --separate-stderr timeout 60 ds-launch -n 4 bash -c '
    [ "$RANK" = 2 ] && { sleep 2; kill -9 $$; } &
    exec ds-train cfg.json --set pipeline.stages=2 --set tensor_parallel.tp_size=2 --steps 100000 --set save.every=0'
  [[ $stderr == *"rank 2"*"was killed by signal 9"* ]]
}

@test "no regular expression takes the process down or runs for long" {
  nested=$(printf '(%.0s' {1..5000})Block$(printf ')%.0s' {1..5000})
  for regex in "$nested" '((.*)*)*$x' "$(printf 'a%.0s' {1..100000})"; do
    run -2 --separate-stderr timeout 20 ds-launch -n 2 ds-train cfg.json --check --set pipeline.stages=2 \
      --set "pipeline.partition=type:$regex"
    [[ $stderr == *"pipeline.partition: \""* ]] || fail "$stderr"
    run -2 --separate-stderr timeout 20 ds-shard "$DS_SOURCE/tests/golden/gpt2" -o out --pp 2 --partition "type:$regex"
    [[ $stderr == *"--partition: \""* ]] || fail "$stderr"
  done
  ds-launch -n 2 ds-train cfg.json --check --quiet --set pipeline.stages=2 --set 'pipeline.partition=type:^gpt2b|HEAD'
}
