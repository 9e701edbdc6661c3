#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-train as a user runs it: real ranks, real files, real kills.

bats_require_minimum_version 1.5.0

load tiny

@test "train, metrics, checkpoint, evaluation, generation" {
  run ds-launch -n 2 ds-train cfg.json --out run
  assert_success
  assert_output --partial "step 12  loss"
  assert_output --partial "checkpoint run/step-00000012"
  assert_equal "$(losses run | wc -l)" 12
  assert_equal "$(cat run/latest)" step-00000012
  run ds-train cfg.json --resume run --eval
  assert_success
  assert_output --regexp "^step 12  val_loss [0-9.]+$"
  run ds-train cfg.json --resume run --generate "The " --max-tokens 30 --seed 7
  assert_success
  first=$output
  run ds-train cfg.json --resume run --generate "The " --max-tokens 30 --seed 7
  assert_equal "$output" "$first"
  run ds-train cfg.json --resume run --generate "The " --max-tokens 100
  assert_failure 2
  assert_output --partial "64 positions"
}

@test "stages, backends and ranks times micro-batches give the same bits" {
  ds-launch -n 2 ds-train cfg.json --out base --quiet
  losses base >want
  merged base want.safetensors
  local n=0
  for variant in ${DS_SLOW:+"2 stage=0" "2 stage=3"} "1 stage=0" "4 stage=1" "4 stage=3" "2 stage=2,communication.backend=mpi" \
    "3 stage=3,train_batch_size=24,train_micro_batch_size_per_gpu=2,gradient_accumulation_steps=4"; do
    n=$((n + 1))
    set=()
    for s in $(echo "${variant#* }" | tr ',' ' '); do
      case $s in stage=*) s=zero_optimization.$s ;; esac
      set+=(--set "$s")
    done
    ds-launch -n "${variant%% *}" ds-train cfg.json --out "v$n" --quiet "${set[@]}"
    [[ $variant == 3* ]] && continue # another batch size: it only has to run
    losses "v$n" >got
    diff want got
    merged "v$n" got.safetensors
    cmp want.safetensors got.safetensors
  done
}

# Bytes of the last step's reduce-scatter, as a run counted or --check --json predicts them.
reduced() { grep -o '"dp.reduce_scatter": *[0-9]*' "$1" | tail -n 1 | grep -o '[0-9]*$'; }

@test "gradients travel in the type that was asked for" {
  for precision in ${DS_SLOW:+fp32 fp16} bf16; do
    on=()
    [[ $precision == fp32 ]] || on=(--set "$precision.enabled=true")
    ds-launch -n 2 ds-train cfg.json --out "$precision" --quiet "${on[@]}"
    for wire in fp32 bf16 bfp16 fp16; do
      name=$precision-$wire
      set=("${on[@]}" --set "communication_data_type=$wire")
      ds-launch -n 2 ds-train cfg.json --check --json "${set[@]}" >"$name.json"
      grep -q "\"communication_data_type\": *\"${wire/bfp/bf}\"" "$name.json"
      ds-launch -n 2 ds-train cfg.json --out "$name" --quiet "${set[@]}"
      assert_equal "$(reduced "$name/metrics.jsonl")" "$(reduced "$name.json")"
      run -0 paste -d " " <(losses "$precision") <(losses "$name")
      assert_equal "$(awk '$4 / $2 > 1 - 4e-3 && $4 / $2 < 1 + 4e-3' <<<"$output" | wc -l)" 12
    done
    diff <(losses "$precision") <(losses "$precision-$precision") # the default
    diff <(losses "$precision-bf16") <(losses "$precision-bfp16")
    assert_equal "$(reduced "$precision-fp32.json")" $((2 * $(reduced "$precision-fp16.json")))
  done
  run -2 --separate-stderr ds-train cfg.json --check --set communication_data_type=fp8
  [[ $stderr == *'communication_data_type: must be one of "fp32", "bf16", "fp16", "int8", "int4"'* ]]
}

