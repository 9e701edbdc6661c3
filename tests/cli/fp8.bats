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

@test "sizes, types and tiles that have no products in FP8 are refused together with their names" {
  run -2 ds-train cfg.json --check "${fp8[@]}"
  assert_output --partial 'fp8.enabled: scales are for 128 x 128 elements'
  assert_output --partial 'h.0.attn.c_attn ['
  assert_output --partial 'h.1.mlp.c_proj ['
  run -2 ds-train cfg.json --check --set fp8.enabled=true "${wide[@]}"
  assert_output --partial 'fp8.enabled: codes are made of numbers in bf16: set bf16.enabled to true'
  run -4 ds-train cfg.json --check "${fp8[@]}" "${wide[@]}" --set zero_optimization.stage=3 \
    --set zero_optimization.stage3_tile_size=1000
  assert_output --partial 'matrices in tiles'
  run -4 ds-memreport cfg.json "${fp8[@]}" "${wide[@]}" --gpu a100
  assert_output --partial 'fp8.enabled: the GPU has compute capability 8'
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
