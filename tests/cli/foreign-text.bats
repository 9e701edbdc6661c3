#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Text from elsewhere does not steer a terminal, and files of another kind than asked for are named as what they are.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  sed -i 's/"steps": 12/"steps": 1/' cfg.json
}

esc=$'\x1b' bel=$'\a'
owned="$esc]0;owned$bel"

# says STATUS TEXT COMMAND...: checks the exit status, and that stderr contains TEXT and no control character.
says() {
  local code=$1 text=$2
  shift 2
  run "-$code" --separate-stderr "$@"
  [[ $stderr == *"$text"* ]] || fail "$stderr"
  harmless "$stderr"
}

harmless() { [[ $(tr -d '\n\t' <<<"$1") != *[[:cntrl:]]* ]] || fail "$(cat -v <<<"$1" | head -c 2000)"; }

on_terminal() { script -qec "stty cols 100; $1" /dev/null </dev/null; }

@test "control characters of files are shown, not sent" {
  mkdir tok
  printf '{"model": {"type": "BPE%s"}}' '\u001b]0;owned\u0007' >tok/tokenizer.json
  says 4 'BPE\x1b]0;owned\x07' ds-train cfg.json --set data.tokenizer=tok
  ds-train cfg.json --out run --quiet
  printf '%s' "$owned" >run/latest
  says 0 "run/latest: names '\\x1b]0;owned\\x07', which is not a step" ds-shard show run
  cp cfg.json "$owned.json"
  cp -r run "run$owned"
  says 0 "" ds-train "$owned.json" --out "out$owned"
  assert_line 'checkpoint out\x1b]0;owned\x07/step-00000001'
  harmless "$output"
  says 0 "" ds-shard show --json "run$owned/step-00000001"
  harmless "$output"
  says 2 'cannot be opened' ds-train "no$owned"
  says 2 "unknown option '--\\xff\\u202e'" ds-train $'--\xff\xe2\x80\xae'
}

@test "a line break of a name begins no line" {
  forged=$'x\nds-train: error: forged'
  says 2 'x\nds-train: error: forged: cannot be opened' ds-train "$forged"
  assert_equal "$(grep -c '^ds-train: error: ' <<<"$stderr")" 1
  cp cfg.json "$forged.json"
  run -0 ds-train "$forged.json" --out "$forged.out"
  assert_line --partial 'checkpoint x\nds-train'
}

