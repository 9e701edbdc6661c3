#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Run directories: whichever process dies, at whatever moment, the run resumes as if nothing had happened and its record
# is whole. The job's exit status gives the reason for its end.

bats_require_minimum_version 1.5.0

load tiny

evals() { grep '"type":"eval"' "$1/metrics.jsonl"; }

@test "the status of a job is that of the rank that knows why, whoever ends first" {
  ds-launch -n 2 ds-train cfg.json --out run --quiet --steps 2
  for _ in 1 2 3 4 5; do
    run ds-launch -n 4 ds-train cfg.json --out run
    assert_failure 2
  done
  printf 'garbage' | dd of=run/step-00000002/rank-00001.h5 bs=1 seek=3000 conv=notrunc status=none
  for _ in 1 2 3 4 5; do
    run ds-launch -n 4 ds-train cfg.json --out run --resume latest
    assert_failure 3
    assert_output --partial "rank-00001.h5"
    refute_output --regexp 'rank [0-9]+ gave up: rank'
  done
}

@test "a run that died before its first checkpoint starts its record anew" {
  ds-launch -n 2 ds-train cfg.json --out run --resume latest --steps 100000 2>/dev/null &
  pid=$!
  until_true 20 steps_at_least run 20
  kill -9 "$(ranks_here | tail -1)"
  wait "$pid" || true
  ds-launch -n 2 ds-train cfg.json --out run --resume latest --quiet
  assert_equal "$(losses run | cut -d' ' -f1 | tr '\n' ' ')" "1 2 3 4 5 6 7 8 9 10 11 12 "
}

@test "ranks that are killed leave nothing in /dev/shm: while they start, while they train, and with their launcher" {
  unshare -m mount -t tmpfs tmpfs /dev/shm || skip "no mount here"
  cat >dies <<'END'
[[ $RANK != 1 ]] || { until compgen -G '/dev/shm/ds-job.*' >/dev/null; do sleep 0.05; done; kill -9 $$; }
exec "$@"
END
  cat >all <<'END'
source "$DS_SOURCE/tests/cli/waiting.bash"
mount -t tmpfs tmpfs /dev/shm
trains() { grep -qs '"type":"step"' "$1/metrics.jsonl"; }
nothing_is_left() { [[ -z $(ls -A /dev/shm) ]]; }
ds-launch -n 2 bash dies ds-train cfg.json --out start
echo "$? $(ls -A /dev/shm)"
ds-launch -n 2 bash dies ds-commbench --op all_reduce -b 8 -e 8
echo "$? $(ls -A /dev/shm)"
ds-launch -n 2 ds-train cfg.json --out rank --steps 100000 &
until_true 20 trains rank
kill -9 "$(ls /dev/shm | sed -n 's/^ds-train\.//p' | head -1)"
wait $!
echo "$? $(ls -A /dev/shm)"
ds-launch -n 2 ds-train cfg.json --out launcher --steps 100000 &
until_true 20 trains launcher
kill -9 $!
until_true 20 nothing_is_left
echo "$? $(ls -A /dev/shm)"
END
  run --separate-stderr unshare -m bash all 3>&-
  assert_equal "$(grep -v '^[^0-9]' <<<"$output" | grep -E '^[0-9]+ ')" $'137 \n137 \n137 \n0 '
}

@test "a stop at a step that wants an evaluation leaves it to the resumed run" {
  set=(--steps 400 --set eval.every=1 --set eval.batches=1 --quiet)
  ds-launch -n 2 ds-train cfg.json --out whole "${set[@]}"
  ds-launch -n 2 ds-train cfg.json --out parts "${set[@]}" 2>/dev/null &
  pid=$!
  until_true 20 steps_at_least parts 20
  kill -TERM $pid
  wait "$pid" || assert_equal $? 75
  ds-launch -n 2 ds-train cfg.json --out parts "${set[@]}" --resume latest
  diff <(losses whole) <(losses parts)
  diff <(evals whole) <(evals parts)
}

@test "a validation loss does not depend on the number of ranks" {
  ds-launch -n 2 ds-train cfg.json --out run --quiet
  for batches in 0 1 2; do
    run ds-train cfg.json --resume run --eval --set eval.batches=$batches --json
    assert_success
    want=$output
    for n in 2 4; do
      run --separate-stderr ds-launch -n $n ds-train cfg.json --resume run --eval --set eval.batches=$batches --json
      assert_output "$want"
    done
  done
}

