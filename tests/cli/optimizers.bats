#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Optimizers from the shell: each trains, resumes bit for bit at another layout, merges with its states, and is refused by
# a run that has another.

bats_require_minimum_version 1.5.0

load tiny

# type, its params, its states
optimizers=(
  'AdamW|"lr":3e-3,"weight_decay":0.1|exp_avg exp_avg_sq'
  'Adam|"lr":3e-3,"adam_w_mode":false,"weight_decay":0.1|exp_avg exp_avg_sq'
  'SGD|"lr":0.05|'
  'SGD|"lr":0.05,"momentum":0.9,"nesterov":true|momentum_buffer'
  'Lion|"lr":3e-4,"weight_decay":0.1|exp_avg'
  'Adagrad|"lr":0.02,"weight_decay":0.1|sum'
  'Muon|"lr":0.02,"adam_lr":3e-3,"weight_decay":0.1|exp_avg exp_avg_sq momentum_buffer'
  'Lamb|"lr":0.02,"weight_decay":0.1|exp_avg exp_avg_sq'
)

with_optimizer() { # type params
  sed "s|\"optimizer\": .*|\"optimizer\": {\"type\": \"$1\", \"params\": {$2}},|" cfg.json
}

# The states in a merged file, from its header.
states_of() { head -c 100000 "$1" | grep -ao '"optimizer\.[a-z_]*' | sed 's/"optimizer\.//' | sort -u | tr '\n' ' ' | sed 's/ $//'; }

@test "every optimizer resumes bit for bit at another layout, and merges with its states" {
  for row in "${optimizers[@]}"; do
    IFS='|' read -r type params states <<<"$row"
    with_optimizer "$type" "$params" >o.json
    rm -rf whole half
    ds-launch -n 2 ds-train o.json --out whole --quiet --steps 8
    ds-launch -n 2 ds-train o.json --out half --quiet --steps 4
    ds-launch -n 4 ds-train o.json --out half --quiet --steps 8 --resume latest --set zero_optimization.stage=3
    assert_equal "$(losses half)" "$(losses whole)"
    assert [ "$(losses whole | tail -1 | cut -d' ' -f2 | cut -c1-4)" != "$(losses whole | head -1 | cut -d' ' -f2 | cut -c1-4)" ]
    if [[ -n $states ]]; then
      merged whole whole.safetensors
      merged half half.safetensors
    else # nothing but weights
      ds-ckpt-merge whole -o whole.safetensors --quiet
      ds-ckpt-merge half -o half.safetensors --quiet
    fi
    cmp whole.safetensors half.safetensors
    assert_equal "$(states_of whole.safetensors)" "$states"
    ds-ckpt-merge whole --verify -o again.safetensors --quiet
  done
}

@test "a run with another optimizer is refused, and told what to do" {
  with_optimizer Lion '"lr":3e-4' >lion.json
  with_optimizer Lamb '"lr":3e-3' >lamb.json
  ds-train lion.json --out run --quiet --steps 2
  for other in cfg lamb; do
    run ds-train $other.json --out run --resume latest
    assert_failure 3
    assert_output --partial "holds the state of optimizer Lion, and this run has"
    assert_output --partial "start from its weights: --weights run/step-00000002"
    run ds-train $other.json --check --out run --resume latest
    assert_failure 3
    ds-train $other.json --out weights-$other --weights run/step-00000002 --quiet --steps 1
  done
  ds-train cfg.json --out adamw --quiet --steps 2
  with_optimizer Adam '"lr":3e-3' >adam.json
  ds-train adam.json --out adamw --resume latest --quiet --steps 3
}

@test "groups of parameters: their own rates, decay, optimizers; frozen ones never move" {
  local groups='{"params": "*wte*", "frozen": true},'
  groups+='{"params": ["*ln_*", "*.bias"], "weight_decay": 0, "lr": 1e-3},'
  groups+='{"params": "*mlp*", "type": "SGD", "lr": 0.05, "momentum": 0.9}'
  with_optimizer AdamW '"lr":3e-3,"weight_decay":0.1' |
    sed "s|\"params\": {\"lr\"|\"param_groups\": [$groups], &|" >groups.json
  ds-launch -n 2 ds-train groups.json --out whole --quiet --steps 6
  ds-launch -n 2 ds-train groups.json --out half --quiet --steps 3
  ds-launch -n 4 ds-train groups.json --out half --quiet --steps 6 --resume latest --set zero_optimization.stage=3
  assert_equal "$(losses half)" "$(losses whole)"
  merged whole whole.safetensors
  merged half half.safetensors
  cmp whole.safetensors half.safetensors
  assert_equal "$(states_of whole.safetensors)" "exp_avg exp_avg_sq momentum_buffer"
  run grep -ac 'optimizer.exp_avg.wte' whole.safetensors
  assert_output 0
  # A file with states goes back to a step, which goes on with the same bits.
  ds-shard whole.safetensors -o sharded --dp 2 --stage 2 --quiet
  ds-launch -n 2 ds-train groups.json --out whole --quiet --steps 8 --resume latest
  run ds-shard show sharded
  assert_output --partial "momentum_buffer bytes"
}

@test "what an optimizer does not take is refused with the name of those that do, all at once" {
  with_optimizer Lion '"lr":1e-4,"eps":1e-8,"momentum":0.9' >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "optimizer.params.eps: belongs to AdamW, Adam, Lamb, Adagrad, Muon; the optimizer is Lion"
  assert_output --partial "optimizer.params.momentum: belongs to SGD, Muon; the optimizer is Lion"
  sed 's|"optimizer": .*|"optimizer": {"param_groups": [{"lr": 1}, 3, {"params": "*", "tpye": "SGD", "betas": [1, 2]}]},|' cfg.json >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "optimizer.param_groups[0].params: is missing"
  assert_output --partial "optimizer.param_groups[1]: must be an object"
  assert_output --partial "optimizer.param_groups[2].tpye: unknown key; did you mean optimizer.param_groups[2].type?"
  assert_output --partial "optimizer.param_groups[2].betas"
  sed 's|"optimizer": .*|"optimizer": {"param_groups": [{"params": "transformer.h.0.mlp.c_fc.wieght", "lr": 1}]},|' cfg.json >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "matches no parameter of the model; did you mean 'transformer.h.0.mlp.c_fc.weight'?"
}
