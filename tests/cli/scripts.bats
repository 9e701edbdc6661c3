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

# Writes the metrics of a run of 8 steps: DIRECTORY, the digits of its losses after the point.
metrics() {
  mkdir -p "$1"
  for step in 1 2 3 4 5 6 7 8; do
    echo "{\"type\":\"step\",\"step\":$step,\"loss\":$((9 - step)).$2,\"grad_norm\":null,\"lr\":${step}e-4,\"tokens_per_s\":100$step.5}"
  done >"$1/metrics.jsonl"
  echo '{"type":"eval","step":8,"val_loss":2.5}' >>"$1/metrics.jsonl"
}

@test "plot draws a falling curve" {
  metrics "$BATS_TEST_TMPDIR" 5
  for run in "$BATS_TEST_TMPDIR/metrics.jsonl" "$BATS_TEST_TMPDIR"; do
    run -0 "$DS_SOURCE/scripts/plot" "$run"
    assert_line --index 0 --regexp '^ +8\.500 \|o$'
    assert_line --index 17 --regexp '^ +1\.500 \| {71}o$'
    assert_line --index 15 --regexp '^ +2\.324 \|.* x$'
    assert_line --index 20 'training loss 8.500 -> 1.500; validation loss 2.500 -> 2.500'
    assert_equal "${#lines[@]}" 21
  done
}

@test "plot draws several runs and other curves" {
  cd "$BATS_TEST_TMPDIR"
  metrics one 5
  metrics two 25
  run -0 "$DS_SOURCE/scripts/plot" one two --what loss,lr
  assert_line --index 0 --regexp '^ +8\.500 \|a$'
  assert_line --index 17 --regexp '^ +1\.250 \| {71}b$'
  assert_line 'a: training loss 8.500 -> 1.500; validation loss 2.500 -> 2.500'
  assert_line 'b: training loss 8.250 -> 1.250; validation loss 2.500 -> 2.500'
  assert_line 'b: lr 0.0001 -> 0.0008'
  assert_line --index $((${#lines[@]} - 1)) 'b = two'
  run -1 "$DS_SOURCE/scripts/plot" --what grad_norm one
  assert_output 'plot: no grad_norm to draw'
}

@test "plot draws a run whose name has an equals sign, and says what is not finite" {
  cd "$BATS_TEST_TMPDIR"
  mkdir 'lr=1'
  printf '{"type":"step","step":%s}\n' '1,"loss":2.5' '2,"loss":null' '3,"loss":2' >lr=1/metrics.jsonl
  cp lr=1/metrics.jsonl x=1.jsonl
  for name in 'lr=1' 'x=1.jsonl'; do
    run -0 timeout 20 "$DS_SOURCE/scripts/plot" "$name" </dev/null
    assert_output --partial 'training loss 2.500 -> 2.000'
    assert_output --partial 'the loss of 1 of 3 steps is not finite'
  done
}

@test "plot refuses what it cannot draw" {
  cd "$BATS_TEST_TMPDIR"
  metrics good 5
  echo '{"type":"event"}' >metrics.jsonl
  run -1 "$DS_SOURCE/scripts/plot" good metrics.jsonl
  assert_output 'plot: no steps in metrics.jsonl'
  : >empty.jsonl
  run -1 "$DS_SOURCE/scripts/plot" empty.jsonl good
  assert_output 'plot: no steps in empty.jsonl'
  run -2 "$DS_SOURCE/scripts/plot"
  assert_output --partial 'usage: scripts/plot'
  run -0 "$DS_SOURCE/scripts/plot" --help
  assert_output --partial 'usage: scripts/plot'
  run -2 "$DS_SOURCE/scripts/plot" good none
  assert_output 'plot: none: no such file'
  run -2 "$DS_SOURCE/scripts/plot" --what speed good
  assert_output --partial "no curve 'speed'"
  run -2 "$DS_SOURCE/scripts/plot" --colour good
  assert_output --partial "no option '--colour'"
  run -2 "$DS_SOURCE/scripts/plot" -o loss.pdf good
  assert_output --partial 'pictures are .svg or .png'
  run -2 "$DS_SOURCE/scripts/plot" good -o
  assert_output --partial '-o needs a value'
}

# The program's words are looked at, for it is no package that tests need; where it is there, it draws.
@test "plot has gnuplot draw pictures" {
  cd "$BATS_TEST_TMPDIR"
  metrics one 5
  metrics "it's two" 25
  mkdir bin
  cat >bin/gnuplot <<'SH'
#!/bin/sh
cat >words
sed -n "s/^set output '\(.*\)'$/\1/p" words >name
echo picture >"$(cat name)"
SH
  chmod +x bin/gnuplot
  PATH=$PWD/bin:$PATH run -0 "$DS_SOURCE/scripts/plot" -o curves.svg one "it's two"
  assert_output ''
  assert_equal "$(cat curves.svg)" picture
  assert [ -z "$(find . -name '.plot-*')" ]
  run cat words
  assert_line --partial 'set terminal svg size 900,900' # there is no norm to draw
  assert_line --partial "\$loss_0 using 1:2 with lines lc 1 title 'one', \$val_loss_0 using 1:2 with points"
  assert_line --partial "\$loss_1 using 1:2 with lines lc 2 title 'it''s two'"
  assert_line '8 0.00080000000000000004'
  printf '#!/bin/sh\ncat >/dev/null\nexit 3\n' >bin/gnuplot
  PATH=$PWD/bin:$PATH run -1 "$DS_SOURCE/scripts/plot" -o curves.png one
  assert_output 'plot: gnuplot has failed'
  assert [ ! -e curves.png -a -z "$(find . -name '.plot-*')" ]
  if command -v gnuplot >/dev/null; then
    run -0 "$DS_SOURCE/scripts/plot" -o curves.svg one "it's two"
    grep -q '</svg>' curves.svg
  else
    run -4 "$DS_SOURCE/scripts/plot" -o curves.svg one
    assert_output --partial 'curves.svg: pictures need gnuplot'
  fi
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
