#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Options, ranks and terminals that make no sense: ds-train reports the mistake once, in words, before anything starts.

bats_require_minimum_version 1.5.0

load terminal
load tiny

setup() {
  tiny_setup
  sed -i 's/"steps": 12/"steps": 2/' cfg.json
}

# refuses STATUS TEXT ARGUMENTS...: with one message on stderr that begins with the tool's name, and nothing on stdout.
refuses() {
  local code=$1 text=$2
  shift 2
  run "-$code" --separate-stderr ds-train "$@"
  assert_equal "$output" ""
  [[ $stderr == "ds-train: error: "*"$text"* ]] || fail "$stderr"
}

@test "an empty value is refused, whatever the option" {
  for option in --weights --out --output --resume --set --generate --completion; do
    refuses 2 "$option" cfg.json "$option" ""
    refuses 2 "$option" cfg.json "$option="
  done
  refuses 2 "CFG is empty" ""
}

@test "numbers have bounds that are said" {
  refuses 2 "--steps: must be an integer, 1 to 1000000000000, not 99999999999999999999" cfg.json --steps 99999999999999999999
  for wrong in 0 -1 1.5 1e3 ten "5 " 0x10; do refuses 2 "--steps: must be an integer" cfg.json --steps "$wrong"; done
  refuses 2 "--max-tokens: must be an integer, 1 to 2147483647" cfg.json --generate x --max-tokens 9999999999
  for wrong in nan inf -0.1 1e999 warm; do
    refuses 2 "--temperature: must be a number, 0 to 1000000, not $wrong" cfg.json --generate x --temperature "$wrong"
  done
  refuses 2 "--top-k: must be" cfg.json --generate x --top-k -1
  refuses 2 "--seed: must be an integer, 0 to 4294967295" cfg.json --generate x --seed 4294967296
  refuses 2 "not 7777777777777777777777777777777777777777..." cfg.json --steps "$(printf '7%.0s' {1..400})"
}

@test "limits of data and of the stack are named before mpirun meets them" {
  ! grep -q '^DS_SANITIZE:[A-Z]*=.' "${DS_BIN%/bin}/CMakeCache.txt" || skip "sanitizers take more data for themselves"
  run -4 --separate-stderr prlimit --data=10000000 ds-launch -n 2 true
  [[ $stderr == "ds-launch: error: the limit of data (ulimit -d) is 9766 KiB, and starting 2 ranks needs "* ]] || fail "$stderr"
  run -4 --separate-stderr prlimit --stack=50000000000 ds-launch -n 2 true
  [[ $stderr == *"the limit of the stack (ulimit -s) is "*"which cannot have so much each: lower it" ]] || fail "$stderr"
  run -4 --separate-stderr prlimit --stack=100000000000 ds-train cfg.json --set threads=2 --out run
  [[ $stderr == *"cannot start thread 2 of 2"*"the limit of the stack (ulimit -s) is "*": lower it" ]] || fail "$stderr"
}

@test "options that would have no effect are refused" {
  for option in "--max-tokens 3" "--temperature 1" "--top-k 1" "--seed 1"; do
    # shellcheck disable=SC2086
    refuses 2 "${option% *} requires --generate" cfg.json $option
  done
  refuses 2 "--generate" cfg.json --generate x --eval
  for what in "--eval" "--generate x"; do
    # shellcheck disable=SC2086
    refuses 2 "--steps" cfg.json $what --steps 3
    # shellcheck disable=SC2086
    refuses 2 "--out excludes ${what% x} without --resume latest" cfg.json $what --out run
    # shellcheck disable=SC2086
    refuses 2 "--out excludes ${what% x} without --resume latest" cfg.json $what --out run --resume run
  done
  local data=(--set data.validation=text.txt)
  ds-train cfg.json "${data[@]}" --out run --quiet
  run -0 ds-train cfg.json "${data[@]}" --eval --out run --resume latest
  run -0 ds-train cfg.json --generate x --max-tokens 2 --out run --resume latest
}

@test "a number that is too small for a double does not become zero" {
  refuses 2 "optimizer.params.lr: the number 1e-400 does not fit a double" cfg.json --set optimizer.params.lr=1e-400
  sed -i 's/3e-3/3e-333/' cfg.json
  refuses 2 "the number 3e-333 does not fit a double" cfg.json
}