@test "more batches than there are, by however many, are the whole validation set" {
  ds-train cfg.json --out run --quiet --steps 2
  run ds-train cfg.json --resume run --eval --set eval.batches=0 --json
  assert_success
  want=$output
  refute_output --partial '"val_loss": 0.0,'
  run ds-train cfg.json --resume run --eval --set eval.batches=1000000000000 --json
  assert_output "$want"
  for batches in 9223372036854775807 768614336404564651; do
    run -2 --separate-stderr ds-train cfg.json --resume run --eval --set eval.batches=$batches
    [[ $stderr == *"eval.batches: must be an integer, 0 to 1000000000000, not $batches"* ]] || fail "$stderr"
  done
}

@test "validation data that cannot be used loses no training" {
  printf 'x%.0s' {1..5000} >good.txt
  run ds-train cfg.json --out run --set data.train=good.txt --set data.validation=none.txt
  assert_failure 2
  assert [ ! -e run ]
}

@test "a finished run has nothing to do and says so" {
  ds-train cfg.json --out run --quiet
  cp run/metrics.jsonl before
  run ds-train cfg.json --out run --resume latest
  assert_success
  assert_output --partial "nothing to train"
  refute_output --partial "loss"
  cmp before run/metrics.jsonl
}

@test "a resumed run clears what a killed one left, also when it has nothing to do" {
  ds-train cfg.json --out run --quiet --set save.every=4
  mkdir run/.tmp-step-00000004 run/.tmp-step-00000008-0123
  touch run/.tmp-step-00000004/manifest.json
  ds-train cfg.json --out run --quiet --resume latest
  assert_equal "$(find run -name '.*')" ""
}

@test "a run does not mix with other steps, another run, or files that are none" {
  ds-train cfg.json --out run --quiet --set save.every=4
  run ds-train cfg.json --out run --resume run/step-00000004
  assert_failure 2
  assert_output --partial "step-00000012, which is newer"
  ds-train cfg.json --out other --quiet --steps 2
  run ds-train cfg.json --out other --resume run
  assert_failure 2
  assert_output --partial "another run"
  mkdir foreign
  touch foreign/thesis.txt
  run ds-train cfg.json --out foreign --resume latest
  assert_failure 2
  assert_output --partial "no run"
  assert_equal "$(ls -A foreign)" thesis.txt
  run ds-train cfg.json --out text.txt
  assert_failure 2
  assert_output --partial "not a directory"
  # A branch from an older step, in a directory of its own.
  ds-train cfg.json --out branch --resume run/step-00000004 --quiet
  diff <(losses run | tail -8) <(losses branch)
}

@test "a run that fails while it starts leaves nothing, and nothing changed" {
  ds-train cfg.json --out run --quiet --steps 2
  tar cf before.tar run
  for args in "--out new --weights nofile.safetensors" "--out new/a/b --resume run --set model.n_embd=64" \
    "--out new --resume run --set seed=7" "--out new --resume run --set data.seq_length=16"; do
    # shellcheck disable=SC2086
    run ds-train cfg.json $args
    assert_failure
    assert [ ! -e new ]
  done
  run ds-train cfg.json --out run --resume latest --set model.n_embd=64
  assert_failure 3
  tar df before.tar
}

@test "kills of a rank, of mpirun, of ds-launch, at any moment, over shm and mpi: the run goes on bit for bit" {
  set=(--steps 60 --set save.every=3 --set save.keep=2)
  ds-launch -n 2 ds-train cfg.json --out whole "${set[@]}" --quiet
  for backend in shm mpi; do
    for victim in rank mpirun launcher; do
      [[ -n ${DS_SLOW-} || $backend-$victim != @(shm-mpirun|mpi-launcher) ]] || continue
      dir=$backend-$victim
      for delay in ${DS_SLOW:+0.2 0.5} 0.35; do
        ds-launch -n 2 ds-train cfg.json --out "$dir" "${set[@]}" --set communication.backend=$backend \
          --set communication.timeout_s=10 --resume latest >/dev/null 2>&1 &
        pid=$!
        sleep "$delay"
        case $victim in
          rank) kill -9 "$(ranks_here | tail -1)" ;;
          mpirun) kill -9 "$(pgrep -P $pid -x mpirun)" ;;
          launcher) kill -9 $pid ;;
        esac 2>/dev/null || true # it may have ended already
        wait $pid 2>/dev/null || true
        until_true 15 no_rank_here
      done
      ds-launch -n 2 ds-train cfg.json --out "$dir" "${set[@]}" --resume latest --quiet 2>/dev/null
      diff <(losses whole) <(losses "$dir")
    done
  done
}

