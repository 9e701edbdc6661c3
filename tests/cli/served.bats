#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Servers of states, from the shell: a run resumes from its last step, whichever process was killed, with other ranks
# too. The states of a server are listed, written as a checkpoint and removed.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  mkdir disk
  sed -i 's/"train_batch_size"/"bf16": {"enabled": true}, &/' cfg.json
  name="bats-$$-$BATS_TEST_NUMBER"
  served=(--set "zero_optimization.offload_optimizer={\"device\": \"server\", \"name\": \"$name\"}")
}

teardown() {
  ranks_here | xargs -r kill -9
  [[ -z ${server:-} ]] || kill -9 "$server" 2>/dev/null || true
  "$DS_BIN/ds-offload" rm "$name" "$name-away" 2>/dev/null || true
}

place() { echo "/dev/shm/ds-offload.$(id -u)/$name"; }
is_served() { ds-offload ls --json | grep -A1 "\"name\": \"$name\"" | grep -q '"runs": true'; }

serve() { # where...
  ds-offload serve "$name" "$@" 2>>server.log 3>&- &
  server=$!
  until_true 30 is_served
}

train() { # ranks argument...
  local n=$1
  shift
  ds-launch -n "$n" ds-train cfg.json --out away --quiet --resume latest "${served[@]}" "$@"
}

# Optimizers and places in pairs that cover both; DS_SLOW=1: all of them.
ordinary() { # optimizer where
  case "${DS_SLOW-}$1 $2" in
    1* | "AdamW --shm" | "Lamb --path disk" | "AdamW --path disk --method"*) ;;
    *) return 1 ;;
  esac
}

@test "a run goes on from what its server has, with other ranks and stages, and has the bits of memory" {
  for optimizer in AdamW Lamb; do
    rm -rf memory away dumped
    ds-launch -n 2 ds-train cfg.json --out memory --quiet --set optimizer.type=$optimizer
    for where in --shm "--path disk" "--path disk --method threads --queue-depth 2 --block-size 64KiB --threads 1"; do
      ordinary $optimizer "$where" || continue
      rm -rf away
      # shellcheck disable=SC2086
      serve $where
      train 2 --set optimizer.type=$optimizer --steps 4
      rm -r away/step-* away/latest # nothing but the server knows the state
      train 2 --set optimizer.type=$optimizer --steps 6
      train 4 --set optimizer.type=$optimizer --set zero_optimization.stage=3 --steps 9
      train 1 --set optimizer.type=$optimizer
      assert_equal "$(losses away)" "$(losses memory)"
      merged memory memory.safetensors
      merged away away.safetensors
      cmp memory.safetensors away.safetensors
      run -0 ds-offload dump "$name" dumped
      assert_output "dumped/step-00000012"
      merged dumped dumped.safetensors
      cmp memory.safetensors dumped.safetensors
      run -0 h5dump -H dumped/step-00000012/model.h5
      run -0 ds-offload verify "$name"
      case $where in # the log states how it is read and written
        --shm) grep -q "is attached, .*iB in memory" server.log ;;
        *threads*) grep -q "is attached, .*iB in a file (2 threads, " server.log ;;
        *) grep -Eq "is attached, .*iB in a file \((io_uring|1 thread)" server.log ;;
      esac
      rm -r dumped
      ds-offload rm "$name"
      wait "$server"
      assert [ ! -e "$(place)" ]
      assert_equal "$(ls -A disk)" ""
    done
  done
}

# DS_SLOW=1: 200 kills.
@test "whoever is killed, a run that is started again has the losses of one that was not" {
  local kills=3 steps=1000
  if [[ -n ${DS_SLOW-} ]]; then kills=100 steps=40000; fi
  sed -i 's/"steps": 12/"steps": '$steps', "save": {"every": 500, "keep": 2}/' cfg.json
  ds-launch -n 2 ds-train cfg.json --out whole --quiet
  local where
  for where in "--shm --checksum" "--path disk --checksum"; do
    rm -rf away
    # shellcheck disable=SC2086
    serve $where
    local -a victims=(ranks server both)
    for ((k = 0; k < kills; ++k)); do
      local victim=${victims[k % 3]}
      ranks=$((1 + RANDOM % 2))
      train $ranks --set zero_optimization.sub_group_size=4096 &
      local job=$!
      until_true 30 some_rank_here
      sleep "0.$((RANDOM % 6))"
      [[ $victim == server ]] || ranks_here | xargs -r kill -9 || true # some have ended in the meantime
      if [[ $victim != ranks ]]; then
        kill -9 "$server"
        wait "$server" || true
      fi
      wait $job || true
      # shellcheck disable=SC2086
      is_served || serve $where
    done
    train 2
    assert_equal "$(losses away)" "$(losses whole)"
    ds-offload rm "$name"
    wait "$server" || true
    assert [ ! -e "$(place)" ]
    assert_equal "$(ls -A disk)" ""
  done
}

