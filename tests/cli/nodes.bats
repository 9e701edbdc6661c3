#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-launch on several hosts, which are network namespaces joined by links of limited bandwidth (tests/net/hosts): the
# environment of ranks, collectives and training over TCP. A rank or host that is killed, frozen or cut off is named,
# and nothing survives.

bats_require_minimum_version 1.5.0
bats_load_library bats-support
bats_load_library bats-assert
load waiting

export BATS_TEST_TIMEOUT=60

hosts=$DS_SOURCE/tests/net/hosts

setup_file() {
  local letters
  letters=$(tr -dc a-z </dev/urandom 2>/dev/null | head -c 5) || true
  why_not=$("$hosts" can) || true
  export net=t$letters why_not
  [[ -n $why_not ]] || "$hosts" up "$net" 3 200 # Mbit/s
}

teardown_file() { [[ -n $why_not ]] || "$hosts" down "$net"; }

setup() {
  [[ -z $why_not ]] || skip "$why_not"
  PATH=$DS_BIN:$PATH
  export CUDA_VISIBLE_DEVICES=
  launch=$DS_BIN/ds-launch
  marker=9$RANDOM$RANDOM # a duration that names our sleeping ranks among all processes
  agent=$("$hosts" agent "$net")
  a=$("$hosts" address "$net" 1) b=$("$hosts" address "$net" 2) c=$("$hosts" address "$net" 3)
  cd "$BATS_TEST_TMPDIR"
}

teardown() {
  [[ -z $why_not ]] || return 0
  "$hosts" down "${net}d"
  for host in 1 2 3; do # what a failed test left, and links
    pids_on $host | xargs -r kill -9 || true
    "$hosts" link "$net" $host up
  done
}

pids_on() { ip netns pids "$net$1" | grep -vxf "${TMPDIR:-/tmp}/ds-hosts-$net/pids"; } # but for the host's door

from_a() { "$hosts" in "$net" 1 "$@"; } # a command on host 1

start() { # ds-launch on host 1 in the background: pid in $job, streams in out and err
  env --default-signal=INT "$hosts" in "$net" 1 "$launch" --agent "$agent" "$@" >out 2>err 3>&- &
  job=$!
}

assert_ends_with() { # status of the job
  local status=0
  wait "$job" || status=$?
  [[ $status == "$1" ]] || { echo "status $status, not $1" && cat out err && false; }
}

# Pids on a host whose command line matches.
matching_on() { comm -12 <(pids_on "$1" | sort) <(pgrep -f -- "$2" | sort); }

matches_on() { [[ -n $(matching_on "$@") ]]; }

not_matching_on() { ! matches_on "$@"; }

sleepers_are() { [[ $(pgrep -cfx "sleep $marker") -eq $1 ]]; }

nobody_on() { [[ -z $(pids_on "$1") ]]; }

listens() { # the port on which ds-launch waits for shims
  from_a ss -ltnpH | grep "pid=$job," | grep -o ':[0-9]* ' | head -1 | tr -d ': ' | grep .
}

agent_that() { # does something before (or instead) it reaches a host: prints its path
  printf '#!/bin/sh\n%s\nexec "%s" "$@"\n' "$1" "$agent" >"$BATS_TEST_TMPDIR/agent"
  chmod +x "$BATS_TEST_TMPDIR/agent"
  echo "$BATS_TEST_TMPDIR/agent"
}

# Starts ranks that sleep on the hosts of a list, each with a background process; each writes the path of its host's
# folder.
start_sleepers() { # list, number of ranks, options...
  local list=$1 n=$2
  shift 2
  # shellcheck disable=SC2016
  start --host "$list" "$@" bash -c 'echo "$OMPI_MCA_orte_tmpdir_base" >"folder.$RANK"; sleep '"$marker & sleep $marker; true"
  until_true 15 sleepers_are $((2 * n))
  until_true 5 test -s "folder.$((n - 1))"
  [[ $(sort -u folder.* | wc -l) -eq $(tr ',' '\n' <<<"$list" | wc -l) ]]
}

assert_nothing_left() { # hosts...
  for host in "$@"; do until_true 8 nobody_on "$host"; done
  until_true 3 sleepers_are 0
  for folder in $(cat folder.*); do until_true 3 test ! -e "$folder"; done
}

