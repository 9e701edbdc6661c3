#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-commbench with real processes: every operation over shared memory and MPI, its output, its refusals, and ranks that
# die or stop.

bats_require_minimum_version 1.5.0

load waiting

setup() {
  bats_load_library bats-support
  bats_load_library bats-assert
  PATH=$DS_BIN:$PATH
  export CUDA_VISIBLE_DEVICES=
  cd "$BATS_TEST_TMPDIR" || exit 1
}

teardown() { # processes that a failed test left running
  ranks_here | xargs -r kill -9
}

# Pids of the ranks that run in this folder.
ranks_here() {
  local p
  for p in $(pgrep -x ds-commbench); do
    [[ $(readlink "/proc/$p/cwd") == "$PWD" ]] && echo "$p"
  done
  true
}
rank_of() { tr '\0' '\n' <"/proc/$1/environ" | sed -n 's/^RANK=//p'; }
rank_here() { # RANK: its pid
  local p
  for p in $(ranks_here); do
    [[ $(rank_of "$p") == "$1" ]] && echo "$p"
  done
  true
}
both_here() { [[ $(ranks_here | wc -l) -ge 2 && -n $(rank_here 1) ]]; }

# bench RANKS ARGUMENTS...: a short run, whose rows are left in $output
bench() {
  local ranks=$1
  shift
  run -0 --separate-stderr timeout 60 ds-commbench --ranks "$ranks" -n 5 -w 1 "$@"
}
rows() { grep -v '^#' <<<"$output"; }

# refuses STATUS TEXT ARGUMENTS...: with one message of one rank, and nothing on stdout.
refuses() {
  local code=$1 text=$2
  shift 2
  run "-$code" --separate-stderr timeout 60 ds-commbench "$@"
  assert_equal "$output" ""
  [[ $stderr == *"ds-commbench"*": error: "*"$text"* ]] || fail "$stderr"
  assert_equal "$(grep -c '^ds-commbench.*error: ' <<<"$stderr")" 1
}

@test "every operation at two and three ranks, over shared memory and MPI, is right" {
  for backend in shm mpi; do
    bench 2 --op all -b 1000 -e 1000 --backend "$backend"
    [[ $output == *"Out of bounds values : 0 OK"* ]]
    for op in all_reduce reduce_scatter all_gather broadcast reduce all_to_all all_to_allv gather scatter sendrecv \
      sendrecv_pairs latency bandwidth barrier zero_step overlap; do
      assert_line "# $op"
    done
    assert_equal "$(rows | wc -l)" 16
    refute_line --partial "left out"
    bench 3 --op all -b 1K -e 70K -f 70 --backend "$backend" --dtype bfloat16
    assert_equal "$(rows | wc -l)" 31
    [[ $output == *"Out of bounds values : 0 OK"* ]]
  done
}

@test "two nodes, played on one: shared memory inside and MPI between, beside MPI alone" {
  run -0 --separate-stderr timeout 60 ds-launch -n 4 bash -c '
    LOCAL_RANK=$((RANK % 2)) LOCAL_WORLD_SIZE=2 exec ds-commbench --op all -b 1000 -e 1000 -n 2 --backend shm+mpi'
  [[ $output == *"Out of bounds values : 0 OK"* ]]
  assert_equal "$(rows | wc -l)" 16
  run -0 --separate-stderr timeout 60 ds-launch -n 4 bash -c '
    LOCAL_RANK=$((RANK % 2)) LOCAL_WORLD_SIZE=2 exec ds-commbench --op all_reduce -b 64K -e 64K -n 2 \
      --backend shm+mpi --compare mpi'
  [[ $output == *"backend shm+mpi beside mpi"*"Out of bounds values : 0 OK"* ]]
  run -0 --separate-stderr timeout 60 ds-launch -n 3 bash -c '
    LOCAL_RANK=$((RANK % 2)) LOCAL_WORLD_SIZE=$((2 - RANK / 2)) exec ds-commbench --op all_reduce -b 4K -e 4K -n 2'
  [[ $output == *"# backend mpi,"* ]] # nodes are unequal
  run -2 --separate-stderr timeout 60 ds-launch -n 2 bash -c '
    LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec ds-commbench --op all_reduce --backend shm'
  [[ $stderr == *"backend shm works on one node; 1 of 2 ranks are on this one"* ]]
}

@test "Open MPI's own collectives stand beside ours" {
  bench 3 --op all -b 1K -e 70K -f 70 --backend shm --compare openmpi
  [[ $output == *"Out of bounds values : 0 OK"* ]]
  bench 2 --op all -b 1K -e 1K --backend openmpi --blocking
  [[ $output == *"Out of bounds values : 0 OK"* ]]
  run -2 --separate-stderr timeout 60 ds-commbench --ranks 2 --op all_reduce --dtype bfloat16 --backend openmpi -b 1K -e 1K
  [[ $stderr == *"Open MPI does not reduce bfloat16"* ]]
  bench 2 --op all --dtype half -b 1K -e 1K --backend openmpi
  assert_line "# left out: Open MPI does not reduce half"
}