# DS_SLOW=1: stage 2 too.
@test "beside a GPU (the simulator): killed and gone on with, a run has the losses of one that was not" {
  slow_only
  sim=$DS_BIN/../lib/libds_cuda_sim.so
  [[ -e $sim ]] || skip "this build has no CUDA"
  export DS_CUDA_PLUGIN=$sim
  sed -i 's/"steps": 12/"device": "cuda", "steps": 24/' cfg.json
  ds-launch -n 2 ds-train cfg.json --out whole --quiet
  merged whole whole.safetensors
  ds-launch -n 2 ds-train cfg.json --out begun --quiet --steps 12
  local stage gradients
  for stage in ${DS_SLOW+2} 3; do
    gradients=$([[ $stage == 3 ]] && echo true || echo false)
    rm -rf away
    serve --shm
    local -a more=(--set zero_optimization.stage="$stage" --set zero_optimization.offload_optimizer.gradients="$gradients")
    [[ $stage == 2 ]] || more+=(--set 'zero_optimization.offload_param={"device": "cpu", "pin_memory": true}'
      --set zero_optimization.offload_optimizer.pin_memory=true)
    for victim in ranks server both; do
      local before
      before=$(losses away 2>/dev/null | wc -l)
      train 2 "${more[@]}" &
      local job=$!
      until_true 60 steps_at_least away $((before + 4))
      [[ $victim == server ]] || ranks_here | xargs -r kill -9 || true # some have ended in the meantime
      if [[ $victim != ranks ]]; then
        kill -9 "$server"
        wait "$server" || true
      fi
      wait $job || true
      is_served || serve --shm
    done
    train 2 "${more[@]}"
    assert_equal "$(losses away)" "$(losses whole)"
    merged away away.safetensors
    cmp whole.safetensors away.safetensors
    # A checkpoint of a run without a server, and one of it.
    rm -rf half
    cp -r begun half
    ds-launch -n 2 ds-train cfg.json --out half --quiet --resume half/step-00000012 "${served[@]}" "${more[@]}"
    assert_equal "$(losses half)" "$(losses whole)"
    merged half half.safetensors
    cmp whole.safetensors half.safetensors
    # The state is the server's, whatever the device: a CPU has it as well.
    rm -r away/step-* away/latest
    train 1 --set device=cpu --set steps=26 --steps 26
    run -0 ds-offload verify "$name"
    ds-offload rm "$name"
    wait "$server" || true
  done
}

@test "a state is not taken over steps that were trained without its server" {
  serve --shm
  train 1 --steps 6
  train 1 --steps 8
  # A run in another, empty directory reports that it resumes from the server.
  run -0 --separate-stderr ds-train cfg.json --out other --steps 9 "${served[@]}"
  [[ $stderr == *"resuming from step 8 of server '$name'"* ]]
  ds-train cfg.json --out away --resume latest --steps 10 --quiet
  run -3 --separate-stderr ds-train cfg.json --out away --resume latest --steps 12 "${served[@]}"
  [[ $stderr == *"step-00000010 is "*"server '$name'"*"ds-offload rm $name"*"--resume "* ]]
  # It takes its place where it is asked to.
  ds-train cfg.json --out away --resume away/step-00000010 --steps 11 "${served[@]}" --quiet
  train 1
  ds-train cfg.json --out whole --quiet
  assert_equal "$(losses away)" "$(losses whole)"
  # A damaged step does not identify its run.
  truncate -s -1 away/step-00000012/rank-00000.h5
  run -0 --separate-stderr ds-train cfg.json --out away --resume latest "${served[@]}"
  [[ $stderr == *"step-00000012"*"resuming from the state of server '$name'"* ]] || fail "$stderr"
}

@test "a server without descriptors refuses, and nobody waits for it" {
  (ulimit -n 12 && exec ds-offload serve "$name" --shm) 2>server.log 3>&- &
  server=$!
  until_true 30 is_served
  run -1 timeout 60 ds-launch -n 6 ds-train cfg.json --out away --quiet --set train_batch_size=12 "${served[@]}"
  grep -q "a connection is refused: Too many open files" server.log
  ds-offload ls
}

