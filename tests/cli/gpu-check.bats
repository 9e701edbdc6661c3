#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/gpu-check before there is a GPU: the steps on the simulator, what it makes of what programs print (stand-ins),
# and what is left when a step fails, hangs, or takes everything with it.

bats_require_minimum_version 1.5.0
load tiny

setup() {
  tiny_setup
  sim=$DS_BIN/../lib/libds_cuda_sim.so
  gpu_check=$DS_SOURCE/scripts/gpu-check
}
need_sim() { [[ -e $sim ]] || skip 'this build has no CUDA'; }
archived() { tar -xJOf "${2-results}/results.tar.xz" "$1"; }
steps_of() { "$gpu_check" --list "$@" | awk '{ print $2 }'; }

# program NAME: a stand-in of what is read.
program() {
  mkdir -p "$(dirname "$1")"
  { echo '#!/bin/bash' && cat; } >"$1"
  chmod +x "$1"
}
# A build of stand-ins: every program ends at once, cuda_bench with lines like those of the real one.
stand_ins() {
  program stub/bin/ds-train <<<'if [[ ${DS_ATTENTION-} == cudnn ]]; then
    echo "ds-train: warning: it is of yesterday; attention runs on the kernels of libds instead" >&2
  fi'
  program stub/bin/ds-launch <<<''
  program stub/bin/device_test <<<'# DS_TEST_DEVICE'
  program stub/bin/cuda_bench <<<'while (($#)); do
    if [[ $1 == --json ]]; then json=$2; fi
    if [[ $1 == step ]]; then
      echo "{\"tokens_per_s\": 1000.0, \"step_ms\": 65536.000," \
        "\"memory_bytes\": 1073741824, \"scratch_bytes\": 0}" >"$json"
    fi
    if [[ $1 == ops ]]; then echo "{\"op\": \"adamw\", \"us\": 1234.5, \"rate\": 1}" >"$json"; fi
    shift
  done'
}

@test "its options, and a machine without a GPU" {
  run -2 "$gpu_check" --nonsense
  assert_output --partial 'usage: gpu-check'
  run -2 "$gpu_check" nonsense
  run -2 "$gpu_check" --budget none
  run -0 "$gpu_check" --list alive
  assert_line --index 0 'alive facts 30 5'
  mkdir empty
  run -4 "$gpu_check" --build empty
  assert_output --partial 'there is no ds-train and ds-launch'
  if command -v nvidia-smi >/dev/null; then skip 'there may be a GPU here'; fi
  run -4 "$gpu_check" --build "${DS_BIN%/bin}" -o results
  assert_line --regexp '^alive +facts +skipped .* there is no nvidia-smi'
  assert_line --regexp '^alive +step +not run +no GPU can be used: .*(NVIDIA driver|built without CUDA|libds_cuda.so)'
  assert_line --regexp '^rest +pytorch +not run +no GPU can be used'
  assert_equal "$(cat results/summary.txt)" "$output"
  assert_equal "$(archived summary.txt)" "$output"
  run -4 "$gpu_check" --build "${DS_BIN%/bin}" -o numbers numbers
  refute_output --partial failed
}

@test "every part is less than ten minutes by its estimates, and no step is longer than its part" {
  for part in alive numbers why rest; do
    "$gpu_check" --list $part | awk -v part=$part '
      { sum += $4; if ($4 > $3 || $3 > 540) exit 1 } END { if (part != "numbers" && sum > 540) exit 1 }'
  done
}

@test "steps on the simulator" {
  need_sim
  program bin/ncu <<'END'
while [[ $1 == -* ]]; do
  if [[ $1 == --log-file ]]; then file=$2; fi
  if [[ $1 == --csv ]]; then shift; else shift 2; fi
done
cat >"$file" <<'CSV'
==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void a<int, 2>(int, float)","gpu__time_duration.sum","ns","1,000"
"0","void a<int, 2>(int, float)","dram__bytes.sum","byte","5,000"
"1","b","gpu__time_duration.sum","ns","9,000,000"
"1","b","dram__bytes.sum","byte","18,000,000"
"2","b","gpu__time_duration.sum","ns","1,000,000"
"2","b","dram__bytes.sum","byte","0"
CSV
exec "$@"
END
  export PATH=$PWD/bin:$PATH
  DS_CUDA_PLUGIN=$sim DS_GPU_CHECK_ONLY='step nccl tests cudnn graphs gemm gpt2-124m gpt2-124m-autotune kernels-124m' \
    run -0 "$gpu_check" --build "${DS_BIN%/bin}" -o results --rehearse alive numbers why
  assert_line --regexp '^alive +step +passed .* loss 5\.[0-9]* to [45]\.'
  assert_line --regexp '^alive +nccl +passed .* the losses are those without'
  assert_line --regexp '^alive +tests +passed .* 2 passed, 0 failed, 0 skipped; no test failed'
  assert_line --regexp '^alive +cudnn +passed .*attention runs on the kernels of libds instead'
  assert_line --regexp '^alive +graphs +passed'
  assert_line --regexp '^numbers +gpt2-124m +passed .* \(at most 783842: .* \(at least 83.61\), .* \(planned 13.69\)'
  assert_line --regexp '^numbers +gpt2-124m-autotune +passed .*at most 783842'
  assert_line --regexp '^why +kernels-124m +passed .* 3 launches, 10001 us in all; 10000 us at 2 GB/s in 2 of b; 1 us'
  assert_line --regexp '^alive +zero +not run +not asked for'
  assert_line --index 0 'what is measured in a rehearsal means nothing'
  assert_equal "$(archived why/kernels-124m/by-kernel.tsv | tail -n 1 | tr '\t' ' ')" \
    '1000 1 5000 5.0 void a<int, 2>(int, float)'
  archived numbers/gpt2-124m/results.jsonl | grep '"section": "step"'
  assert_equal "$(archived numbers/gpt2-124m-autotune/tuned | head -n 1)" '# ds-autotune/1'
  run bash -c 'tar -tJf results/results.tar.xz | grep step-0'
  assert_output ''
  assert_equal "$(ls results | xargs)" 'alive numbers results.tar.xz summary.txt why'
}