@test "a whole run on the least instruction set" {
  ds-launch -n 2 ds-train cfg.json --out best --quiet
  export DS_ISA=avx2
  for n in 1 2; do ds-launch -n "$n" ds-train cfg.json --out "avx2-$n" --quiet; done
  diff <(losses avx2-1) <(losses avx2-2)
  merged avx2-1 1.safetensors
  merged avx2-2 2.safetensors
  cmp 1.safetensors 2.safetensors
  run paste -d " " <(losses best) <(losses avx2-1)
  assert_equal "$(awk 'NF == 4 && $1 == $3 && $4 / $2 > 1 - 1e-4 && $4 / $2 < 1 + 1e-4' <<<"$output" | wc -l)" 12
  run -0 grep '"isa":' avx2-2/step-00000012/manifest.json
  assert_output --partial avx2
  unset DS_ISA
  run -0 ds-train cfg.json --out avx2-2 --steps 13 --resume latest
  if ! grep -q avx2 best/step-00000012/manifest.json; then assert_output --partial "bits may not"; fi
}

@test "a resumed run gives the bits of one that was never interrupted" {
  for precision in '{}' '{"enabled": true}'; do
    rm -rf whole parts
    ds-launch -n 2 ds-train cfg.json --out whole --quiet --set "bf16=$precision"
    ds-launch -n 2 ds-train cfg.json --out parts --quiet --set "bf16=$precision" --steps 5
    ds-launch -n 2 ds-train cfg.json --out parts --quiet --set "bf16=$precision" --resume latest
    diff <(losses whole) <(losses parts)
    merged whole whole.safetensors
    merged parts parts.safetensors
    cmp whole.safetensors parts.safetensors
  done
}

@test "resume at another world size and stage continues the same trace" {
  ds-launch -n 2 ds-train cfg.json --out whole --quiet
  ds-launch -n 2 ds-train cfg.json --out parts --quiet --steps 4
  ds-launch -n 4 ds-train cfg.json --out parts --quiet --steps 8 --resume latest --set zero_optimization.stage=3
  ds-launch -n 1 ds-train cfg.json --out parts --quiet --resume latest --set zero_optimization.stage=0
  diff <(losses whole) <(losses parts)
  merged whole whole.safetensors
  merged parts parts.safetensors
  cmp whole.safetensors parts.safetensors
}

@test "SIGTERM commits a checkpoint, exits 75, and the run goes on" {
  ds-launch -n 2 ds-train cfg.json --out whole --steps 1000 --quiet
  ds-launch -n 2 ds-train cfg.json --out parts --steps 1000 --quiet &
  pid=$!
  until_true 20 steps_at_least parts 20
  kill -TERM $pid
  local status=0
  wait "$pid" || status=$?
  assert_equal "$status" 75
  assert [ -s parts/latest ]
  ds-launch -n 2 ds-train cfg.json --out parts --steps 1000 --quiet --resume latest
  diff <(losses whole) <(losses parts)
}

@test "a rank killed mid-step: no hang, no orphan, the last checkpoint loads" {
  ds-launch -n 2 ds-train cfg.json --out run --steps 100000 --set save.every=10 --set save.keep=2 2>err &
  pid=$!
  until_true 20 test -s run/latest
  kill -9 "$(ranks_here | tail -1)"
  local status=0
  wait "$pid" || status=$?
  assert_equal "$status" 137
  run cat err
  assert_output --partial "SIGKILL"
  sleep 1
  assert_equal "$(ranks_here)" ""
  run ds-train cfg.json --resume run --eval
  assert_success
}