@test "data files that are not there are named together, with their keys" {
  refuses 2 "data.train[1]: no file 'no.txt'; data.validation: no file 'gone.txt' (names are relative to the working directory, $PWD)" \
    cfg.json --set 'data.train=["text.txt", "no.txt"]' --set data.validation=gone.txt --out run
  refuses 2 "data.train: no file '$PWD/no.txt'" cfg.json --set data.train="$PWD/no.txt" --out run
  refute_output --partial 'names are relative'
}

@test "initial weights that are not there are a mistake of the command line" {
  refuses 2 "--weights: no.safetensors: No such file or directory" cfg.json --weights no.safetensors
  mkdir empty
  refuses 2 "--weights empty: there is no model.safetensors, no " cfg.json --weights empty --out run
  refuses 2 "--resume empty: there is no checkpoint in this directory" cfg.json --resume empty --out run
}

@test "--output that cannot be written is found out before the run" {
  mkdir sub
  ln -s loop loop
  refuses 2 "--output sub: is a directory" cfg.json --output sub
  refuses 2 "--output no/x: cannot write in" cfg.json --output no/x
  refuses 2 "--output loop: Too many levels" cfg.json --output loop
}

@test "two outputs cannot be one file" {
  refuses 2 "--output x.json: is also --trace" cfg.json --output x.json --trace x.json
  refuses 2 "--output ./x.svg: is also --plan" cfg.json --check --output ./x.svg --plan x.svg
  refuses 2 "--plan x.svg: is also --pattern" cfg.json --check --pattern x.svg --plan x.svg
}

# Most are known before anything is opened: nobody waits for the other end of a pipe.
@test "what a key names and is no file is a mistake of the configuration" {
  mkdir directory
  mkfifo pipe
  ln -s none dangling
  local key file other
  for key in model.path data.train data.validation data.tokenizer sparse_attention.layout cuda.autotune_file; do
    for file in directory pipe /dev/zero dangling; do
      [[ $key != cuda* || $file != dangling ]] || continue # one that is made
      case $key in
        model.path) other='model={"path": "'$file'"}' ;;
        sparse*) other='sparse_attention={"mode": "layout", "block": 16, "layout": "'$file'"}' ;;
        cuda*) other='cuda={"autotune": true, "autotune_file": "'$file'"}' ;;
        *) other=$key=$file ;;
      esac
      run -2 --separate-stderr timeout 20 ds-train cfg.json --set "$other"
      [[ $stderr == *"$file"* ]] || fail "$key $file: $stderr"
      [[ $key == data.[tv]* && $file == dangling || $stderr == *"$key"* ]] || fail "$key $file: $stderr"
    done
  done
}

@test "weights that are a pipe are a mistake of whoever names them" {
  mkfifo pipe.safetensors
  refuses 2 "--weights: pipe.safetensors is a pipe" cfg.json --out run --weights pipe.safetensors
  ds-train cfg.json --out run --quiet
  ds-ckpt-merge run -o hf --format hf --quiet
  rm hf/model.safetensors
  mkfifo hf/model.safetensors
  sed -i 's/"model": {[^}]*}/"model": {"path": "hf"}/' cfg.json
  refuses 2 "model.path: hf/model.safetensors is a pipe" cfg.json --out new --set data.tokenizer=bytes
}

@test "--output follows a link, also one that leads to nothing yet" {
  ln -s result link
  run -0 ds-train cfg.json --check --output link
  assert [ -L link ]
  run -0 grep -c parameters result
}

@test "every mistake of a configuration is a line of its own, said by rank 0 alone" {
  run -2 --separate-stderr ds-train cfg.json --set seed=-3 --set stepz=1
  assert_equal "$(grep -c '^ds-train: error: --set ' <<<"$stderr")" 2
  run -2 --separate-stderr ds-launch -n 2 ds-train cfg.json --set seed=-3
  assert_equal "$(grep -c '^ds-train.*error: ' <<<"$stderr")" 1
  run -4 --separate-stderr ds-launch -n 2 ds-train cfg.json --set torch_autocast.enabled=true
  assert_equal "$(grep -c '^ds-train.*error: ' <<<"$stderr")" 1
}