@test "a run whose server is killed says so, and ends with status 1" {
  serve --shm
  sed -i 's/"steps": 12/"steps": 100000/' cfg.json
  ds-launch -n 2 ds-train cfg.json --out away --quiet "${served[@]}" 2>err &
  local job=$!
  until_true 60 steps_at_least away 20
  kill -9 "$server"
  local status=0
  wait $job || status=$?
  assert_equal $status 1
  grep -q "the server '$name' has ended; its states are not lost" err
  run -0 --separate-stderr ds-offload ls
  assert_line --regexp "^$name +- +- +[0-9]+ +[0-9.]+ .iB +memory$"
  # The states that remain can be used without a server.
  run -0 ds-offload dump "$name" dumped
  run -0 ds-offload verify "$name"
  run -0 ds-offload rm "$name"
  assert [ ! -e "$(place)" ]
}

@test "what cannot be served is said before anything is written" {
  refused 2 'offload_optimizer.name: is missing' --set zero_optimization.offload_optimizer.device=server
  refused 2 'stage 0 has all states' --set zero_optimization.stage=0 "${served[@]}"
  refused 2 'save.async: copies the state' --set save.async=true "${served[@]}"
  refused 2 'a server has all states' "${served[@]}" --set zero_optimization.offload_optimizer.ratio=0.5
  refused 2 '"server" is for states of optimizers' --set zero_optimization.stage=3 \
    --set zero_optimization.offload_param.device=server
  refused 4 "there is no server '$name': start it with ds-offload serve $name" "${served[@]}"
  refused 4 "there is no server '$name'" "${served[@]}" --check
  refused 2 "cannot be the name of a server" --set 'zero_optimization.offload_optimizer={"device": "server", "name": "../x"}'
  serve --shm --capacity 100KiB
  refused 4 'its --capacity is 100.000 KiB' "${served[@]}"
  run -4 --separate-stderr ds-offload serve "$name" --shm
  [[ $stderr == *"there is already a server '$name'"* ]]
  run -4 --separate-stderr ds-offload dump "$name" dumped
  [[ $stderr == *"has no states yet"* ]]
  ds-offload rm "$name"
  wait "$server"
  run -4 ds-offload rm "$name"
  serve --shm
  run -4 --separate-stderr ds-offload rm "$name-no" "$name" "$name-none" # what is there goes
  assert_equal "$(grep -c "there is no server" <<<"$stderr")" 2
  wait "$server"
  assert [ ! -e "$(place)" ]
  run -4 ds-offload verify "$name"
  run -2 --separate-stderr ds-offload serve "$name"
  [[ $stderr == *"either --shm or --path DIR"* ]]
  run -2 ds-offload serve "$name" --shm --path disk
  run -4 --separate-stderr timeout 20 ds-offload serve "$name" --path nowhere
  [[ $stderr == *"nowhere"* ]]
  assert [ ! -e "$(place)" ]
}

@test "states that take more than --capacity are refused when their server starts again, and stay" {
  serve --shm
  train 1 --steps 2
  kill "$server"
  wait "$server" || true
  run -4 --separate-stderr timeout 20 ds-offload serve "$name" --shm --capacity 100KiB
  [[ $stderr == *"the states of the server '$name' take "*", and its --capacity is 100.000 KiB"* ]] || fail "$stderr"
  serve --shm --capacity 100MiB
  train 1 --steps 4
  assert_equal "$(losses away | wc -l)" 4
}

