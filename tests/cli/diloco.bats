#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# DiLoCo from the shell: workers that meet in some steps alone, whose own states go into checkpoints and come back.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  sed -i 's|"reduce_order"|"diloco": {"enabled": true, "workers": 2, "sync_every": 4}, "reduce_order"|' cfg.json
}

@test "a run resumes bit for bit between meetings, and another layout says what it begins without" {
  local more
  for more in ${DS_SLOW:+zero_optimization.stage=0 zero_optimization.stage=3 bf16.enabled=true tensor_parallel.tp_size=2 save.async=true} pipeline.stages=2 zeropp diloco.overlap_steps=4 diloco.fragments=2; do
    set -- --set "$more"
    [[ $more != zeropp ]] || set -- --set zero_optimization.stage=3 --set save.async=true \
      --set zero_optimization.zero_quantized_gradients=true --set zero_optimization.zeropp_loco_param={}
    # Ranks of tp have copies of some rows, and two stages a tied matrix, which what workers send in codes leaves the
    # same.
    [[ $more != tensor* ]] || set -- "$@" --set diloco.outer_gradient_bits=4
    [[ $more != pipeline* ]] || set -- "$@" --set diloco.outer_gradient_bits=4 --set model.n_embd=192 --set model.n_head=4
    # Saved while a fragment is under way.
    [[ $more != *overlap* ]] || set -- "$@" --set diloco.outer_gradient_bits=8 --set save.async=true
    resumes_bit_for_bit 4 7 "$@"
  done
  ds-ckpt-merge half --verify --quiet -o again.safetensors
  grep -q '"workers":2' half/step-00000012/manifest.json
  h5dump -H half/step-00000012/rank-00003.h5 | grep -A3 'GROUP "exp_avg"' | grep -q 'DATASET "'
  run ds-shard show half
  assert_success
  assert_output --partial "workers 2"
  # One worker, and other ranks inside of workers.
  for more in '-n 2 ds-train cfg.json --set diloco.workers=1' '-n 2 ds-train cfg.json'; do
    rm -rf other
    cp -r half other
    # shellcheck disable=SC2086
    run --separate-stderr ds-launch $more --out other --resume latest --steps 16 --set diloco.fragments=2
    assert_success
    assert_equal "$(losses other | wc -l)" 16
    [[ $stderr == *"was made by another layout of ranks"*"what workers of diloco had of their own there is lost"* ]] || fail "$stderr"
  done
}

@test "an evaluation between meetings does not depend on the ranks of a worker" {
  local more ranks set
  val_losses() { grep -h '"type":"eval"' "$1/metrics.jsonl" | sed 's/.*"step":\([0-9]*\),"val_loss":\([^,}]*\).*/\1 \2/'; }
  for more in '2 zero_optimization.stage=2' '4 zero_optimization.stage=1' '4 zero_optimization.stage=3' \
    '4 pipeline.stages=2' ${DS_SLOW:+'4 tensor_parallel.tp_size=2' '8 zero_optimization.stage=3'}; do
    read -r ranks set <<<"$more"
    rm -rf run
    ds-launch -n "$ranks" ds-train cfg.json --out run --quiet --steps 6 --set data.split=0.1 --set eval.every=3 \
      --set eval.batches=2 --set train_micro_batch_size_per_gpu=1 --set "$set"
    val_losses run >"losses.$ranks.$set"
    assert [ "$(wc -l <"losses.$ranks.$set")" = 2 ]
    # Products that are cut over tp sum in another order.
    [[ $set == tensor* ]] || cmp "losses.$ranks.$set" "losses.2.zero_optimization.stage=2"
  done
}

@test "what was trained without it gives its weights" {
  ds-train cfg.json --out plain --quiet --set diloco.enabled=false
  run -3 ds-launch -n 2 ds-train cfg.json --out plain --resume latest --steps 14
  assert_output --partial "start from the weights: --weights"
  ds-launch -n 2 ds-train cfg.json --out on --weights plain/step-00000012 --quiet
  assert [ "$(losses on | wc -l)" = 12 ]
  # Its checkpoint is read like any other run's.
  ds-ckpt-merge on -o on.safetensors --quiet
  run ds-train cfg.json --weights on --generate 'the ' --max-tokens 4 --set diloco.enabled=true
  assert_success
}

@test "metrics show where workers meet and what was sent, which --check predicts" {
  ds-launch -n 4 ds-train cfg.json --out run --quiet
  assert_equal "$(grep -c outer_grad_norm run/metrics.jsonl)" 3
  grep '"type":"step","step":8,' run/metrics.jsonl | grep -q '"outer_grad_norm":[0-9.]*'
  local sent
  sent=$(grep '"type":"step","step":12,' run/metrics.jsonl | grep -o '"outer.all_reduce":[0-9]*' | cut -d: -f2)
  run ds-launch -n 4 ds-train cfg.json --check --json
  assert_success
  assert_output --partial "\"outer.all_reduce\": $sent"
  assert_output --partial '"workers": 2'
  run grep '"type":"step","step":11,' run/metrics.jsonl
  refute_output --partial '"outer.all_reduce"'
  # Meetings and their norms can be the largest calls; memory is as predicted then, too.
  ds-launch -n 4 ds-train cfg.json --out stages --quiet --set pipeline.stages=2 --set diloco.outer_gradient_bits=8 --steps 7
  run ds-memreport stages/metrics.jsonl
  assert_line --regexp '^ *comm .* exact'
  run ds-memreport cfg.json -n 4
  assert_success
  assert_output --partial "workers 2"
}