# ---- what ranks see -------------------------------------------------------------------------------------------------

@test "every rank gets its place among hosts, in blocks, and runs there" {
  unset OMP_NUM_THREADS
  # shellcheck disable=SC2016
  run --separate-stderr from_a "$launch" --agent "$agent" --host "$a:2,$b:1,$c:2" bash -c 'echo $RANK $LOCAL_RANK \
    $WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK $(hostname) $(ip -4 -br addr show eth0 | grep -o "10[.0-9]*") $OMP_NUM_THREADS \
    $MASTER_ADDR $MASTER_PORT $DS_JOB $PWD'
  assert_success
  [[ ${#lines[@]} -eq 5 ]]
  local half=$(($(nproc) / 2 > 0 ? $(nproc) / 2 : 1)) same="$a [0-9]+ [0-9a-f]{32} $PWD"
  assert_line --regexp "^0 0 5 2 0 ${net}1 $a $half $same$"
  assert_line --regexp "^1 1 5 2 0 ${net}1 $a $half $same$"
  assert_line --regexp "^2 0 5 1 1 ${net}2 $b $(nproc) $same$"
  assert_line --regexp "^3 0 5 2 2 ${net}3 $c $half $same$"
  assert_line --regexp "^4 1 5 2 2 ${net}3 $c $half $same$"
  [[ $(printf '%s\n' "${lines[@]}" | cut -d' ' -f10- | sort -u | wc -l) -eq 1 ]]
}

@test "a hostfile; fewer ranks fill hosts in their order; arguments, environment and stdin arrive" {
  printf '# ours\r\n%s slots=1\r\n\n  %s\tslots=2 # two\n%s slots=4' "$a" "$b" "$c" >hosts
  # shellcheck disable=SC2016
  NASTY=$'a\n$(touch ran) `touch ran` "q" \'s\' \\' SSH_TTY=mine run --separate-stderr from_a bash -c 'seq 1000 |
    "$1" --agent "$2" --hostfile hosts -n 3 bash -c "$3" "x y" "\$HOME"' bash "$launch" "$agent" \
    '[[ $0 == "x y" && $1 == "\$HOME" && $NASTY == *ran*\\ && -z $SSH_TTY ]] && echo $RANK $(hostname) $(wc -l)'
  assert_success
  assert_equal "$(sort <<<"$output")" "0 ${net}1 1000"$'\n'"1 ${net}2 0"$'\n'"2 ${net}2 0"
  [[ ! -e ran ]]
}

@test "one host in a list, this one by its name: no agent is needed" {
  run --separate-stderr from_a "$launch" --host "${net}1:2" --agent /bin/false hostname
  assert_success
  assert_output "${net}1"$'\n'"${net}1"
}

# ---- collectives and training ----------------------------------------------------------------------------------------

crossed() { ip netns exec "$net-sw" cat "/sys/class/net/port$1/statistics/rx_bytes"; } # bytes that left host N

@test "collectives over TCP: every operation of a communicator on three hosts" {
  [[ -x $DS_BIN/comm_mpi_test ]] || skip "comm_mpi_test is not built"
  mkdir stories
  run -0 from_a "$launch" --agent "$agent" --host "$a:1,$b:1,$c:1" "$DS_BIN/comm_mpi_test" --rank exercise stories
  [[ $(cat stories/*) == okokok ]]
}

training() {
  cp "$DS_SOURCE/LICENSE" text.txt
  cat >cfg.json <<'JSON'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
  "reduce_order": "micro", "device": "cpu", "threads": 1, "steps": 4
}
JSON
}

losses() { grep -o '"step":[0-9]*,"loss":[^,]*' "$1/metrics.jsonl"; }

@test "ZeRO 2 and 3 on two hosts train the bits of one, over the link" {
  training
  "$launch" -n 4 ds-train cfg.json --out here 2>/dev/null
  for variant in "2 auto shm+mpi" "3 shm+mpi shm+mpi" "3 mpi mpi"; do
    local before after stage asked taken
    read -r stage asked taken <<<"$variant"
    before=$(crossed 2)
    run -0 from_a "$launch" --agent "$agent" --host "$a:2,$b:2" ds-train cfg.json --out "two$stage$asked" --verbose \
      --set "zero_optimization.stage=$stage" --set "communication.backend=$asked"
    after=$(crossed 2)
    assert_output --partial "communication: $taken"
    assert_equal "$(losses "two$stage$asked")" "$(losses here)"
    ((after - before > 200000))
  done
  # Nodes of 2 and 1 ranks.
  run -0 from_a "$launch" --agent "$agent" --host "$a:2,$b:1" ds-train cfg.json --out uneven --set steps=1 --set train_batch_size=6
  assert_output --partial "takes mpi alone"
}

@test "four hosts with a delay between them train the same" {
  [[ -c /dev/net/tun ]] || skip "no /dev/net/tun"
  training
  "$launch" -n 4 ds-train cfg.json --out here --set steps=3 2>/dev/null
  far=${net}d
  "$hosts" up "$far" 4 100 2
  list=$(for host in 1 2 3 4; do "$hosts" address "$far" $host; done | paste -sd,)
  run "$hosts" in "$far" 1 timeout 40 "$launch" --agent "$("$hosts" agent "$far")" --host "$list" ds-train cfg.json \
    --out far --set steps=3 --set zero_optimization.stage=3
  "$hosts" down "$far"
  assert_success
  assert_equal "$(losses far)" "$(losses here)"
}

# ---- how jobs end -----------------------------------------------------------------------------------------------------

@test "kill -9 of a rank on another host: it is named, with its last lines, and everything ends" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:2" bash -c 'until_there() { until [[ -e $1 ]]; do sleep 0.05; done; sleep 0.3; }
    echo "I am $RANK" >&2
    case $RANK in
      1) until_there said; echo later >&2; touch more ;;
      2) touch said; until_there more; kill -9 $$ ;;
    esac
    sleep '"$marker"
  assert_ends_with 137
  grep -qE "rank 2 \($b, pid [0-9]+\) was killed by signal 9 \(SIGKILL\); its last lines:" err
  grep -qx '  | I am 2' err
  for host in 1 2; do until_true 5 nobody_on $host; done
}

@test "the rank that failed first is blamed, whatever the clocks of hosts say" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1" bash -c 'if [[ $RANK == 1 ]]; then sleep 0.3; exit 9; else until ! pgrep -fx "sleep 0.3"; do :; done
    sleep 0.5; exit 8; fi'
  assert_ends_with 9
  grep -q "rank 1 ($b, pid [0-9]*) exited with status 9" err
}

@test "a rank that is stopped is named by the others within the timeout" {
  training
  start --host "$a:1,$b:1,$c:1" ds-train cfg.json --out run --set steps=100000 --set communication.timeout_s=2 \
    --set train_batch_size=6
  until_true 60 grep -qs '"step":3,' run/metrics.jsonl
  kill -STOP "$(matching_on 2 '^ds-train')"
  SECONDS=0
  assert_ends_with 1
  ((SECONDS <= 20))
  [[ $(grep -c "rank 1 did not arrive within 2 s" err) -ge 2 ]]
  for host in 1 2 3; do until_true 5 nobody_on $host; done
}

@test "Ctrl-C while a host does not answer yet ends the job, and no host is blamed" {
  agent=$(agent_that "sleep $marker")
  start --host "$a:1,$b:1" true
  until_true 10 matches_on 1 '^[^ ]*/orted '
  until_true 10 sleepers_are 1
  until_true 5 listens
  kill -INT $job
  assert_ends_with 130
  run ! grep -q "host $a" err
  until_true 5 nobody_on 1
}

@test "an agent that loses its connection while the ranks run is no reason to end them" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1" bash -c 'touch ready.$RANK; until [[ -e go ]]; do sleep 0.1; done; echo $RANK'
  until_true 10 test -e ready.0 -a -e ready.1
  kill -9 "$(matching_on 1 '^[^ ]*/net_helper call [^ ]*/door2 ')"
  sleep 1
  touch go
  assert_ends_with 0
  assert_equal "$(sort out)" $'0\n1'
}

@test "whatever mpirun takes the login shell for, and with arguments for its agent, jobs run" {
  cp /etc/passwd passwd
  for shell in /bin/sh /bin/fish; do
    sed -i "s|^\(root:.*:\)[^:]*$|\1$shell|" passwd
    # shellcheck disable=SC2016
    OMPI_MCA_plm_rsh_args=-q run -0 from_a unshare -m bash -c 'mount --bind passwd /etc/passwd && "$@"' bash \
      timeout 20 "$launch" --agent "$agent" --host "$a,$b" hostname
    assert_equal "$(sort <<<"$output")" "${net}1"$'\n'"${net}2"
  done
}

@test "a log that takes nothing for longer than the hosts' timeout holds the job up and does not end it" {
  mkdir logs
  mkfifo logs/rank-00000.log
  exec 9<>logs/rank-00000.log # and nobody reads
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1" --host-timeout 1 --log-dir logs bash -c '[[ $RANK == 1 ]] || head -c 300000 /dev/zero | tr "\0" "\n"
    touch ready.$RANK; until [[ -e go ]]; do sleep 0.1; done; echo $RANK' 9>&-
  until_true 10 test -e ready.1
  sleep 4
  kill -0 $job
  cat <&9 >/dev/null 3>&- & # all that was held back
  reader=$!
  touch go
  assert_ends_with 0
  kill $reader
  exec 9>&-
  assert_equal "$(grep . out | sort)" $'0\n1'
}

@test "a host that is lost after its ranks have ended is named when mpirun ends the job" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1" bash -c '[[ $RANK == 0 ]] || exit 0; touch ready; sleep '"$marker"
  until_true 10 test -e ready
  until_true 5 not_matching_on 2 '--rank-shim'
  kill -9 "$(matching_on 2 '--host-shim$' | tail -1)"
  assert_ends_with 1
  grep -q "mpirun ended the job; host $b (rank 1) is lost: its part of ds-launch has ended" err
  run ! grep -q ds-launch-host- err
  for host in 1 2; do until_true 8 nobody_on $host; done
}

@test "a host that is lost while the others wait for checkpoints: no more waiting" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1,$c:1" bash -c 'touch ready.$RANK; [[ $RANK != 0 ]] || exit 75; sleep '"$marker"
  until_true 10 test -e ready.0 -a -e ready.1 -a -e ready.2
  kill -9 "$(matching_on 3 '--host-shim$' | tail -1)"
  SECONDS=0
  assert_ends_with 1
  ((SECONDS <= 15))
  grep -q "host $c (rank 2) is lost" err
  for host in 1 2 3; do until_true 8 nobody_on $host; done
}

@test "TERM reaches all hosts, which may return 75" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1" bash -c 'trap "echo saved \$RANK; exit 75" TERM; touch ready.$RANK; while :; do sleep 0.1; done'
  until_true 10 test -e ready.0 -a -e ready.1
  kill -TERM $job
  assert_ends_with 75
  assert_equal "$(sort out)" $'saved 0\nsaved 1'
}

@test "a rank that is stopped on another host is continued when the job is told to stop" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1" bash -c 'trap "echo saved \$RANK; exit 75" TERM; echo $$ >ready.$RANK; while :; do sleep 0.1; done'
  until_true 10 test -s ready.0 -a -s ready.1
  kill -STOP "$(matching_on 2 'echo saved' | head -1)"
  kill -TERM $job
  assert_ends_with 75
  assert_equal "$(sort out)" $'saved 0\nsaved 1'
}

@test "a job that is stopped by Ctrl-Z for longer than the hosts' timeout goes on" {
  # shellcheck disable=SC2016
  start --host "$a:1,$b:1" --host-timeout 1 bash -c 'touch ready.$RANK; until [[ -e go ]]; do sleep 0.1; done; echo $RANK'
  until_true 10 test -e ready.0 -a -e ready.1
  kill -TSTP $job
  sleep 2.5
  touch go
  kill -CONT $job
  assert_ends_with 0
  assert_equal "$(sort out)" $'0\n1'
}

@test "kill -9 of ds-launch: nothing is left on any host" {
  start_sleepers "$a:1,$b:2,$c:1" 4
  [[ -n $(matching_on 2 orted) ]]
  tr '\0' '\n' <"/proc/$(pgrep -P $job -x mpirun)/cmdline" | grep -o '.*/ds-launch\.[A-Za-z0-9]*' | head -1 >folder.launcher
  kill -9 $job
  assert_ends_with 137
  assert_nothing_left 1 2 3
}

@test "kill -9 of mpirun or of an orted: the job ends, named, and nothing is left" {
  start_sleepers "$a:1,$b:1" 2
  kill -9 "$(pgrep -P $job -x mpirun)"
  assert_ends_with 137
  grep -q "mpirun was killed by signal 9 (SIGKILL)" err
  assert_nothing_left 1 2
  start_sleepers "$a:1,$b:1" 2
  kill -9 "$(matching_on 2 orted | head -1)"
  assert_ends_with 1
  grep -q "host $b (rank 1): Open MPI's orted was killed by signal 9 (SIGKILL)" err
  assert_nothing_left 1 2
}

@test "kill -9 of a host's shim: the host is named, and nothing is left" {
  start_sleepers "$a:1,$b:2" 3
  kill -9 "$(matching_on 2 '--host-shim$' | tail -1)"
  assert_ends_with 1
  grep -q "host $b (ranks 1 to 2) is lost: its part of ds-launch has ended" err
  # A shim that is killed leaves its folder, which any next job sweeps.
  rm -rf "$(cat folder.1)" folder.1 folder.2
  assert_nothing_left 1 2
}

@test "a link that goes down: the host is named within the limit, and ends its part" {
  start_sleepers "$a:1,$b:2" 3 --host-timeout 2
  "$hosts" link "$net" 2 down
  SECONDS=0
  assert_ends_with 1
  ((SECONDS <= 20))
  grep -q "host $b (ranks 1 to 2) is lost: nothing was heard from it for 2 s" err
  assert_nothing_left 1 2
}

@test "a host that freezes is found within the limit" {
  start_sleepers "$a:1,$b:1" 2 --host-timeout 2
  frozen=$(pids_on 2)
  kill -STOP $frozen
  SECONDS=0
  assert_ends_with 1
  ((SECONDS <= 20))
  grep -q "host $b (rank 1) is lost: nothing was heard" err
  kill -CONT $frozen
  assert_nothing_left 1 2
}

# ---- what is refused --------------------------------------------------------------------------------------------------

@test "more ranks than slots: exit 2 with the numbers" {
  run -2 from_a "$launch" --agent "$agent" --host "$a:1,$b:2" -n 4 touch started
  assert_output --partial "4 ranks, but the 2 hosts given have 3 slots"
  [[ ! -e started ]]
}

@test "wrong hostfiles are refused with all their lines, and nothing is started" {
  printf 'good slots=2\n-oProxyCommand=touch${IFS}ran slots=1\nw;reboot\nw slots=0\nw slots=4x\nw slots=-1\ngood\n' >hosts
  run -2 from_a "$launch" --hostfile hosts touch started
  assert_line --partial "hosts:2: '-oProxyCommand=touch\${IFS}ran': a host name may not begin with '-'"
  for line in 3 4 5 6 7; do assert_line --partial "hosts:$line: "; done
  : >hosts
  run -2 from_a "$launch" --hostfile hosts touch started
  assert_output --partial "hosts: contains no host"
  run -2 from_a "$launch" --hostfile nowhere touch started
  assert_output --partial "the hostfile nowhere cannot be opened: No such file or directory"
  run -2 from_a "$launch" --hostfile /dev/zero touch started
  assert_output --partial "the hostfile /dev/zero is larger than 16 MiB"
  run -2 from_a "$launch" --host "a:2,-b,c:x" touch started
  assert_line --partial "--host, host 2: '-b'"
  run -2 from_a "$launch" --host a --hostfile hosts touch started
  for name in localhost LOCALHOST '[0:0:0:0:0:0:0:1]' 127.0.0.1; do
    run -2 from_a "$launch" --agent "$agent" --host "$name,$b" touch started
    assert_output --partial "means a different machine on each host"
  done
  run -2 from_a "$launch" --agent "$agent" touch started
  assert_output --partial "--agent applies to other hosts: give --hostfile or --host"
  [[ ! -e started && ! -e ran ]]
}

@test "a host that cannot be reached: exit 4, named with what its agent said" {
  run -4 from_a timeout 30 "$launch" --agent "$agent" --host "$a,10.9.8.7" touch started
  assert_output --partial "host 10.9.8.7 (rank 1) cannot be used: '$agent' exited with status 255; it said:
  | no route to host 10.9.8.7"
  run -4 from_a timeout 30 "$launch" --agent ./nothing --host "$a,$b" touch started
  assert_output --partial "there is no way to reach host $b: './nothing' does not exist"
  [[ ! -e started ]]
  command -v ssh >/dev/null || skip "no ssh"
  run -4 from_a timeout 30 "$launch" --host "$a,$b" touch started # nobody listens there
  assert_output --partial "host $b (rank 1) cannot be used: 'ssh' exited with status 255; it said:
  | ssh: connect to host $b port 22: Connection refused"
}

@test "a folder or a program that a host lacks is named with rank and host" {
  mkdir here
  cat >poor <<END
#!/bin/sh
exec "$agent" "\$1" "unshare --mount sh -c 'mount -t tmpfs none $PWD/here && exec \$2'"
END
  chmod +x poor
  cd here
  mkdir deep
  cd deep
  run -2 from_a "$launch" --agent "$BATS_TEST_TMPDIR/poor" --host "$a,$b" true
  assert_output --partial "rank 1 ($b, pid "
  assert_output --partial "the working directory '$PWD' cannot be entered on ${net}2: No such file or directory"
  cd "$BATS_TEST_TMPDIR"
  cp "$(type -P true)" here/prog
  run -127 from_a "$launch" --agent "$BATS_TEST_TMPDIR/poor" --host "$a,$b" here/prog
  assert_output --partial "cannot execute 'here/prog': No such file or directory"
}

# ---- who may take part ------------------------------------------------------------------------------------------------

@test "strangers are turned away, and the secret is on no command line and in no rank's environment" {
  agent=$(agent_that 'until [ -e open ]; do sleep 0.1; done')
  # shellcheck disable=SC2016
  start --verbose --host "$a:1,$b:1" bash -c 'touch ready.$RANK; until [[ -e go ]]; do sleep 0.1; done; env'
  local port secret
  until_true 10 listens
  port=$(listens)
  for junk in 'GET / HTTP/1.0\r\n\r\n' '\x01\x28\x00\x00\x00aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' '\xff\xff\xff\xff\xff'; do
    "$hosts" in "$net" 2 timeout 5 bash -c "exec 3<>/dev/tcp/$a/$port; printf '$junk' >&3; cat <&3 >/dev/null" || true
  done
  # Connections that send nothing keep nobody out.
  "$hosts" in "$net" 2 bash -c "for i in {1..150}; do exec {fd}<>/dev/tcp/$a/$port || exit; done; touch open; exec sleep $marker" 3>&- &
  until_true 10 test -e ready.0 -a -e ready.1
  run ! listens # all are there
  secret=$(tr '\0' '\n' <"/proc/$(matching_on 2 '--rank-shim' | tail -1)/environ" | sed -n 's/^DS_LAUNCH_HOME=[0-9]* \([0-9a-f]\{32\}\) .*/\1/p')
  [[ -n $port && ${#secret} -eq 32 ]]
  ! cat /proc/[0-9]*/cmdline 2>/dev/null | grep -qa "$secret"
  touch go
  assert_ends_with 0
  ! grep -q "$secret" out
  ! grep -q DS_LAUNCH out
}

@test "a host that knows itself as 127.0.1.1 is this machine, with a warning about MASTER_ADDR" {
  printf '127.0.1.1 %s1 alias\n' "$net" >etc
  for name in "${net}1" alias; do
    # shellcheck disable=SC2016
    run -0 from_a unshare -m bash -c 'mount --bind etc /etc/hosts && "$@"' bash "$launch" --agent "$agent" \
      --host "$name:1,$b:1" --dry-run true
    assert_line "host $name: this machine"
    assert_line --partial "host $name is 127.0.1.1 to itself: a program that listens at MASTER_ADDR may hear no other host"
  done
}

@test "--dry-run shows hosts and how each is reached, and starts nothing" {
  run -0 from_a "$launch" --agent "$agent" --host "$a:2,$b:1" --dry-run touch started
  assert_line "host $a: this machine"
  assert_line "host $b: $agent $b '$launch --host-shim'"
  assert_line --regexp "^rank 2: +RANK=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=1$"
  printf '#!/bin/sh\n' >ssh
  chmod +x ssh
  PATH=$PWD:$PATH run -0 from_a "$launch" --host "$a:2,$b:1" --dry-run --json touch started
  [[ $(tr -d ' \n' <<<"$output") == *'"reached_by":["ssh",'*"\"--\",\"$b\",\"$launch--host-shim\"]"* ]]
  [[ ! -e started ]]
}
