#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/gpu-check before there is a GPU: the steps on the simulator, its reading of programs' output (from stand-ins),
# and its results when a step fails, hangs, or takes everything with it.

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
  program stub/bin/ds-train <<<''
  program stub/bin/ds-launch <<<''
  program stub/bin/device_test <<<'# DS_TEST_DEVICE'
  program stub/bin/cuda_bench <<<'if [[ " $* " =~ " --cudnn "|" cuda.attention=cudnn " ]]; then
    echo "cuda_bench: error: it is of yesterday" >&2
    exit 4
  fi
  while (($#)); do
    if [[ $1 == cuda.autotune_file=* && ! -e ${1#*=} ]]; then printf "# ds-autotune/1\nGPU\t1\t2,3\t4\n" >"${1#*=}"; fi
    if [[ $1 == --json ]]; then json=$2; fi
    if [[ $1 == step ]]; then
      echo "{\"tokens_per_s\": 1000.0, \"step_ms\": 65536.000," \
        "\"memory_bytes\": 1073741824, \"scratch_bytes\": 0}" >"$json"
    fi
    if [[ $1 == gemm ]]; then echo "{\"op\": \"matmul NT\", \"us\": 1.5, \"rate\": 612.5}" >"$json"; fi
    if [[ $1 == attention ]]; then
      printf "{\"op\": \"attention %s\", \"us\": 1.5, \"rate\": %s}\n" fwd 90 bwd 100 fwd 300.5 >"$json"
    fi
    if [[ $1 == features ]]; then echo "{\"op\": \"quantize\", \"shape\": \"9\", \"us\": 1, \"rate\": 7.5, \"unit\": \"GB/s\"}" >"$json"; fi
    if [[ $1 == ops ]]; then echo "{\"op\": \"adamw\", \"us\": 1234.5, \"rate\": 1}" >"$json"; fi
    shift
  done'
}

# hung PROGRAM: a stand-in that does not end.
hung() { program "$1" <<<'exec sleep 1000'; }
marked() { # processes that are left of the folder
  grep -lzxF "DS_GPU_CHECK_FOLDER=$(stat -c %d:%i "$1")" /proc/[0-9]*/environ 2>/dev/null || true
}

@test "its options, and a machine without a GPU" {
  run -2 "$gpu_check" --nonsense
  assert_output --partial 'usage: gpu-check'
  run -2 "$gpu_check" nonsense
  run -2 "$gpu_check" --budget none
  assert_line --index 0 "gpu-check: error: --budget wants seconds, not 'none'"
  run -2 "$gpu_check" -o -dash
  assert_line --index 0 "gpu-check: error: -o wants a value, not '-dash'; a folder of that name is ./-dash"
  run -0 "$gpu_check" --help
  assert_output --partial 'more     numbers of larger micro-batches'
  run -2 "$DS_SOURCE/tests/bench/gpu/run" nothing --time abc
  assert_line --index 0 "run: error: --time wants seconds, not 'abc'"
  run -0 "$gpu_check" --list alive
  assert_line --index 0 'alive facts 30 3'
  mkdir empty
  run -4 "$gpu_check" --build empty
  assert_output --partial 'there is no ds-train and ds-launch'
  stand_ins
  run -1 "$gpu_check" --build stub -o /proc # where nobody can make a file
  assert_output 'gpu-check: error: nothing can be written in /proc'
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

@test "every part is less than its budget by its estimates, no step longer than its part; what is expected is a step" {
  for part in alive features numbers why rest more; do
    run -0 "$gpu_check" --list $part
    awk '{ sum += $4; if ($4 > $3 || $3 > 540) exit 1 } END { exit sum > 540 || !sum }' <<<"$output"
  done
  assert_equal "$(awk -F '\t' '/^#/ || $1 == "step" { next } { print $1 }' "$DS_SOURCE/tests/bench/gpu/expected.tsv" |
    sort -u | grep -vxFf <(steps_of))" ''
}

@test "steps on the simulator" {
  slow_only
  need_sim
  program bin/ncu <<'END'
while [[ $1 == -* ]]; do
  if [[ $1 == --log-file ]]; then file=$2; fi
  if [[ $1 == --launch-* ]]; then echo "$1 $2" >>launches; fi
  if [[ $1 == --csv ]]; then shift; else shift 2; fi
done
cat >"$file" <<'CSV'
==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void a<int, 2>(int, float)","gpu__time_duration.sum","ns","1,000"
"0","void a<int, 2>(int, float)","dram__bytes.sum","byte","5,000"
"1","b","gpu__time_duration.sum","ns","9,000,000"
"1","b","dram__bytes.sum","byte","18,000,000"
"2","adamw_kernel(b)","gpu__time_duration.sum","ns","1,000,000"
"2","adamw_kernel(b)","dram__bytes.sum","byte","0"
CSV
exec "$@"
END
  export PATH=$PWD/bin:$PATH
  DS_CUDA_PLUGIN=$sim DS_GPU_CHECK_ONLY='step nccl tests cudnn graphs gemm attention ops gpt2-124m gpt2-124m-autotune \
    kernels-124m kernels-0.5b choices features sparse-attention documents random-ltd curriculum one-bit zero-plus-plus codes accumulation fp8 \
    post-validate diloco \
    generation save-async traces commbench late-updates experts' \
    run -0 "$gpu_check" --build "${DS_BIN%/bin}" -o results --rehearse alive features numbers why
  assert_line --regexp '^alive +step +passed .* loss 5\.[0-9]* to [45]\.'
  assert_line --regexp '^alive +nccl +passed .* the losses are those without'
  assert_line --regexp '^alive +tests +passed .* 2 passed, 0 failed, 0 skipped; no test failed'
  assert_line --regexp '^alive +cudnn +passed .*; "attention":"cuDNN 9.19.0"'
  assert_line --regexp '^alive +graphs +passed'
  assert_line --regexp '^numbers +gemm +passed .* [0-9.]+ TFLOP/s at most'
  assert_line --regexp '^numbers +attention +passed .* fwd [0-9.]+ TFLOP/s at most; '
  assert_line --regexp '^numbers +ops +passed .* [1-9][0-9]+ ops; AdamW of 124M [0-9.]+ us'
  assert_line --regexp '^numbers +gpt2-124m +passed .* \(at most 794493: .* \(at least 82.49\), .* \(planned 13.31\)'
  assert_line --regexp '^numbers +gpt2-124m +passed .* op by op, ms \(at least\): .* between ops [0-9.]*; clocks not noted'
  assert_line --regexp '^numbers +gpt2-124m-autotune +passed .*at most 794493'
  assert_line --regexp '^numbers +choices +passed .* choices.tsv has [1-9][0-9]* products of simulator 0$'
  assert_line --regexp '^numbers +features +passed .*BigBird of 16: .* documents: .*; evoformer fwd, .*; quantize_signs, '
  assert_line --regexp '^features +one-bit +passed .* from the CPU; zero-one-adam to [0-9.]*, [0-9.e-]* from the CPU;'
  assert_line --regexp '^features +codes +passed .*; sparse gradients move no bit$'
  assert_line --regexp '^features +generation +passed .* 4 prompts, the same alone and together; [0-4] of 4 are'
  for step in $(steps_of features); do assert_line --regexp "^features +$step +passed"; done
  assert_line --regexp \
    '^why +kernels-124m +passed .* 3 launches \(1 of AdamW\) behind about two steps, 10001 us in all; 9000 us at 2 GB/s'
  assert_line --regexp '^why +kernels-124m .* By the roofline, one step has 763 calls of ops, .* 82.49 ms: matmul 61'
  assert_line --regexp '^why +kernels-0.5b +passed .* one step has 601 calls of ops'
  assert_equal "$(archived why/kernels-124m/launches | xargs)" '--launch-skip 1526 --launch-count 1526'
  assert_line --regexp '^alive +zero +not run +not asked for'
  assert_line --index 0 'what is measured in a rehearsal means nothing'
  assert_equal "$(archived why/kernels-124m/by-kernel.tsv | tail -n 1 | tr '\t' ' ')" \
    '1000 1 5000 5.0 void a<int, 2>(int, float)'
  archived numbers/gpt2-124m/results.jsonl | grep '"section": "step"'
  assert_equal "$(archived numbers/gpt2-124m-autotune/tuned | head -n 1)" '# ds-autotune/1'
  run bash -c 'tar -tJf results/results.tar.xz | grep step-0'
  assert_output ''
  assert_equal "$(ls results | xargs)" 'alive features numbers results.tar.xz summary.txt why'
}

@test "figures beside what is expected; what does not fit, or would not be cuDNN's, is not measured" {
  stand_ins
  program bin/nvidia-smi <<<'echo 81559'
  PATH=$PWD/bin:$PATH run -0 "$gpu_check" --build stub -o results numbers more
  assert_line --regexp '^numbers +gemm +passed .* 612.5 TFLOP/s at most \(expected of a large product: 790\); clocks'
  assert_line --regexp '^numbers +attention +passed .* fwd 300.5 TFLOP/s at most; '
  assert_line --regexp '^numbers +gpt2-1.5b +passed .* 1000 tokens/s \(at most 71513: 1 %\), 65536.00 ms \(at '
  assert_line --regexp '^numbers +gpt2-1.5b +passed .* \(at least 916.42\), 1.00 GiB \(planned 46.79\); clocks not noted: nvidia-smi gave none$'
  assert_line --regexp '^numbers +gpt2-124m-graphs +passed .* \(at most 794493: 0 %\)'
  assert_line --regexp '^more +gpt2-1.5b-micro4 +skipped .* wants 104.71 GiB, and the GPU has 79$'
  assert_line --regexp '^numbers +ops +passed .* AdamW of 124M 1234.5 us \(at least 868.2\); clocks'
  for step in $(steps_of numbers | grep cudnn); do
    assert_line --regexp "^numbers +$step +skipped .*it is of yesterday"
  done
}

@test "what records no figure has failed" {
  stand_ins
  program stub/bin/cuda_bench <<<'if [[ $* == *ops ]]; then echo "{\"op\": \"cast\", \"us\": 1}" >results.jsonl; fi'
  DS_GPU_CHECK_ONLY='gemm attention ops gpt2-124m' run -1 "$gpu_check" --build stub -o results --rehearse numbers
  refute_output --partial passed
  assert_line --regexp '^numbers +gemm +failed .* results.jsonl has no line of a product$'
  assert_line --regexp '^numbers +attention +failed .* results.jsonl has no line of attention fwd$'
  assert_line --regexp '^numbers +ops +failed .* results.jsonl has no line of AdamW$'
  assert_line --regexp '^numbers +gpt2-124m +failed .* results.jsonl has no line of a step$'
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
  assert_line --regexp '; ended otherwise: embedding_test \(status 1: Device not supported\); 0 tests'
  program bin/compute-sanitizer <<<'if [[ $* == *norm_test* ]]; then kill -KILL $$; fi'
  sanitized -1 # not by its limit, so it has not found nothing
  assert_line --regexp 'memcheck +failed .* clean: embedding_test .*; ended otherwise: norm_test \(status 137: '
  program bin/compute-sanitizer <<<'exit 0'
  sanitized -0
  assert_line --regexp 'memcheck +passed .* clean: norm_test embedding_test attention_test; 0 tests ran$'
}

@test "a test that is killed for its memory has met no limit" {
  stand_ins
  program stub/bin/device_test <<<'# DS_TEST_DEVICE
    kill -KILL $$'
  DS_GPU_CHECK_ONLY=tests run -1 "$gpu_check" --build stub -o results --rehearse alive
  archived alive/tests/list.txt | grep 'failed *killed by signal KILL after [01] s; see'
  program stub/bin/cuda_bench <<<'kill -KILL $PPID' # the step itself
  DS_GPU_CHECK_ONLY=gemm run -1 "$gpu_check" --build stub -o results --rehearse numbers
  assert_line --regexp '^numbers +gemm +failed .* status 137: '
}

@test "a ds-train that hangs costs no more than the budget, and not what the GPU says of itself" {
  stand_ins
  # It notes how long it has lived: the time of the whole call is that of archives, too, which a busy machine determines.
  program stub/bin/ds-train <<<"trap 'echo \$SECONDS >>$PWD/lives; exit 143' TERM
    sleep 1000 & wait"
  program bin/nvidia-smi <<<'echo a GPU'
  PATH=$PWD/bin:$PATH run -1 "$gpu_check" --build stub -o results --budget 9 alive
  awk '{ sum += $1 } END { exit sum > 9 + NR }' lives # bash counts each to the next second
  assert [ "$(wc -l <lives)" -ge 2 ] # before the first step, and in it
  assert_line --regexp '^alive +facts +failed +[0-9]+ s +ended at its limit of [1-8] s;'
  assert_equal "$(grep -c ' not run .* left of 9, ' <<<"$output")" "$(($(steps_of alive | wc -l) - 1))"
  assert_line --regexp '^alive +facts .* a GPU; bounds are those of an H200, which this is not$'
  archived alive/facts/nvidia-smi-q.txt | grep 'a GPU'
  assert_equal "$(marked results)" ''
}

# Parts each of whose steps fails, hangs or is cut off. DS_SLOW=1: all.
faulty_parts() { echo alive ${DS_SLOW:+why rest}; }

@test "a step that fails or hangs, whichever it is: those around it run, and the archive has all of it" {
  stand_ins
  local kind of faulty pids=() parts
  read -ra parts <<<"$(faulty_parts)" # steps of the others differ by their arguments alone
  for kind in fail hang; do # every third step at once, then the steps after them
    for of in 0 1 2; do
      faulty=$(steps_of "${parts[@]}" | awk -v of=$of -v kind=$kind 'NR % 3 == of { print $1 ":" kind }' | xargs)
      DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=$faulty \
        "$gpu_check" --build stub -o $kind$of --rehearse "${parts[@]}" >$kind$of.txt 2>&1 3>&- &
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
        run grep -E "^$part +$step " summary # printed if it is not as it should be
        if ((number % 3 == of)); then
          assert_output --regexp " failed .* $faulted$"
        else
          assert_output --regexp ' passed .* dry$'
          grep -qx dry all$kind$of/"$part/$step/why"
        fi
      done < <("$gpu_check" --list "${parts[@]}")
      assert_equal "$(wc -l <summary)" $((number + 1))
    done
  done
  for kind in fail hang; do # nobody is left, in whatever session
    for of in 0 1 2; do assert_equal "$(marked $kind$of)" ''; done
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
  local before=0 all parts
  read -ra parts <<<"$(faulty_parts)"
  all=$(steps_of "${parts[@]}" | wc -l)
  while read -r part step _; do
    DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=$step:kill \
      run -137 "$gpu_check" --build stub -o results --rehearse --continue "${parts[@]}"
    archived summary.txt >summary
    assert_equal "$(grep -c passed summary)" $before
    grep -qE "^$part +$step +begun$" summary
    assert_equal "$(grep -c 'not run$' summary)" "$((all - before - 1))"
    before=$((before + 1))
  done < <("$gpu_check" --list "${parts[@]}")
  tar -xJf results/results.tar.xz
  assert_equal "$(cat */*/why | grep -cx dry)" "$((all - 1))"
}

@test "what a script that was killed has left running, the next one ends" {
  stand_ins
  program stub/bin/cuda_bench <<<"setsid sleep 54321 & kill -KILL \$(cat $PWD/results/.lock); sleep 54321"
  DS_GPU_CHECK_ONLY=gemm run -137 "$gpu_check" --build stub -o results --rehearse numbers 3>&-
  assert [ "$(marked results | wc -l)" -ge 3 ]
  DS_GPU_CHECK_DRY=1 run -0 "$gpu_check" --build stub -o results --rehearse rest
  assert_equal "$(marked results)" ''
  grep -qE '^numbers +gemm +cut off$' results/summary.txt
}

@test "what is to be run again is removed first" {
  stand_ins
  export DS_GPU_CHECK_DRY=1
  run -0 "$gpu_check" --build stub -o results --rehearse alive why
  DS_GPU_CHECK_FAULT=racecheck:kill run -137 "$gpu_check" --build stub -o results --rehearse why
  run bash -c 'tar -tJf results/results.tar.xz | grep "/why$" | sort | xargs'
  assert_output --regexp '^alive/cudnn/why .*alive/zero/why why/kernels-0.5b/why why/kernels-124m/why why/memcheck/'
  refute_output --partial why/ranks
  archived summary.txt | grep -E '^why +ranks +not run$'
  archived summary.txt | grep -E '^alive +zero +passed'
}

# A limit of 1 KiB for every file is a disk that is full: verdicts are shorter, a summary of all parts is not.
@test "where the disk is full, the summary and the archive are as they were, and nothing is lost or done again" {
  stand_ins
  export DS_GPU_CHECK_DRY=1
  run -0 "$gpu_check" --build stub -o results --rehearse why
  cp results/summary.txt before.txt
  cp results/results.tar.xz before.tar.xz
  touch results/why/{memcheck,ranks}/kept
  full() { (trap '' XFSZ && ulimit -f 1 && "$gpu_check" --build stub -o results --rehearse --continue "$@"); }
  run -1 --separate-stderr full numbers why
  assert_equal "$(grep -c ' passed ' <<<"$output")" "$(steps_of numbers why | wc -l)"
  # shellcheck disable=SC2154
  assert_regex "${stderr_lines[0]}" '^gpu-check: warning: the summary and the archive in .* are as they were: .*large'
  assert_regex "${stderr_lines[1]}" '^gpu-check: error: .* has more than its archive: .*File too large'
  assert_equal ${#stderr_lines[@]} 2
  cmp before.txt results/summary.txt
  cmp before.tar.xz results/results.tar.xz
  assert_equal "$(ls results | xargs)" 'numbers results.tar.xz summary.txt why'
  touch results/numbers/epilogues/kept
  rm results/numbers/gemm/verdict # could not be written
  run -0 "$gpu_check" --build stub -o results --rehearse --continue numbers why
  run -0 ls results/why/{memcheck,ranks}/kept results/numbers/epilogues/kept
  grep -qE '^numbers +gemm +passed' results/summary.txt
  program bin/xz <<<'head -c 100; echo "xz: no space" >&2; exit 1' # half of an archive
  cp results/results.tar.xz before.tar.xz
  PATH=$PWD/bin:$PATH run -1 "$gpu_check" --build stub -o results --rehearse rest
  assert_line --regexp '^gpu-check: error: .* has more than its archive: xz: no space'
  cmp before.tar.xz results/results.tar.xz
  assert [ ! -e results/results.tar.xz.new ]
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
  run -0 "$gpu_check" --build stub -o results --rehearse --budget 60 rest # another budget is the same kind of run
}

@test "a failure of ds-train stops nothing else; a GPU that is lost does" {
  stand_ins
  program stub/bin/ds-train <<<'echo "ds-train: error: a bug of ours" >&2; exit 1'
  run -1 "$gpu_check" --build stub -o results alive more
  assert_line --regexp '^alive +step +failed .* first: a bug of ours$'
  assert_line --regexp '^more +gpt2-124m-micro2 +passed'
  refute_output --partial 'not run'
  mv stub/bin/cuda_bench stub/bin/bench
  program stub/bin/ds-train <<<"[[ ! -e $PWD/lost ]] || { echo 'ds-train: error: it is off the bus' >&2; exit 4; }"
  program stub/bin/cuda_bench <<<"if [[ \$* == *gemm ]]; then exec $PWD/stub/bin/bench \"\$@\"; fi
    touch $PWD/lost && echo gone >&2 && exit 1"
  run -1 "$gpu_check" --build stub -o again numbers
  assert_line --regexp '^numbers +gemm +passed'
  assert_line --regexp '^numbers +attention +failed .* gone$'
  assert_line --regexp '^numbers +attention-cudnn +not run +no GPU can be used: it is off the bus$'
}

@test "what does not fit into the budget is not begun, and says so" {
  stand_ins
  run -0 "$gpu_check" --build stub -o results --budget 30 numbers
  assert_line --regexp '^numbers +gemm +passed'
  assert_line --regexp '^numbers +ops +not run +[0-9]* s are left of 30, and it wants 30$'
}

@test "plans fit into their totals by their estimates, and each of their steps is one of a part" {
  local plan total
  for plan in first:420 second:300; do
    total=${plan#*:} plan=${plan%:*}
    run -0 "$gpu_check" --list --plan "$plan"
    awk -v total="$total" '{ sum += $4; if ($4 > $3) exit 1 } END { exit sum > total || sum < total / 2 }' <<<"$output"
    assert_equal "$(awk '{ print $1, $2 }' <<<"$output" | grep -vxFf <("$gpu_check" --list | awk '{ print $1, $2 }'))" ''
    assert_equal "$(awk '{ print $1, $2 }' <<<"$output" | sort | uniq -d)" ''
  done
  run -2 "$gpu_check" --plan third
  assert_line --index 0 "gpu-check: error: there is no plan 'third': first, second"
  run -2 "$gpu_check" --plan first alive
  assert_line --index 0 'gpu-check: error: a plan names its steps: without alive'
  run -2 "$gpu_check" --total 0
  assert_line --index 0 "gpu-check: error: --total wants seconds, not '0'"
  stand_ins
  local inside option path
  for inside in results results/copies ./results/../results/a/b; do
    run -2 "$gpu_check" --build stub -o results --to "$inside"
    assert_line --index 0 'gpu-check: error: --to is a folder outside -o, and gets copies alone'
  done
  [[ ! -e results ]]
  touch file
  for option in -o --to; do
    run -2 "$gpu_check" --build stub "$option" file
    assert_line --index 0 "gpu-check: error: $option: $PWD/file is no folder"
    for path in file/in /proc/x; do
      run -2 "$gpu_check" --build stub "$option" $path
      assert_line --index 0 --regexp "^gpu-check: error: $option: the folder /.* cannot be made: name one where"
    done
  done
}

@test "a plan: its steps in its order, and what does not fit into the total is not begun and says so" {
  stand_ins
  export DS_GPU_CHECK_DRY=1
  run -0 "$gpu_check" --build stub -o results --rehearse --plan second
  assert_equal "$(sed 1d <<<"$output" | awk '{ print $1, $2 }')" "$("$gpu_check" --list --plan second | awk '{ print $1, $2 }')"
  assert_equal "$(grep -c ' passed ' results/summary.txt)" "$(wc -l <<<"$("$gpu_check" --list --plan second)")"
  unset DS_GPU_CHECK_DRY
  # As on a GPU, where a step wants its estimate.
  run "$gpu_check" --build stub -o small --total 52 --to copies rest
  refute_line --regexp '^rest +pytorch-124m +not run'
  assert_line --regexp '^rest +pytorch +not run +[34][0-9] s are left of 52, and it wants 400$'
  diff copies/summary.txt small/summary.txt
  run -4 "$gpu_check" --build stub -o none --total 2 --plan first
  assert_line --regexp '^alive +facts +not run +[0-2] s are left of 2, and it wants 3$'
  refute_line --partial passed
}

@test "a step is ended in time for the total, and what it had done is in the copies" {
  stand_ins
  program stub/bin/device_test <<<'# DS_TEST_DEVICE
    echo "[ RUN      ] Some.Test" && exec sleep 1000'
  local start=$SECONDS
  DS_GPU_CHECK_ONLY='tests graphs' run -1 "$gpu_check" --build stub -o results --to out --rehearse --total 8 alive
  assert [ $((SECONDS - start)) -le 12 ]
  assert_line --regexp '^alive +tests +failed .* 0 passed, 2 failed, .* 2 without an end; Some.Test'
  archived alive/tests/activation_test.log out | grep 'Some.Test'
  assert_equal "$(marked results)" ''
}

@test "a call that is killed in a step has left summary and archive with what that step had done, and nothing else" {
  stand_ins
  program stub/bin/cuda_bench <<<'echo "{\"op\": \"matmul NT\", \"rate\": 612.5}" >results.jsonl; sleep 1000'
  DS_GPU_CHECK_TICK=1 DS_GPU_CHECK_ONLY='gemm attention' \
    "$gpu_check" --build stub -o results --to out --rehearse numbers >/dev/null 2>&1 3>&- &
  local pid=$!
  for _ in {1..100}; do
    if archived numbers/gemm/results.jsonl out 2>/dev/null | grep -q 612.5; then break; fi
    sleep 0.1
  done
  kill -KILL $pid
  wait $pid || true
  archived numbers/gemm/results.jsonl out | grep 612.5
  grep -qE '^numbers +gemm +begun$' out/summary.txt
  grep -qE '^numbers +attention +not run$' out/summary.txt
  rm -f out/new.tmp # half a copy, if it was killed in one
  assert_equal "$(ls -A out | xargs)" 'results.tar.xz summary.txt'
  DS_GPU_CHECK_DRY=1 run -0 "$gpu_check" --build stub -o results --rehearse rest # ends what is left
  assert_equal "$(marked results)" ''
}

@test "an archive that would be too large has its largest files left out, and listed" {
  slow_only
  stand_ins
  program stub/bin/cuda_bench <<<'for n in 1 2 3 4 5; do head -c 300000 /dev/urandom >large$n; done
    head -c 2000 /dev/urandom >small; echo "{\"op\": \"matmul NT\", \"rate\": 612.5}" >results.jsonl'
  DS_GPU_CHECK_MOST=1000000 DS_GPU_CHECK_ONLY=gemm \
    run -0 "$gpu_check" --build stub -o results --to out --rehearse numbers
  assert [ "$(stat -c %s out/results.tar.xz)" -lt 1000000 ]
  archived left-out.txt out | grep -x numbers/gemm/large5
  archived numbers/gemm/small out | wc -c | grep -x 2000
}

@test "what is expected is that of the GPU by its name, and clocks are noted beside what is measured" {
  stand_ins
  program bin/nvidia-smi <<'END'
case $* in
  *query-gpu=name\ *) echo "$NAME" ;;
  *clocks.sm*) printf '1200, 2619, 80.10, 35\n1980, 2619, 640.50, 61\n1755, 2619, 698.20, 64\n' && sleep 100 ;;
  *) echo "$NAME, 580.1, 81559 MiB" ;;
esac
END
  program stub/bin/cuda_bench <<<'echo "{\"op\": \"matmul NT\", \"rate\": 612.5}" >results.jsonl; sleep 0.5
    if [[ $* == *step* ]]; then echo "{\"section\": \"by-op\", \"model\": \"m\", \"queue\": \"compute\", \"op\": \"matmul\", \"dtype\": \"bf16\", \"shape\": [1, 2, 3], \"calls\": 7, \"ms\": 50.5000, \"tflop\": 39.50000, \"gb\": 3.00000}
{\"section\": \"by-op\", \"model\": \"m\", \"queue\": \"comm\", \"op\": \"fold\", \"dtype\": \"fp32\", \"shape\": [0, 0, 0], \"calls\": 1, \"ms\": 2.0000, \"tflop\": 0.00000, \"gb\": 3.00000}
{\"section\": \"by-op-step\", \"model\": \"m\", \"step_ms\": 60.000, \"ops_ms\": 50.500, \"between_ms\": 9.500, \"all_ops\": true}
{\"tokens_per_s\": 1000.0, \"step_ms\": 60.000, \"memory_bytes\": 1073741824, \"scratch_bytes\": 0}" >results.jsonl; fi'
  export PATH=$PWD/bin:$PATH DS_GPU_CHECK_ONLY='facts gemm gpt2-1.5b' name
  for name in 'NVIDIA H100 80GB HBM3:an H100 SXM:68352:50.00:1.00' 'NVIDIA H200:an H200:71513:50.00:0.70' \
    'NVIDIA GB200:a GB200, from its data sheet:171548:19.75:0.42'; do
    IFS=: read -r NAME gpu most product fold <<<"$name"
    export NAME
    rm -rf results
    run -0 "$gpu_check" --build stub -o results --rehearse alive numbers
    assert_line --regexp "^alive +facts +passed .* 81559 MiB; bounds are those of $gpu\$"
    assert_line --regexp '^numbers +gemm +passed .*; SM 1755 to 1980 MHz, 698 W at most, 64 C$'
    assert_line --regexp "^numbers +gpt2-1.5b +passed .* \\(at most $most: .*; op by op, ms \\(at least\\): matmul 50.50 \\($product\\), comm:fold 2.00 \\($fold\\), between ops 9.500; SM "
  done
  assert_equal "$(archived numbers/gpt2-1.5b/by-op.tsv | sed -n 2p | tr '\t' ' ')" '50.500 19.750 7 matmul'
}

@test "PyTorch stands beside what was measured before; where it is missing that is said" {
  stand_ins
  export DS_GPU_CHECK_ONLY='gpt2-124m pytorch-124m pytorch-ops'
  program bin/python3 <<'END'
[[ $1 != -c ]] || exit "$MISSING"
while (($#)); do
  if [[ $1 == --json ]]; then
    printf '{"section": "step", "tokens_per_s": 535501.9}\n{"op": "cast"}\n{"op": "add"}\n' >"$2"
  fi
  shift
done
END
  sed -i 's/"{\\"tokens_per_s/"{\\"section\\": \\"step\\", \\"tokens_per_s/' stub/bin/cuda_bench
  MISSING=0 PATH=$PWD/bin:$PATH run -0 "$gpu_check" --build stub -o results --rehearse numbers rest
  assert_line --regexp '^rest +pytorch-124m +passed .* PyTorch 535501 tokens/s; ours, gpt2-124m: 1000$'
  assert_line --regexp '^rest +pytorch-ops +passed .* 2 ops of PyTorch$'
  MISSING=1 PATH=$PWD/bin:$PATH run -4 "$gpu_check" --build stub -o again --rehearse rest
  assert_line --regexp '^rest +pytorch-124m +skipped .* there is no python3 with torch$'
}

@test "run-gpu: shares of a test, a total, and all cases but on the simulator" {
  unset DS_SLOW # run-gpu sets it itself
  program bin/device_test <<'END'
# DS_TEST_DEVICE
echo "${DS_SLOW-no} ${GTEST_SHARD_INDEX-0} of ${GTEST_TOTAL_SHARDS-1}"
[[ $* != *norm_test* ]] || sleep 100
END
  run -1 "$DS_SOURCE/tests/run-gpu" --bin bin -o out --jobs 8 --total 2 device_training_test norm_test quantize_test
  assert_line --regexp '^device_training_test.5 +passed'
  assert_line --regexp '^norm_test +failed +not done after [12] s; see'
  assert_line '6 passed, 1 failed, 0 skipped'
  assert_equal "$(cat out/device_training_test.*.log | sort | sed -n '1p;5p' | xargs)" '1 0 of 5 1 4 of 5'
  DS_CUDA_PLUGIN=/nothing/libds_cuda_sim.so run -0 "$DS_SOURCE/tests/run-gpu" --bin bin -o out quantize_test
  grep -x 'no 0 of 1' out/quantize_test.log
  run -0 "$DS_SOURCE/tests/run-gpu" --bin bin -o out --quick quantize_test
  grep -x 'no 0 of 1' out/quantize_test.log
  run -2 "$DS_SOURCE/tests/run-gpu" --jobs 17
  run -0 "$DS_SOURCE/tests/run-gpu" --list
  # Every file of tests that can run on a device is one of its.
  assert_equal "$(sort <<<"$output")" "$(cd "$DS_SOURCE/tests/parity" &&
    printf '%s\n' ./*_test.cc compressed_test.cc device_session_test.cc device_training_test.cc | sed '/cuda_/d; s|^\./||; s|\.cc$||' | sort)"
}

@test "a signal ends the step that runs, and is said; a second call is refused meanwhile" {
  stand_ins
  DS_GPU_CHECK_DRY=1 DS_GPU_CHECK_FAULT=racecheck:wait \
    "$gpu_check" --build stub -o results --rehearse why >out 2>&1 3>&- &
  local pid=$!
  for _ in {1..100}; do
    if grep -q 'racecheck *begun' results/summary.txt 2>/dev/null; then break; fi
    sleep 0.1
  done
  run -2 "$gpu_check" --build stub -o results --rehearse rest
  assert_output "gpu-check: error: another gpu-check ($pid) is at work in $PWD/results"
  kill -TERM $pid
  local status=0
  wait $pid || status=$?
  assert_equal $status 143
  archived summary.txt | grep -E '^why +racecheck +stopped by a signal'
  archived summary.txt | grep -E '^why +ranks +not run'
  assert_equal "$(marked results)" ''
}
