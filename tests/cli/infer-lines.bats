#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-infer: lengths, defaults and tokens of lines.

bats_require_minimum_version 1.5.0

load infer

@test "a layout of attention bounds the context" {
  ds-train cfg.json --out run --steps 1 --quiet --set sparse_attention.mode=fixed --set sparse_attention.block=16 \
    --set sparse_attention.attention=unidirectional --set sparse_attention.num_local_blocks=2
  infer <<<'{"prompt": "abc", "max_tokens": 29}' | each 'len(d["tokens"])' | grep -qx 29
  run -1 infer <<<'{"prompt": "abc", "max_tokens": 30}'
  assert_output --partial "exceed the context of 32"
  run -2 infer --context 33
  assert_output --partial "--context 33 exceeds the 32 tokens (data.seq_length) that sparse_attention has a layout of"
}

@test "prompts that are too long lose their beginning with --cut" {
  trained
  python3 -c 'import json; print(json.dumps({"prompt": list(range(100)), "max_tokens": 10, "seed": 1}))' >long.jsonl
  run -1 infer long.jsonl
  assert_output --partial "exceed the context of 64: --cut leaves out the beginning of the prompt"
  infer long.jsonl --cut | each 'd["tokens"]' >cut
  python3 -c 'import json; print(json.dumps({"prompt": list(range(46, 100)), "max_tokens": 10, "seed": 1}))' |
    infer | each 'd["tokens"]' | cmp - cut
  run -1 infer --cut <<<'{"prompt": "abc", "max_tokens": 64}'
  refute_output --partial "--cut leaves"
}

@test "options and members of lines take the same values" {
  trained
  local line='{"prompt": "The words", "max_tokens": 8, "seed": 2'
  infer <<<"$line}" >all
  infer --top-k -1 <<<"$line}" | cmp - all
  infer --top-k 0 <<<"$line}" | cmp - all
  infer <<<"$line, \"top_k\": -1}" | each 'd["tokens"]' | cmp - <(each 'd["tokens"]' <all)
  infer --max-tokens 0 <<<'{"prompt": "The", "prompt_logprobs": true}' | each 'len(d["tokens"]), len(d["prompt_logprobs"])' | grep -qxF '[0, 2]'
  run -2 infer --top-k -2 <<<"$line}"
  run -2 infer --max-tokens -1 <<<"$line}"
}

@test "tokens without a text are named once" {
  ds-train cfg.json --out run --steps 1 --quiet --set model.vocab_size=300
  for i in 1 2 3; do echo "{\"prompt\": \"a\", \"max_tokens\": 60, \"temperature\": 50, \"seed\": $i}"; done >in.jsonl
  run -0 --separate-stderr infer in.jsonl
  assert_equal "$(grep -c 'which has no text in its tokenizer' <<<"$stderr")" 1
  [[ $stderr == *"warning: the model has written the token 2"[5-9]* ]]
}

@test "logits that are not finite are an error of their line alone" {
  trained
  ds-ckpt-merge run -o hf --format hf --quiet
  python3 - <<'PY'
import json, struct
raw = bytearray(open("hf/model.safetensors", "rb").read())
size = 8 + int.from_bytes(raw[:8], "little")
begin, _ = next(t for name, t in json.loads(raw[8:size]).items() if name.endswith("wpe.weight"))["data_offsets"]
raw[size + begin + 40 * 32 * 4 : size + begin + 41 * 32 * 4] = struct.pack("<f", 3e38) * 32  # position 40
open("hf/model.safetensors", "wb").write(raw)
PY
  cat >in.jsonl <<'JSON'
{"id": 1, "prompt": "The words", "max_tokens": 10, "temperature": 0}
{"id": 2, "prompt": "The words", "max_tokens": 50, "temperature": 0}
{"id": 3, "prompt": "The licence", "max_tokens": 5, "temperature": 0}
{"id": 4, "prompt": "This is a prompt that has more than forty bytes", "max_tokens": 5, "n": 2}
JSON
  infer_hf() { ds-infer hf --tokenizer bytes "$@"; }
  run -1 --separate-stderr infer_hf in.jsonl
  [[ $stderr == *"in.jsonl:2: the logits of token 41 are not finite"* && $stderr == *"in.jsonl:4: "* ]] || fail "$stderr"
  assert_equal "$(each '"error" in d' <<<"$output" | tr '\n' ' ')" "false true false true "
  cmp <(sed -n '1p;3p' <<<"$output") <(sed -n '1p;3p' in.jsonl | infer_hf)
  run -1 --separate-stderr ds-launch -n 2 ds-infer hf --tokenizer bytes in.jsonl
  assert_equal "$(each '"error" in d' <<<"$output" | tr '\n' ' ')" "false true false true "
  run -1 infer_hf in.jsonl -o out.jsonl
  assert_equal "$(wc -l <out.jsonl)" 4
}