@test "another run than the server's is refused, and a checkpoint that is asked for takes its place" {
  serve --shm
  train 2 --steps 4
  cp -r away saved
  train 2 --steps 8
  run -3 --separate-stderr ds-train cfg.json --out other --quiet "${served[@]}" --set seed=7
  [[ $stderr == *"data.seed is 7, but the run was started with 1234"* ]]
  run -3 --separate-stderr ds-train cfg.json --out other --quiet "${served[@]}" --set model.n_embd=64
  [[ $stderr == *"server '$name': a checkpoint of another model"* ]]
  run -3 --separate-stderr ds-train cfg.json --out other --quiet "${served[@]}" --set optimizer.type=Lion
  [[ $stderr == *"server '$name' has the state of AdamW, and this run updates by Lion"* ]]
  assert [ ! -e other ]
  # A second run at the same time.
  sed 's/"steps": 12/"steps": 100000/' cfg.json >long.json
  ds-launch -n 2 ds-train long.json --out away --resume latest --quiet "${served[@]}" 3>&- &
  local job=$!
  until_true 60 steps_at_least away 20
  run -4 --separate-stderr ds-train cfg.json --out other --quiet "${served[@]}"
  [[ $stderr == *"another run is attached"* ]]
  run -4 --separate-stderr ds-offload rm "$name"
  [[ $stderr == *"a run is attached"* ]]
  # A look at it does not end it. Nobody else writes in the directory of a run: unfinished steps there are its own.
  mkdir away/.tmp-step-00099999-0123456789abcdef
  run -2 --separate-stderr ds-offload dump "$name" away
  [[ $stderr == *"run directory away is in use by another run (process "* ]] || fail "$stderr"
  rmdir away/.tmp-step-00099999-0123456789abcdef
  run -0 ds-offload dump "$name" dumped
  run -0 ds-offload verify "$name"
  local seen
  seen=$(losses away | wc -l)
  until_true 60 steps_at_least away $((seen + 10))
  ranks_here | xargs kill -9
  wait $job || true
  # Back to the fourth step.
  ds-train cfg.json --out memory --quiet
  cp -r saved away4
  run -0 --separate-stderr ds-train cfg.json --out away4 --resume away4/step-00000004 "${served[@]}"
  [[ $stderr == *"discarding the state of step"* ]]
  assert_equal "$(losses away4)" "$(losses memory)"
  # A server whose state is older than a checkpoint is not trusted.
  ds-train cfg.json --out away4 --resume latest --quiet --steps 14 --set steps=14
  run -3 --separate-stderr ds-train cfg.json --out away4 --resume latest --quiet "${served[@]}" --set steps=14
  [[ $stderr == *"is newer than the state that server '$name' has"* ]]
}

@test "a byte of the states that is not as it was written is said by who reads it, with --checksum" {
  ds-train cfg.json --out memory --quiet
  local where
  for where in --shm "--path disk"; do
    for optimizer in AdamW Lamb; do
      ordinary $optimizer "$where" || continue
      rm -rf away
      # shellcheck disable=SC2086
      serve $where --checksum
      train 2 --set optimizer.type=$optimizer --steps 6
      run -0 ds-offload verify "$name"
      kill -9 "$server"
      wait "$server" || true
      # Without it, states with checksums are not served, nor the other way round.
      # shellcheck disable=SC2086
      run -2 --separate-stderr ds-offload serve "$name" $where
      [[ $stderr == *"has its states with checksums; serve it with --checksum"* ]] || fail "$stderr"
      # A byte of each chunk's slot, of whichever is named.
      file=$(readlink -f "$(echo "$(place)"/*/states)")
      cp "$file" kept
      python3 - "$file" "$(echo "$(place)"/*/table)" <<'PYTHON'
import struct, sys
with open(sys.argv[2], "rb") as f:
    table = f.read()
chunks, slots, slot_bytes = struct.unpack_from("qqq", table, 16)
header = len(table) - 8 * (chunks + slots)
entry = struct.unpack_from("Q", table, header)[0]
at = ((entry & 0xffffffff) - 1) * slot_bytes + 100
with open(sys.argv[1], "r+b") as f:
    f.seek(at)
    byte = f.read(1)[0]
    f.seek(at)
    f.write(bytes([byte ^ 1]))
PYTHON
      run -3 --separate-stderr ds-offload verify "$name"
      [[ $stderr == *"server '$name': rank 0: $file: chunk 0, in slot "*"differs from what was written: damaged"* ]] || fail "$stderr"
      assert_equal "$(grep -c . <<<"$stderr")" 1
      run -3 --separate-stderr ds-offload dump "$name" dumped
      [[ $stderr == *"$file: chunk 0, in slot "* ]] || fail "$stderr"
      # shellcheck disable=SC2086
      serve $where --checksum
      for ranks in 2 1; do # at the same layout, and at another
        run -3 --separate-stderr train $ranks --set optimizer.type=$optimizer
        [[ $stderr == *"the server '$name': "*"$file: chunk 0, in slot "*": damaged"* ]] || fail "$stderr"
      done
      is_served
      kill "$server"
      wait "$server"
      cat kept >"$file"
      # shellcheck disable=SC2086
      serve $where --checksum
      train 2 --set optimizer.type=$optimizer
      [[ $optimizer == Lamb ]] || assert_equal "$(losses away)" "$(losses memory)"
      ds-offload rm "$name"
      wait "$server"
    done
  done
}