@test "messages are short, whatever the names in them" {
  python3 -c 'import json; json.dump({"k" * 2**20: 1}, open("long.json", "w"))'
  says 2 "long.json: kkk" ds-train long.json
  [[ ${#stderr} -lt 2500 && $stderr == *" ... (1048"*" bytes) ... "*"unknown key"* ]] || fail "${#stderr}"
}

@test "what ranks say passes as it is; their last lines in our message do not" {
  cat >rank <<'EOS'
[[ $RANK == 1 ]] || { trap 'echo ended >&2; exit 1' TERM; sleep 10 & wait; }
for i in {1..12}; do printf '\033[3%dm%s\n' $((i % 8)) "$(head -c 1000000 /dev/zero | tr '\0' "${i:0:1}")"; done >&2
exit 3
EOS
  run -3 --separate-stderr ds-launch -n 2 --json --output report bash rank
  [[ $stderr == *"$esc[31m"* ]]
  why=$(sed -n '/^ds-launch: error/,$p' <<<"$stderr")
  harmless "$why"
  assert_equal "$(grep -c '^  | \\x1b\[3.m' <<<"$why")" 10
  [[ ${#why} -lt 16000 && $(stat -c %s report) -lt 300000 ]] || fail "${#why} $(stat -c %s report)"
}

@test "generated text is data, but a terminal gets no control characters of it" {
  command -v script >/dev/null || skip "no script(1)"
  ds-train cfg.json --out run --quiet
  # So hot that every byte is as likely as any other.
  generate="ds-train cfg.json --quiet --resume run --generate x --max-tokens 60 --temperature 1000000"
  $generate >text
  [[ $(LC_ALL=C tr -d '\n' <text | LC_ALL=C grep -c '[[:cntrl:]]') -gt 0 ]]
  run on_terminal "$generate"
  assert_success
  shown=${output//$'\r'/}
  harmless "$shown"
  assert_output --partial '\x'
}

@test "every tool says what a file of another kind is, with one status whatever its size" {
  ds-train cfg.json --out run --quiet
  ds-ckpt-merge run -o m.safetensors --quiet
  ds-ckpt-merge run -o m.h5 --quiet
  head -c 20000000 /dev/zero >zeros
  cat m.h5 zeros >large.h5
  for file in m.h5 large.h5; do
    says 2 "is an HDF5 file: give a configuration, the directory or the config.json of a model" ds-memreport $file
    says 2 "is an HDF5 file" ds-train $file
    says 2 "is an HDF5 file" ds-ckpt-merge m.safetensors -o hf --format hf --config $file
    ln -sf $file named.safetensors
    says 3 "named.safetensors: is an HDF5 file, not a safetensors file" ds-shard named.safetensors -o sharded
    ln -sf $file named.pt
    says 3 "named.pt: is an HDF5 file, not a file of torch.save" ds-shard named.pt -o sharded
    ln -sf $file named.jsonl
    says 3 "named.jsonl: is an HDF5 file, not a metrics.jsonl" ds-memreport named.jsonl
    cp $file tokenizer.json
    says 3 "tokenizer.json:1:1: this is an HDF5 file, not JSON" ds-train cfg.json --set data.tokenizer=tokenizer.json
    rm tokenizer.json
  done
  cp m.safetensors named.h5
  says 3 "named.h5: is a safetensors file, not an HDF5 file" ds-ckpt-merge named.h5 -o out.safetensors
  cp "$(command -v ds-train)" elf
  says 2 "elf: is a program or a library: give" ds-memreport elf
  says 4 "elf: is a program or a library; by its name not a supported kind of file" ds-shard elf -o sharded
  says 2 "--resume m.h5: not a directory; a checkpoint is one" ds-train cfg.json --resume m.h5
  head -c 20000000 /dev/urandom | base64 >large.json
  says 2 "at most" ds-memreport large.json
  says 2 "larger than 16 MiB" ds-train large.json
  [[ ! -e hf && ! -e sharded ]]
}

@test "syntax errors of all JSON are in our words, with line and column" {
  printf '{"version": "1.0",\n "model": {"type": x}}' >tokenizer.json
  says 3 "tokenizer.json:2:20: 'x' is not JSON" ds-train cfg.json --set data.tokenizer=tokenizer.json
  printf '\x13\0\0\0\0\0\0\0{"a":{"dtype":"U8",' >cut.safetensors
  says 3 "cut.safetensors: header:1:20: unexpected end of input; expected string literal" ds-shard cut.safetensors -o out
  printf '{"metadata": {}}' >x.safetensors.index.json
  says 3 "not a safetensors index: key 'weight_map' not found" ds-shard x.safetensors.index.json -o out
  printf '{"schema": "ds-links/1", "ranks": "two"}' >links.json
  says 2 "links.json: ranks must be an integer, 0 to 16777216" ds-memreport cfg.json --gpu h100 --links links.json
}

@test "--out may be a link that leads to nothing yet; a link that cannot be followed stays" {
  ln -s place link
  run -0 ds-train cfg.json --out link
  [[ -L link && -e place/latest ]]
  ln -s no/such/place deep
  run -0 ds-train cfg.json --out deep/run
  [[ -L deep && -e no/such/place/run/latest ]]
  ln -s loop loop
  says 2 "Too many levels of symbolic links" ds-train cfg.json --out loop
  [[ -L loop ]]
  ln -s text.txt/below wrong
  says 2 "cannot create run directory wrong: Not a directory" ds-train cfg.json --out wrong
  [[ -L wrong ]]
}

@test "data that are too few for a sample are a mistake of the configuration, none at all as well" {
  : >empty.txt
  printf 'short' >short.txt
  says 2 "data file 'empty.txt' is empty" ds-train cfg.json --set data.train=empty.txt
  says 2 "one sample of seq_length 32 needs 33" ds-train cfg.json --set data.train=short.txt
  printf 'odd' >odd.bin
  says 3 "has 3 bytes, no multiple of 2" ds-train cfg.json --set data.train=odd.bin
}
