#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Block-sparse attention, and documents of packed samples, from the shell: training, resuming on other ranks, merging,
# generation, drawings; and refusals.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  sed -i 's/"n_positions": 64/"n_positions": 128/; s/"seq_length": 32/"seq_length": 128/' cfg.json
  sparse=(--set 'sparse_attention={"mode": "fixed", "num_local_blocks": 2, "different_layout_per_head": true, "num_different_global_patterns": 2}')
}

@test "a run with a layout has the same losses over ranks, stages and after a resume, and other ones than without" {
  ds-launch -n 1 ds-train cfg.json --out one --quiet "${sparse[@]}"
  ds-launch -n 2 ds-train cfg.json --out two --quiet "${sparse[@]}" --steps 5
  ds-launch -n 4 ds-train cfg.json --out two --quiet "${sparse[@]}" --resume latest --set zero_optimization.stage=3
  assert_equal "$(losses two)" "$(losses one)"
  ds-launch -n 1 ds-train cfg.json --out dense --quiet
  [[ $(losses dense) != "$(losses one)" ]]
  merged one one.safetensors
  merged two two.safetensors
  cmp one.safetensors two.safetensors
  run -0 ds-train cfg.json "${sparse[@]}" --resume one --eval
  assert_output --regexp 'step 12  val_loss [0-9.]+'
  run -0 ds-train cfg.json "${sparse[@]}" --resume one --generate 'Apache' --max-tokens 40
  run -2 --separate-stderr ds-train cfg.json "${sparse[@]}" --resume one --generate 'Apache' --max-tokens 123
  [[ $stderr == *"exceed the "*"positions"* ]] || fail "$stderr"
}

@test "a checkpoint of another attention is refused, but for its weights" {
  ds-train cfg.json --out one --quiet "${sparse[@]}" --steps 4
  local -a other
  for other in none "sparse_attention.mode=local" "data.document_token=32"; do
    local -a with=("${sparse[@]}")
    [[ $other != none ]] || with=()
    [[ $other == none ]] || with+=(--set "$other")
    refused 3 'a checkpoint of another attention' --resume one "${with[@]}"
    run -3 ds-train cfg.json "${with[@]}" --resume one --eval
  done
  ds-train cfg.json --out two --quiet --weights one --steps 2
  # All blocks are no layout.
  ds-train cfg.json --out all --quiet --steps 2
  ds-train cfg.json --out all --quiet --resume latest --steps 4 --set sparse_attention.mode=dense
  run -0 --separate-stderr ds-ckpt-merge one -o hf --format hf
  [[ $stderr == *"cannot describe the run's attention pattern"* ]] || fail "$stderr"
  # A file of a layout is known by what is in it, and found from anywhere.
  python3 -c 'import json; json.dump([[[int(j <= i) for j in range(8)] for i in range(8)]], open("mine.json", "w"))'
  mine=(--set 'sparse_attention={"mode": "layout", "layout": "mine.json"}')
  ds-train cfg.json --out own --quiet "${mine[@]}" --steps 2
  mkdir sub
  (cd sub && ds-memreport ../own --device cpu >/dev/null)
  ds-train cfg.json --out own --quiet "${mine[@]}" --resume latest --steps 3
  run -0 ds-train cfg.json "${mine[@]}" --resume own --eval
  python3 -c 'import json; json.dump([[[int(j == i) for j in range(8)] for i in range(8)]], open("mine.json", "w"))'
  refused 3 'a checkpoint of another attention' --resume own "${mine[@]}"
}

@test "a query that sees no key within its window is refused" {
  cat >qwen.json <<'JSON'
{"model": {"type": "qwen2", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
  "intermediate_size": 64, "max_position_embeddings": 128, "use_sliding_window": true, "sliding_window": 16,
  "max_window_layers": 0}, "data": {"train": "text.txt", "seq_length": 128}, "train_batch_size": 2, "steps": 2}
JSON
  python3 -c 'import json; json.dump([[[int(j == 0) for j in range(8)] for i in range(8)]], open("first.json", "w"))'
  run -2 --separate-stderr ds-train qwen.json --check --set 'sparse_attention={"mode": "layout", "layout": "first.json"}'
  [[ $stderr == *"token 31 sees no key in head 0"* ]] || fail "$stderr"
}

