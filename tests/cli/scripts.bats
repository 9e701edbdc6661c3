#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The scripts that need no network.

bats_require_minimum_version 1.5.0

setup() {
  bats_load_library bats-support
  bats_load_library bats-assert
}

@test "bootstrap has nothing to do where the tests run" {
  run -0 "$DS_SOURCE/scripts/bootstrap" --dry-run
  assert_output --regexp '^bootstrap: all [0-9]+ packages are installed$'
  run -2 "$DS_SOURCE/scripts/bootstrap" --nonsense
}

@test "bare-path has the commands of bootstrap's packages and of the least system, and no others" {
  local path=$BATS_TEST_TMPDIR/path
  run -0 "$DS_SOURCE/scripts/bare-path" "$path"
  for command in apt-get awk bash bats c++ git h5dump mpicc mpirun pgrep script ssh; do
    [ -x "$path/$command" ] || fail "$command"
  done
  for command in col gawk make sudo; do [ ! -e "$path/$command" ] || fail "$command"; done
  run -2 "$DS_SOURCE/scripts/bare-path"
  mkdir "$BATS_TEST_TMPDIR/full" && touch "$BATS_TEST_TMPDIR/full/file"
  run -2 "$DS_SOURCE/scripts/bare-path" "$BATS_TEST_TMPDIR/full"
  [ -e "$BATS_TEST_TMPDIR/full/file" ]
}

@test "bare-machine says why it makes no machine" {
  local path=$BATS_TEST_TMPDIR/path
  "$DS_SOURCE/scripts/bare-path" "$path"
  rm -f "$path/debootstrap"
  PATH=$path run -77 "$DS_SOURCE/scripts/bare-machine"
  assert_output --regexp '^bare-machine: skipped: (this needs root|there is no debootstrap)$'
  run -2 "$DS_SOURCE/scripts/bare-machine" --root
}

@test "get-text keeps a text that is there" {
  echo mine >"$BATS_TEST_TMPDIR/text"
  run -0 "$DS_SOURCE/scripts/get-text" "$BATS_TEST_TMPDIR/text"
  assert_equal "$(cat "$BATS_TEST_TMPDIR/text")" mine
}

@test "plot-loss draws a falling curve" {
  for step in 1 2 3 4 5 6 7 8; do
    echo "{\"type\":\"step\",\"step\":$step,\"loss\":$((9 - step)).5,\"grad_norm\":1e-3}"
  done >"$BATS_TEST_TMPDIR/metrics.jsonl"
  echo '{"type":"eval","step":8,"val_loss":2.5}' >>"$BATS_TEST_TMPDIR/metrics.jsonl"
  run -0 "$DS_SOURCE/scripts/plot-loss" "$BATS_TEST_TMPDIR/metrics.jsonl"
  assert_line --index 0 --regexp '^ +8\.500 \|o$'
  assert_line --index 17 --regexp '^ +1\.500 \| {71}o$'
  assert_line --index 15 --regexp '^ +2\.324 \|.* x$'
  assert_output --partial 'training loss 8.500 -> 1.500; validation loss 2.500 -> 2.500'
}

@test "plot-loss refuses what it cannot draw" {
  echo '{"type":"event"}' >"$BATS_TEST_TMPDIR/metrics.jsonl"
  run -1 "$DS_SOURCE/scripts/plot-loss" "$BATS_TEST_TMPDIR/metrics.jsonl"
  assert_output --partial 'no steps in'
  run -2 "$DS_SOURCE/scripts/plot-loss"
}

@test "the configurations of the repository are valid" {
  cd "$DS_SOURCE"
  text=$BATS_TEST_TMPDIR/text # long enough for the longest sequences
  for _ in {1..80}; do cat LICENSE; done >"$text"
  for config in configs/*.json configs/gpu/*.json; do
    ranks=2
    [[ $config != *3d* ]] || ranks=8
    run -0 env WORLD_SIZE=$ranks "$DS_BIN/ds-train" "$config" --check --set "data.train=$text"
  done
}

@test "pipeline-experiment: every arrangement has the losses of one rank" {
  run -0 --separate-stderr "$DS_SOURCE/scripts/pipeline-experiment" --build "$DS_BIN/.." --steps 4 --rounds 2 \
    --only 'model parallel, 2|1f1b, 4|data parallel, 2' --set model.hidden_size=32 --set model.intermediate_size=64 \
    --set data.seq_length=16 "$DS_SOURCE/LICENSE"
  [ "$(grep -c 'same bits' <<<"$output")" -eq 4 ]
  assert_output --partial 'within'
  run -2 "$DS_SOURCE/scripts/pipeline-experiment" --steps none
  run -2 "$DS_SOURCE/scripts/pipeline-experiment" --unknown
}
