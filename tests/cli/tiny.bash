# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# A tiny training run in a folder of its own: cfg.json over text.txt.

load waiting

tiny_setup() {
  bats_load_library bats-support
  bats_load_library bats-assert
  PATH=$DS_BIN:$PATH
  export CUDA_VISIBLE_DEVICES=  # runs here are of the CPU, also on a machine with a GPU
  cd "$BATS_TEST_TMPDIR" || exit 1
  cp "$DS_SOURCE/LICENSE" text.txt
  # Two micro-batches in "micro" order: the sums do not depend on how ranks and micro-batches share them.
  cat >cfg.json <<'JSON'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
  "reduce_order": "micro",
  "steps": 12
}
JSON
}
setup() { tiny_setup; }

losses() { grep '"type":"step"' "$1/metrics.jsonl" | sed 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/'; }
merged() { ds-ckpt-merge "$1" -o "$2" --optimizer --quiet; }

teardown() { # processes that a failed test left running
  ranks_here | xargs -r kill -9
}

# Pids of the ranks that run in this folder.
ranks_here() {
  local p
  for p in $(pgrep -x ds-train); do
    [[ $(readlink "/proc/$p/cwd") == "$PWD" ]] && echo "$p"
  done
  true
}

some_rank_here() { [[ -n $(ranks_here) ]]; }
no_rank_here() { [[ -z $(ranks_here) ]]; }

# Runs that ds-train must refuse before anything is written: status text argument...
refused() {
  local status=$1 text=$2
  shift 2
  run "-$status" --separate-stderr ds-train cfg.json --out refused "$@"
  [[ $stderr == *"$text"* ]] || fail "$stderr"
  assert [ ! -e refused ]
}

# A rank that is killed in step 20 or so is named, and none is left: text of the ranks' numbers, then ds-launch's arguments.
killed_rank_is_named() {
  local numbers=$1 launcher status=0
  shift
  ds-launch "$@" 2>err.txt &
  launcher=$!
  until_true 60 steps_at_least run 20
  kill -9 "$(ranks_here | tail -1)"
  wait $launcher || status=$?
  assert [ $status -ne 0 ]
  grep -qE "rank $numbers .* was killed by signal 9" err.txt || fail "$(cat err.txt)"
  until_true 60 no_rank_here
}

steps_at_least() { (($(losses "$1" 2>/dev/null | wc -l) >= $2)); }

# Runs so many ranks, ends the run after a step and resumes it: the losses and the state are those of an uninterrupted
# run, and nothing is reported as lost. Arguments: ranks, step, arguments. Leaves both runs (whole, half), and a copy of
# half from before it resumed (other).
resumes_bit_for_bit() {
  local ranks=$1 step=$2
  shift 2
  rm -rf whole half other
  ds-launch -n "$ranks" ds-train cfg.json --out whole --quiet "$@"
  ds-launch -n "$ranks" ds-train cfg.json --out half --quiet --steps "$step" "$@"
  cp -r half other
  run --separate-stderr ds-launch -n "$ranks" ds-train cfg.json --out half --resume latest "$@"
  assert_success
  # shellcheck disable=SC2154
  [[ $stderr != *"was made by another layout of ranks"* ]] || fail "$stderr"
  assert_equal "$(losses half)" "$(losses whole)"
  merged whole whole.safetensors
  merged half half.safetensors
  cmp whole.safetensors half.safetensors
}