@test "what a step finds damaged ends run and server, and is listed" {
  serve --shm --checksum
  train 1 --steps 1000000 2>train.log &
  local job=$!
  until_true 30 test -s away/metrics.jsonl
  # Stop between two steps, so that no slot of a chunk is rewritten between its change and its next read.
  ranks_here | xargs kill -STOP
  sleep 0.5
  python3 - "$(readlink -f "$(echo "$(place)"/*/states)")" "$(echo "$(place)"/*/table)" <<'PYTHON'
import struct, sys
slot_bytes = struct.unpack_from("qqq", open(sys.argv[2], "rb").read(), 16)[2]
with open(sys.argv[1], "r+b") as f:
    end = f.seek(0, 2)
    for at in range(100, end, slot_bytes):
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
PYTHON
  ranks_here | xargs kill -CONT
  local code=0
  wait $job || code=$?
  [[ $code == 3 ]] && grep -q "damaged" train.log || fail "$code: $(<train.log)"
  wait "$server" || true
  run -3 --separate-stderr ds-offload verify "$name"
  [[ $stderr == *"the last step was committed, but cannot be completed: "* ]] || fail "$stderr"
  ds-offload rm "$name"
  assert [ ! -e "$(place)" ]
}

@test "a table of another version is refused, and can be removed" {
  serve --shm
  train 1 --steps 3
  kill -9 "$server"
  wait "$server" || true
  printf '\x01' | dd of="$(echo "$(place)"/*/table)" bs=1 seek=8 conv=notrunc status=none
  run -4 --separate-stderr ds-offload serve "$name" --shm
  [[ $stderr == *"table: version 1, but this program reads version 2: dump it with the ds-offload that made it"* ]]
  ds-offload rm "$name"
  assert [ ! -e "$(place)" ]
}

