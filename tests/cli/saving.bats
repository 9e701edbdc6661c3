#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Saves beside training, saves that fail, and damage of every part: a save writes the same however it is made, and a run
# resumes from the newest step that is whole.

bats_require_minimum_version 1.5.0

load tiny

events() { grep -o "\"event\":\"$2\",\"step\":[0-9]*" "$1/metrics.jsonl" | sed 's/.*://' | tr '\n' ' '; }

# The elements of a safetensors file, without its header, which describes the run's configuration too.
elements() { tail -c +$((8 + $(od -An -tu8 -N 8 "$1") + 1)) "$1"; }

# Flips one bit of a file in place.
flip() { # file offset
  local byte
  byte=$(od -An -tu1 -j "$2" -N 1 "$1")
  printf '%b' "\\x$(printf %x $((byte ^ 16)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

# The offset of the data of a rank's first piece.
offset_of() { # step rank state
  grep -m 1 "{\"file\":$2," "$1/manifest.json" | grep -o "\"$3\":{\"offset\":[0-9]*" | grep -o '[0-9]*$'
}

@test "a save in the background saves the bits of its step, at any stage and precision" {
  for options in "2 zero_optimization.stage=2" "2 zero_optimization.stage=0" \
    '4 zero_optimization.stage=3 bf16={"enabled":true}' '1 fp16={"enabled":true}'; do
    read -ra words <<<"$options"
    set=(--set save.every=1 --set save.keep=3)
    for key in "${words[@]:1}"; do set+=(--set "$key"); done
    rm -rf now beside
    ds-launch -n "${words[0]}" ds-train cfg.json --out now --quiet "${set[@]}"
    ds-launch -n "${words[0]}" ds-train cfg.json --out beside --quiet "${set[@]}" --set save.async=true
    diff <(losses now) <(losses beside)
    assert_equal "$(events beside saved)" "1 2 3 4 5 6 7 8 9 10 11 12 "
    assert_equal "$(ls -A beside)" "$(ls -A now)"
    for step in 10 11 12; do
      merged now/step-000000$step now.safetensors
      merged beside/step-000000$step beside.safetensors
      cmp <(elements now.safetensors) <(elements beside.safetensors)
      assert_equal "$(grep -v '"id"\|"config"\|"structure"\|"checksum"\|"view"' beside/step-000000$step/manifest.json)" \
        "$(grep -v '"id"\|"config"\|"structure"\|"checksum"\|"view"' now/step-000000$step/manifest.json)"
    done
  done
}

@test "the memory of the snapshot is predicted, and counted" {
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out run --json --quiet --set save.async=true
  assert_success
  host=$(grep -o '"host":{"predicted_bytes":[0-9]*,"peak_bytes":[0-9]*}' <<<"$output")
  [[ $host =~ predicted_bytes\":([0-9]+),\"peak_bytes\":([0-9]+) ]]
  assert_equal "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
  ((BASH_REMATCH[1] > 100000))
  run ds-launch -n 2 ds-train cfg.json --check --set save.async=true
  assert_output --regexp 'host +[0-9]'
  run ds-launch -n 2 ds-train cfg.json --check
  refute_output --regexp 'host +[0-9]'
}

@test "a stop waits for the save beside training, and saves on top" {
  ds-launch -n 2 ds-train cfg.json --out whole --steps 400 --quiet
  for _ in 1 2 3; do
    ds-launch -n 2 ds-train cfg.json --out parts --steps 400 --set save.every=1 --set save.async=true \
      --set save.keep=2 --resume latest 2>err &
    pid=$!
    before=$(losses parts 2>/dev/null | wc -l)
    until_true 20 steps_at_least parts $((before + 10))
    kill -TERM $pid
    wait $pid || assert_equal $? 75
    assert_equal "$(cat parts/latest)" "$(printf 'step-%08d' "$(losses parts | tail -1 | cut -d' ' -f1)")"
    assert_equal "$(find parts -name '.*')" ""
    ds-ckpt-merge parts -o parts.safetensors --verify --quiet
  done
  ds-launch -n 2 ds-train cfg.json --out parts --steps 400 --quiet --resume latest --set save.async=true
  diff <(losses whole) <(losses parts)
}

@test "save.on_error: a run that goes on without its checkpoints says so, and ends with status 1" {
  # Files end at 40 KB: rank files of this model are larger.
  for async in false true; do
    set=(--set save.every=4 --set "save.async=$async")
    rm -rf run
    run bash -c 'ulimit -f 40; exec "$@"' _ ds-train cfg.json --out run "${set[@]}" \
      --set save.on_error=continue
    assert_failure 1
    assert_output --regexp "warning: step 4 was not saved: rank [01]: run/\.tmp-step-00000004-[0-9a-f]+/rank-0000[01].h5: .*File too large"
    assert_output --partial "error: rank"
    assert_equal "$(events run save_failed)" "4 8 "
    assert_equal "$(losses run | wc -l)" 12
    assert_equal "$(ls -A run)" metrics.jsonl
    rm -rf run
    run bash -c 'ulimit -f 40; exec "$@"' _ ds-train cfg.json --steps 1000000 --out run "${set[@]}"
    assert_failure 1
    assert_output --partial "File too large"
    assert_equal "$(ls -A run)" metrics.jsonl
  done
}

@test "a run goes on from the step before a damaged one, says which file and dataset, and writes that step again" {
  set=(--set save.every=4 --set save.keep=2)
  ds-launch -n 2 ds-train cfg.json --out whole --quiet "${set[@]}"
  ds-launch -n 2 ds-train cfg.json --out run --steps 8 --quiet "${set[@]}"
  cp -r run pristine
  flip run/step-00000008/rank-00001.h5 $(($(offset_of run/step-00000008 1 exp_avg_sq) + 9))
  run ds-train cfg.json --out new --resume run/step-00000008
  assert_failure 3
  assert_output --regexp 'run/step-00000008/rank-00001.h5: checksum mismatch in /exp_avg_sq/.*@'
  assert [ ! -e new ]
  # An evaluation reads weights alone.
  cp -r run weights
  flip weights/step-00000008/rank-00001.h5 $(($(offset_of weights/step-00000008 1 param) + 9))
  for asked in "--eval --resume NAME" "--eval --out NAME --resume latest"; do
    # shellcheck disable=SC2086
    ds-train cfg.json ${asked/NAME/run}
    # shellcheck disable=SC2086
    run ds-train cfg.json ${asked/NAME/weights}
    assert_failure 3
    assert_output --regexp 'weights/step-00000008/rank-00001.h5: checksum mismatch in /param/.*@'
  done
  rm -r weights
  run ds-ckpt-merge run -o x.safetensors --optimizer
  assert_failure 3
  run ds-launch -n 4 ds-train cfg.json --out run --resume latest "${set[@]}"
  assert_success
  assert_output --regexp 'warning: rank [0-3]: run/step-00000008/rank-00001.h5: checksum mismatch in /exp_avg_sq/.*; resuming from the step before, run/step-00000004'
  diff <(losses whole) <(losses run)
  assert_equal "$(ls -A run)" "$(ls -A whole)"
  for step in 08 12; do
    merged whole/step-000000$step a.safetensors
    ds-ckpt-merge run/step-000000$step -o b.safetensors --optimizer --verify --quiet
    cmp <(elements a.safetensors) <(elements b.safetensors)
  done

  # For any damage, --check foresees what a run would do.
  for damage in 'truncate -s -1 run/step-00000008/rank-00000.h5' 'rm run/step-00000008/rank-00000.h5' \
    'flip run/step-00000008/manifest.json 3000' 'flip run/step-00000008/rank-00000.h5 60' \
    'rm run/step-00000008/manifest.json' 'rm -r run/step-00000008' \
    'ln -sf nowhere run/step-00000008/manifest.json' 'ln -sf /dev/null run/step-00000008/manifest.json'; do
    rm -rf run
    cp -r pristine run
    $damage
    run ds-train cfg.json --out run --resume latest --check
    assert_success
    assert_output --partial 'run/step-00000004'
    run ds-train cfg.json --out run --resume latest
    assert_success
    assert_output --partial 'run/step-00000004'
    diff <(losses whole) <(losses run)
  done

  # Nothing to go back to.
  rm -rf run
  cp -r pristine run
  flip run/step-00000008/rank-00000.h5 60
  flip run/step-00000004/rank-00001.h5 60
  run ds-launch -n 2 ds-train cfg.json --out run --resume latest
  assert_failure 3
  assert_output --partial "run/step-00000004/rank-00001.h5: damaged"
}

@test "a bit flipped anywhere is found by --verify and by resuming, with the file and the dataset" {
  ds-launch -n 2 ds-train cfg.json --out run --steps 2 --quiet --set 'bf16={"enabled":true}'
  step=run/step-00000002
  found() { # file offset words
    cp "$step/$1" kept
    flip "$step/$1" "$2"
    run ds-ckpt-merge run -o x.safetensors --verify
    assert_failure 3
    assert_output --partial "$step/$1: $3"
    if [[ $1 != model.h5 ]]; then # readers take the rank files
      run ds-launch -n 2 ds-train cfg.json --out run --resume latest --set 'bf16={"enabled":true}'
      assert_failure 3
      assert_output --partial "$step/$1: $3"
    fi
    mv kept "$step/$1"
  }
  for rank in 0 1; do
    for state in param master exp_avg exp_avg_sq; do
      found rank-0000$rank.h5 $(($(offset_of $step $rank $state) + 4)) "checksum mismatch in /$state/"
    done
    found rank-0000$rank.h5 9 "damaged"
    found rank-0000$rank.h5 $(($(stat -c %s $step/rank-0000$rank.h5) - 20)) ""
  done
  for at in 5 400 3000; do found manifest.json $at ""; done
  for at in 9 2000; do found model.h5 $at "damaged"; done
  flip run/latest 3
  run ds-ckpt-merge run -o x.safetensors --verify
  assert_success
  assert_output --partial "run/latest: names "
}
