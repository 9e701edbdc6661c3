#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-infer: drafts, which propose tokens.

bats_require_minimum_version 1.5.0

load infer

# A smaller model of the same text.
small() {
  ds-train cfg.json --out small --steps 3 --quiet --set model.n_layer=1 --set model.n_embd=16 --set seed=5
}

@test "a draft changes no byte, at any size and number of ranks" {
  trained
  small
  lines >in.jsonl
  # As the first line but for a stop string, which ends it among proposed tokens.
  infer <<<'{"prompt": "The words", "max_tokens": 20, "temperature": 0}' | each 'd["text"][6:8]' >stop
  echo "{\"prompt\": \"The words\", \"max_tokens\": 20, \"temperature\": 0, \"stop\": [$(cat stop)]}" >>in.jsonl
  echo '{"prompt": "The words", "max_tokens": 30, "seed": 5, "min_tokens": 9, "stop_token_ids": [101, 32, 116, 97]}' >>in.jsonl
  infer in.jsonl >want.jsonl
  for draft in small run; do
    infer in.jsonl --draft $draft | cmp - want.jsonl
    infer in.jsonl --draft $draft --draft-tokens 7 --batch 2 --chunk 3 | cmp - want.jsonl
    infer in.jsonl --draft $draft --draft-tokens 1 --batch 4 --context 60 --cache 60 | cmp - want.jsonl
  done
  ds-launch -n 2 ds-infer run in.jsonl --draft small | cmp - want.jsonl
  ds-launch -n 2 ds-infer run in.jsonl --draft run --set pipeline.stages=2 | cmp - want.jsonl
  ds-launch -n 2 ds-infer run in.jsonl --set zero_optimization.stage=3 --draft small | cmp - want.jsonl
  ds-launch -n 2 ds-infer run in.jsonl --set tensor_parallel.tp_size=2 >tp.jsonl
  ds-launch -n 2 ds-infer run in.jsonl --set tensor_parallel.tp_size=2 --draft small | cmp - tp.jsonl
  # A run resumes with another draft, or none.
  infer in.jsonl -o out.jsonl --draft small --draft-tokens 2
  cmp out.jsonl want.jsonl
}

@test "a draft's share is told, and its memory" {
  trained
  small
  lines >in.jsonl
  run -0 --separate-stderr infer in.jsonl --draft run --verbose
  [[ $stderr =~ ([0-9]+)" of "([0-9]+)" proposed tokens accepted" ]]
  assert_equal "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
  assert [ "${BASH_REMATCH[1]}" -gt 30 ]
  # Counts are those of all ranks.
  local all=${BASH_REMATCH[2]}
  run -0 --separate-stderr ds-launch -n 2 ds-infer run in.jsonl --draft run --verbose
  [[ $stderr == *"$all of $all proposed tokens accepted"* ]]
  run -0 --separate-stderr infer in.jsonl --draft small --verbose
  [[ $stderr =~ ([0-9]+)" of "([0-9]+)" proposed tokens accepted" ]]
  assert [ "${BASH_REMATCH[1]}" -lt "${BASH_REMATCH[2]}" ]
  run -0 --separate-stderr infer in.jsonl --verbose
  [[ $stderr != *"proposed"* ]]
  ds-infer bench run --draft run -p 16 -n 12 --parallel 2 -r 1 --json >bench.jsonl
  assert_equal "$(each 'd["test"], d["proposed"], d["accepted_share"]' <bench.jsonl | tr '\n' ' ')" '["pp16 x2", 0, 0.0] ["tg12 x2", 18, 1.0] '
  run -0 ds-infer bench run --draft small -p 0 -n 12 -r 1 --draft-tokens 2
  assert_output --regexp '\| test +\| +t/s \| accepted \|'
  assert_output --regexp '\| tg12 +\| +[0-9.]+ ± [0-9.]+ \| +[0-9.]+ % \|'
  run -0 infer --check --draft small
  assert_output --partial "draft small, 3 tokens at a time"
  assert_output --regexp 'draft +[0-9.]+ [KM]iB of these'
  infer --check --json --batch 2 >without.json
  infer --check --json --batch 2 --draft small --draft-tokens 3 >with.json
  python3 - <<'PY'
import json
a, b = (json.load(open(f)) for f in ("without.json", "with.json"))
assert b["draft_tokens"] == 3 and b["draft_bytes"] > 0 and "draft_bytes" not in a
params = b["memory"]["params"]["predicted_bytes"] - a["memory"]["params"]["predicted_bytes"]
# Embeddings, positions, a block and a norm.
numbers = 256 * 16 + 64 * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16
assert 4 * numbers <= params < 4 * numbers + 1024, (params, 4 * numbers)
assert b["total_bytes"] > a["total_bytes"] + b["draft_bytes"]  # rows of proposed tokens
PY
}

@test "drafts that cannot propose tokens are refused" {
  trained
  small
  local golden=$DS_SOURCE/tests/golden
  cp -r "$golden/gguf/text-llama3" llama3
  cp "$golden/tokenizers/llama3/tokenizer.json" llama3
  run -2 infer --draft llama3 <<<'{"prompt": "a"}'
  assert_output --partial "the draft llama3 has the tokenizer llama3 and the model bytes, so it cannot propose tokens"
  run -2 infer --draft llama3 --check
  assert_output --partial "the draft llama3 has the tokenizer"
  run -2 infer --draft nowhere
  assert_output --partial "nowhere: No such file"
  run -2 infer --draft-tokens 3
  assert_output --partial -- "--draft-tokens needs --draft"
  run -2 infer --draft small --draft-tokens 65
  run -2 ds-infer --draft small score run
  assert_output --partial -- "--draft has no effect with score"
  # The tokenizer that --tokenizer names is that of published models without one.
  ds-ckpt-merge small -o plain --format hf --quiet
  lines | infer --draft plain --tokenizer bytes | cmp - <(lines | infer)
  # A draft with fewer positions helps as far as they go.
  ds-train cfg.json --out short --steps 1 --quiet --set model.n_positions=32 --set data.seq_length=16
  run -0 --separate-stderr infer --draft short <<<'{"prompt": "The words", "max_tokens": 50, "seed": 3}'
  [[ $stderr == *"--draft: the model has 32 positions: it proposes nothing for longer texts (--context 64)"* ]]
  cmp <(echo "$output") <(infer <<<'{"prompt": "The words", "max_tokens": 50, "seed": 3}')
}
