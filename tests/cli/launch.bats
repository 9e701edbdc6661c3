#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-launch: exit statuses, environment, streams, signals; nothing survives, whichever process is killed.

bats_require_minimum_version 1.5.0
bats_load_library bats-support
bats_load_library bats-assert
load terminal
load waiting

export BATS_TEST_TIMEOUT=120

setup() {
  launch=$DS_BIN/ds-launch
  marker=9$RANDOM$RANDOM # a duration that names our sleeping ranks among all processes
  cd "$BATS_TEST_TMPDIR"
}

teardown() {
  pkill -9 -f "sleep $marker" || true
}

start() { # in the background: pid in $job, streams in out and err. (Shells ignore SIGINT and SIGQUIT for background jobs.)
  env --default-signal=INT,QUIT "$launch" "$@" >out 2>err 3>&- &
  job=$!
  local program='' tries
  for ((tries = 0; tries < 1000; ++tries)); do # until then it is a copy of this shell, and a signal ends the test there
    read -r program <"/proc/$job/comm"
    if [[ $program != bash && $program != env ]]; then break; fi
  done
}

assert_ends_with() { # status of the job
  local status=0
  wait "$job" || status=$?
  assert_equal "$status" "$1"
}

sleepers_are() { [[ $(pgrep -cfx "sleep $marker") -eq $1 ]]; }

shims_are_gone() { ! pgrep -f -- "--rank-shim $folder" >pids; }

mpirun_of() { pgrep -P "$1" -x mpirun; }

private_folder_of() { tr '\0' '\n' <"/proc/$(mpirun_of "$1")/cmdline" | grep -o '.*/ds-launch\.[A-Za-z0-9]*' | head -1; }

# Starts ranks that sleep, each with a background process of its own that sleeps, too.
start_sleepers() { # number of ranks
  start -n "$1" bash -c "sleep $marker & sleep $marker; true"
  until_true 10 sleepers_are $((2 * $1))
  folder=$(private_folder_of "$job")
  [[ -d $folder ]]
}

assert_nothing_left() {
  until_true 10 sleepers_are 0
  until_true 5 test ! -e "$folder"
  until_true 5 shims_are_gone
}

# ---- what ranks see -------------------------------------------------------------------------------------------------