@test "a stopped rank is named within the time limit" {
  for backend in shm ${DS_SLOW:+mpi}; do
    ds-launch -n 2 ds-train cfg.json --out run-$backend --steps 100000 --set communication.backend=$backend \
      --set communication.timeout_s=2 2>err &
    pid=$!
    until_true 20 steps_at_least run-$backend 5
    kill -STOP "$(ranks_here | tail -1)"
    SECONDS=0
    local status=0
    wait "$pid" || status=$?
    assert_equal "$status" 1
    ((SECONDS <= 20))
    assert_equal "$(ranks_here)" ""
    run cat err
    assert_output --regexp "rank [01] .*(stopped|did not arrive within 2 s)"
  done
}

@test "a rank with a mistake of its own says it; one that all have is said once" {
  # shellcheck disable=SC2016
  run -2 timeout 60 ds-launch -n 2 sh -c 'test $RANK = 0 || exec ds-train cfg.json --set steps=none; exec ds-train cfg.json --out run'
  assert_output --partial 'ds-train[1]: error: --set steps=none'
  run -2 timeout 60 ds-launch -n 3 ds-train cfg.json --set steps=none
  assert_equal "$(grep -c '^ds-train.*error: --set steps=none' <<<"$output")" 1
}

@test "a run directory that cannot be listed is not one without checkpoints" {
  ds-train cfg.json --out run --quiet --steps 3
  # One descriptor beside the standard ones: enough for the configuration, not for a folder while another is open.
  run bash -c 'exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- 10>&-; exec prlimit --nofile=4 ds-train cfg.json --out run --resume latest'
  refute_output --partial 'no checkpoint yet'
  refute_output --partial 'complete step'
  ((status == 1)) || fail "$status: $output"
}

@test "a rank that never comes is not waited for: at once where it has ended, else until the time limit" {
  for backend in shm mpi; do
    for absent in 0 1; do
      # shellcheck disable=SC2016
      run -1 timeout 60 ds-launch -n 2 sh -c 'test $RANK = $0 || exec ds-train cfg.json --out run --set communication.backend=$1' \
        $absent $backend
      assert_output --regexp "rank $absent (ended before it|died: it ended before it attached)"
    done
    # shellcheck disable=SC2016
    run -1 timeout 60 ds-launch -n 2 sh -c 'test $RANK = 0 || exec sleep 100; exec ds-train cfg.json --out run \
      --set communication.timeout_s=2 --set communication.backend=$0' $backend
    assert_output --partial "within 2 s"
    assert_equal "$(ranks_here)" ""
  done
  [[ ! -e run ]]
}

@test "a full disk: an error, and the checkpoint before is whole" {
  ds-train cfg.json --out run --quiet --steps 3
  # Files end at 40 KB: rank files of this model are larger.
  run bash -c 'ulimit -f 40; exec ds-train cfg.json --out run --resume latest'
  assert_failure 1
  assert_output --partial "File too large"
  assert_equal "$(cat run/latest)" step-00000003
  assert_equal "$(find run -name '.tmp*' -o -name '*.tmp*')" ""
  ds-launch -n 2 ds-train cfg.json --out run --resume latest --quiet
  assert_equal "$(losses run | wc -l)" 12
}

@test "SIGTERM to one rank without --out: 128 + signal, whoever ends first" {
  for _ in 1 2 3; do
    ds-launch -n 2 ds-train cfg.json --steps 1000000 --quiet 2>/dev/null &
    pid=$!
    until_true 20 some_rank_here
    sleep 0.7
    kill -TERM "$(ranks_here | tail -1)"
    local status=0
    wait "$pid" || status=$?
    assert_equal "$status" 143
  done
}

