#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Files of prompts: each text has the bytes that its prompt gets alone.

bats_require_minimum_version 1.5.0

load tiny

trained() {
  ds-train cfg.json --out run --steps 3 --quiet
}
write() { ds-train cfg.json --resume run --max-tokens 20 --seed 7 "$@"; }
field() { python3 -c 'import json, sys; [sys.stdout.write(json.loads(l)[sys.argv[1]] + "\0") for l in sys.stdin]' "$1"; }

@test "prompts, a line each: in order, with the bytes of each alone, on any ranks" {
  trained
  printf 'The words\n A\nIt was in the year of\n\303\274ber\nz' >prompts
  write --prompts prompts >all.jsonl
  assert_equal "$(wc -l <all.jsonl)" 5
  field prompt <all.jsonl | tr '\0' '\n' | cmp - <(cat prompts; echo)
  while IFS= read -r prompt || [[ -n $prompt ]]; do
    write --generate "$prompt" --json >one.json
    python3 -c 'import json, sys; sys.stdout.write(json.load(sys.stdin)["text"] + "\0")' <one.json
  done <prompts >alone
  cmp <(field text <all.jsonl) alone
  for batch in 1 2 5; do write --prompts prompts --batch "$batch" | cmp - all.jsonl; done
  ds-launch -n 2 ds-train cfg.json --resume run --max-tokens 20 --seed 7 --prompts prompts | cmp - all.jsonl
  write --prompts - <prompts | cmp - all.jsonl
  write --prompts prompts --output file.jsonl
  cmp file.jsonl all.jsonl
}

@test "prompts in JSON Lines keep what else is in their objects" {
  trained
  printf '{"id": 17, "prompt": "The words", "tags": ["a"]}\r\n\n{"prompt": "two\\nlines"}\n' >prompts.jsonl
  run -0 --separate-stderr write --prompts prompts.jsonl
  assert_equal "${#lines[@]}" 2
  assert_regex "${lines[0]}" '^\{"schema":"ds-train/[0-9]+","id": 17, "prompt": "The words", "tags": \["a"\],"text":".*,"tokens":\['
  assert_regex "${lines[1]}" '"prompt": "two\\nlines"'
  printf '\357\273\277\n{"prompt": "The words"}\n' >marked.jsonl
  run -0 --separate-stderr write --prompts marked.jsonl
  assert_equal "${#lines[@]}" 1
  assert_regex "${lines[0]}" '"prompt": "The words"'
}

@test "what is wrong with prompts is said before anything runs, with file and line" {
  trained
  printf '{"prompt": "a"}\n{"prompt": 3}\n' >bad.jsonl
  run -2 write --prompts bad.jsonl
  assert_output --partial 'bad.jsonl:2: a prompt is an object with the text "prompt"'
  printf '{"prompt": "a"}\nplain\n{"text": 1}\n' >bad.jsonl  # all at once
  run -2 write --prompts bad.jsonl
  assert_output --partial 'bad.jsonl:2:1: '
  assert_output --partial 'bad.jsonl:3: a prompt is an object'
  : >empty
  run -2 write --prompts empty
  assert_output --partial "empty: contains no prompts"
  run -2 write --prompts none
  assert_output --partial "none"
  assert_output --partial "No such file"
  printf 'a\n\nb\n' >blank
  run -2 write --prompts blank
  assert_output --partial "blank:2: the prompt is empty"
  { echo short; printf 'x%.0s' {1..60}; echo; } >long
  run -2 write --prompts long
  assert_output --partial "long:2: the prompt (60 tokens by bytes) and 20 new tokens exceed the model's 64 positions"
  { cat long; echo; } >both  # all at once
  run -2 write --prompts both --check
  assert_output --partial "both:2: the prompt (60 tokens by bytes)"
  assert_output --partial "both:3: the prompt is empty"
  run -2 write --prompts long --generate x
  run -2 write --prompts long --eval
  run -2 ds-train cfg.json --resume run --batch 3
  run -2 ds-train cfg.json --resume run --max-tokens 3
  assert_output --partial "--generate or --prompts"
  run -2 ds-launch -n 2 ds-train cfg.json --resume run --prompts -
  assert_output --partial "only one of 2 ranks can read standard input"
  mkfifo pipe
  run -2 ds-launch -n 2 ds-train cfg.json --resume run --prompts pipe
  assert_output --partial "2 ranks read it, and it can be read only once"
  run -2 write --prompts blank --out other
  assert_output --partial -- "--out excludes --prompts"
}

@test "--check counts what texts under way take" {
  trained
  activations() { write --check --json "$@" | python3 -c 'import json, sys; print(json.load(sys.stdin)["memory_bytes"]["activations"])'; }
  for n in 1 2 3 4; do echo "text $n"; done >four
  local one all
  one=$(activations --prompts four --batch 1)
  all=$(activations --prompts four)
  assert [ "$one" -gt 0 ]
  assert [ "$all" -gt $((2 * one)) ]
}

@test "members of an object come back as they stood there, but for those of the result" {
  trained
  echo ' {"prompt": "The", "id": 12345678901234567890123, "f": 1.50e10, "schema": "x", "text": 1 } ' >own.jsonl
  echo '{"id": 12345678901234567890123, "f": 1.50e10, "prompt": "The" }' >>own.jsonl
  run -0 --separate-stderr write --prompts own.jsonl
  assert_equal "${#lines[@]}" 2
  assert_regex "${lines[0]}" '^\{"schema":"ds-train/1","prompt":"The","id":.*,"text":".*","tokens":\[.*\]\}$'
  assert_regex "${lines[1]}" '^\{"schema":"ds-train/1","id": 12345678901234567890123, "f": 1.50e10, "prompt": "The" ,"text":".*","tokens":\[.*\]\}$'
  python3 -c 'import json, sys; [json.loads(line) for line in sys.stdin]' <<<"$output"
}

@test "a run with another seed writes and evaluates: it goes on with no sample" {
  trained
  write --generate x
  write --generate x --set seed=3
  ds-train cfg.json --resume run --eval --set seed=3
  run -3 ds-train cfg.json --out run --resume latest --steps 5 --set seed=3
  assert_output --partial "seed"
}

@test "a text is as its tokens are, also where it ends at the end token within a character" {
  python3 - <<'END'
import json, os
b = [*range(33, 127), *range(161, 173), *range(174, 256)]
rest = [x for x in range(256) if x not in b]
names = dict(zip(b, map(chr, b))) | {x: chr(256 + i) for i, x in enumerate(rest)}
os.mkdir("tok")
json.dump({names[x]: x for x in range(256)} | {"<|endoftext|>": 256}, open("tok/vocab.json", "w"))
open("tok/merges.txt", "w").write("#version: 0.2\n")
json.dump({"tokenizer_class": "GPT2Tokenizer", **{f"{t}_token": "<|endoftext|>" for t in ("eos", "bos", "unk")}},
          open("tok/tokenizer_config.json", "w"))
END
  set_keys=(--set model.vocab_size=257 --set data.tokenizer=tok)
  ds-train cfg.json "${set_keys[@]}" --out ends --steps 1 --quiet
  local ended=0
  for seed in {1..16}; do
    say() { ds-train cfg.json "${set_keys[@]}" --resume ends --generate abc --max-tokens 55 --temperature 3 --seed $seed "$@"; }
    say >text
    ended=$((ended + $(say --json | python3 -c '
import json, sys
tokens = json.load(sys.stdin)["tokens"]
assert open("text", "rb").read() == bytes(tokens) + b"\n", tokens
print(int(len(tokens) < 55))')))
  done
  assert [ $ended -gt 0 ]
}