@test "every rank gets its place and the job's name" {
  for n in 1 2 3 8; do
    run --separate-stderr "$launch" -n $n bash -c \
      'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR $MASTER_PORT $DS_JOB'
    assert_success
    [[ ${#lines[@]} -eq $n ]]
    for ((r = 0; r < n; ++r)); do assert_line --regexp "^$r $r $n $n 0 127\.0\.0\.1 [0-9]+ [0-9a-f]{32}$"; done
    [[ $(printf '%s\n' "${lines[@]}" | cut -d' ' -f6- | sort -u | wc -l) -eq 1 ]]
  done
}

@test "two jobs at once have different ports and names" {
  "$launch" bash -c 'echo $MASTER_PORT $DS_JOB; sleep 1' >a 3>&- &
  local other=$!
  "$launch" bash -c 'echo $MASTER_PORT $DS_JOB; sleep 1' >b
  wait $other
  [[ $(cut -d' ' -f1 a) != $(cut -d' ' -f1 b) && $(cut -d' ' -f2 a) != $(cut -d' ' -f2 b) ]]
}

@test "OMP_NUM_THREADS is a share of the cores, unless it is set" {
  unset OMP_NUM_THREADS
  run "$launch" bash -c 'echo $OMP_NUM_THREADS'
  assert_output "$(nproc)"
  run --separate-stderr "$launch" -n 64 bash -c '[[ $RANK != 63 ]] || echo $OMP_NUM_THREADS'
  assert_output 1
  OMP_NUM_THREADS=7 run "$launch" bash -c 'echo $OMP_NUM_THREADS'
  assert_output 7
}

@test "--bind core gives each rank cores of its own" {
  (($(nproc) >= 2)) || skip "one core"
  run "$launch" -n 2 --bind core bash -c 'echo $(nproc) cores: $(taskset -cp $$ | sed "s/.*: //")'
  assert_success
  assert_line --partial "$(($(nproc) / 2)) cores"
  [[ ${lines[0]} != "${lines[1]}" ]]
  run "$launch" -n $(($(nproc) + 1)) --bind core true
  assert_failure 2
  assert_output --partial "--bind core needs a core for every rank"
}

@test "arguments and environment arrive literally" {
  local nasty=$'a b\n$(touch ran) `touch ran` "q" \'s\' \\ * : -- é'
  NASTY=$nasty run "$launch" -n 2 bash -c '[[ $1 == "$NASTY" && $2 == : && $3 == "" && $4 == -n && $# == 4 ]] && echo same' \
    bash "$nasty" : "" -n
  assert_success
  assert_output $'same\nsame'
  [[ ! -e ran ]]
}

@test "a value of 128 KB in the environment arrives" {
  BIG=$(head -c 131000 /dev/zero | tr '\0' x) run "$launch" bash -c 'echo ${#BIG}'
  assert_output 131000
}

@test "stdin goes to rank 0, the others read nothing" {
  run bash -c "seq 100000 | '$launch' -n 3 bash -c 'echo \$RANK \$(wc -l)' | sort"
  assert_output --partial $'0 100000\n1 0\n2 0'
  run bash -c "yes | timeout 20 '$launch' -n 2 true" # a rank that does not read
  assert_success
}

@test "a closed stdin is the end of the file" {
  run timeout 20 bash -c "'$launch' -n 2 cat <&-"
  assert_success
}

# ---- streams --------------------------------------------------------------------------------------------------------

@test "lines of different ranks are not mixed, stdout and stderr stay apart" {
  "$launch" -n 3 bash -c 'for i in {1..300}; do printf "%s" $RANK; printf "%0300d\n" 0; done; echo e >&2' >out 2>err
  [[ $(wc -l <out) -eq 900 && $(grep -cE '^[012]0{300}$' out) -eq 900 ]]
  [[ $(grep -cx e err) -eq 3 ]]
}

@test "one rank: every byte passes as it is" {
  head -c 3000000 /dev/urandom >bytes
  "$launch" cat bytes >copy
  cmp bytes copy
  [[ $("$launch" printf 'no newline' | od -c) == "$(printf 'no newline' | od -c)" ]]
}

@test "--tag-output names the rank of every line" {
  "$launch" -n 2 --tag-output bash -c 'echo o$RANK; echo e$RANK >&2' >out 2>err
  [[ $(sort out) == $'[0] o0\n[1] o1' && $(sort err) == $'[0] e0\n[1] e1' ]]
}

@test "a line of more than 1 MiB begins anew when another rank's line has come between its pieces" {
  # shellcheck disable=SC2016
  "$launch" -n 2 --tag-output bash -c 'if [[ $RANK == 0 ]]; then head -c 5000000 /dev/zero | tr "\0" a; echo
    else for i in {1..300}; do echo b; done; fi' >out
  [[ $(grep -c '^\[1\] b$' out) -eq 300 && $(tr -cd a <out | wc -c) -eq 5000000 ]]
  run grep -cvE '^\[1\] b$|^\[0\] a+$' out
  assert_output 0
  "$launch" -n 2 bash -c '[[ $RANK == 1 ]] || { head -c 5000000 /dev/zero | tr "\0" a; echo; }' >out # nobody between
  [[ $(wc -l <out) -eq 1 && $(wc -c <out) -eq 5000001 ]]
}

@test "--log-dir keeps one file per rank with both streams, and appends" {
  for _ in 1 2; do "$launch" -n 2 --log-dir new/logs bash -c 'echo o$RANK; echo e$RANK >&2' >out 2>err; done
  [[ $(ls new/logs) == $'rank-00000.log\nrank-00001.log' ]]
  [[ $(sort new/logs/rank-00001.log) == $'e1\ne1\no1\no1' ]]
  [[ $(sort out) == $'o0\no1' ]]
  ln -s elsewhere/logs link
  "$launch" --log-dir link true
  [[ -d elsewhere/logs ]]
  run "$launch" --log-dir /proc/no true
  assert_failure 2
  echo data >data
  for make in "ln -s ../data" "ln data" mkfifo mkdir; do
    rm -rf logs && mkdir logs
    $make logs/rank-00000.log
    run -2 timeout 20 "$launch" --log-dir logs echo hello
    assert_output --partial "--log-dir: cannot write logs/rank-00000.log: it "
  done
  [[ $(<data) == data ]]
}

@test "a reader that goes away ends the job quietly" {
  run --separate-stderr bash -c "'$launch' -n 2 yes | head -1; echo \${PIPESTATUS[0]}"
  assert_output $'y\n141'
  assert_equal "$stderr" ""
}

@test "a full disk under stdout is an error" {
  run bash -c "'$launch' -n 2 bash -c 'while echo x; do sleep 0.1; done' >/dev/full"
  assert_failure 1
  assert_output --partial "cannot write to stdout: No space left on device"
}

@test "on a terminal an unfinished line appears at once, and DS_COLUMNS is told to rank 0 alone" {
  need_terminal
  TERM=xterm SHELL=/bin/bash timeout 30 script -qec "stty cols 77; '$launch' -n 2 bash -c 'echo c\$RANK=\$DS_COLUMNS; [[ \$RANK == 0 ]] || exit 0; printf half; sleep 30'" \
    /dev/null >out </dev/null 3>&- &
  local shown=$!
  until_true 15 grep -q 'half' out
  grep -q 'c0=77' out
  until_true 15 grep -q 'c1=.$' out
  kill $shown
  wait $shown || true
}

# ---- exit statuses ---------------------------------------------------------------------------------------------------

@test "the status of the rank that failed first is passed on, with its last lines if another rank wrote after it" {
  run "$launch" -n 3 bash -c 'echo "I am $RANK" >&2; [[ $RANK == 1 ]] && exit 3; sleep 0.7; echo late >&2; exit 4'
  assert_failure 3
  assert_output --regexp "ds-launch: error: rank 1 \([^ ]+, pid [0-9]+\) exited with status 3; its last lines:"
  assert_line "  | I am 1"
}

@test "the last lines of the rank that failed first are not repeated where they are the last ones anyway" {
  run "$launch" -n 2 bash -c '[[ $RANK == 0 ]] && echo "no such key" >&2 && exit 2; sleep 60'
  assert_failure 2
  assert_output --regexp "ds-launch: error: rank 0 \([^ ]+, pid [0-9]+\) exited with status 2$"
  assert_equal "$(grep -c 'no such key' <<<"$output")" 1
}

@test "a rank killed by a signal: 128 + signal, named" {
  run "$launch" -n 2 bash -c '[[ $RANK == 1 ]] && kill -SEGV $$; sleep 60'
  assert_failure 139
  assert_output --regexp "rank 1 \([^ ]+, pid [0-9]+\) was killed by signal 11 \(SIGSEGV\)"
}

@test "peers of a failed rank get time to say their part, then are ended within seconds" {
  SECONDS=0
  run "$launch" -n 3 bash -c \
    'case $RANK in 0) trap "" TERM; sleep 60; sleep 60;;
       1) until [[ -e here ]]; do sleep 0.05; done; exit 9;;
       2) touch here; sleep 1; echo "rank 1 is gone"; exit 1;; esac'
  assert_failure 9
  assert_line "rank 1 is gone"
  ((SECONDS <= 12))
}

# late RANK: mpirun starts that rank's shim a second after the others; '*': every one so late
late() {
  mkdir bin
  cat >bin/mpirun <<END
#!/bin/bash
exec $(command -v mpirun) "\${@:1:\$#-3}" bash -c '[[ \$OMPI_COMM_WORLD_RANK == $1 ]] && sleep 1; exec "\$@"' late "\${@: -3}"
END
  chmod +x bin/mpirun
  PATH=$PWD/bin:$PATH
}

@test "a rank whose shim is late still says why, though another has failed" {
  late 0
  run "$launch" -n 2 bash -c '[[ $RANK == 1 ]] || echo "rank 0 says why"; exit 2'
  assert_failure 2
  assert_line "rank 0 says why"
}

@test "a rank that starts late has its part, though others have returned 75" {
  late 1
  run "$launch" -n 2 bash -c '[[ $RANK == 1 ]] && echo "late $RANK"; exit 75'
  assert_failure 75
  assert_line "late 1"
}

@test "75: a checkpoint was committed" {
  run "$launch" -n 3 bash -c 'sleep 0.$RANK; exit 75'
  assert_failure 75
  assert_output "$( (($(nproc) >= 3)) || echo "ds-launch: warning: 3 ranks share $(nproc) cores")"
  run "$launch" -n 2 bash -c 'exit $((RANK * 75))'
  assert_failure 75
  run "$launch" -n 2 bash -c 'sleep 0.$RANK; exit $((75 - RANK))'
  assert_failure 74
}

@test "program not found: 127; not executable: 126" {
  run -127 "$launch" no-such-program
  assert_output "ds-launch: error: 'no-such-program' is neither a program in the directory of ds-launch nor in PATH"
  run -127 "$launch" ./nowhere
  touch plain
  run "$launch" ./plain
  assert_failure 126
  run "$launch" /
  assert_failure 126
  printf '#!/no/such/interpreter\n' >script
  chmod +x script
  run -127 "$launch" -n 2 ./script
  assert_output --partial "cannot execute './script': No such file or directory"
}

@test "PROG is looked up beside ds-launch first" {
  mkdir bin other
  cp "$launch" bin/
  printf '#!/bin/sh\necho beside\n' >bin/prog
  printf '#!/bin/sh\necho path\n' >other/prog
  chmod +x bin/prog other/prog
  LD_LIBRARY_PATH=$DS_BIN/../lib PATH=$PWD/other:$PATH run bin/ds-launch prog
  assert_output beside
  PATH=$PWD/other:$PATH run "$launch" prog
  assert_output path
}

@test "misuse: exit 2, a suggestion, nothing started" {
  for wrong in "-n 0 true" "-n x true" "-n -1 true" "-n" "--bind socket true" "--no-such true" "" "-n 2"; do
    run "$launch" $wrong
    assert_failure 2
    assert_output --partial "ds-launch: error: "
  done
  run "$launch" --tag-outptu touch started
  assert_failure 2
  assert_output --partial "unknown option '--tag-outptu'; did you mean '--tag-output'?"
  run "$launch" --restarts x touch started
  assert_failure 2
  assert_output --partial "unknown option '--restarts'"
  [[ ! -e started ]]
}

@test "options of torchrun, deepspeed and mpirun that mean the same are taken" {
  for options in "-np 2" "--np=2" "--nproc_per_node=2" "--nproc-per-node 2 --nnodes 1:1" "--num_gpus 2 --num_nodes 1" \
    "--standalone --nnodes=1 --node_rank=0 --nproc-per-node=2 --max-restarts=0 --rdzv-backend=c10d" "-n2 --bind_cores_to_rank" \
    "-np 2 -bind-to none --oversubscribe --allow-run-as-root" "--num_processes 2 --num_machines 1"; do
    run -0 "$launch" $options --dry-run true -np 9 --nnodes 7 # which belong to PROG
    assert_line --regexp '^ranks: .*/true -np 9 --nnodes 7$'
    assert_line --regexp '^mpirun: .*mpirun -n 2 '
  done
  printf 'localhost slots=2\n' >hosts
  run -0 "$launch" -hostfile hosts --nproc_per_node 2 --nnodes 1 --dry-run true
  run -0 "$launch" --machinefile hosts --enable_each_rank_log logs true
  [[ -e logs/rank-00001.log ]]
}

@test "options of theirs that mean something else: the error names ours" {
  refuses() { # option and value, what is named
    run -2 "$launch" $1 touch started
    assert_line --index 0 --partial "ds-launch: error: $1"
    assert_line --index 0 --partial -- "$2"
  }
  refuses "--nnodes 2" "--host or --hostfile"
  refuses "--nnodes 1:4" "the number of hosts is fixed"
  refuses "--node-rank 1" "--host or --hostfile"
  refuses "--master-addr 10.0.0.1" "MASTER_ADDR"
  refuses "--master-port 29500" "MASTER_PORT"
  refuses "--max-restarts 3" "run ds-launch again"
  refuses "--include a:0" "--host NAME:SLOTS"
  refuses "--exclude a:0" "--host NAME:SLOTS"
  refuses "-H a:1" "--hostfile FILE"
  refuses "--bind-to core" "--bind core"
  refuses "--launcher pdsh" "--agent PROG"
  refuses "--module" "python3 -m MODULE"
  run -2 "$launch" --nproc_per_node gpu touch started
  assert_output --partial "--nproc-per-node: must be an integer"
  run -2 "$launch" --nproc_per_node 2 --nproc_per_node 2 touch started
  assert_output --partial "error: --nproc-per-node was given more than once"
  run -2 "$launch" --max-restarts
  assert_output --partial "error: --max-restarts needs a value"
  run -2 "$launch" -n 3 --nproc_per_node 2 touch started
  assert_output --partial "--ranks 3 and --nproc-per-node 2 contradict each other"
  run -2 "$launch" --host a:2,b:1 --nproc_per_node 2 touch started
  assert_output --partial "host b has 1 slot; the slots in --host or --hostfile"
  [[ ! -e started ]]
}

@test "a folder that is gone, a job inside a job: exit 2, said once, before anything starts" {
  mkdir gone
  # shellcheck disable=SC2016
  run -2 bash -c 'cd gone; rmdir ../gone; "$1" -n 2 echo started' bash "$launch"
  assert_line --partial "ds-launch: error: the working directory no longer exists"
  refute_output --partial "started"
  run -2 "$launch" "$launch" -n 2 echo started
  assert_line --partial "ds-launch: error: this process is a rank of a job"
  refute_output --partial "mpirun exited"
  refute_output --partial "started"
}

@test "limits with which mpirun would crash or wait for ever, an mpirun that ends at once: a line of ours" {
  # shellcheck disable=SC2016
  local alone='for f in /proc/self/fd/*; do f=${f##*/}; ((f < 3)) || eval "exec $f>&-"; done'
  run -4 bash -c "$alone"'; ulimit -n 34; "$1" -n 2 true' bash "$launch"
  assert_output "ds-launch: error: the limit of open files (ulimit -n) is 34, and starting 2 ranks needs 35: raise it"
  run -0 bash -c "$alone"'; ulimit -n 35; "$1" -n 2 true' bash "$launch"
  run -4 bash -c "$alone"'; ulimit -n 36; exec 5</dev/null 9</dev/null; "$1" -n 2 true' bash "$launch"
  assert_output "ds-launch: error: the limit of open files (ulimit -n) is 36, and starting 2 ranks needs 37: raise it"
  run -0 bash -c "$alone"'; ulimit -n 37; exec 5</dev/null 9</dev/null; "$1" -n 2 true' bash "$launch"
  run -4 bash -c 'ulimit -s 32; "$1" -n 2 true' bash "$launch"
  assert_output "ds-launch: error: the limit of the stack (ulimit -s) is 32 KiB, and this program needs 512 KiB: raise it"
  run -0 bash -c 'ulimit -s 512; "$1" -n 2 true' bash "$launch"
  run -4 bash -c 'ulimit -f 10; "$1" -n 2 true' bash "$launch"
  assert_output "ds-launch: error: the limit of file size (ulimit -f) is 10 KiB, and starting 2 ranks needs 16 KiB: raise it"
  run -0 bash -c 'ulimit -f 16; "$1" -n 2 true' bash "$launch"
  if ! grep -q '^DS_SANITIZE:[A-Z]*=.' "${DS_BIN%/bin}/CMakeCache.txt"; then # which take terabytes of addresses
    run -4 bash -c 'ulimit -v 90000; "$1" -n 2 true' bash "$launch"
    assert_output --partial "ds-launch: error: the limit of address space (ulimit -v) is 90000 KiB, and starting 2 ranks needs "
  fi
  mkdir bin
  printf '#!/bin/sh\necho "no, never" >&2\nexit 9\n' >bin/mpirun
  chmod +x bin/mpirun
  PATH=$PWD/bin:$PATH run -9 "$launch" -n 2 true
  assert_output "ds-launch: error: mpirun exited with status 9 before any rank had started; it said:
  | no, never"
}

@test "an agent that never answers: --host-timeout holds for the wait" {
  printf '#!/bin/sh\necho asking >&2\nexec sleep %s\n' "$marker" >agent
  chmod +x agent
  local before=$SECONDS
  run -4 "$launch" --host 203.0.113.1,203.0.113.2 --agent "$PWD/agent" --host-timeout 2 touch started
  assert_output --partial "ds-launch: error: host 203.0.113.1 (rank 0) cannot be used: nothing arrived from it within 2 s after its agent was started (--host-timeout)"
  assert_output --partial asking
  ((SECONDS - before < 30))
  [[ ! -e started ]]
  until_true 5 sleepers_are 0
}

@test "options after PROG belong to PROG; -- ends ours" {
  run "$launch" echo -n 5 --help --json
  assert_output -- "5 --help --json"
  run "$launch" -n 1 -- echo a --version
  assert_output -- "a --version"
  run "$launch" -n 1 echo -- a
  assert_output -- "-- a"
}

@test "--dry-run prints what would be started and starts nothing" {
  run "$launch" -n 2 --dry-run touch "a b"
  assert_success
  assert_output --regexp "mpirun:.*mpirun -n 2 "
  assert_output --partial " --mca shmem ^posix " # which may leave a segment in /dev/shm
  assert_output --regexp "ranks: .*/touch 'a b'"
  assert_output --regexp "rank 1: +RANK=1 LOCAL_RANK=1"
  [[ ! -e "a b" ]]
  run bash -c "'$launch' -n 2 --dry-run --json touch f | grep -c '\"schema\": \"ds-launch/1\"'"
  assert_output 1
  run -0 "$launch" --agent /bin/true --host "$(seq -s , -f 203.0.113.%g 200)" --dry-run true
  assert_output --partial " --mca plm_rsh_num_concurrent 200 "
}

@test "--output writes a report of how the ranks ended; --json alone is refused" {
  run "$launch" -n 2 --json --output report.json bash -c 'exit $((RANK * 3))'
  assert_failure 3
  grep -q '"culprit": 1' report.json
  run "$launch" --json true
  assert_failure 2
}

@test "--output replaces nothing that the program's command line names" {
  printf '#!/bin/sh\necho "$@"\n' >prog
  chmod +x prog
  cp prog before
  echo data >data.txt
  local words
  for words in ./prog "echo prog" "echo --file=prog" "echo --set=a.b=prog" "echo $PWD/prog"; do
    for dry in "" --dry-run; do
      run -2 --separate-stderr "$launch" --output prog $dry $words
      [[ $stderr == *"--output prog: the program's command line names this file"* ]] || fail "$words: $stderr"
      cmp prog before
    done
  done
  "$launch" --output report ./prog new data.txt
  grep -q 'status 0' report
}

@test "a directory of logs that is a link to itself is a mistake" {
  ln -s loop loop
  run -2 --separate-stderr "$launch" --log-dir loop true
  [[ $stderr == *"--log-dir: cannot create loop: Too many levels of symbolic links"* ]] || fail "$stderr"
}

# ---- signals --------------------------------------------------------------------------------------------------------

@test "TERM and USR1 reach the ranks, which may take their time to return 75" {
  for signal in TERM USR1; do
    start -n 2 bash -c "trap 'sleep 3; echo saved \$RANK; exit 75' $signal; touch ready.\$RANK; while :; do sleep 0.1; done"
    until_true 10 test -e ready.0 -a -e ready.1
    kill -$signal $job
    assert_ends_with 75
    assert_equal "$(sort out)" $'saved 0\nsaved 1'
    refute grep -q "ds-launch" err
    rm ready.*
  done
}

@test "ranks that die of the signal we were sent: 128 + signal, no accusation" {
  for signal in INT TERM HUP; do
    start -n 2 sleep $marker
    until_true 10 sleepers_are 2
    kill -$signal $job
    assert_ends_with $((128 + $(kill -l $signal)))
    refute grep -q "error" err
  done
}

@test "the second stop signal is force" {
  start -n 2 bash -c "trap '' INT TERM; touch ready.\$RANK; while :; do sleep 0.1; done"
  until_true 10 test -e ready.0 -a -e ready.1
  kill -TERM $job
  sleep 1
  kill -0 $job
  kill -TERM $job
  SECONDS=0
  assert_ends_with 143
  ((SECONDS <= 5))
}

@test "Ctrl-C on a terminal reaches the ranks once" {
  need_terminal
  cat >rank <<'END'
trap 'echo caught; sleep 1; exit 75' INT
touch "ready.$RANK"
while :; do sleep 0.1; done
END
  (until_true 20 test -e ready.0 -a -e ready.1; printf '\003'; sleep 2) |
    SHELL=/bin/bash timeout 30 script -qec "'$launch' -n 2 bash rank; echo status=\$?" /dev/null >out 3>&-
  [[ $(grep -c caught out) -eq 2 ]]
  grep -q 'status=75' out
}

@test "a stop before the ranks have started ends the job, also by a signal that is told once" {
  for stop in TERM:0 TERM:0.05 USR1:0.04 USR2:0.06; do
    start -n 8 sleep $marker
    sleep "${stop#*:}"
    kill -"${stop%:*}" $job
    assert_ends_with $((128 + $(kill -l "${stop%:*}")))
    refute grep -q error err
    until_true 5 sleepers_are 0
  done
}

@test "whatever signal comes at whatever moment of the start ends the job, and nothing is left" {
  slow_only
  needs_mounts
  cat >all <<'END'
exec 2>noise # where the shell names who was killed
mount -t tmpfs tmpfs /dev/shm
export TMPDIR=$PWD/tmp
mkdir tmp
for ((delay = 0; delay < 200; delay += 20)); do
  for signal in TERM INT USR1 USR2 HUP QUIT XCPU ALRM; do
    env --default-signal "$1" -n 4 sleep "$2" 2>err &
    job=$!
    until [[ $(</proc/$job/comm) == ds-launch ]]; do :; done
    sleep "0.$(printf %03d $delay)"
    kill -$signal $job
    timeout 20 tail --pid=$job -f /dev/null || { echo "$signal after $delay ms: it goes on"; kill -9 $job; }
    wait $job
    status=$?
    [[ $status == $((128 + $(kill -l $signal))) ]] || echo "$signal after $delay ms: $status, $(<err)"
    ! grep error err || echo "$signal after $delay ms"
    [[ -z $(ls -A /dev/shm tmp | grep -v :) ]] || { echo "$signal after $delay ms left $(ls -A /dev/shm tmp)"; rm -rf /dev/shm/* tmp/*; }
  done
done
END
  run unshare -m bash all "$launch" $marker 3>&-
  assert_output ""
  until_true 5 sleepers_are 0
}

is_stopped() { [[ $(ps -o stat= -p "$1") == T* ]]; }

# Starts two ranks that save when they are asked to stop; their pids are in ready.0 and ready.1.
start_savers() {
  start -n 2 bash -c "trap 'echo saved \$RANK; exit 75' TERM USR1; echo \$\$ >ready.\$RANK; while :; do sleep 0.05; done"
  until_true 10 test -s ready.0 -a -s ready.1
}

@test "a suspended job that is told to stop is continued, and its ranks may save" {
  start_savers
  kill -TSTP $job
  until_true 5 is_stopped $job
  until_true 5 is_stopped "$(<ready.1)"
  kill -TERM $job
  assert_ends_with 75
  assert_equal "$(sort out)" $'saved 0\nsaved 1'
  rm ready.*
  start_savers
  kill -TSTP $job
  kill -TERM $job # the launcher may hear of both at once, the smaller number first
  assert_ends_with 75
  assert_equal "$(sort out)" $'saved 0\nsaved 1'
}

@test "a rank that is stopped by itself is continued when the job is told to stop" {
  start_savers
  kill -STOP "$(<ready.1)"
  kill -TERM $job
  assert_ends_with 75
  assert_equal "$(sort out)" $'saved 0\nsaved 1'
}

@test "a rank that is stopped by itself when another fails is continued to end" {
  slow_only # two seconds of grace
  start_savers
  kill -STOP "$(<ready.1)"
  kill -9 "$(<ready.0)" # then rank 1 gets SIGTERM, and need not be killed
  assert_ends_with 137
  assert_equal "$(<out)" "saved 1"
}

# ---- nothing survives -----------------------------------------------------------------------------------------------

@test "kill -9 of a rank: the job ends, the rank is named, nothing is left" {
  start_sleepers 3
  kill -9 "$(pgrep -fx "sleep $marker" | head -1 | xargs -I{} ps -o ppid= -p {})" # its bash
  assert_ends_with 137
  grep -qE "rank [012] \([^ ]+, pid [0-9]+\) was killed by signal 9 \(SIGKILL\)" err
  assert_nothing_left
}

@test "kill -9 of a shim: its rank and the job end, nothing is left" {
  start_sleepers 2
  kill -9 "$(pgrep -f -- "--rank-shim $folder" | xargs -n1 -I{} sh -c 'grep -qs mpirun /proc/{}/comm || echo {}' | head -1)"
  assert_ends_with 137
  assert_nothing_left
}

@test "kill -9 of a shim before all have come: the job ends at once, also if the launcher hears it together with the names" {
  late 0
  PATH=$PWD/bin:$PATH start -n 3 sleep $marker
  until_true 10 mpirun_of $job
  kill -STOP $job
  mpirun=$(mpirun_of $job)
  until_true 10 eval '[[ $(pgrep -c -P $mpirun) -eq 3 ]]'
  sleep 0.5
  kill -9 "$(pgrep -P "$mpirun" -x bash)"
  sleep 0.3
  SECONDS=0
  kill -CONT $job
  assert_ends_with 1
  ((SECONDS <= 8))
}

@test "kill -9 of a shim before any has come: the job ends at once" {
  late '*'
  PATH=$PWD/bin:$PATH start -n 3 sleep $marker
  until_true 10 mpirun_of $job
  mpirun=$(mpirun_of $job)
  until_true 10 eval '[[ $(pgrep -c -x -P $mpirun bash) -eq 3 ]]'
  SECONDS=0
  kill -9 "$(pgrep -P "$mpirun" -x bash | head -1)"
  assert_ends_with 1
  ((SECONDS <= 8))
  grep -q "mpirun gave up before any rank had started; it said:" err
}

@test "kill -9 of mpirun: the job ends, nothing is left" {
  start_sleepers 2
  kill -9 "$(mpirun_of $job)"
  assert_ends_with 137
  grep -q "mpirun was killed by signal 9 (SIGKILL)" err
  assert_nothing_left
}

@test "kill -9 of ds-launch: nothing is left" {
  for n in 1 2 8; do
    start_sleepers $n
    kill -9 $job
    assert_ends_with 137
    assert_nothing_left
  done
}

@test "SIGSEGV of mpirun ends it and the job: no handler of its own waits; ranks have theirs" {
  # shellcheck disable=SC2016
  run -0 "$launch" -n 1 sh -c 'echo "${OMPI_MCA_opal_signal-unset}"'
  assert_output unset
  start_sleepers 2
  kill -SEGV "$(mpirun_of $job)"
  assert_ends_with 139
  grep -q "mpirun was killed by signal 11 (SIGSEGV)" err
  assert_nothing_left
}

@test "kill -9 of ds-launch and mpirun at once: nothing is left" {
  start_sleepers 2
  kill -9 $job "$(mpirun_of $job)"
  assert_ends_with 137
  assert_nothing_left
}

needs_mounts() { unshare -m mount -t tmpfs tmpfs /dev/shm || skip "no mount here"; }

in_own_memory() { # command...: with a /dev/shm of its own; what is there in the end is in the file left
  # shellcheck disable=SC2016
  unshare -m bash -c 'mount -t tmpfs tmpfs /dev/shm; "$@"; s=$?; ls -A /dev/shm >left; exit $s' bash "$@"
}

@test "what a launcher left that was killed before its shims came goes with the next job" {
  needs_mounts
  mkdir bin
  printf '#!/bin/sh\nexec sleep %s\n' $marker >bin/mpirun
  chmod +x bin/mpirun
  cat >killed <<'END'
PATH=$PWD/bin:$PATH "$1" true &
job=$!
until [[ -n $(pgrep -P $job sleep) ]]; do sleep 0.02; done
kill -9 $job
ls -A /dev/shm >before
"$1" true
END
  in_own_memory bash killed "$launch" 3>&-
  [[ $(cat before) == ds-launch.* ]]
  assert_equal "$(cat left)" ""
}

@test "another job's start and end take nothing from one that runs" {
  start_sleepers 2
  "$launch" true
  [[ -S $folder/socket ]]
  kill -TERM $job
  assert_ends_with 143
  assert_nothing_left
}

@test "what a rank leaves in the background ends with it" {
  run "$launch" -n 2 bash -c "setsid sleep $marker & sleep 0.2"
  assert_success
  sleepers_are 0
}

# ---- MPI programs -----------------------------------------------------------------------------------------------------

mpi_rank() {
  command -v mpicc >/dev/null || skip "no mpicc"
  mpicc -o mpi_rank "$DS_SOURCE/tests/cli/mpi_rank.c"
}

@test "MPI programs work through the shim" {
  mpi_rank
  for n in 1 2 3 8; do
    run "$launch" -n $n ./mpi_rank
    assert_success
    for ((r = 0; r < n; ++r)); do assert_line "rank $r counts $n"; done
  done
  run "$launch" -n 2 ./mpi_rank checkpoint
  assert_failure 75
}

@test "a /dev/shm that is short of space is left to others" {
  needs_mounts
  mpi_rank
  # shellcheck disable=SC2016
  local short='mount -t tmpfs -o size=5m tmpfs /dev/shm; TMPDIR=$PWD timeout 60 "$@"; s=$?; df -k --output=used /dev/shm; exit $s'
  run -0 unshare -m bash -c "$short" bash "$launch" -n 2 ./mpi_rank
  assert_line "rank 1 counts 2"
  # Except for the byte for each rank that has ended.
  run -0 unshare -m bash -c "$short" bash "$launch" -n 2 find /dev/shm -type f ! -name 'ds-job.*.ended'
  assert_output --regexp '^ *Used'$'\n'' *0$'
  run -0 unshare -m bash -c "$short" bash "$launch" -n 2 --dry-run true
  assert_output --partial "orte_tmpdir_base $PWD/ds-launch.XXXXXX"
  run -0 unshare -m bash -c "${short/5m/64m}" bash "$launch" -n 2 --dry-run true
  assert_output --partial "orte_tmpdir_base /dev/shm/ds-launch.XXXXXX"
}

@test "the end of an MPI rank is noticed, however it comes" {
  mpi_rank
  run timeout 20 "$launch" -n 2 ./mpi_rank abort
  assert_failure 42
  run timeout 20 "$launch" -n 2 ./mpi_rank kill
  assert_failure 137
  run timeout 20 "$launch" -n 2 ./mpi_rank exit
  assert_failure 5
  run timeout 20 "$launch" -n 2 ./mpi_rank leave
  assert_failure 1
  assert_output --partial "without MPI_Finalize"
}
