#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Runs without masters in fp32: each trains, resumes bit for bit at another ZeRO stage, with its states elsewhere, and
# merges. A run with masters resumes from it.

bats_require_minimum_version 1.5.0

load tiny

# name, settings
without_masters=(
  'nearest|--set bf16.enabled=true --set bf16.bf16_master_weights_and_grads=true'
  'stochastic|--set bf16.enabled=true --set bf16.bf16_master_weights_and_grads=true --set bf16.stochastic_rounding=true'
  'states|--set bf16.enabled=true --set bf16.bf16_master_weights_and_grads=true --set bf16.bf16_optimizer_states=true'
  'fp16|--set fp16.enabled=true --set fp16.initial_scale_power=8 --set fp16.fp16_master_weights_and_grads=true'
  'sums|--set bf16.enabled=true --set data_types.grad_accum_dtype=bf16'
)

@test "runs without masters resume bit for bit at another ZeRO stage, with offloaded states, and merge" {
  for row in "${without_masters[@]}"; do
    IFS='|' read -r name set <<<"$row"
    read -ra set <<<"$set"
    ds-launch -n 2 ds-train cfg.json --out "$name" --quiet --steps 8 "${set[@]}"
    for other in ${DS_SLOW:+zero_optimization.stage=3 zero_optimization.offload_optimizer.device=cpu} \
      zero_optimization.offload_optimizer.device=nvme; do
      rm -rf half
      ds-launch -n 2 ds-train cfg.json --out half --quiet --steps 4 "${set[@]}"
      ds-launch -n 2 ds-train cfg.json --out half --quiet --steps 8 --resume latest "${set[@]}" --set $other \
        --set zero_optimization.offload_optimizer.nvme_path=.
      assert_equal "$(losses half)" "$(losses "$name")"
      merged "$name" whole.safetensors
      merged half half.safetensors
      cmp whole.safetensors half.safetensors
    done
    assert [ "$(losses "$name" | head -1 | cut -d' ' -f2 | cut -c1-4)" != "$(losses "$name" | tail -1 | cut -d' ' -f2 | cut -c1-4)" ]
    run ds-ckpt-merge "$name" --verify -o again.safetensors --quiet
    assert_success
  done
}

@test "a run with masters goes on from one without, and the other way round" {
  for way in false true; do
    [[ $way == true ]] && other=false || other=true
    ds-train cfg.json --out "$way" --quiet --steps 4 --set bf16.enabled=true --set bf16.bf16_master_weights_and_grads=$way
    ds-train cfg.json --out "$way" --quiet --steps 6 --resume latest --set bf16.enabled=true \
      --set bf16.bf16_master_weights_and_grads=$other
    assert_equal "$(losses "$way" | wc -l)" 6
  done
}

@test "without masters a rank has their bytes less, as it is predicted" {
  ds-train cfg.json --check --set bf16.enabled=true >with
  ds-train cfg.json --check --set bf16.enabled=true --set bf16.bf16_master_weights_and_grads=true >without
  grep -q '^ *master' with
  run grep -E '^ *master +[1-9]' without
  assert_failure
  ds-memreport cfg.json -n 2 --explain --set bf16.enabled=true \
    --set bf16.bf16_master_weights_and_grads=true >explained
  grep -q 'Parameters are their own masters here' explained
}
