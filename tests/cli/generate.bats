#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-train --generate: a look at the text of a run.

bats_require_minimum_version 1.5.0

load tiny

trained() {
  ds-train cfg.json --out run --steps 3 --quiet
}
write() { ds-train cfg.json --resume run --max-tokens 20 --seed 7 "$@"; }

@test "a prompt that cannot be continued is refused before anything runs" {
  trained
  run -2 write --generate ''
  assert_output --partial -- "--generate is empty"
  run -2 write --generate "$(printf 'x%.0s' {1..60})" --check
  assert_output --partial "the prompt (60 tokens by bytes) and 20 new tokens exceed the model's 64 positions"
  run -2 write --generate x --eval
  run -2 ds-train cfg.json --resume run --max-tokens 3
  assert_output --partial -- "--max-tokens requires --generate"
  run -2 write --generate x --out other
  assert_output --partial -- "--out excludes --generate"
  # Many prompts are the task of another tool.
  run -2 ds-train cfg.json --resume run --prompts file --batch 3
  assert_output --partial -- "--prompts file: not available; ds-infer MODEL FILE continues"
}

@test "the text is that of ds-infer, on any ranks" {
  trained
  write --generate 'The words' --json >one.json
  ds-launch -n 2 ds-train cfg.json --resume run --max-tokens 20 --seed 7 --generate 'The words' --json | cmp - one.json
  ds-infer run --max-tokens 20 --seed 7 --temperature 0.8 <<<'{"prompt": "The words"}' >line.json
  python3 -c 'import json; a, b = (json.load(open(f)) for f in ("one.json", "line.json")); assert a["tokens"] == b["tokens"] and a["text"] == b["text"], (a, b)'
}

@test "--check counts the keys and values of the text" {
  trained
  activations() { write --check --json "$@" | python3 -c 'import json, sys; print(json.load(sys.stdin)["memory_bytes"]["activations"])'; }
  local short long
  short=$(activations --generate x)
  long=$(activations --generate "$(printf 'x%.0s' {1..40})")
  assert [ "$short" -gt 0 ]
  assert [ "$long" -gt "$short" ]
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