@test "a run that has diverged stops, and its last good checkpoint stays and is named" {
  run ds-train cfg.json --out run --steps 100 --set save.every=1 --set optimizer.params.lr=1e30 --set gradient_clipping=0
  assert_failure 1
  assert_output --partial "the run has diverged: the loss is not finite since step 2"
  assert_output --partial "no checkpoint is from before that, for run/step-00000001 is already lost"
  assert_equal "$(cat run/latest)" step-00000001

  ds-train cfg.json --out good --steps 3 --quiet
  run ds-train cfg.json --out good --resume latest --set save.every=1 --set save.keep=1 --set optimizer.params.lr=1e30 \
    --set gradient_clipping=0
  assert_failure 1
  assert_output --partial "resume from good/step-00000003, for good/step-00000004 is already lost"
  run ds-train cfg.json --eval --resume good/step-00000003
  assert_success

  # Weights beyond all numbers after the only step.
  run ds-train cfg.json --out once --steps 1 --set optimizer.params.lr=1e38 --set optimizer.params.weight_decay=1e20
  assert_failure 1
  assert_output --partial "weights or moments are not finite since step 1; no checkpoint is from before that"
  assert [ ! -e once/latest ]
}

@test "a stop during an evaluation ends it, and the resumed run makes up for it" {
  cp text.txt long.txt
  for _ in {1..12}; do cat long.txt long.txt >longer.txt && mv longer.txt long.txt; done
  long=(--set data.validation=long.txt --set eval.every=2 --set eval.batches=0)
  for steps in 4 2; do # in the middle, and after the last step
    ds-launch -n 2 ds-train cfg.json --out run$steps --quiet --steps $steps "${long[@]}" 2>err &
    pid=$!
    until_true 20 steps_at_least run$steps 2
    until_true 20 test -e run$steps/step-00000002 -o $steps = 4
    sleep 0.5
    SECONDS=0
    kill -TERM $pid
    wait $pid || assert_equal $? 75
    ((SECONDS <= 10))
    assert_equal "$(cat run$steps/latest)" step-00000002
    assert_equal "$(grep -c '"type":"eval"' run$steps/metrics.jsonl)" 0
    ds-launch -n 2 ds-train cfg.json --out run$steps --resume latest --quiet --steps $steps "${long[@]}" --set eval.batches=1
    assert_equal "$(grep -c '"type":"eval","step":2,' run$steps/metrics.jsonl)" 1
  done
}

@test "a run that is stopped again and again keeps as many checkpoints as it should" {
  ds-train cfg.json --out run --steps 1 --quiet
  for _ in 1 2 3 4; do
    ds-train cfg.json --out run --resume latest --steps 1000000 --set save.keep=1 --quiet 2>err &
    pid=$!
    before=$(losses run | wc -l)
    until_true 20 steps_at_least run $((before + 5))
    kill -TERM $pid
    wait $pid || assert_equal $? 75
    (($(find run -name 'step-*' | wc -l) <= 2)) # the last one has not proved itself
  done
}

@test "a run whose directory was replaced leaves the new one alone" {
  ds-train cfg.json --out run --steps 100000 --quiet 2>err &
  pid=$!
  until_true 20 steps_at_least run 3
  mv run elsewhere # at once, where rm would race with what the run writes
  ds-train cfg.json --out run --steps 3 --quiet
  wait $pid || assert_equal $? 1
  grep -q "run directory run was removed or replaced" err || fail "$(cat err)"
  assert_equal "$(cat run/latest)" step-00000003
  assert_equal "$(losses run | wc -l)" 3
}

@test "skipped steps, and a loss scale at its floor, are events" {
  local low=(--set fp16.enabled=true --set fp16.initial_scale_power=34 --set fp16.hysteresis=1)
  ds-train cfg.json --out r --quiet --steps 3 "${low[@]}"
  grep -qF '"event":"skipped","step":1,"loss_scale":17179869184.0,"next_loss_scale":8589934592.0,"skipped_steps":1}' \
    r/metrics.jsonl
  grep -qF '"event":"skipped","step":2,"loss_scale":8589934592.0,"next_loss_scale":4294967296.0,"skipped_steps":2}' \
    r/metrics.jsonl
  run -1 ds-train cfg.json --out f --quiet --steps 9 "${low[@]}" --set fp16.min_loss_scale=4294967296
  assert_equal "$(grep -c '"event":"skipped"' f/metrics.jsonl)" 2
  grep -qF '"event":"loss_scale_floor","step":3,"loss_scale":4294967296.0,"skipped_steps":3}' f/metrics.jsonl
}