@test "figures beside what is expected; what does not fit, or would not be cuDNN's, is not measured" {
  stand_ins
  program bin/nvidia-smi <<<'echo 81559'
  PATH=$PWD/bin:$PATH run -0 "$gpu_check" --build stub -o results numbers
  assert_line --regexp '^numbers +gpt2-1.5b +passed .* 1000 tokens/s \(at most 68922: 1 %\), 65536.00 ms \(at '
  assert_line --regexp '^numbers +gpt2-1.5b +passed .* \(at least 950.87\), 1.00 GiB \(planned 50.08\)$'
  assert_line --regexp '^numbers +gpt2-124m-graphs +passed .* \(at most 783842: 0 %\)'
  assert_line --regexp '^numbers +gpt2-1.5b-micro4 +skipped .* wants 108.00 GiB, and the GPU has 79$'
  assert_line --regexp '^numbers +ops +passed .* AdamW of 124M 1234.5 us \(at least 868.2\)$'
  for step in $(steps_of numbers | grep cudnn); do
    assert_line --regexp "^numbers +$step +skipped .*it is of yesterday; attention runs on the kernels of libds instead"
  done
}

@test "tests that fail are told by name and by whether only a bound does not hold" {
  stand_ins
  program stub/bin/device_test <<'END'
# DS_TEST_DEVICE
[[ $1 == --file=activation_test ]] || exit 0
cat <<'LOG'
[ RUN      ] Activation.Fine
[       OK ] Activation.Fine (0 ms)
[ RUN      ] Activation.Bound
/a/activation_test.cc:73: Failure
Expected: (forward) <= (hardware_factor(ops, DType::F32)), actual: 3.25 vs 3
cuda f32
/a/activation_test.cc:90: Failure
The difference between ys.at(i) and y_want is 2e-6, which exceeds 1e-6, where
[  FAILED  ] Activation.Bound (1 ms)
[ RUN      ] Activation.NotANumber/7
/a/activation_test.cc:73: Failure
Expected: (forward) <= (3), actual: nan vs 3
[  FAILED  ] Activation.NotANumber/7, where GetParam() = 7 (1 ms)
[ RUN      ] Activation.Ends
Segmentation fault
LOG
exit 139
END
  DS_GPU_CHECK_ONLY='tests graphs' run -1 "$gpu_check" --build stub -o results --rehearse alive
  assert_line --regexp '^alive +tests +failed .* 1 failed, 0 skipped; 1 by a bound alone, 1 otherwise, 1 without an'
  assert_line --regexp '; Activation.Bound \(bound\): Expected: \(forward\) <= .* 3.25 vs 3; Activation.NotANumber/7 '
  assert_line --regexp '; Activation.NotANumber/7 \(other\): .* nan vs 3; Activation.Ends \(no end\):$'
  refute_line --regexp '^alive +graphs +not run'
  assert_equal "$(archived alive/tests/failed.txt | cut -f 2 | xargs)" 'bound other no end'
}

@test "what compute-sanitizer finds, what it cannot do, and what a test says under it are three things" {
  stand_ins
  export DS_GPU_CHECK_ONLY=memcheck
  sanitized() { PATH=$PWD/bin:$PATH run "$1" "$gpu_check" --build stub -o results --rehearse why; }
  program bin/compute-sanitizer <<<'case $* in
    *norm_test*) exit 99 ;;
    *embedding_test*) echo Device not supported && exit 1 ;;
  esac'
  sanitized -1
  assert_line --regexp 'memcheck +failed .* clean: attention_test; with reports: norm_test; ended otherwise: embedding'
  assert_line --regexp '; ended otherwise: embedding_test \(status 1: Device not supported\)$'
  program bin/compute-sanitizer <<<'exit 0'
  sanitized -0
  assert_line --regexp 'memcheck +passed .* clean: norm_test embedding_test attention_test$'
}

