#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# 1-bit Adam from the shell: checkpoints save and restore the errors of its signs; a checkpoint that does not fit is
# refused.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  one_bit '"freeze_step": 4' '"stage": 0'
}

one_bit() { # params zero
  sed -i "s|\"optimizer\": .*|\"optimizer\": {\"type\": \"OneBitAdam\", \"params\": {\"lr\": 5e-4, \"betas\": [0.9, 0.9], $1}},|;
    s|\"zero_optimization\": .*|\"zero_optimization\": {$2},|" cfg.json
}

@test "a run resumes bit for bit at the same layout, and says that another one begins without what was lost" {
  # DS_SLOW=1: each with each.
  for stage in 0 1; do
    for more in save.async=false save.async=true bf16.enabled=true; do
      [[ -n ${DS_SLOW-} || $stage$more == 0save.async=true || $stage$more == 1bf16* ]] || continue
      set -- --set zero_optimization.stage=$stage --set $more
      resumes_bit_for_bit 2 7 "$@"
      run --separate-stderr ds-launch -n 4 ds-train cfg.json --out other --resume latest "$@"
      assert_success
      [[ $stderr == *"other/step-00000007 was made by another layout of ranks"*"what compression had lost there is lost"* ]]
      assert_equal "$(losses other | head -8)" "$(losses whole | head -8)" # the loss before the first such update
      ds-ckpt-merge half --verify --quiet -o again.safetensors
    done
  done
  h5dump -H whole/step-00000012/rank-00001.h5 | grep -A3 'DATASET "momentum_worker_error@0[.]' | grep -q H5T_IEEE_F32LE
  # A command that reads only weights loses nothing by that.
  run --separate-stderr ds-train cfg.json --out whole --resume latest --eval --set data.split=0.1
  assert_success
  [[ $stderr != *"is lost"* ]] || fail "$stderr"
  # Before the freeze nothing has been lost.
  ds-train cfg.json --out early --steps 4 --quiet
  run ! grep -q '\"rank_local\"' early/step-00000004/manifest.json
}

@test "damage to what was lost is found, and a step with less of it is one of another optimizer" {
  ds-launch -n 2 ds-train cfg.json --out run --steps 6 --quiet
  local offset
  offset=$(grep -o 'worker_error@0[.][0-9a-f]*","offset":[0-9]*' run/step-00000006/manifest.json | head -1 | grep -o '[0-9]*$')
  printf '\x55' | dd of=run/step-00000006/rank-00000.h5 bs=1 seek=$((offset + 5)) conv=notrunc status=none
  run -3 ds-launch -n 2 ds-train cfg.json --out run --resume run/step-00000006
  assert_output --partial "rank-00000.h5: damaged"
  run -3 ds-ckpt-merge run --verify -o merged.safetensors
  assert_output --partial "rank-00000.h5: damaged"
}

@test "AdamW may warm up what 1-bit Adam goes on with, and the other way round" {
  sed 's|"OneBitAdam"|"AdamW"|; s|"freeze_step": 4|"bias_correction": false|' cfg.json >adamw.json
  ds-launch -n 2 ds-train adamw.json --out run --quiet --steps 6
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out run --steps 9 --resume latest
  assert_success
  [[ $stderr == *"holds nothing that compression had lost: the run begins without"* ]] || fail "$stderr"
  ds-launch -n 2 ds-train adamw.json --out run --quiet --resume latest
  assert_equal "$(losses run | wc -l)" 12
}

@test "metrics have what signs have lost and what was sent, which --check predicts" {
  ds-launch -n 2 ds-train cfg.json --out run --quiet
  run grep '"step":4,' run/metrics.jsonl
  refute_output --partial compression
  run grep '"type":"step","step":5,' run/metrics.jsonl
  assert_output --regexp '"compression":\{"momentum":0\.[0-9]+,"server_error":0\.[0-9]+,"worker_error":0\.[0-9]+\}'
  local sent
  sent=$(grep -o '"dp.one_bit":[0-9]*' run/metrics.jsonl | sort -u | cut -d: -f2)
  run ds-launch -n 2 ds-train cfg.json --check --json
  assert_success
  assert_output --partial "\"dp.one_bit\": $sent"
}