@test "steps that a static loss scale makes useless are said" {
  run ds-train cfg.json --set 'fp16={"enabled": true, "loss_scale": 1e9}'
  assert_success
  assert_output --partial "warning: 10 steps in a row were skipped: gradients overflow fp16 at fp16.loss_scale"
}

@test "a resumed run says that --steps moves its schedule, and the key that keeps it" {
  cosine=(--set scheduler.type=Cosine --set scheduler.params.warmup_num_steps=0)
  ds-train cfg.json --out run --quiet "${cosine[@]}"
  cp -r run kept && cp -r run same
  run -0 ds-train cfg.json --out run --resume latest --steps 24 "${cosine[@]}"
  assert_line --index 0 --regexp "warning: run/step-00000012 was trained with a schedule of 12 steps, and this run has 24: \
the learning rate of step 13 is 0.0015 instead of 0; scheduler.params.total_num_steps 12 keeps the schedule"
  run -0 ds-train cfg.json --out kept --resume latest --steps 24 "${cosine[@]}" --set scheduler.params.total_num_steps=12
  refute_output --partial "was trained with a schedule"
  run -0 ds-train cfg.json --out same --resume latest --steps 14
  refute_output --partial "was trained with a schedule"
  # Without the key the schedule follows the steps again. Another type was meant to move.
  cp -r kept linear
  run -0 ds-train cfg.json --out linear --resume latest --steps 26 --set 'scheduler={"type": "WarmupDecayLR"}'
  refute_output --partial "was trained with a schedule"
  cp -r kept longer
  run -0 ds-train cfg.json --out longer --resume latest --steps 36 "${cosine[@]}"
  assert_output --partial "was trained with a schedule of 12 steps, and this run has 36: the learning rate of step 25 is"
  # Steps that are skipped move no schedule.
  local low=(--set fp16.enabled=true --set fp16.initial_scale_power=34 --set fp16.hysteresis=1)
  ds-train cfg.json --out low --quiet --steps 20 "${cosine[@]}" "${low[@]}"
  run -0 ds-train cfg.json --out low --resume latest --steps 24 "${cosine[@]}" "${low[@]}"
  local said='the learning rate of step ([0-9]+) is ([0-9.e+-]+) instead'
  [[ $output =~ $said ]] || fail "$output"
  assert_equal "$(printf '%.4g' "$(sed -n "s/.*\"step\":${BASH_REMATCH[1]},.*\"lr\":\([^,}]*\).*/\1/p" low/metrics.jsonl | tail -n 1)")" \
    "$(printf '%.4g' "${BASH_REMATCH[2]}")"
  # Nothing is left whose rate could move.
  run -0 ds-train cfg.json --out kept --resume latest --steps 12 "${cosine[@]}"
  refute_output --partial "was trained with a schedule"
}

# Two ranks at ZeRO stage 2 in bf16, five steps over the text that is made here; from version e8cd8a7, as are the digest
# of the merged file and the losses of the steps after the resume.
@test "a checkpoint of an older version merges to the bytes that it had, and goes on" {
  cp -r "$DS_SOURCE/tests/golden/checkpoint-e8cd8a7" old
  ds-ckpt-merge old -o old.safetensors --optimizer --verify >/dev/null
  assert_equal "$(sha256sum <old.safetensors)" "f34306dfa7b2cd6213b611fafff3535bf59544bad16cf129e7805e8caf812c24  -"

  for i in $(seq 1 60); do
    echo "Line $i of a text that was written for this: it goes on for $((i * 7919 % 101)) words."
  done >text.txt
  cat >old.json <<'END'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 4, "gradient_accumulation_steps": 1,
  "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "steps": 8, "device": "cpu", "save": {"every": 0}
}
END
  ds-launch -n 2 ds-train old.json --out old --resume latest --quiet >/dev/null
  # Instruction sets round sums of 16-bit products otherwise.
  losses old | tail -3 | awk -v want="5.228854369 5.183141835 5.122263849" '
    BEGIN { split(want, of, " ") }
    { if (($2 - of[NR]) ^ 2 > (2e-3) ^ 2) { print "step", $1, "loss", $2, "not", of[NR]; bad = 1 } }
    END { exit bad || NR != 3 }'
}
