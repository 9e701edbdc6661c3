#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Records of a run: the first and last lines of its metrics, and the counters in /dev/shm while it trains.

bats_require_minimum_version 1.5.0

load tiny

# Checks the lines of run/metrics.jsonl: RANKS, DIRECTORY.
check_record() {
  /usr/bin/python3 - "$@" <<'PY'
import json, sys
world, directory = int(sys.argv[1]), sys.argv[2]
lines = [json.loads(line) for line in open(directory + "/metrics.jsonl")]
run, memory = lines[0], lines[-1]
assert run["type"] == "run" and memory["type"] == "memory", (run["type"], memory["type"])
assert [l["type"] for l in lines].count("run") == 1
last = max(l["step"] for l in lines if l["type"] == "step")
assert run["step"] == 0 and memory["step"] == last
m = run["mesh"]
assert run["world_size"] == world == m["pp"] * m["dp"] * m["sp"] * m["tp"], m
assert run["device"] == "cpu" and run["device_name"].startswith("cpu.") and run["peak_flops"] > 1e6
assert run["host"] and run["version"] and run["start"].endswith("Z")
assert run["config"]["steps"] == last and run["config"]["data"]["train"][0].startswith("/"), run["config"]
assert run["model"]["model_type"] == "gpt2" and run["model"]["n_embd"] == 32
assert len(run["stages"]) == m["pp"]
assert sorted(r for s in run["stages"] for r in s["ranks"]) == list(range(world))
ranks = memory["ranks"]
assert [r["rank"] for r in ranks] == list(range(world))
for r in ranks:
    stage = next(s for s in run["stages"] if r["rank"] in s["ranks"])
    if m["tp"] == 1:
        assert r["predicted_bytes"] == stage["predicted_bytes"], r
    assert r["counted_bytes"] == r["predicted_bytes"] and r["counted_bytes"]["params"] > 0, r
    assert 0 < r["base_bytes"] < r["resident_bytes"], r
step = [l for l in lines if l["type"] == "step"][-1]["memory_bytes"]
for tag, bytes in ranks[0]["predicted_bytes"].items():  # the loss of an evaluation, which comes after, is a third number
    assert 0 <= bytes - step[tag] <= (8 * world if tag == "comm" else 0), (tag, step)
PY
}

@test "the first line says what a run is, the last one what each rank was predicted and took" {
  ds-train cfg.json --out alone --quiet
  check_record 1 alone
  for stage in 0 3; do
    ds-launch -n 2 ds-train cfg.json --out "dp$stage" --quiet --set zero_optimization.stage=$stage
    check_record 2 "dp$stage"
  done
  ds-launch -n 4 ds-train cfg.json --out mesh --quiet --set pipeline.stages=2 --set tensor_parallel.tp_size=2
  check_record 4 mesh
  grep -q '"mesh":{"pp":2,"dp":1,"sp":1,"tp":2}' mesh/metrics.jsonl
}

@test "a process takes what was predicted beside what is counted, at most" {
  ! grep -q '^DS_SANITIZE:[A-Z]*=.' "${DS_BIN%/bin}/CMakeCache.txt" || skip "sanitizers have memory beside the program's"
  sed -i 's/"n_embd": 32, "n_layer": 2/"n_embd": 256, "n_layer": 3/' cfg.json
  for ranks in 1 2; do
    ds-memreport cfg.json -n $ranks --device cpu --json >predicted.json
    ds-launch -n $ranks ds-train cfg.json --out "run$ranks" --quiet --steps 3 --set save.every=1
    /usr/bin/python3 - "run$ranks/metrics.jsonl" <<'PY'
import json, sys
groups = json.load(open("predicted.json"))["groups"]
ranks = json.loads(open(sys.argv[1]).readlines()[-1])["ranks"]
mib = 2 ** 20
for r in ranks:
    group = next(g for g in groups if r["rank"] in g["ranks"])
    assert sum(r["counted_bytes"].values()) == group["device_bytes"], (r, group)
    assert 0.6 * group["process_bytes"] < r["base_bytes"] < 1.3 * group["process_bytes"], (r, group)
    # The momentary part is of VmHWM, which includes the pages of libraries, too: those of HDF5 come with the first
    # save.
    most, seen = group["device_bytes"] + group["process_bytes"] + group["momentary_bytes"], r["resident_bytes"] + r["momentary_bytes"]
    assert most - 4 * mib < seen < most + 4 * mib, (most / mib, seen / mib, r, group)
    assert 4 * mib < group["momentary_bytes"] < 12 * mib, group
PY
  done
}