@test "what is not the user's own is refused" {
  mkdir -p "/dev/shm/ds-offload.$(id -u)" && chmod 700 "/dev/shm/ds-offload.$(id -u)"
  mkdir -m 755 "$(place)"
  run -1 --separate-stderr ds-offload serve "$name" --shm
  [[ $stderr == *"others can open it"* ]]
  refused 1 "others can open it" "${served[@]}"
  run -1 ds-offload rm "$name"
  chmod 700 "$(place)"
  # Leftovers of a server that never came to serve.
  head -c 100 /dev/zero >"$(place)/socket"
  head -c 100 /dev/zero >"$(place)/mail.1"
  refused 4 "there is no server" "${served[@]}"
  serve --shm
  train 1 --steps 3
  kill -9 "$server"
  wait "$server" || true
  # A table that is damaged.
  table=$(echo "$(place)"/*/table)
  printf '\xff\xff\xff\xff' | dd of="$table" bs=1 seek=16 conv=notrunc status=none
  run -3 --separate-stderr ds-offload serve "$name" --shm
  [[ $stderr == *"table"* ]]
  run -3 ds-offload verify "$name"
  run -0 --separate-stderr ds-offload ls
  assert_line --partial "$name"
  ds-offload rm "$name"
  assert [ ! -e "$(place)" ]
}

@test "a file of states that is gone or cut is told, and no other is made" {
  serve --path disk/
  train 2 --steps 4
  for damage in cut gone; do
    kill -9 "$server"
    wait "$server" || true
    file=$(echo disk/ds-offload.*)
    cp "$file" kept
    if [[ $damage == gone ]]; then rm "$file"; else truncate -s 4096 "$file"; fi
    run -3 --separate-stderr ds-offload serve "$name" --path disk
    [[ $stderr == *"$name"* ]]
    run -3 ds-offload verify "$name"
    run -3 ds-offload dump "$name" dumped
    [[ $damage == cut ]] || assert_equal "$(ls disk)" ""
    cp kept "$file"
    chmod 600 "$file"
    serve --path ./disk
  done
  train 2
  ds-train cfg.json --out memory --quiet
  assert_equal "$(losses away)" "$(losses memory)"
}

@test "a dump whose server ends writes nothing, whatever step its next server is at" {
  serve --shm
  train 2 --steps 4
  mkdir dumped
  head -c 64 /dev/zero >log
  env RANK=0 LD_PRELOAD="$DS_BIN/../lib/libds_crash_shim.so" DS_CRASH_LOG="$PWD/log" \
    DS_CRASH_DIR="$(realpath dumped)" DS_CRASH_AT=1 DS_CRASH_MODE=stop ds-offload dump "$name" dumped 2>err 3>&- &
  local dump=$!
  until_true 30 eval "[[ \$(ps -o state= -p $dump) == T ]]"
  kill -9 "$server"
  wait "$server" || true
  serve --shm
  train 2 --steps 7
  kill -CONT $dump
  local status=0
  wait $dump || status=$?
  assert_equal $status 1
  grep -q "has ended meanwhile" err || fail "$(cat err)"
  assert_equal "$(ls -A dumped)" ""
}

@test "a step that comes with a tool's wish to hold the files waits for its end" {
  serve --shm
  sed -i 's/"steps": 12/"steps": 100000/' cfg.json
  python3 - "$(place)" "$server" <<'PYTHON' 3>&-
import glob, os, signal, socket, struct, subprocess, sys, time

place, server = sys.argv[1], int(sys.argv[2])
HOLD = 9


def connected():
    s = socket.socket(socket.AF_UNIX)
    s.connect(place + "/socket")
    return s


def step():  # of the record in the table
    with open(glob.glob(place + "/*/table")[0], "rb") as f:
        return struct.unpack_from("q", f.read(56), 48)[0]


tools = [connected() for _ in range(5)]  # before the ranks, so that theirs are looked at first
run = subprocess.Popen(["ds-launch", "-n", "2", "ds-train", "cfg.json", "--out", "away", "--quiet", "--set",
                        'zero_optimization.offload_optimizer={"device": "server", "name": "%s"}' % place.split("/")[-1]])
while not glob.glob(place + "/*/table") or step() < 20:
    time.sleep(0.01)
for tool in tools:
    while True:  # between two steps
        os.kill(server, signal.SIGSTOP)
        time.sleep(0.2)  # both ranks have asked
        if not glob.glob(place + "/*/pending"):
            break
        os.kill(server, signal.SIGCONT)
        time.sleep(0.01)
    tool.sendall(struct.pack("II", HOLD, 0))
    os.kill(server, signal.SIGCONT)
    tool.recv(8, socket.MSG_WAITALL)
    before = step()  # the server may have been stopped in a step, which it ended first
    time.sleep(0.2)
    assert step() == before, (step(), before)
    tool.close()
    end = time.time() + 30
    while step() < before + 5:
        assert time.time() < end
run.send_signal(signal.SIGTERM)
assert run.wait() == 75
PYTHON
}

@test "a step whose line a killed run had not written yet has one when the run goes on" {
  ds-train cfg.json --out memory --quiet
  local recovered=0 tried=0 every=3
  [[ -z ${DS_SLOW-} ]] || every=1
  for at in $(seq 4 $every 13); do # changes to files of the run directory: most are lines
    rm -rf away
    mkdir away
    serve --shm
    head -c 64 /dev/zero >log
    run -137 env LD_PRELOAD="$DS_BIN/../lib/libds_crash_shim.so" DS_CRASH_LOG="$PWD/log" \
      DS_CRASH_DIR="$(realpath away)" DS_CRASH_AT="$at" DS_CRASH_MODE=kill \
      ds-launch -n 1 ds-train cfg.json --out away --quiet "${served[@]}"
    train 1
    assert_equal "$(losses away)" "$(losses memory)"
    ds-memreport away/metrics.jsonl >/dev/null
    ((++tried, recovered += $(grep -c '"recovered":true' away/metrics.jsonl))) || true
    ds-offload rm "$name"
    wait "$server"
  done
  ((2 * recovered >= tried)) || fail "$recovered lines"
}

@test "a disk of a server that fails ends the run, or the server, and nothing is lost" {
  ds-train cfg.json --out memory --quiet
  small=(--set zero_optimization.sub_group_size=4096)
  for mode in once sticky; do
    for at in 10 40 80; do # while the states are filled; in a step, whose passes are done once more, or cannot be
      [[ -n ${DS_SLOW-} || $mode$at != @(once80|sticky40) ]] || continue
      rm -rf away
      head -c 64 /dev/zero >log
      RANK=0 LD_PRELOAD="$DS_BIN/../lib/libds_crash_shim.so" DS_CRASH_LOG="$PWD/log" DS_CRASH_DIR="$(realpath disk)" \
        DS_CRASH_AT=$at DS_CRASH_MODE=$mode DS_CRASH_ERRNO=5 \
        ds-offload serve "$name" --path disk --method threads 2>server.log 3>&- &
      server=$!
      until_true 30 is_served
      run -1 --separate-stderr ds-train cfg.json --out away --quiet "${served[@]}" "${small[@]}"
      [[ $stderr == *"disk: cannot write offloaded data: Input/output error"* ]] || fail "$stderr"
      kill "$server" 2>/dev/null || true
      local status=0
      wait "$server" || status=$?
      if [[ $mode$at == once* || $at == 10 ]]; then
        assert_equal $status 0
      else
        assert_equal $status 1
        grep -q "error: .*Input/output error" server.log
      fi
      serve --path disk
      train 1 "${small[@]}"
      assert_equal "$(losses away)" "$(losses memory)"
      ds-offload rm "$name"
      wait "$server"
      assert_equal "$(ls disk)" ""
    done
  done
}

@test "in a shared directory a server leaves alone what another server of its name has left" {
  serve --path disk
  train 1 --steps 3
  kill "$server"
  wait "$server"
  mv "$(place)" "$(place)-away" # as for a server that has another user, or another /dev/shm
  : >server.log
  serve --path disk
  grep -q "disk has states of other servers named '$name', .*(user $(id -un), host $(hostname))" server.log
  ds-train cfg.json --out other --steps 2 --quiet "${served[@]}"
  assert_equal "$(ls disk | wc -l)" 2
  ds-offload rm "$name"
  wait "$server"
  assert_equal "$(ls disk | wc -l)" 1
  mv "$(place)-away" "$(place)"
  serve --path disk
  train 1
  ds-train cfg.json --out memory --quiet
  assert_equal "$(losses away)" "$(losses memory)"
  ds-offload rm "$name"
  wait "$server"
  assert_equal "$(ls disk)" ""
}

# Whether the step is in memory or on a disk.
@test "a step that a server made for a run of another layout goes when the server was killed" {
  local where step
  for where in --shm "--path disk"; do
    mkdir -p "$(place)" && chmod 700 "$(place)" "$(dirname "$(place)")"
    step="$(place)/step-0123456789abcdef"
    if [[ $where == --shm ]]; then
      mkdir "$step"
    else
      mkdir "disk/ds-offload.$name.step-0123456789abcdef.host" "disk/ds-offload.$name.step-aaaaaaaaaaaaaaaa.host"
      ln -s "$PWD/disk/ds-offload.$name.step-0123456789abcdef.host" "$step"
    fi
    # shellcheck disable=SC2086
    serve $where
    assert [ ! -L "$step" ]
    assert [ ! -e "$step" ]
    ds-offload rm "$name"
    wait "$server"
  done
  assert_equal "$(ls disk)" "ds-offload.$name.step-aaaaaaaaaaaaaaaa.host" # whose link is nowhere here
}

@test "a server whose lock is no file is removed, and what a link leads to stays" {
  local lock
  lock="$(place)/lock"
  echo book >book
  stopped() { # with a state
    serve --path disk
    train 1 --steps 2
    kill "$server"
    wait "$server"
    rm "$lock"
    rm -r away
  }
  for make in "ln -s $PWD/book" "ln -s $PWD/nothing" mkdir mkfifo; do
    stopped
    $make "$lock"
    run -1 --separate-stderr timeout 20 ds-offload serve "$name" --path disk
    [[ $stderr == *"$lock is not a regular file, so a server cannot lock it: remove it with ds-offload rm $name"* ]] || fail "$stderr"
    run -0 timeout 20 ds-offload rm "$name"
    assert [ ! -e "$(place)" ]
    assert_equal "$(ls disk)" ""
  done
  stopped
  mkdir -p "$lock/mine"
  run -1 --separate-stderr timeout 20 ds-offload rm "$name"
  [[ $stderr == *"$lock is not a server's lock, and cannot be removed: Directory not empty"* ]] || fail "$stderr"
  assert [ -d "$lock/mine" ]
  assert_equal "$(ls disk | wc -l)" 1
  rm -r "$lock"
  ds-offload rm "$name"
  assert_equal "$(cat book; ls disk)" book
}

@test "what is not a server's is not touched on its disk" {
  mkdir "disk/ds-offload.$name.backup"
  touch "disk/ds-offload.$name.log" "disk/ds-offload.$name.0123" "disk/ds-offload.$name-b.0123456789abcdef"
  touch "disk/ds-offload.$name.0123456789abcdef" # of a server that is not here, or whose host was restarted
  serve --path disk
  grep -q "disk/ds-offload.$name.0123456789abcdef (user $(id -un))" server.log
  train 1 --steps 2
  run -0 ls disk
  for kept in backup log 0123; do assert_line "ds-offload.$name.$kept"; done
  assert_line "ds-offload.$name-b.0123456789abcdef"
  assert_line "ds-offload.$name.0123456789abcdef"
  ds-offload rm "$name"
  assert_equal "$(ls disk | wc -l)" 5
}

@test "a checkpoint that cannot be loaded leaves the server what it has" {
  serve --shm
  train 2 --steps 4
  cp -r away bad
  train 2 --steps 8
  printf x | dd of=bad/step-00000004/rank-00000.h5 bs=1 seek=20000 conv=notrunc status=none
  run -3 ds-train cfg.json --out bad --resume bad/step-00000004 "${served[@]}"
  run -0 ds-offload verify "$name"
  train 2
  ds-train cfg.json --out memory --quiet
  assert_equal "$(losses away)" "$(losses memory)"
  run -2 --separate-stderr ds-train cfg.json --out weights --weights memory "${served[@]}"
  [[ $stderr == *"holds the state of step 12"* ]]
}

@test "a server that is busy while a run ends and another begins serves that" {
  slow_only
  serve --shm
  sed -i 's/"steps": 12/"steps": 2000/' cfg.json
  ds-train cfg.json --out whole --quiet
  train 1 3>&- &
  local job=$!
  until_true 60 steps_at_least away 100
  kill -STOP "$server"
  ranks_here | xargs kill -9
  wait $job || true
  train 2 3>&- & # which has memory that it shares, and waits
  job=$!
  until_true 30 some_rank_here
  sleep 0.5
  kill -CONT "$server"
  wait $job
  assert_equal "$(losses away)" "$(losses whole)"
  # A rank that is killed before it has identified itself leaves nothing.
  kill -STOP "$server"
  run -1 --separate-stderr timeout 20 ds-offload rm "$name"
  [[ $stderr == *"does not answer"* ]]
  run -0 timeout 20 ds-offload ls
  assert_output --partial "does not answer"
  ds-train cfg.json --out other --quiet "${served[@]}" --set steps=3000 3>&- &
  job=$!
  until_true 30 eval "ls $(place)/mail.* >/dev/null 2>&1"
  kill -9 $job
  wait $job || true
  kill -CONT "$server"
  until_true 30 eval "! ls $(place)/mail.* >/dev/null 2>&1"
  is_served
}

@test "ranks of a run that is refused all end with the status of the reason" {
  serve --shm --capacity 1KiB
  for _ in 1 2 3; do
    run -4 ds-launch -n 4 ds-train cfg.json --out refused --quiet "${served[@]}"
    assert [ ! -e refused ]
  done
}

@test "a run of another precision has the loss scale that it has from a checkpoint" {
  serve --shm
  half=(--set bf16.enabled=false --set fp16.enabled=true --set fp16.initial_scale_power=10)
  ds-train cfg.json --out memory --quiet --steps 3
  ds-train cfg.json --out memory --quiet --resume latest "${half[@]}"
  train 1 --steps 3
  train 1 "${half[@]}" --set steps=3
  train 1 "${half[@]}"
  assert_equal "$(losses away)" "$(losses memory)"
}

@test "a full /dev/shm is told, and nothing is left in it" {
  if [[ $(id -u) != 0 ]] || ! unshare -m true 2>/dev/null; then skip "needs to mount a small one"; fi
  for size in 3M 12M; do # no room for what the trainer shares; none for the states
    unshare -m bash -c "mount -t tmpfs -o size=$size none /dev/shm
      ds-offload serve $name --shm 2>server.log 3>&- &
      until ds-offload ls --json | grep -q '\"runs\": true'; do sleep 0.05; done
      ds-train cfg.json --out full --quiet --set model.n_embd=256 --set zero_optimization.offload_optimizer.device=server \
        --set zero_optimization.offload_optimizer.name=$name 2>err 3>&-
      echo \$? >status
      find /dev/shm -type f >left
      ds-offload rm $name
      wait
      find /dev/shm -mindepth 1 >left2"
    assert_equal "$(cat status)" 4
    grep -q 'No space left on device' err || fail "$(cat err)"
    assert_equal "$(sed 's|.*/||' left)" lock
    assert_equal "$(cat left2)" ""
    assert [ ! -e full ]
  done
}