@test "a file of JSON that is something else is called by its name" {
  cp "$DS_SOURCE/tests/golden/checkpoint-v2/step-00000003/manifest.json" manifest.json
  printf '{"type":"run","step":0,"world_size":1}\n{"step":1,"loss":5.5}\n' >metrics.jsonl
  printf '{"version":"1.0","added_tokens":[],"pre_tokenizer":null,"model":{"type":"BPE"}}' >tokenizer.json
  printf '{"metadata":{},"weight_map":{}}' >index.json
  refuses 2 "manifest.json: is the manifest of a checkpoint's step, not a configuration" manifest.json
  refuses 2 "metrics.jsonl: is the metrics of a run, not a configuration" metrics.jsonl
  refuses 2 "tokenizer.json: is a tokenizer, not a configuration" tokenizer.json
  refuses 2 "index.json: is the index of a model in several safetensors files, not a configuration" index.json
  [[ $stderr != *$'\n'*error* ]]
  run -2 --separate-stderr "$DS_BIN/ds-memreport" tokenizer.json
  [[ $stderr == *"tokenizer.json: is a tokenizer"* ]] || fail "$stderr"
}

@test "a key with a control character is shown escaped, and hides no other mistake" {
  printf '{"a\\u0000b": 1, "c\\nd": 2, "stepz": 3}' >cfg.json
  run -2 --separate-stderr ds-train cfg.json
  [[ $stderr == *'"a\u0000b": unknown key'* && $stderr == *'"c\nd": unknown key'* && $stderr == *'stepz: unknown key'* ]]
  assert_equal "$(tr -d '\0' <<<"$stderr")" "$stderr"
}

@test "standard input has one reader" {
  run -0 ds-train - --check <cfg.json
  run -2 --separate-stderr ds-launch -n 2 ds-train - <cfg.json
  [[ $stderr == "ds-train: error: standard input: only one of 2 ranks can read it; name a file"* ]]
  mkfifo pipe # without a writer, which a rank alone would wait for
  run -2 --separate-stderr timeout 20 ds-launch -n 2 ds-train pipe
  [[ $stderr == "ds-train: error: pipe: only one of 2 ranks can read it; name a file"* ]]
}

@test "mpirun, srun and others alone do not start several independent runs" {
  OMPI_COMM_WORLD_SIZE=2 refuses 2 "start them with ds-launch -n 2" cfg.json
  SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 refuses 2 "srun alone starts 4 independent runs (SLURM_STEP_NUM_TASKS=4)" cfg.json
  PMI_SIZE=3 PMI_RANK=0 refuses 2 "start them with ds-launch -n 3; if that is intended, set WORLD_SIZE=1" cfg.json
  PMIX_RANK=1 refuses 2 "starts several independent runs (PMIX_RANK=1): start them with ds-launch -n N" cfg.json
  SLURM_STEP_NUM_TASKS=2 run -2 "$DS_BIN/ds-commbench" --op barrier
  assert_output --partial "start them with ds-launch -n 2"
  SLURM_STEP_NUM_TASKS=2 run -2 "$DS_BIN/ds-launch" true
  assert_output --partial "srun started several copies of ds-launch (SLURM_STEP_NUM_TASKS=2)"
}

@test "a run alone inside an allocation, several runs on purpose, and ranks of ds-launch are none of these" {
  OMPI_COMM_WORLD_SIZE=1 run -0 ds-train cfg.json --check
  OMPI_COMM_WORLD_SIZE=2 WORLD_SIZE=1 run -0 ds-train cfg.json --check
  SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 run -0 ds-train cfg.json --check
  SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 PMI_SIZE=1 run -0 ds-launch -n 2 ds-train cfg.json
  SLURM_STEP_NUM_TASKS=2 WORLD_SIZE=1 run -0 ds-launch true
}

@test "ranks that the environment alone speaks of are a mistake, and MPI leaves nothing of them" {
  mkdir tmp
  export TMPDIR=$PWD/tmp
  RANK=0 WORLD_SIZE=2 refuses 2 "this is rank 0 of 2, but it was not started by a launcher through which MPI finds the others: start with ds-launch -n 2" cfg.json --quiet
  RANK=0 WORLD_SIZE=2 run -2 "$DS_BIN/ds-commbench" --op all_reduce -b 8 -e 8
  assert_output --partial "start with ds-launch -n 2"
  assert_equal "$(ls -A tmp)" ""
}

