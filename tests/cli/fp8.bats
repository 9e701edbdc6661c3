#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Products in FP8: a run trains and resumes bit for bit; its memory is predicted; what does not fit is refused before it
# starts.

bats_require_minimum_version 1.5.0

load tiny

fp8=(--set bf16.enabled=true --set fp8.enabled=true)
wide=(--set model.n_embd=128 --set model.n_head=2)

@test "a run in FP8 resumes bit for bit at another ZeRO stage" {
  for gradients in e4m3 e5m2; do
    set=("${fp8[@]}" "${wide[@]}" --set fp8.gradients=$gradients)
    ds-launch -n 2 ds-train cfg.json --out $gradients --quiet --steps 6 "${set[@]}"
    ds-launch -n 2 ds-train cfg.json --out half --quiet --steps 3 "${set[@]}"
    ds-launch -n 2 ds-train cfg.json --out half --quiet --steps 6 --resume latest "${set[@]}" \
      --set zero_optimization.stage=3
    assert_equal "$(losses half)" "$(losses $gradients)"
    rm -rf half
  done
  assert [ "$(losses e4m3)" != "$(losses e5m2)" ]
  ds-train cfg.json --out bf16 --quiet --steps 6 --set bf16.enabled=true "${wide[@]}"
  assert [ "$(losses e4m3)" != "$(losses bf16)" ]
}

@test "memory of operands is part of the prediction, and parameters are those of bf16" {
  ds-train cfg.json --check "${fp8[@]}" "${wide[@]}" >with
  ds-train cfg.json --check --set bf16.enabled=true "${wide[@]}" >without
  for tag in params master optimizer activations; do
    assert_equal "$(grep "^ *$tag " with)" "$(grep "^ *$tag " without)"
  done
  assert [ "$(grep '^ *workspace ' with)" != "$(grep '^ *workspace ' without)" ]
}

@test "sizes, types and tiles that have no products in FP8 are refused together with all other mistakes" {
  run -2 ds-train cfg.json --check "${fp8[@]}" --set optimizer.params.lr=-1
  assert_output --partial 'optimizer.params.lr: must be'
  assert_output --partial 'fp8.enabled: scales are for 128 x 128 elements'
  assert_output --partial 'the hidden size 32 (128 would do), 2 heads of 16, together 32 (128 would do)'
  run -2 ds-train cfg.json --check --set fp8.enabled=true "${wide[@]}"
  assert_output --partial 'fp8.enabled: codes are made of numbers in bf16: set bf16.enabled to true'
  run -4 ds-train cfg.json --check "${fp8[@]}" "${wide[@]}" --set zero_optimization.stage=3 \
    --set zero_optimization.stage3_tile_size=1000
  assert_output --partial 'matrices in tiles'
  run -4 ds-memreport cfg.json "${fp8[@]}" "${wide[@]}" --gpu a100
  assert_output --partial 'fp8.enabled: the GPU has compute capability 8'
}

@test "gathers of stage 3 as codes change no loss, send half as much, and are predicted" {
  set=("${fp8[@]}" "${wide[@]}" --set zero_optimization.stage=3 --set zero_optimization.stage3_param_persistence_threshold=1000)
  sent() { # from NAME's metrics or plan: bytes of a message
    grep -o "\"$2\": *[0-9]*" "$1" | sort -u | grep -o '[0-9]*$'
  }
  for gathers in false true; do
    ds-launch -n 2 ds-train cfg.json --out $gathers --quiet --steps 4 "${set[@]}" --set fp8.gathers=$gathers
    ds-launch -n 2 ds-train cfg.json --check --json "${set[@]}" --set fp8.gathers=$gathers >$gathers.json
    assert_equal "$(sent $gathers/metrics.jsonl dp.all_gather)" "$(sent $gathers.json dp.all_gather)"
    assert_equal "$(sent $gathers/metrics.jsonl dp.all_reduce)" "$(sent $gathers.json dp.all_reduce)"
  done
  assert_equal "$(losses true)" "$(losses false)"
  assert [ "$(sent true.json dp.all_reduce)" -gt 0 ]
  # Embeddings and vectors travel in bf16.
  assert [ "$(sent true.json dp.all_gather)" -lt $(($(sent false.json dp.all_gather) * 6 / 10)) ]
}

@test "a run that resumes with other products or gathers says so" {
  set=("${wide[@]}" --set bf16.enabled=true --set zero_optimization.stage=3)
  ds-launch -n 2 ds-train cfg.json --out a --quiet --steps 2 "${set[@]}"
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out a --steps 4 --resume latest "${set[@]}" --set fp8.enabled=true
  assert_equal "$status" 0
  [[ $stderr == *'fp8.enabled is true here and false there; losses differ by roundings'* ]] || fail "$stderr"
  [[ $stderr != *'fp8.gathers'* ]] || fail "$stderr"
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out a --steps 6 --resume latest "${set[@]}" --set fp8.enabled=true \
    --set fp8.gathers=true
  assert_equal "$status" 0
  [[ $stderr == *'fp8.gathers is true here and false there; no loss changes'* ]] || fail "$stderr"
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out a --steps 8 --resume latest "${set[@]}" --set fp8.enabled=true \
    --set fp8.gathers=true
  [[ $stderr != *'here and'* ]] || fail "$stderr"
}

@test "by its peaks an H200 takes less time for a step in FP8, and more workspace" {
  large=(--set model.n_embd=4096 --set model.n_head=32 --set bf16.enabled=true --set data.seq_length=64
    --set train_batch_size=512 --set train_micro_batch_size_per_gpu=256)
  ds-memreport cfg.json "${large[@]}" --gpu h200 >bf16
  ds-memreport cfg.json "${large[@]}" --set fp8.enabled=true --gpu h200 >fp8
  milliseconds() { awk '$1 == "computing" { print $2 }' "$1"; }
  assert [ -n "$(milliseconds fp8)" ]
  awk -v fp8="$(milliseconds fp8)" -v bf16="$(milliseconds bf16)" 'BEGIN { exit !(fp8 > 0.5 * bf16 && fp8 < 0.9 * bf16) }'
  assert [ "$(grep '^ *workspace ' fp8)" != "$(grep '^ *workspace ' bf16)" ]
}