@test "what is sent on average is predicted, whether or not the last step meets" {
  local steps fragments mean
  for steps in 8 11 12; do
    fragments=$((steps == 12 ? 4 : 1)) # one of which meets in every step
    ds-launch -n 2 ds-train cfg.json --out "run$steps" --quiet --steps $steps --set diloco.fragments=$fragments
    run ds-launch -n 2 ds-train cfg.json --check --json --steps $steps --set diloco.fragments=$fragments
    mean=$(grep '"type":"step"' "run$steps/metrics.jsonl" | grep -o '"outer.all_reduce":[0-9]*' | cut -d: -f2 |
      awk -v n=$steps '{ s += $1 } END { printf "%.0f", s / n }')
    assert_output --regexp "\"mean_comm_bytes_per_step\": \\{[^}]*\"outer.all_reduce\": $mean"
  done
  run ds-launch -n 2 ds-train cfg.json --check --steps 11
  assert_output --partial "sent per rank in the last step"
}

@test "the mean over tokens is that over the tokens of a worker" {
  awk 'BEGIN { for (i = 0; i < 40; ++i) { s = ""; for (j = 0; j < (i % 2 ? 4 : 50); ++j) s = s "x"; printf "{\"prompt\": \"ab\", \"completion\": \"%s\"}\n", s } }' >lines.jsonl
  ds-launch -n 2 ds-train cfg.json --out run --quiet --steps 1 --set data.train=lines.jsonl --set loss_norm=token \
    --set train_micro_batch_size_per_gpu=1 --set train_batch_size=2
  losses run | awk '{ exit !($2 > 5.2 && $2 < 5.9) }'
}

@test "a worker that is killed is named" {
  sed -i 's/"steps": .*/"steps": 1000000/; s/"sync_every": 4/"sync_every": 1/; s/3e-3/1e-6/' cfg.json
  killed_rank_is_named '[0-3]' -n 4 ds-train cfg.json --out run --quiet
  rm -rf run
  killed_rank_is_named '[0-3]' -n 4 ds-train cfg.json --out run --quiet --set diloco.overlap_steps=1
}

@test "between meetings ranks of other workers are not waited for, and a signal is heeded at the next" {
  sed -i 's/"steps": .*/"steps": 1000000/; s/"sync_every": 4/"sync_every": 1000/; s/3e-3/1e-6/' cfg.json
  ds-launch -n 2 ds-train cfg.json --out run --quiet &
  local launcher=$! status=0
  until_true 60 steps_at_least run 10
  # The first worker continues beside one that is stopped.
  local p still='' before
  for p in $(ranks_here); do
    if tr '\0' '\n' <"/proc/$p/environ" | grep -qx RANK=1; then still=$p; fi
  done
  [[ -n $still ]] || fail "no rank 1 among $(ranks_here)"
  kill -STOP "$still"
  before=$(losses run | wc -l)
  until_true 30 steps_at_least run $((before + 20))
  kill -CONT "$still"
  kill -TERM $launcher
  wait $launcher || status=$?
  assert_equal "$status" 75
  grep -qE '"event":"stopped","step":[0-9]*000[,}]' run/metrics.jsonl
}

@test "what it cannot be with is refused with the reason" {
  refused 2 "diloco.workers: 2 does not divide the 1 ranks that see other samples"
  sed 's/"enabled": true, //' cfg.json >forgotten.json
  run -2 ds-launch -n 2 ds-train forgotten.json --out refused
  assert_output --partial "diloco.workers: has no effect without diloco.enabled true"
  assert_output --partial "diloco.sync_every: has no effect without"
  run -2 ds-train cfg.json --out refused --set diloco.enabled=1
  refute_output --partial "has no effect without"
  set -- --set diloco.workers=1
  refused 2 "must be 32, 8 or 4, not 16" "$@" --set diloco.outer_gradient_bits=16
  refused 2 "5 fragments do not meet in steps of their own: diloco.sync_every is 4" "$@" --set diloco.fragments=5
  refused 2 "hides messages between workers, and there is one" "$@" --set diloco.overlap_steps=1
  refused 2 "5 is more than the 4 steps between the meetings of two fragments" "$@" --set diloco.overlap_steps=5
  refused 2 "are more than the 4 layers" "$@" --set diloco.fragments=5 --set diloco.sync_every=9
  refused 2 "discards what the steps between meetings have learned" "$@" --set diloco.outer_lr=0
  refused 2 "the 1-bit family averages by signs" "$@" --set optimizer.type=OneBitAdam --set zero_optimization.stage=1
  refused 4 "outer states stay on the device" "$@" --set zero_optimization.offload_optimizer.device=cpu
  refused 2 "did you mean diloco.sync_every" "$@" --set diloco.sync_evry=3
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out refused --set fp16.enabled=true
  assert_equal $status 4
  [[ $stderr == *"each worker would have a loss scale of its own"* ]]
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out refused --set optimizer.type=AdamW8bit
  assert_equal $status 4
  [[ $stderr == *"masters and states cannot be in fewer bits"* ]]
  assert [ ! -e refused ]
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out never --set diloco.sync_every=40
  assert_success
  [[ $stderr == *"40 is more than the 12 steps of the run: nothing ever meets"* ]]
}