@test "pairs as CSV; one end of the sizes is enough; what has no bandwidth is told" {
  run -0 --separate-stderr timeout 60 ds-commbench --ranks 2 --matrix -e 1K --csv -n 5
  assert_line "backend,from,to,link,bytes,latency_us,bandwidth_GB_per_s,back_GB_per_s,both_GB_per_s"
  assert_line --regexp '^shm,0,1,[a-z]+,1024,[0-9.e-]+,[0-9.e-]+,[0-9.e-]+,[0-9.e-]+$'
  bench 2 --op all_reduce -e 64
  refuses 2 "--stats has no room in a comparison" --ranks 2 --op all_gather --compare mpi --stats
  refuses 2 "overlap cannot be compared" --ranks 2 --op overlap --compare mpi
  refuses 2 "nothing that was measured has a bus bandwidth" --op barrier -n 2 --min-busbw 1 --csv --output out.csv
  refuses 2 "a fault needs an operation" --ranks 2 --matrix -e 1K --fault 0
}

@test "one rank needs no launcher, ds-launch starts others, and both print the same columns" {
  run -0 --separate-stderr ds-commbench --op all -b 4K -e 4K -n 2
  assert_line --partial "backend self"
  assert_line "# left out: sendrecv needs 2 ranks"
  run -0 --separate-stderr timeout 60 ds-launch -n 2 ds-commbench --op all_gather -b 8 -e 64 -n 2
  assert_line --index 0 --regexp '^# ds-commbench [0-9.]+$'
  assert_line --partial "# 2 ranks"
  assert_line --partial "size         count      type   redop    root     time   algbw   busbw  #wrong"
  # 8 and 16 bytes leave no slice of 16 for each of two.
  assert_equal "$(rows | awk '{ print $1, $2, $3, $4, $5, $9, $13 }')" $'32 4 float none -1 0 0\n64 8 float none -1 0 0'
  run -0 --separate-stderr timeout 60 ds-launch -n 2 ds-commbench --ranks 2 --op barrier
}

@test "busbw is algbw times the factor, and algbw size over time" {
  bench 3 --op all_reduce,reduce_scatter,broadcast,all_to_all -b 1M -e 1M --csv
  tail -n +2 <<<"$output" | awk -F, '
    BEGIN { f["all_reduce"] = 4 / 3; f["reduce_scatter"] = 2 / 3; f["broadcast"] = 1; f["all_to_all"] = 2 / 3 }
    function near(a, b) { return a - b < 1e-6 * b && b - a < 1e-6 * b }
    !near($10, $3 / $9 / 1e3) || !near($11, $10 * f[$2]) || $12 != 0 { exit 1 }
    END { exit NR != 7 }'
}