@test "a resumed run has a line for each start, and cuts what it takes back" {
  ds-train cfg.json --out run --quiet --set save.every=4 --steps 8
  ds-launch -n 2 ds-train cfg.json --out run --quiet --resume latest
  run grep -o '"type":"\(run\|memory\)","step":[0-9]*' run/metrics.jsonl
  assert_output '"type":"run","step":0
"type":"memory","step":8
"type":"run","step":8
"type":"memory","step":12'
  # From step 4 on: of the first start its beginning stays.
  ds-train cfg.json --out run --quiet --resume latest --steps 16
  rm -r run/step-00000016 run/step-00000012 run/step-00000008
  echo step-00000004 >run/latest
  ds-train cfg.json --out run --quiet --resume latest --steps 6
  run grep -o '"type":"\(run\|memory\)","step":[0-9]*' run/metrics.jsonl
  assert_output '"type":"run","step":0
"type":"run","step":4
"type":"memory","step":6'
}

@test "counters are in /dev/shm while a run trains, and gone when it ends, also by a signal" {
  ds-train cfg.json --out run --quiet --steps 1000000 &
  pid=$!
  until_true 20 test -s "/dev/shm/ds-train.$pid"
  assert_equal "$(stat -c %a "/dev/shm/ds-train.$pid")" 600
  until_true 20 steps_at_least run 2
  kill -TERM $pid
  status=0
  wait $pid || status=$?
  assert_equal $status 75
  assert [ ! -e "/dev/shm/ds-train.$pid" ]
  # The stopped run has recorded the memory that it took.
  grep -q '"type":"memory"' run/metrics.jsonl

  ds-launch -n 2 ds-train cfg.json --out both --quiet --steps 1000000 &
  pid=$!
  until_true 20 steps_at_least both 2
  local ranks
  ranks=$(ranks_here)
  assert_equal "$(wc -w <<<"$ranks")" 2
  for p in $ranks; do assert [ -e "/dev/shm/ds-train.$p" ]; done
  # A run that fails takes them along, of the rank that is left too.
  kill -KILL "$(head -n 1 <<<"$ranks")"
  status=0
  wait $pid || status=$?
  assert [ $status -ne 0 ]
  until_true 20 no_rank_here
  assert [ ! -e "/dev/shm/ds-train.$(tail -n 1 <<<"$ranks")" ]
}

# Starts a run of its own in the background, until it trains: pid in $pid.
trains() { # arguments of ds-train
  env --default-signal=INT,QUIT ds-train cfg.json --out run --quiet --steps 1000000 "$@" &
  pid=$!
  until_true 20 steps_at_least run 1
}

@test "whatever signal ends a run, nothing of it stays in /dev/shm" {
  ulimit -c 0
  for signal in QUIT SEGV; do
    rm -rf run
    trains
    assert [ -e "/dev/shm/ds-train.$pid" ]
    kill -$signal $pid
    status=0
    wait $pid || status=$?
    assert_equal "$signal $status" "$signal $((128 + $(kill -l $signal)))"
    assert [ ! -e "/dev/shm/ds-train.$pid" ]
  done
  trains --resume latest
  kill -INT $pid
  kill -INT $pid # the second ends it by force, unless it has ended
  wait $pid || true
  assert [ ! -e "/dev/shm/ds-train.$pid" ]
}

@test "SIGUSR2 and SIGXCPU, which schedulers send ahead of the end, save as SIGUSR1 does" {
  for signal in USR2 XCPU; do
    rm -rf run
    trains
    kill -$signal $pid
    status=0
    wait $pid || status=$?
    assert_equal "$signal $status" "$signal 75"
  done
}

@test "a run alone over MPI that is killed leaves neither a folder in TMPDIR nor a daemon" {
  mkdir tmp
  TMPDIR=$PWD/tmp trains --set communication.backend=mpi
  assert_equal "$(ls -A tmp)" ""
  assert_equal "$(pgrep -P $pid)" ""
  kill -KILL $pid
  wait $pid || true
}

@test "what a killed run left in /dev/shm goes with the next one" {
  ds-train cfg.json --out run --quiet --steps 1000000 &
  pid=$!
  until_true 20 steps_at_least run 1
  kill -KILL $pid
  wait $pid || true
  ds-train cfg.json --quiet --out next
  assert [ ! -e "/dev/shm/ds-train.$pid" ]
}

@test "a run without room for its counters says so once and trains" {
  unshare -m mount -t tmpfs tmpfs /dev/shm || skip "no mount here"
  run -0 --separate-stderr unshare -m bash -c 'mount -t tmpfs -o size=4k tmpfs /dev/shm; ds-train cfg.json --out run'
  assert_equal "$(grep -c "ds-memreport will not find this rank: /dev/shm/ds-train.* cannot be written" <<<"$stderr")" 1
  assert_equal "$(losses run | wc -l)" 12
}