@test "what 1-bit Adam cannot be with is refused with the reason" {
  refused 2 "OneBitAdam needs each rank's own gradients whole" --set zero_optimization.stage=2
  refused 2 "zero_optimization.stage 0 or 1" --set zero_optimization.stage=3
  refused 4 "states stay there" --set zero_optimization.stage=1 --set zero_optimization.offload_optimizer.device=cpu
  refused 2 "must be an integer, 1 to" --set optimizer.params.freeze_step=0
  refused 2 "it updates all parameters or none, with the same freeze_step" \
    --set 'optimizer.param_groups=[{"params": "*mlp*", "type": "AdamW"}]'
  refused 2 "it updates all parameters or none, with the same freeze_step" \
    --set 'optimizer.param_groups=[{"params": "*mlp*", "freeze_step": 9}]'
  refused 2 "belongs to OneBitAdam, OneBitLamb; the optimizer is AdamW" --set optimizer.type=AdamW
  run --separate-stderr ds-train cfg.json --out clipped --set gradient_clipping=1
  assert_success
  [[ $stderr == *"gradient_clipping"*"ends with freeze_step 4"* ]]
  # Frozen parameters and rates of their own are groups like others.
  ds-launch -n 2 ds-train cfg.json --out groups --quiet \
    --set 'optimizer.param_groups=[{"params": "*mlp*", "lr": 1e-3}, {"params": "*wpe*", "frozen": true}]'
}

zero_one() { # stage is 0; intervals are short
  sed -i "s|\"optimizer\": .*|\"optimizer\": {\"type\": \"ZeroOneAdam\", \"params\": {\"lr\": 2e-4, \"betas\": [0.9, 0.9], \"var_freeze_step\": 6, \"var_update_scaler\": 2, \"local_step_scaler\": 2, \"local_step_clipper\": 4}},|;
    s|\"reduce_order\"|\"scheduler\": {\"type\": \"WarmupCosineLR\", \"params\": {\"warmup_num_steps\": 3, \"total_num_steps\": 23}}, \"reduce_order\"|" cfg.json
}

@test "0/1 Adam resumes bit for bit, also between two means of parameters" {
  zero_one
  # DS_SLOW=1: also in bf16, and at more steps.
  for more in ${DS_SLOW:+save.async=false bf16.enabled=true} save.async=true; do
    rm -rf whole
    set -- --set $more
    ds-launch -n 2 ds-train cfg.json --out whole --quiet --steps 20 "$@"
    merged whole whole.safetensors
    for at in ${DS_SLOW:+5 11} 8 13 17; do
      rm -rf half
      ds-launch -n 2 ds-train cfg.json --out half --quiet --steps $at "$@"
      run --separate-stderr ds-launch -n 2 ds-train cfg.json --out half --steps 20 --resume latest "$@"
      assert_success
      [[ $stderr != *"had lost"* ]]
      assert_equal "$(losses half)" "$(losses whole)"
      merged half half.safetensors
      cmp whole.safetensors half.safetensors
    done
  done
  grep -q 'common_parameters@0' half/step-00000017/manifest.json
  # One rank sends nothing, and still keeps its errors over its own steps.
  ds-train cfg.json --out alone --steps 20 --quiet
  run ! grep -q dp.one_bit alone/metrics.jsonl
  ds-train cfg.json --out parted --steps 13 --quiet
  ds-train cfg.json --out parted --steps 20 --resume latest --quiet
  assert_equal "$(losses parted)" "$(losses alone)"
  refused 2 "which is zero_optimization.stage 0" --set zero_optimization.stage=1
  refused 2 "ZeroOneAdam has none" --set optimizer.params.bias_correction=true
  refused 4 "it needs masters" --set bf16.enabled=true --set bf16.bf16_master_weights_and_grads=true
  run -4 ds-launch -n 2 ds-train cfg.json --out refused --set sequence_parallel_size=2 --set train_batch_size=4
  assert_output --partial "have parts of one sequence alone"
  refused 4 "averages sums of gradients in fp32" --set bf16.enabled=true --set data_types.grad_accum_dtype=bf16
}

@test "between two means of parameters a checkpoint is the model of one rank, and another phase or optimizer says what is lost" {
  zero_one
  ds-launch -n 2 ds-train cfg.json --out run --quiet --steps 13
  # All pieces are the first rank's; the second one's own data is saved beside them.
  run ds-ckpt-merge run --verify --quiet -o run.safetensors
  assert_success
  run h5dump -H run/step-00000013/rank-00001.h5
  refute_output --partial 'GROUP "exp_avg"'
  assert_output --partial 'DATASET "parameter_worker_error@0.'
  local more
  for more in 'optimizer.params.var_freeze_step=15' 'optimizer={"type":"AdamW"}' \
    'optimizer={"type":"OneBitAdam","params":{"freeze_step":4}}'; do
    rm -rf other
    cp -r run other
    run --separate-stderr ds-launch -n 2 ds-train cfg.json --out other --resume latest --steps 16 --set "$more"
    [[ $status == 0 ]] || fail "$more: $stderr"
    [[ $stderr == *"what compression had lost and ranks' own steps had made there is lost"* ]] || fail "$more: $stderr"
  done
  # Errors of momentums are none of gradients.
  cp cfg.json zero_one.json
  one_bit '"freeze_step": 4' '"stage": 0'
  ds-launch -n 2 ds-train cfg.json --out run --quiet --steps 18 --resume latest
  run --separate-stderr ds-launch -n 2 ds-train zero_one.json --out run --steps 20 --resume latest --set optimizer.params.var_freeze_step=30
  assert_success
  [[ $stderr == *"what compression had lost there is lost"* ]] || fail "$stderr"
}

