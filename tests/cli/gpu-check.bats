#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/gpu-check before there is a GPU: the steps on the simulator, and what is left when one of them fails, hangs, or
# takes everything with it.

bats_require_minimum_version 1.5.0
load tiny

setup() {
  tiny_setup
  sim=$DS_BIN/../lib/libds_cuda_sim.so
}
check() { "$DS_SOURCE/scripts/gpu-check" --build "${DS_BIN%/bin}" -o results "$@"; }
need_sim() { [[ -e $sim ]] || skip 'this build has no CUDA'; }
rehearse() { DS_CUDA_PLUGIN=$sim check --rehearse "$@"; }
archived() { tar -xJOf results/results.tar.xz "$1"; }
steps_of() { "$DS_SOURCE/scripts/gpu-check" --list "$1" | awk '{ print $2 }'; }

@test "its options, and a machine without a GPU" {
  run -2 "$DS_SOURCE/scripts/gpu-check" --nonsense
  assert_output --partial 'usage: gpu-check'
  run -2 "$DS_SOURCE/scripts/gpu-check" nonsense
  run -2 "$DS_SOURCE/scripts/gpu-check" --budget none
  run -0 "$DS_SOURCE/scripts/gpu-check" --list alive
  assert_line --index 0 'alive facts 30 5'
  mkdir empty
  run -4 "$DS_SOURCE/scripts/gpu-check" --build empty
  assert_output --partial 'there is no ds-train and ds-launch'
  if command -v nvidia-smi >/dev/null; then skip 'there may be a GPU here'; fi
  run -4 check
  assert_line --regexp '^alive +step +skipped .*(NVIDIA driver|built without CUDA|there is no .*libds_cuda.so)'
  assert_line --regexp '^rest +pytorch +not run +no GPU can be reached'
  assert_equal "$(cat results/summary.txt)" "$output"
  assert_equal "$(archived summary.txt)" "$output"
}

@test "every part is less than ten minutes by its estimates, and no step is longer than its part" {
  for part in alive numbers why rest; do
    "$DS_SOURCE/scripts/gpu-check" --list $part | awk -v part=$part '
      { sum += $4; if ($4 > $3 || $3 > 540) exit 1 } END { if (part != "numbers" && sum > 540) exit 1 }'
  done
}

@test "steps on the simulator" {
  need_sim
  mkdir bin
  printf '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do case $1 in --log-file) file=$2 ;; esac; case $1 in --csv) shift ;; *) shift 2 ;; esac; done
    echo gpu__time_duration.sum,1 >"$file"; exec "$@"\n' >bin/ncu
  printf '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift 2; done\nexec "$@"\n' >bin/compute-sanitizer
  chmod +x bin/*
  export PATH=$PWD/bin:$PATH
  DS_GPU_CHECK_ONLY='step nccl tests cudnn graphs gemm attention-cudnn gpt2-124m gpt2-124m-autotune qwen2.5-0.5b-cudnn kernels-124m memcheck' \
    run -0 rehearse alive numbers why
  assert_line --regexp '^alive +step +passed .* loss 5\.[0-9]* to [45]\.'
  assert_line --regexp '^alive +nccl +passed .* the losses are those without'
  assert_line --regexp '^alive +tests +passed .* 2 passed, 0 failed'
  assert_line --regexp '^alive +cudnn +passed .*attention runs on the kernels of libds instead'
  assert_line --regexp '^alive +graphs +passed'
  assert_line --regexp '^numbers +gpt2-124m +passed .* tokens/s, .*; at most 783842 .*; planned 13.69 GiB'
  assert_line --regexp '^numbers +gpt2-124m-autotune +passed'
  assert_line --regexp '^why +kernels-124m +passed .* 1 kernels'
  assert_line --regexp '^why +memcheck +passed .* 3 clean, 0 with reports'
  assert_line --regexp '^alive +zero +not run +not asked for'
  archived numbers/gpt2-124m/results.jsonl | grep '"section": "step"'
  assert_equal "$(archived numbers/gpt2-124m-autotune/tuned | head -n 1)" '# ds-autotune/1'
  run bash -c 'tar -tJf results/results.tar.xz | grep step-0'
  assert_output ''
  [[ ! -e results/results.tar.xz.new && ! -e results/pid ]]
}

# fault STEP KIND PART: a rehearsal in which nothing but gpu-check itself is tried, and one step goes wrong.
fault() {
  rm -rf results
  DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=$1:$2 DS_CUDA_PLUGIN=$sim "$DS_SOURCE/scripts/gpu-check" --build "${DS_BIN%/bin}" \
    -o results --rehearse "$3" >out 2>&1
}

@test "whichever step fails or hangs, the others run, and all of it is in the archive" {
  need_sim
  for step in $(steps_of why) gemm gpt2-1.5b ops facts nccl; do
    part=$("$DS_SOURCE/scripts/gpu-check" --list | awk -v step="$step" '$2 == step { print $1 }')
    run -1 fault "$step" fail "$part"
    run cat results/summary.txt
    assert_line --regexp "^$part +$step +failed .* as was asked for"
    assert_equal "$(grep -c passed results/summary.txt)" "$(($(steps_of "$part" | wc -l) - 1))"
    assert_equal "$(archived summary.txt)" "$output"
  done
  for step in memcheck ops; do
    part=$("$DS_SOURCE/scripts/gpu-check" --list | awk -v step="$step" '$2 == step { print $1 }')
    run -1 fault "$step" hang "$part"
    run cat results/summary.txt
    assert_line --regexp "^$part +$step +failed .* ended at its limit of 2 s"
    assert_equal "$(grep -c passed results/summary.txt)" "$(($(steps_of "$part" | wc -l) - 1))"
  done
}

@test "cut off at any step, the archive has what came before and says what did not run" {
  need_sim
  for part in alive why; do
    local before=0
    for step in $(steps_of $part); do
      run -137 fault "$step" kill $part
      archived summary.txt >summary
      assert_equal "$(grep -c passed summary)" $before
      grep -qE "^$part +$step +begun$" summary
      assert_equal "$(grep -c 'not run$' summary)" "$(($(steps_of $part | wc -l) - before - 1))"
      for done in $(steps_of $part | head -n $before); do archived "$part/$done/why" | grep -q dry; done
      before=$((before + 1))
    done
  done
}

@test "a signal ends the step that runs, and is said" {
  need_sim
  DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=racecheck:wait DS_CUDA_PLUGIN=$sim \
    "$DS_SOURCE/scripts/gpu-check" --build "${DS_BIN%/bin}" -o results --rehearse why >out 2>&1 3>&- &
  local pid=$!
  for _ in {1..100}; do
    if grep -q 'racecheck *begun' results/summary.txt 2>/dev/null; then break; fi
    sleep 0.1
  done
  kill -TERM $pid
  local status=0
  wait $pid || status=$?
  assert_equal $status 143
  archived summary.txt | grep -E '^why +racecheck +stopped by a signal'
  archived summary.txt | grep -E '^why +ranks +not run'
  for process in /proc/[0-9]*; do # its processes are in its folder
    [[ $(readlink "$process/cwd" 2>/dev/null) != "$PWD"/results/* ]] || fail "$(tr '\0' ' ' <"$process/cmdline") is left"
  done
}