@test "nothing is written by a run that did not start" {
  printf 'x' >tiny.txt
  check() { # exit status, text in the message, arguments of ds-train
    local status=$1 text=$2
    shift 2
    rm -rf out
    run ds-train "$@" --out out
    assert_failure "$status"
    assert_output --partial "$text"
    assert [ ! -e out ]
  }
  check 2 "missing.json" missing.json
  check 2 "did you mean" cfg.json --set zero_optimization.stge=2
  check 2 "zero_optimization.stage" cfg.json --set zero_optimization.stage=4
  check 2 "train_batch_size" cfg.json --set train_batch_size=7
  check 2 "steps" cfg.json --steps 0
  check 2 "nofile.txt" cfg.json --set data.train=nofile.txt
  check 2 "tiny.txt" cfg.json --set data.train=tiny.txt
  mkfifo pipe.txt
  check 2 "data.train: pipe.txt is a pipe" cfg.json --set data.train=pipe.txt
  check 2 "data.train: / is a directory" cfg.json --set data.train=/
  { head -c 100000 /dev/zero && printf '\377\377'; } >tokens.bin
  check 3 "token 65535 at position 50000" cfg.json --set data.train=tokens.bin
  check 2 "vocab" cfg.json --set model.vocab_size=100
  check 2 "positions" cfg.json --set data.seq_length=65
  check 2 "n_head" cfg.json --set model.n_head=3
  check 2 "fp16" cfg.json --set fp16.enabled=true --set bf16.enabled=true
  check 2 "boundary" cfg.json --set reduce_order=boundary
  check 4 "super_offload" cfg.json --set zero_optimization.offload_optimizer.super_offload=true
  check 4 "MuAdam" cfg.json --set optimizer.type=MuAdam
  check 4 "nccl" cfg.json --set communication.backend=nccl
  check 4 "cuda" cfg.json --set device=cuda
  DS_CUDA_PLUGIN=nowhere.so check 4 "nowhere.so (DS_CUDA_PLUGIN)" cfg.json --set device=cuda
  check 4 "GiB" cfg.json --set model.n_embd=65536 --set model.n_head=512 --set model.n_layer=80
  check 2 "--bogus" cfg.json --bogus
  LOCAL_WORLD_SIZE=0 check 2 "LOCAL_WORLD_SIZE 0" cfg.json
  LOCAL_RANK=7 check 2 "LOCAL_RANK 7" cfg.json
  check 2 "no such directory" cfg.json --resume elsewhere
}

@test "wrong directories, data and checkpoints" {
  ds-train cfg.json --out run --quiet --steps 2
  run ds-train cfg.json --out run
  assert_failure 2
  assert_output --partial "--resume latest"
  run ds-train cfg.json --out run --resume latest --set model.n_embd=64
  assert_failure 3
  run ds-train cfg.json --out run --resume latest --set seed=5
  assert_failure 3
  assert_output --partial "seed"
  echo more >>text.txt
  run ds-train cfg.json --out run --resume latest
  assert_failure 3
  assert_output --partial "text.txt"
  cp "$DS_SOURCE/LICENSE" text.txt
  truncate -s -100 run/step-00000002/rank-00000.h5
  run ds-train cfg.json --out run --resume latest
  assert_failure 3
  assert_output --partial "rank-00000.h5"
  echo garbage >run/latest
  run ds-train cfg.json --out run --resume latest
  assert_failure 3
  assert_output --partial "latest"
  run ds-train cfg.json --set save.every=1
  assert_failure 2
  assert_output --partial "--out"
}

@test "a directory in use is refused" {
  ds-train cfg.json --out run --steps 100000 --quiet &
  pid=$!
  until_true 20 test -s run/metrics.jsonl
  for option in --quiet --check; do
    run -2 ds-train cfg.json --out run --resume latest $option
    assert_output --partial "run directory run is in use by another run (process $pid)"
  done
  kill -TERM $pid
  wait $pid || true
}