@test "a step that fails or hangs, whichever it is: those around it run, and the archive has all of it" {
  stand_ins
  local kind of faulty pids=()
  for kind in fail hang; do # every third step at once, then those behind them
    for of in 0 1 2; do
      faulty=$(steps_of | awk -v of=$of -v kind=$kind 'NR % 3 == of { print $1 ":" kind }' | xargs)
      DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=$faulty \
        "$gpu_check" --build stub -o $kind$of --rehearse >$kind$of.txt 2>&1 3>&- &
      pids+=($!)
    done
  done
  for pid in "${pids[@]}"; do
    local status=0
    wait "$pid" || status=$?
    assert_equal $status 1
  done
  for kind in fail hang; do
    for of in 0 1 2; do
      archived summary.txt $kind$of >summary
      tar -xJf $kind$of/results.tar.xz --one-top-level=all$kind$of
      local number=0 faulted='as was asked for'
      [[ $kind == fail ]] || faulted='ended at its limit of 1 s'
      while read -r part step _; do
        number=$((number + 1))
        run grep -E "^$part +$step " summary # told where it is not as it should be
        if ((number % 3 == of)); then
          assert_output --regexp " failed .* $faulted$"
        else
          assert_output --regexp ' passed .* dry$'
          grep -qx dry all$kind$of/"$part/$step/why"
        fi
      done < <("$gpu_check" --list)
      assert_equal "$(wc -l <summary)" $((number + 1))
    done
  done
  for pid in "${pids[@]}"; do # nobody is left, in whatever session
    run bash -c "grep -lz '^DS_GPU_CHECK_STEP=$pid/' /proc/[0-9]*/environ 2>/dev/null"
    assert_output ''
  done
}

@test "a step that does not heed TERM is killed" {
  stand_ins
  DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=racecheck:deaf run -1 "$gpu_check" --build stub -o results --rehearse why
  assert_line --regexp '^why +racecheck +failed .* ended at its limit of 1 s$'
  assert_line --regexp '^why +ranks +passed'
}

@test "cut off at whichever step: the archive has what came before, says what did not run, and can be continued" {
  stand_ins
  local before=0 all
  all=$(steps_of | wc -l)
  while read -r part step _; do
    DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=$step:kill \
      run -137 "$gpu_check" --build stub -o results --rehearse --continue
    archived summary.txt >summary
    assert_equal "$(grep -c passed summary)" $before
    grep -qE "^$part +$step +begun$" summary
    assert_equal "$(grep -c 'not run$' summary)" "$((all - before - 1))"
    before=$((before + 1))
  done < <("$gpu_check" --list)
  tar -xJf results/results.tar.xz
  assert_equal "$(cat */*/why | grep -cx dry)" "$((all - 1))"
}

@test "parts of several calls share a summary; rehearsals and measurements do not" {
  stand_ins
  export DS_GPU_CHECK_DRY=1
  DS_GPU_CHECK_FAULT=memcheck:fail run -1 "$gpu_check" --build stub -o results --rehearse why
  run -0 "$gpu_check" --build stub -o results --rehearse rest
  archived summary.txt >summary
  grep -qE '^why +memcheck +failed' summary
  grep -qE '^why +racecheck +passed' summary
  grep -qE '^rest +pytorch +passed' summary
  assert_equal "$(grep -cE '^(alive|numbers)' summary || true)" 0
  archived why/racecheck/why | grep -x dry
  run -2 "$gpu_check" --build stub -o results rest
  assert_output --partial 'rehearsed or measured: name another folder'
  run -0 "$gpu_check" --build stub -o results --rehearse --budget 1 rest
}

@test "a failure of ds-train stops nothing else; a GPU that is lost does" {
  stand_ins
  program stub/bin/ds-train <<<'echo "ds-train: error: a bug of ours" >&2; exit 1'
  run -1 "$gpu_check" --build stub -o results alive numbers
  assert_line --regexp '^alive +step +failed .* first: a bug of ours$'
  assert_line --regexp '^numbers +gpt2-124m +passed'
  refute_output --partial 'not run'
  program stub/bin/ds-train <<<"[[ ! -e $PWD/lost ]] || { echo 'ds-train: error: it is off the bus' >&2; exit 4; }"
  program stub/bin/cuda_bench <<<"[[ \$* == *gemm ]] || { touch $PWD/lost; echo gone >&2; exit 1; }"
  run -1 "$gpu_check" --build stub -o again numbers
  assert_line --regexp '^numbers +gemm +passed'
  assert_line --regexp '^numbers +attention +failed .* gone$'
  assert_line --regexp '^numbers +attention-cudnn +not run +no GPU can be used: it is off the bus$'
}

@test "what does not fit into the budget is not begun, and says so" {
  stand_ins
  run -0 "$gpu_check" --build stub -o results --budget 30 numbers
  assert_line --regexp '^numbers +gemm +passed'
  assert_line --regexp '^numbers +ops +not run +[0-9]* s are left of 30, and it wants 60$'
}

@test "a signal ends the step that runs, and is said" {
  stand_ins
  DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=racecheck:wait \
    "$gpu_check" --build stub -o results --rehearse why >out 2>&1 3>&- &
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
  run bash -c "grep -lzxF 'DS_GPU_CHECK_STEP=$pid/why/racecheck' /proc/[0-9]*/environ 2>/dev/null"
  assert_output ''
}