@test "ranks that are others to MPI than to the environment are a mistake of the start" {
  RANK=0 LOCAL_RANK=1 WORLD_SIZE=2 refuses 2 "RANK 0 and LOCAL_RANK 1 do not fit WORLD_SIZE 2" cfg.json
  # shellcheck disable=SC2016
  local turned='export RANK=$((1 - RANK)) LOCAL_RANK=$((1 - RANK)); exec "$@" --set communication.backend=mpi'
  run -2 ds-launch -n 2 sh -c "$turned" sh ds-train cfg.json
  assert_line --regexp "this is rank [01] of MPI, and [01] as the environment says: start with ds-launch"
}

@test "a number of threads that is none is told once" {
  OMP_NUM_THREADS=many run -0 --separate-stderr ds-train cfg.json
  assert_equal "$(grep -c 'OMP_NUM_THREADS: "many" is not a number of threads; ignored' <<<"$stderr")" 1
}

@test "a run that keeps nothing says so" {
  run -0 --separate-stderr ds-train cfg.json
  assert_equal "$stderr" "ds-train: warning: no --out: this run keeps neither checkpoints nor metrics"
  run -0 --separate-stderr ds-train cfg.json --out run
  assert_equal "$stderr" ""
}

@test "generation and evaluation ask for no more than they need" {
  cat >small.json <<'JSON'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "scheduler": {"type": "WarmupCosineLR"}, "optimizer": {"type": "AdamW"}
}
JSON
  ds-train cfg.json --out run --quiet
  run -0 ds-train small.json --resume run --generate The --max-tokens 3
  run -0 ds-launch -n 3 ds-train cfg.json --resume run --generate The --max-tokens 3 # no batch of 8 on 3 ranks
  run -2 ds-train small.json --eval
  assert_output --partial "data.train"
  refute_output --partial "steps"
  run -0 ds-train small.json --resume run --eval --set data.train=text.txt --set data.seq_length=32 --set train_batch_size=2
  run -2 ds-train small.json
  assert_output --partial "steps: is missing"
}

@test "a file-size limit is an error with a message" {
  (
    ulimit -f 8
    run -1 --separate-stderr ds-train cfg.json --out run
    [[ $stderr == *"File too large"* ]]
  )
}

@test "address space that ends anywhere is status 4 with a message that names the limit" {
  ! grep -q '^DS_SANITIZE:[A-Z]*=.' "${DS_BIN%/bin}/CMakeCache.txt" || skip "sanitizers take terabytes of addresses"
  local limit refused=0
  for limit in $(seq 40000 2000 110000); do
    run bash -c 'ulimit -v "$1"; ds-train cfg.json --out "run$1" --set threads=2 --quiet || { s=$?; exit $((s == 127 ? 75 : s)); }' _ "$limit"
    case $status in
      0 | 75) ;; # 75: the dynamic linker has failed, with 127
      4)
        assert_output --partial "(ulimit -v)"
        refute_output --partial terminate
        refused=$((refused + 1))
        ;;
      134) # what a library's own constructors throw, before there is anything of ours
        assert_equal "$refused" 0
        ;;
      139) # glibc has no memory for thread-local storage, before there is anything of ours: whatever the command
        assert_equal "$refused" 0
        run bash -c 'ulimit -v "$1"; ds-train --version' _ "$limit"
        assert_equal "$status" 139
        ;;
      *) fail "$limit KiB: status $status: $output" ;;
    esac
  done
  ((refused > 2))
}

on_terminal() { # columns, TERM, command: what it shows
  script -qec "stty cols $1; TERM=$2 $3" /dev/null </dev/null
}

@test "on a terminal the progress line gives way to messages and results" {
  need_terminal
  run on_terminal 100 xterm "ds-train cfg.json --json -v --out run --set steps_per_print=1"
  assert_success
  assert_output --partial $'\x1b[K\r\x1b[Kds-train: step 1/2'
  # Without the cleared lines, whole notes and whole documents are left.
  run sed -e 's/.*\r\x1b\[K//' -e 's/\r$//' <<<"$output"
  assert_equal "$(grep -vcE '^(ds-train: .*|\{"schema".*\})$' <<<"$output")" 0
}

@test "a dumb terminal gets no escapes, a narrow one the time left" {
  need_terminal
  run on_terminal 100 dumb "ds-train cfg.json --out a"
  assert_success
  refute_output --partial $'\x1b'
  run on_terminal 40 xterm "ds-train cfg.json --out b"
  assert_success
  assert_output --partial "ETA 0m00s"
}