@test "--json is nccl-tests' schema, --stats has every iteration, --output a file" {
  bench 2 --op all_reduce -b 1K -e 4K -I --json --output report.json
  assert_equal "$output" ""
  python3 - <<'PY'
import json
j = json.load(open("report.json"))
assert list(j)[:2] == ["schema", "version"] and j["schema"] == "ds-commbench/1" and j["version"] == 3
assert [r["size"] for r in j["results"]] == [1024, 2048, 4096]
for r in j["results"]:
    assert (r["count"], r["type"], r["redop"], r["root"]) == (r["size"] // 4, "float", "sum", -1)
    for form in ("out_of_place", "in_place"):
        t, i = r[form], r[form + "_per_iter"]
        assert t["nwrong"] == 0
        assert abs(t["alg_bw"] - r["size"] / t["time"] / 1e3) < 1e-12 and abs(t["bus_bw"] - t["alg_bw"]) < 1e-12
        assert len(i["times_us"]) == 5 and i["min_us"] == min(i["times_us"]) and i["p99_us"] == max(i["times_us"])
assert [d["rank"] for d in j["devices"]] == [0, 1] and all(d["pid"] > 0 and d["hostname"] for d in j["devices"])
assert j["out_of_bounds"] == {"count": 0, "okay": True}
assert j["average_bus_bandwidth"]["bandwidth"] > 0
assert j["config"]["iterations"] == 5 and j["config"]["step_factor"] == 2
assert "--stats" in j["args"] or "-I" in j["args"]
m, = j["models"]
assert m["op"] == "all_reduce" and m["form"] == "in_place" and m["ranks"] == 2
PY
}

@test "--blocking, averages, steps, roots, types and memory" {
  bench 2 --op broadcast,scatter --root 1 --dtype uint64 --blocking -a max -b 1K -e 3K -i 1K --memory ordinary
  assert_line --partial "min      avg      max      p99"
  assert_equal "$(rows | awk '{ print $1, $3, $5 }' | sort -u)" $'1024 uint64 1\n2048 uint64 1\n3072 uint64 1'
  bench 2 --op all_reduce --redop max --dtype half --in-place --check 0 -b 4K -e 4K
  assert_equal "$(rows | awk '{ print $4, $6, $9, $13 }')" "max - - N/A"
  [[ $output == *"Out of bounds values : 0 UNCHECKED"* ]]
}

@test "--compare has both backends in a line" {
  bench 2 --op all_gather,all_to_all --backend shm --compare mpi -b 64K -e 64K
  assert_line --regexp 'form +shm +busbw +#wrong +mpi +busbw +#wrong +ratio'
  assert_equal "$(rows | awk '{ print $6, NF }')" $'out 13\nin 13\nout 13'
  rows | awk '{ off = $7 / $10 - $13; if (off < 0) off = -off; if (off > 0.006 + 0.01 * $13) exit 1 }'  # 2 decimals
}

@test "--matrix has every pair, --save what predictions are made from" {
  bench 3 --matrix -b 64K -e 64K --save links.json
  assert_equal "$(rows | awk '{ print NF }' | sort | uniq -c | tr -s ' ')" " 9 4"
  assert_equal "$(rows | grep -c ' - *')" 9
  bench 2 --op all_reduce,all_gather -b 4K -e 64K -f 4 --save links.json
  python3 - <<'PY'
import json
j = json.load(open("links.json"))
assert list(j)[0] == "schema" and j["schema"] == "ds-links/1" and j["ranks"] == 2 and j["backends"] == ["shm"]
assert sum(j["hosts"].values()) == 2
link, = j["links"]
assert link["class"] in ("numa", "host") and link["pairs"] == 1
assert 0 < link["latency_s"] < 1 and link["bandwidth_bytes_per_s"] > 1e6
assert [o["op"] for o in j["operations"]] == ["all_reduce", "all_gather"]
for o in j["operations"]:
    assert o["alpha_s"] >= 0 and o["beta_s_per_byte"] >= 0 and (o["min_bytes"], o["max_bytes"]) == (4096, 65536)
PY
}

@test "a wrong element: status 3, the element named, no links written" {
  run -3 --separate-stderr timeout 60 ds-commbench --ranks 2 --op all_reduce -b 1K -e 1K -n 1 --fault 1 --save links.json
  [[ $stderr == *"ds-commbench: error: 2 wrong elements; the first: all_reduce of 1024 bytes, out of place, rank 1, element 0: "*" instead of "* ]]
  assert_line --partial "Out of bounds values : 2 FAILED"
  assert_equal "$(rows | awk '{ print $9, $13 }')" "1 1"
  [ ! -e links.json ]
}

@test "--min-busbw: status 1 and both numbers" {
  run -1 --separate-stderr timeout 60 ds-commbench --ranks 2 --op all_gather -b 1K -e 1K -n 2 --min-busbw 100000
  [[ $stderr == *"average bus bandwidth "*" GB/s is below --min-busbw 100000"* ]]
  bench 2 --op all_gather -b 64K -e 64K --min-busbw 0.00001
}

@test "what cannot be is refused before anything starts" {
  refuses 2 "there is no operation 'all_reduces'; there are all, all_reduce" --op all_reduces
  refuses 2 "did you mean 'all_reduce'?" --op all_reduces --ranks 2
  refuses 2 "nothing to measure"
  refuses 2 "all_reduce does not offer sum of int8; it offers sum of float" --op all_reduce --dtype int8
  refuses 2 "reduce_scatter does not offer max of float" --op reduce_scatter --redop max
  refuses 2 "sendrecv needs 2 ranks" --op sendrecv
  refuses 2 "--dtype: " --op all --dtype float8
  refuses 2 "--redop: " --op all --redop prod
  refuses 2 "--backend: " --op all --backend gloo
  refuses 2 "--min-bytes: '12Q' is not a size" --op all -b 12Q
  refuses 2 "sizes from 64 to 32 bytes" --op all -b 64 -e 32
  refuses 2 "root 2 is not one of 2 ranks" --op broadcast --root 2 --ranks 2
  refuses 2 "backend shm needs a job name" --op all --backend shm
  refuses 2 "all_to_all does not work in place" --op all_to_all --in-place
  refuses 2 "is compared with itself" --op all --compare mpi --backend mpi
  refuses 2 "pairs need 2 ranks" --matrix
  refuses 2 "--csv excludes --json" --op all --csv --json
  refuses 2 "--min-busbw needs --op" --matrix --min-busbw 1 --ranks 2
  refuses 2 "--hostfile requires --ranks" --op all --hostfile hosts
  refuses 2 "--output x: is also --save" --op all --save x --output x
  run -2 --separate-stderr timeout 60 ds-launch -n 2 ds-commbench --op all_reduces
  assert_equal "$(grep -c '^ds-commbench.*error: ' <<<"$stderr")" 1
  run -2 --separate-stderr timeout 60 ds-launch -n 2 ds-commbench --ranks 3 --op all
  [[ $stderr == *"--ranks 3 under a launcher that started 2"* ]]
}

@test "more ranks than the slots of a hostfile: ds-launch says so, with status 2" {
  echo "$(hostname) slots=2" >hosts
  run -2 --separate-stderr timeout 60 ds-commbench --ranks 3 --hostfile hosts --op all_reduce
  [[ $stderr == "ds-launch: error: "*"slot"* ]] || fail "$stderr"
  assert_equal "$output" ""
  run -0 --separate-stderr timeout 60 ds-commbench --ranks 2 --host "$(hostname):2" --op all_reduce -b 4K -e 4K -n 2
  [[ $output == *"Out of bounds values : 0 OK"* ]]
}

@test "no GPU for nccl: status 4 and why" {
  refuses 4 "backend nccl needs GPUs" --op all_reduce --backend nccl
  refuses 4 "backend staged needs GPUs" --ranks 2 --op all_reduce --backend shm --compare staged
  run -4 --separate-stderr timeout 60 ds-launch -n 2 ds-commbench --op all_reduce --backend nccl
  [[ $stderr == *"backend nccl needs GPUs"* ]]
}

@test "shared memory that is not there: status 4 and how much is" {
  ! grep -q '^DS_SANITIZE:[A-Z]*=thread' "${DS_BIN%/bin}/CMakeCache.txt" || skip "there is no room for such addresses beside a sanitizer's"
  run -4 --separate-stderr timeout 60 ds-commbench --ranks 2 --op all_gather -b 4096G -e 4096G --backend shm
  [[ $stderr == *"/dev/shm"*"free"* ]]
}

@test "a rank that is killed is named, over both backends" {
  for backend in shm mpi; do
    timeout 60 ds-commbench --ranks 2 --op all_reduce -b 1M -e 1M -n 1000000 --backend $backend 2>errors >/dev/null &
    local tool=$!
    until_true 20 both_here
    sleep 0.5
    kill -9 "$(rank_here 1)"
    local ended=0
    wait $tool || ended=$?
    assert_equal $ended 137
    grep -q "rank 1 .*was killed by signal 9" errors
  done
}

@test "a rank that stops is named within the timeout" {
  timeout 60 ds-commbench --ranks 2 --op all_reduce -b 1M -e 1M -n 1000000 --timeout 1 2>errors >/dev/null &
  local tool=$!
  until_true 20 both_here
  sleep 0.5
  kill -STOP "$(rank_here 1)"
  local ended=0
  wait $tool || ended=$?
  assert_equal $ended 1
  grep -q "rank 1 did not arrive within 1 s" errors
}

@test "options of nccl-tests that mean the same are taken" {
  bench 1 --op all_reduce -b 8k -e 8k -f 1 -g 1 -t 1 -d half -o max -r 0 -a 2 -m 1 -z 0 -p 1 -R 0 -G 0 -c 1 --backend self
  [[ $(rows) =~ ^\ *8192\ +4096\ +half\ +max\  ]] || fail "$output"
  run -0 --separate-stderr ds-commbench --op all_reduce --minbytes 1m --maxbytes 2m --stepbytes 1m --warmup_iters 0 \
    --iters 2 --datatype float --ngpus 1
  assert_equal "$(rows | awk '{ print $1 }' | tr '\n' ' ')" "1048576 2097152 "
  bench 1 --op all_reduce -b 1m -e 4m --stepfactor 4 --backend self
  assert_equal "$(rows | awk '{ print $1 }' | tr '\n' ' ')" "1048576 4194304 "
}

@test "options of nccl-tests that mean something else: the error names ours" {
  refuses_line() { # text, arguments
    run -2 ds-commbench --op all_reduce "${@:2}"
    assert_line --index 0 --partial "$1"
  }
  refuses_line "-g 8: not available; a rank has one thread and one GPU; start more ranks with --ranks N" -g 8
  refuses_line "start more ranks with --ranks N" --nthreads 4
  refuses_line "--json --output FILE" -J out.json
  refuses_line "--timeout S" -T 60
  refuses_line "--blocking" -z 1
  refuses_line "--dtype" -d all
  refuses_line "--redop" -o prod
  refuses_line "--root: must be" -r all
  refuses_line "sizes that grow by a factor of 1 do not grow: give a larger one, or --step" -b 8 -e 64 -f 1
  run -2 ds-commbench --op sum
  assert_line --index 0 --partial "'sum' is a reduction, not an operation: give it to --redop"
}