@test "what steps of different kinds send is predicted on average, and memory over MPI for all of them" {
  local kind
  for kind in one_bit zero_one; do
    "$kind" '"freeze_step": 4' '"stage": 0'
    ds-launch -n 2 ds-train cfg.json --out "$kind" --quiet --set communication.backend=mpi
    run ds-memreport "$kind/metrics.jsonl"
    assert_line --regexp '^ *comm .* exact'
    run ds-launch -n 2 ds-train cfg.json --check --json
    local sum
    sum=$(grep '"type":"step"' "$kind/metrics.jsonl" | grep -o '"dp.one_bit":[0-9]*' | cut -d: -f2 | awk '{ s += $1 } END { printf "%.0f", s / 12 }')
    assert_output --partial "\"mean_comm_bytes_per_step\""
    assert_output --regexp "\"mean_comm_bytes_per_step\": \{[^}]*\"dp.one_bit\": $sum"
  done
  # The first update after the freeze gathers momentums at stage 1, and no other.
  one_bit '"freeze_step": 4' '"stage": 1'
  ds-launch -n 2 ds-train cfg.json --out gathers --quiet
  sum=$(grep '"type":"step"' gathers/metrics.jsonl | grep -o '"dp.all_gather":[0-9]*' | cut -d: -f2 | awk '{ s += $1 } END { printf "%.0f", s / 12 }')
  run ds-launch -n 2 ds-train cfg.json --check --json
  assert_output --regexp "\"mean_comm_bytes_per_step\": \\{[^}]*\"dp.all_gather\": $sum"
  # For a checkpoint, the values that 1-bit LAMB keeps for each parameter go to the first rank of all.
  sed -i 's|"OneBitAdam"|"OneBitLamb"|' cfg.json
  ds-launch -n 4 ds-train cfg.json --out tensors --quiet --set tensor_parallel.tp_size=2
  run ds-memreport tensors/metrics.jsonl
  assert_line --regexp '^ *comm .* exact'
  run ds-memreport cfg.json -n 2
  assert_output --partial "in the last step"
  assert_output --partial "on average over all steps"
}

@test "1-bit LAMB resumes bit for bit, and its means of ratios go along to any layout" {
  sed -i 's|"OneBitAdam"|"OneBitLamb"|; s|5e-4|5e-3|' cfg.json
  local at
  for at in ${DS_SLOW:+3} 4 7; do
    resumes_bit_for_bit 2 $at --set zero_optimization.stage=$((at % 2))
  done
  run grep -o '"optimizer_numbers": .*' half/step-00000007/manifest.json
  assert_output --regexp '"transformer.wte.weight":\[0\.[0-9]+,[0-9.]+\]'
  resumes_bit_for_bit 4 7 --set pipeline.stages=2
  # Another layout, and a file of whole tensors, continue with the same means and factors.
  ds-ckpt-merge half/step-00000007 --optimizer -o half.safetensors --quiet
  ds-shard half.safetensors -o sharded --dp 2 --quiet
  local numbers
  numbers=$(grep -o '"optimizer_numbers": {[^}]*}' half/step-00000007/manifest.json)
  assert_equal "$(grep -o '"optimizer_numbers": {[^}]*}' sharded/step-00000007/manifest.json)" "$numbers"
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out sharded --resume latest
  assert_success
  [[ $stderr == *"holds nothing that compression had lost: the run begins without"* ]]
  # The next loss, before the first update by other signs; then nearly the same.
  assert_equal "$(losses sharded | head -1)" "$(losses whole | sed -n 8p)"
  awk -v a="$(losses sharded | tail -1 | cut -d' ' -f2)" -v b="$(losses whole | tail -1 | cut -d' ' -f2)" \
    'BEGIN { d = a - b; exit !(d < 0.1 && d > -0.1) }'
  # Lamb has no such numbers.
  sed 's|"OneBitLamb"|"Lamb"|; s|"freeze_step": 4|"bias_correction": false|' cfg.json >lamb.json
  ds-train lamb.json --out lamb --quiet --steps 2
  run -3 ds-train cfg.json --out lamb --resume latest
  assert_output --partial "has the state of Lamb (exp_avg, exp_avg_sq) there"
}

@test "a rank that is killed while signs travel is named" {
  sed -i 's/"steps": .*/"steps": 1000000/; s/"freeze_step": 4/"freeze_step": 1/; s/"train_batch_size": 8/"train_batch_size": 6/; s/5e-4/1e-6/' cfg.json
  local transport
  for transport in ${DS_SLOW:+shm} mpi; do
    rm -rf run
    killed_rank_is_named '[0-2]' -n 3 ds-train cfg.json --out run --quiet --set communication.backend=$transport
  done
}