@test "weights from safetensors under Hugging Face names" {
  ds-train cfg.json --out run --quiet --steps 3
  ds-ckpt-merge run -o model.safetensors --quiet
  want=$(ds-train cfg.json --resume run --eval | sed 's/.*val_loss//')
  run ds-train cfg.json --weights model.safetensors --eval
  assert_success
  assert_output --partial "val_loss$want"
  run ds-train cfg.json --weights model.safetensors --eval --set model.n_layer=1
  assert_failure 3
  assert_output --partial "is not a parameter of the model"

  # Numbers that the model cannot compute with write no text.
  /usr/bin/python3 - <<'PY'
import json, struct
whole = open("model.safetensors", "rb").read()
n = struct.unpack("<Q", whole[:8])[0]
header = json.loads(whole[8:8 + n])
for name, value in (("huge", 1e30), ("nan", float("nan"))):
    data = bytearray(whole)
    for t, row in header.items():
        if t != "__metadata__" and ("mlp" in t or t.startswith("transformer.w")):
            begin, end = (8 + n + o for o in row["data_offsets"])
            data[begin:end] = struct.pack("<f", value) * ((end - begin) // 4)
    open(name + ".safetensors", "wb").write(data)
PY
  run -1 ds-train cfg.json --weights huge.safetensors --generate a --max-tokens 3
  assert_output --regexp "the logits of token 1 are not finite: weights or activations exceed the range of fp32"
  run -1 ds-train cfg.json --weights nan.safetensors --generate a --max-tokens 3
  assert_output --regexp "nan.safetensors: element 0 of .* is nan in fp32"
}

@test "model.path: its weights are found, foreign ones refused, none is said" {
  mkdir model
  cp "$DS_SOURCE/tests/golden/gpt2/config.json" model
  head -c 4000 /dev/zero >zeros.bin # tokens that the small vocabulary has
  tokens=(--set "data.train=zeros.bin" --set data.seq_length=16 --set steps=1)
  for path in model model/config.json; do
    for use in --eval "--generate A --max-tokens 4"; do
      # shellcheck disable=SC2086 # an option and its value
      run ds-train cfg.json --set "model={\"path\": \"$path\"}" "${tokens[@]}" $use
      assert_failure 2
      assert_output --partial "--weights FILE"
    done
  done
  run ds-train cfg.json --set 'model={"path": "model"}' "${tokens[@]}"
  assert_success
  assert_line "ds-train: warning: model.path model has no weights: the model starts from random ones"
  run ds-train cfg.json --set 'model={"path": "model/config.json"}' "${tokens[@]}"
  assert_success
  refute_output --partial "random"

  touch model/model.gguf
  for path in model model/config.json; do
    run ds-train cfg.json --set "model={\"path\": \"$path\"}" "${tokens[@]}" --out run
    assert_failure 4
    assert_output --partial "model.gguf"
    assert [ ! -e run ]
  done
  touch model/pytorch_model.bin
  run ds-train cfg.json --set 'model={"path": "model"}' "${tokens[@]}" --out run
  assert_failure 3
  assert_output --partial "model/pytorch_model.bin: not a file of torch.save"
  assert [ ! -e run ]
  rm model/pytorch_model.bin

  cp "$DS_SOURCE/tests/golden/gpt2/model.safetensors" model
  run ds-train cfg.json --set 'model={"path": "model"}' "${tokens[@]}" --eval
  assert_success
  want=$output
  run ds-train cfg.json --set 'model={"path": "model/config.json"}' "${tokens[@]}" --eval
  assert_output "$want"
  run ds-train cfg.json --weights model/model.safetensors --set 'model={"path": "model/config.json"}' "${tokens[@]}" --eval
  assert_output "$want"
}

@test "what is written does not depend on data.seq_length, whatever the rotary scaling" {
  local base='"type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "initializer_range": 0.6'
  local longrope='"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [3, 5, 7, 9],
    "original_max_position_embeddings": 16'
  for model in "{$base, \"max_position_embeddings\": 64, \"rope_scaling\": {$longrope}}" \
    "{$base, \"max_position_embeddings\": 16, \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 8}}"; do
    rm -rf run
    ds-train cfg.json --set "model=$model" --set data.seq_length=8 --out run --quiet --steps 1
    ds-ckpt-merge run -o model.safetensors --quiet
    for tokens in 4 40; do
      written=()
      for length in 8 40; do
        run -0 ds-train cfg.json --set "model=$model" --set data.seq_length=$length --weights model.safetensors \
          --generate "The words " --max-tokens $tokens --temperature 0
        written+=("$output")
      done
      assert_equal "${written[0]}" "${written[1]}"
    done
  done
}

with_shm() { # bytes, command: with a /dev/shm of that size
  unshare -m bash -c 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && "${@:2}"' bash "$@"
}

@test "a /dev/shm that is too small: auto takes mpi and says so, shm says what it needs" {
  with_shm 1m true || skip "no mount here"
  for stage in ${DS_SLOW:+0} 3; do
    local zero=(--set "zero_optimization.stage=$stage" --set steps=3)
    run -4 --separate-stderr with_shm 100k ds-launch -n 2 ds-train cfg.json --set communication.backend=shm "${zero[@]}"
    [[ $stderr =~ 'communication.backend "shm": 2 ranks of this run share '([0-9]+)' bytes of memory, and /dev/shm has 102400 bytes free' ]]
    local needed=${BASH_REMATCH[1]}
    refute [ -e run ]
    # The size that the message names is enough, to the page.
    run -0 --separate-stderr with_shm "$needed" ds-launch -n 2 ds-train cfg.json -v --out "shm$stage" "${zero[@]}"
    assert_equal "$(grep -c 'communication: shm$' <<<"$stderr")" 1
    run -0 --separate-stderr with_shm $((needed - 4096)) ds-launch -n 2 ds-train cfg.json -v --out "mpi$stage" "${zero[@]}"
    assert_equal "$(grep -c 'communication: mpi$' <<<"$stderr")" 1
    assert_equal "$(grep -c "warning: communication.backend \"auto\" takes mpi, which is slower: .* $needed bytes" <<<"$stderr")" 1
    assert_equal "$(losses "shm$stage")" "$(losses "mpi$stage")"
    assert_equal "$(losses "shm$stage" | wc -l)" 3
  done
  run -0 --separate-stderr unshare -m bash -c 'mount -t tmpfs -o ro tmpfs /dev/shm; ds-launch -n 2 ds-train cfg.json --out ro'
  [[ $stderr == *"takes mpi"*"/dev/shm has 0 bytes free"* ]]
}

