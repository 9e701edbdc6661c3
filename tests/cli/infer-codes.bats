#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-infer: weights and caches of codes, and experts of other ranks.

bats_require_minimum_version 1.5.0

load infer

@test "from training to codes of weights and of caches" {
  python3 - <<'PY'
import json
cfg = json.load(open("cfg.json"))
cfg["model"] = {"type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 128, "max_position_embeddings": 64}
cfg["bf16"] = {"enabled": True}
json.dump(cfg, open("cfg.json", "w"))
PY
  ds-launch -n 2 ds-train cfg.json --out run --steps 12 --quiet
  ds-ckpt-merge run -o model --format hf --dtype bf16 --quiet
  lines >in.jsonl
  local form
  for form in "--weights int8" "--weights int4" "--weights w8a8" "--weights int4 --activations int8" \
    "--cache-dtype int8"; do
    # shellcheck disable=SC2086
    ds-infer model --tokenizer bytes in.jsonl $form >all.jsonl
    assert_equal "$(wc -l <all.jsonl)" 7
    # shellcheck disable=SC2086
    while IFS= read -r line; do ds-infer model --tokenizer bytes $form <<<"$line"; done <in.jsonl | cmp - all.jsonl
    # shellcheck disable=SC2086
    ds-launch -n 2 ds-infer model --tokenizer bytes in.jsonl $form --set pipeline.stages=2 --chunk 3 | cmp - all.jsonl
    # shellcheck disable=SC2086
    ds-launch -n 2 ds-infer model --tokenizer bytes in.jsonl $form --set zero_optimization.stage=1 | cmp - all.jsonl
    ds-infer model --tokenizer bytes in.jsonl | cmp -s - all.jsonl && fail "$form changed nothing"
  done
  # A run's own steps are coded as the merged model is, but for the roundings of the latter.
  ds-infer run in.jsonl --weights int8 --json >of_run.jsonl
  assert_equal "$(wc -l <of_run.jsonl)" 7
  params() { ds-infer --check model --tokenizer bytes "$@" | awk '$1 == "params" {print int($2)}'; }
  assert [ "$(params --weights int8)" -lt "$(params)" ]
  assert [ "$(params --weights int4)" -lt "$(params --weights int8)" ]
  caches() { ds-infer --check model --tokenizer bytes --batch 512 "$@" | awk '$1 == "activations" {print int($2)}'; }
  assert [ "$(caches --cache-dtype int8)" -lt "$(caches)" ]
  echo '{"context": "The sky", "continuations": [" is", " was"]}' >score.jsonl
  ds-infer score model --tokenizer bytes score.jsonl --weights int8 | grep -q is_greedy
  ds-infer bench model --tokenizer bytes -p 8 -n 4 -r 1 --weights int4 --cache-dtype int8
  run -2 ds-infer model --tokenizer bytes in.jsonl --weights int8 --group 128
  assert_output --partial "its rows of 64 elements are no multiple of 128"
  run -2 ds-infer model --tokenizer bytes in.jsonl --group 32
  assert_output --partial "only --weights int8 and int4 have groups"
  run -2 ds-infer model --tokenizer bytes in.jsonl --weights int9
  ds-infer model --tokenizer bytes in.jsonl --weights int4 | cmp -s - <(ds-infer model --tokenizer bytes in.jsonl \
    --weights int4 --activations int8) && fail "--activations changed nothing"
  run -0 ds-infer --check model --tokenizer bytes --weights int4 --activations int8
  assert_line "matrices: 14 in int4, groups of 32, sums of integers; 1 in int8, groups of 32; 1 in int8, groups of 32, sums of integers"
  run -0 ds-infer --check model --tokenizer bytes --weights w8a8
  assert_line "matrices: 1 in int8, whole rows; 15 in int8, whole rows, sums of integers"
  run -2 ds-infer model --tokenizer bytes in.jsonl --weights w8a8 --activations work
  assert_output --partial "--weights int8 codes the weights alone"
  run -2 ds-infer model --tokenizer bytes in.jsonl --weights work --activations int8
  assert_output --partial "--weights work has no codes to multiply"
  run -2 ds-infer model --tokenizer bytes in.jsonl --activations int8
  assert_output --partial "MODEL contains no codes"
  run -4 ds-launch -n 2 ds-infer model --tokenizer bytes in.jsonl --weights int8 --activations int8 \
    --set tensor_parallel.tp_size=2
  assert_output --partial "--activations work decodes the codes"
  # Sums of integers are another computation, with which an output does not continue.
  (head -2 in.jsonl; sleep 20) | ds-infer model --tokenizer bytes - --weights int4 -o out.jsonl 2>/dev/null &
  until_true 60 grep -q '"id": 2' out.jsonl
  kill -9 $!
  wait $! || true
  run -3 ds-infer model --tokenizer bytes in.jsonl --weights int4 --activations int8 -o out.jsonl --resume
  assert_output --partial "other options"
  run -0 ds-infer --check model --tokenizer bytes --weights int4
  assert_output --partial "matrices: 14 in int4, groups of 32;"
  run -4 ds-launch -n 2 ds-infer model --tokenizer bytes in.jsonl --weights int8 --set zero_optimization.stage=3
  assert_output --partial "stage"
}

@test "matrices of GPT-2 are kept as codes of their transposes; those of its experts are refused" {
  trained
  lines >in.jsonl
  run -0 infer --check --weights int8
  assert_output --partial "matrices: 2 in int8, groups of 32; 7 in int8, whole rows"
  infer in.jsonl --weights int8 >want.jsonl
  infer in.jsonl --weights int8 --batch 1 --chunk 3 | cmp - want.jsonl
  ds-launch -n 2 ds-infer run in.jsonl --weights int8 --set pipeline.stages=2 | cmp - want.jsonl
  rm -r run
  ds-train cfg.json --out run --steps 1 --quiet --set model.moe.num_experts=2 --set model.moe.k=1
  run -2 infer --weights int8 <<<'{"prompt": "a"}'
  assert_output --partial "read no codes"
}

@test "a model in 4 bits proposes tokens for itself" {
  of_llama
  trained
  lines >in.jsonl
  infer in.jsonl >want.jsonl
  run -0 --separate-stderr infer in.jsonl --draft run --draft-weights int4 --verbose --output got.jsonl
  cmp got.jsonl want.jsonl
  [[ $stderr =~ ([0-9]+)" of "([0-9]+)" proposed tokens accepted" ]]
  assert [ "${BASH_REMATCH[1]}" -lt "${BASH_REMATCH[2]}" ]
  assert [ "${BASH_REMATCH[1]}" -gt 10 ]
  infer in.jsonl --weights int8 >coded.jsonl
  infer in.jsonl --weights int8 --draft run --draft-weights int8 | cmp - coded.jsonl
  run -2 infer in.jsonl --draft-weights int4
  assert_output --partial "--draft-weights needs --draft"
}

@test "experts divided over ranks" {
  python3 - <<'PY'
import json
cfg = json.load(open("cfg.json"))
cfg["model"] = {"type": "olmoe", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 32, "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2}
json.dump(cfg, open("cfg.json", "w"))
PY
  local divided="--set expert_parallel.enabled=true --set expert_parallel.autoep_size=2"
  trained
  lines >in.jsonl
  infer in.jsonl >all.jsonl
  # shellcheck disable=SC2086
  ds-launch -n 2 ds-infer run in.jsonl $divided | cmp - all.jsonl
  # One line leaves a rank without a text.
  # shellcheck disable=SC2086
  head -1 in.jsonl | ds-launch -n 2 ds-infer run $divided --chunk 4 | cmp - <(head -1 all.jsonl)
  params() { ds-launch -n 2 ds-infer run --check "$@" | awk '$1 == "params" {print int($2)}'; }
  # shellcheck disable=SC2086
  assert [ "$(params $divided)" -lt "$(params)" ]
  # shellcheck disable=SC2086
  cmp <(ds-launch -n 2 ds-train cfg.json --resume run --generate 'The words' --max-tokens 20 --quiet $divided) \
    <(ds-train cfg.json --resume run --generate 'The words' --max-tokens 20 --quiet)
}
