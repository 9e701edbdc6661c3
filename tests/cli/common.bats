#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Properties of every tool: help, version, completion, streams, misuse, manual.

bats_require_minimum_version 1.5.0
bats_load_library bats-support
bats_load_library bats-assert
load terminal

setup() {
  tools=()
  for path in "$DS_BIN"/ds-*; do tools+=("${path##*/}"); done
  ((${#tools[@]} > 0))
  cd "$BATS_TEST_TMPDIR"
}

common_options="--help --version --json --output --quiet --verbose --completion"

# The options at the beginnings of lines, as in " -n, --ranks N ...".
leading_options() { sed -nE 's/^ +((-[a-zA-Z0-9], )?--?[a-zA-Z0-9-]+)( .*|$)/\1/p' | tr -d ' ' | tr , '\n' | sort -u; }

# The options of a tool and its commands.
options_of_help() {
  local command
  {
    "$DS_BIN/$1" --help
    for command in $("$DS_BIN/$1" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p'); do
      "$DS_BIN/$1" "$command" --help
    done
  } | sed '/^Examples:/,/^Manual:/d' | leading_options
}

options_of_page() { mandoc -Tascii "$DS_SOURCE/man/$1.1" | sed 's/.\x08//g' | awk '/^[A-Z]/ { on = $1 == "OPTIONS" } on' | leading_options; }

@test "--help: to stdout, status 0, purpose first, with examples and the manual's name" {
  for tool in "${tools[@]}"; do
    run -0 --separate-stderr "$DS_BIN/$tool" --help
    assert_equal "$stderr" ""
    assert_line --index 0 --regexp "^$tool - .+"
    assert_line --index 1 --regexp "^Usage: $tool "
    assert_line "Examples:"
    assert_line --partial "man $tool"
    for option in $common_options; do assert_output --partial -- "$option"; done
    [[ $(awk '{ if (length > m) m = length } END { print m }' <<<"$output") -le 100 ]]
    run -0 "$DS_BIN/$tool" -h
  done
}

@test "--version: name and version first, then compiler and features" {
  for tool in "${tools[@]}"; do
    run -0 --separate-stderr "$DS_BIN/$tool" --version
    assert_line --index 0 --regexp "^$tool [0-9]+\.[0-9]+\.[0-9]+$"
    assert_line --regexp "^compiler: "
    assert_line --regexp "^features: .*mpi.*hdf5"
    assert_equal "$stderr" ""
  done
}

@test "an option that does not exist: status 2, the nearest one, nothing on stdout" {
  for tool in "${tools[@]}"; do
    run -2 --separate-stderr "$DS_BIN/$tool" --verbos
    assert_equal "$output" ""
    [[ $stderr == "$tool: error: unknown option '--verbos'; did you mean '--verbose'?"* ]]
    run -2 --separate-stderr "$DS_BIN/$tool" --zzzzzzzzzz=1
    [[ $stderr == "$tool: error: unknown option '--zzzzzzzzzz'"$'\n'* ]]
  done
}

@test "wrong values and missing values: status 2" {
  for tool in "${tools[@]}"; do
    run -2 "$DS_BIN/$tool" --completion ksh
    run -2 "$DS_BIN/$tool" --output
    assert_output --partial "--output needs a value"
    run -2 "$DS_BIN/$tool" --output a --output b
    assert_output --partial "given more than once"
  done
}

@test "no arguments: status 2 and what is missing" {
  for tool in "${tools[@]}"; do
    run -2 --separate-stderr "$DS_BIN/$tool"
    assert_equal "$output" ""
    [[ $stderr == "$tool: error: "* ]]
  done
}

@test "a message of a rank other than 0 names it" {
  for tool in "${tools[@]}"; do
    RANK=3 run -2 "$DS_BIN/$tool" --no-such-option
    assert_line --index 0 --partial "$tool[3]: error: "
  done
}

@test "no colour off a terminal; on one, unless NO_COLOR is set" {
  tool=${tools[0]}
  run "$DS_BIN/$tool" --no-such-option
  refute_output --partial $'\x1b'
  need_terminal
  run env TERM=xterm NO_COLOR= script -qec "$DS_BIN/$tool --no-such-option" /dev/null </dev/null
  assert_output --partial $'\x1b[1;31merror:'
  run env TERM=xterm NO_COLOR=1 script -qec "$DS_BIN/$tool --no-such-option" /dev/null </dev/null
  refute_output --partial $'\x1b'
}

@test "a full stdout is an error, a closed reader is not" {
  for tool in "${tools[@]}"; do
    run bash -c "'$DS_BIN/$tool' --help >/dev/full"
    assert_failure 1
    assert_output --partial "No space left on device"
    run bash -c "'$DS_BIN/$tool' --help | true; exit \${PIPESTATUS[0]}"
    [[ $status == 0 || $status == 141 ]]
    assert_output ""
  done
}

@test "completion scripts parse and offer every option" {
  for tool in "${tools[@]}"; do
    for shell in bash zsh fish; do
      "$DS_BIN/$tool" --completion $shell >script
      if command -v $shell >/dev/null; then run -0 $shell -n script; fi
      for option in $(options_of_help "$tool"); do
        if [[ $shell == fish ]]; then option="-[ls] $(sed 's/^-*//' <<<"$option")"; fi
        run -0 grep -qE -- "$option\b" script
      done
    done
  done
}

@test "completion offers files for options that name one" {
  "$DS_BIN/ds-train" --completion bash >script
  run -0 grep -E -- "--weights\).*compgen -f" script
}

@test "bash completes options and their values" {
  "$DS_BIN/ds-launch" --completion bash >script
  source ./script
  COMP_WORDS=(ds-launch --dry) COMP_CWORD=1
  _ds_launch
  assert_equal "${COMPREPLY[*]}" --dry-run
  COMP_WORDS=(ds-launch --bind "") COMP_CWORD=2
  _ds_launch
  assert_equal "${COMPREPLY[*]}" "none core"
}

@test "the manual and --help list the same options" {
  for tool in "${tools[@]}"; do
    assert_equal "$tool: $(options_of_page "$tool")" "$tool: $(options_of_help "$tool")"
  done
}

@test "the manual names every instruction set and every signal that saves" {
  DS_ISA=none run -2 "$DS_BIN/ds-train" "$DS_SOURCE/configs/quickstart.json" --check
  isas=$(sed -n 's/.*must be one of //p' <<<"$output" | tr -d ,)
  [[ $isas == auto*onednn* ]]
  section=$(sed -n '/^\.It Ev DS_ISA/,/^\.El/p' "$DS_SOURCE/man/ds-train.1" | tr ' ' '\n')
  for isa in $isas; do grep -qx "$isa" <<<"$section" || fail "$isa"; done
  signals=$(grep -o 'SIG[A-Z0-9]*' <(grep -m1 'for (const int s : {' "$DS_SOURCE/tools/common/stopping.cc"))
  section=$(sed -n '/^\.Sh EXIT STATUS/,/committed/p' "$DS_SOURCE/man/ds-train.1")
  for signal in $signals; do grep -q "$signal" <<<"$section" || fail "$signal"; done
}

@test "manual pages: mandoc has nothing to say, sections stand in order" {
  for page in "$DS_SOURCE"/man/*.[1357]; do
    run -0 mandoc -Tlint -Wwarning "$page"
    assert_output ""
  done
  order="NAME SYNOPSIS DESCRIPTION OPTIONS OUTPUT ENVIRONMENT FILES EXIT_STATUS EXAMPLES COMPATIBILITY SEE_ALSO"
  for tool in "${tools[@]}"; do
    sections=$(sed -n 's/^\.Sh //p' "$DS_SOURCE/man/$tool.1" | tr ' ' _ | tr '\n' ' ')
    expected=
    for section in $order; do [[ " $sections" != *" $section "* ]] || expected+="$section "; done
    assert_equal "$tool: $sections" "$tool: $expected"
    for section in NAME SYNOPSIS DESCRIPTION OPTIONS EXIT_STATUS EXAMPLES SEE_ALSO; do [[ " $sections" == *" $section "* ]]; done
  done
}