@test "--check ends soon with the most micro-batches that are allowed" {
  run -0 timeout 30 ds-train cfg.json --check --set train_batch_size=100000 --set train_micro_batch_size_per_gpu=1
  run -2 ds-train cfg.json --check --set train_batch_size=100001 --set train_micro_batch_size_per_gpu=1
  run -4 ds-train cfg.json --set train_batch_size=20000000 --set train_micro_batch_size_per_gpu=20000000
  assert_output --partial "GiB"
  refute_output --regexp " -[0-9]"
}

@test "--check finds in files and directories what a run would find" {
  ds-train cfg.json --out run --quiet --steps 2
  ds-ckpt-merge run -o model.safetensors --quiet
  check() { # exit code, words, options
    run -"$1" ds-train cfg.json --check --set save.every=0 "${@:3}"
    assert_output --partial "$2"
    assert_output --partial "memory per rank" # the prediction is there all the same
  }
  check 0 "" --out new
  check 0 "" --out run --resume latest
  check 0 "" --weights model.safetensors
  check 2 "nofile" --set data.train=nofile
  check 2 "nodir" --resume nodir
  check 2 "--resume run/latest: not a directory" --resume run/latest
  check 2 "give one" --resume latest
  check 2 "is not empty" --out run
  check 3 "seed" --out run --resume latest --set seed=4
  check 3 "another model: model.n_layer is" --resume run --set model.n_layer=1
  check 3 "does not fit the model" --weights model.safetensors --set model.n_layer=1
  check 2 "Not a directory" --out text.txt/run
  assert [ ! -e new ]
}

@test "--check predicts and writes nothing" {
  run ds-train cfg.json --check --json
  assert_success
  assert_output --partial '"schema": "ds-train/1"'
  assert_output --partial '"memory_bytes"'
  run ls
  refute_output --partial run
}