@test "a text that is longer than its layout is refused" {
  ds-launch -n 1 ds-train cfg.json --out one --quiet "${sparse[@]}" --set data.seq_length=64 --steps 1
  run -2 --separate-stderr ds-train cfg.json "${sparse[@]}" --set data.seq_length=64 --resume one --generate 'Apache' \
    --max-tokens 60
  [[ $stderr == *"6 tokens by "*" and 60 new tokens exceed the 64 tokens (data.seq_length) that sparse_attention has a layout of"* ]] || fail "$stderr"
}

@test "--check draws the pattern, and --pattern writes a picture of it" {
  run -0 ds-train cfg.json --check "${sparse[@]}" --pattern pattern.svg
  assert_line "attention of head 0: 0.316 of all pairs, blocks of 16 tokens; 1 other pattern"
  assert_line --regexp '^  --$'
  grep -q '^<svg ' pattern.svg
  assert_equal "$(grep -c '<text y="12">' pattern.svg)" 2
  xmllint --noout pattern.svg 2>/dev/null || python3 -c 'import sys, xml.dom.minidom as m; m.parse("pattern.svg")'
  # Without a section: the mask of the model.
  run -0 ds-train cfg.json --check --pattern causal.svg
  refute_output --partial 'attention of'
  grep -q 'all layers and heads' causal.svg
  run -2 ds-train cfg.json --pattern x.svg
}

@test "a layout of one's own, from JSON and from HDF5" {
  python3 - <<'PYTHON'
import json
rows = [[1 if j in (0, i) else 0 for j in range(8)] for i in range(8)]
json.dump([rows], open("mine.json", "w"))
rows[3] = [0] * 8
json.dump({"layout": [rows]}, open("empty.json", "w"))
PYTHON
  printf '%s\n' $(for i in {0..7}; do for j in {0..7}; do echo $((j == 0 || j == i)); done; done) >numbers
  printf 'PATH layout\nINPUT-CLASS TEXTIN\nINPUT-SIZE 32\nRANK 3\nDIMENSION-SIZES 1 8 8\nOUTPUT-CLASS IN\nOUTPUT-SIZE 32\n' >conf
  h5import numbers -c conf -o mine.h5
  local file
  for file in mine.json mine.h5; do
    ds-train cfg.json --out "out.$file" --quiet --steps 3 \
      --set "sparse_attention={\"mode\": \"layout\", \"layout\": \"$file\"}"
  done
  assert_equal "$(losses out.mine.json)" "$(losses out.mine.h5)"
  refused 2 'row 3' --set 'sparse_attention={"mode": "layout", "layout": "empty.json"}'
  refused 2 '' --set 'sparse_attention={"mode": "layout", "layout": "mine.json", "block": 32}'
}

@test "mistakes in the section are told at once" {
  run -2 --separate-stderr ds-train cfg.json --out refused --set \
    'sparse_attention={"mode": "fixd", "blok": 32, "num_local_blocks": 0}'
  for text in '"fixd"' 'blok' 'num_local_blocks'; do
    [[ $stderr == *"$text"* ]] || fail "$text: $stderr"
  done
  refused 2 'do not meet in ring attention' --set sparse_attention.mode=fixed --set sparse_attention.block=128 \
    --set sequence_parallel_size=1 --set sequence_parallel_size=2 --set sequence_parallel_mode=ring
}

@test "documents: the token that ends them, and one that the model does not have" {
  ds-launch -n 2 ds-train cfg.json --out apart --quiet --steps 4 --set data.document_token=10
  ds-launch -n 1 ds-train cfg.json --out alone --quiet --steps 4 --set data.document_token=10 "--set=zero_optimization.stage=0"
  assert_equal "$(losses apart)" "$(losses alone)"
  ds-launch -n 1 ds-train cfg.json --out together --quiet --steps 4
  [[ $(losses apart) != "$(losses together)" ]]
  refused 2 "data.document_token: 256 is outside the model's vocabulary of 256" --set data.document_token=256
}