@test "--eval and --generate need weights and a forward pass: they run where training does not fit, and --check says so" {
  sed 's|"n_embd": 32, "n_layer": 2, "n_head": 2|"n_embd": 576, "n_layer": 8, "n_head": 8|' cfg.json >big.json
  one=(--set train_batch_size=2 --set threads=1)
  ds-train big.json "${one[@]}" --out run --quiet --steps 1
  (
    ulimit -v 600000
    run ds-train big.json "${one[@]}" --quiet --steps 1
    assert_failure 4
    assert_output --partial "address space limit"
    ds-train big.json "${one[@]}" --out run --resume latest --generate The --max-tokens 4 --quiet
    ds-train big.json "${one[@]}" --out run --resume latest --eval --set eval.batches=1 --quiet
  )
  needs() { ds-train big.json "${one[@]}" --check "$@" --quiet --json | sed 's/.*"memory_bytes":{\([^}]*\)}.*/\1/'; }
  [[ $(needs) == *'"optimizer"'* ]]
  for what in --eval "--generate The --max-tokens 4"; do
    # shellcheck disable=SC2086
    [[ $(needs $what) == *'"params"'* ]]
    # shellcheck disable=SC2086
    [[ $(needs $what) != *'"optimizer":'[1-9]* && $(needs $what) != *'"grads":'[1-9]* ]]
  done
  # This holds for any optimizer.
  ds-train big.json "${one[@]}" --set optimizer.type=Lion --out run --resume latest --generate The --max-tokens 4 --quiet
}

@test "what nobody has chosen is stated in one line, at the start and by --check" {
  sed -i 's/"params": {"lr": 3e-3}/"params": {"lr": "auto", "weight_decay": "auto"}/' cfg.json
  line='cfg.json:5:45: optimizer.params.lr: no learning rate is given, and the run takes 0.001 in every step, with neither
    warm-up nor decay; optimizer.params.weight_decay 0.0, gradient_clipping 1.0; give the values that you want'
  line=$(tr -s '\n ' ' ' <<<"$line")
  for option in --check --steps=1; do
    run --separate-stderr ds-launch -n 2 ds-train cfg.json --set gradient_clipping=auto "$option"
    assert_success
    assert_equal "$(grep -c 'the run takes' <<<"$stderr")" 1
    [[ $stderr == *"ds-train: warning: ${line% }"* ]] || fail "$stderr"
  done
  run --separate-stderr ds-train cfg.json --set optimizer.params.lr=1e-3 --set optimizer.params.weight_decay=0 --check
  [[ $stderr != *"the run takes"* ]] || fail "$stderr"
}

@test "micro-batches with other numbers of targets say which key makes them one batch" {
  for i in {1..40}; do
    printf '{"prompt": "p%d", "completion": "%s"}\n' "$i" "$(seq -s '' $((i * 7 % 31 + 1)))"
  done >pairs.jsonl
  pairs=(--set data.train=pairs.jsonl --set data.split=0 --set data.seq_length=16 --steps 1)
  for command in "ds-train cfg.json" "ds-train cfg.json --check" "ds-launch -n 4 ds-train cfg.json --check"; do
    # shellcheck disable=SC2086
    run --separate-stderr $command "${pairs[@]}"
    assert_success
    assert_equal "$(grep -c 'loss_norm "micro": the micro-batches of a step have different numbers of targets .*; loss_norm "token" gives' <<<"$stderr")" 1
    # One batch, or the other mean.
    # shellcheck disable=SC2086
    run --separate-stderr $command "${pairs[@]}" --set loss_norm=token
    [[ $stderr != *'loss_norm "micro"'* ]] || fail "$stderr"
  done
  run --separate-stderr ds-train cfg.json --check "${pairs[@]}" --set train_micro_batch_size_per_gpu=8
  [[ $stderr != *'loss_norm "micro"'* ]] || fail "$stderr"
  run --separate-stderr ds-train cfg.json --check # all tokens are targets
  [[ $stderr != *'loss_norm "micro"'* ]] || fail "$stderr"
}
