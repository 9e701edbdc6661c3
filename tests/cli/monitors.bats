#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Monitors and reports that a configuration asks for: TensorBoard's event files, DeepSpeed's CSV files, Prometheus's
# text file, and the reports of phases, messages and operations.

bats_require_minimum_version 1.5.0

load tiny

all_on() {
  sed -i 's/"steps": 12/"steps": 12, "steps_per_print": 3, "eval": {"every": 4}, "save": {"every": 4},\
  "tensorboard": {"enabled": true}, "csv_monitor": {"enabled": true, "output_path": "csv", "job_name": "tiny"},\
  "prometheus": {"file": "tiny.prom", "job_name": "tiny"}, "wall_clock_breakdown": true,\
  "comms_logger": {"verbose": false}, "flops_profiler": {"enabled": true, "profile_step": 2, "output_file": "flops.txt"}/' cfg.json
}

# Holds the files of run, csv and tiny.prom to run/metrics.jsonl: number of event files.
check_files() {
  /usr/bin/python3 - "$1" <<'PY'
import csv, glob, json, struct, sys
lines = [json.loads(l) for l in open("run/metrics.jsonl")]
steps = [l for l in lines if l["type"] == "step"]
evals = [l for l in lines if l["type"] == "eval"]
assert [l["step"] for l in steps] == list(range(1, 13)) and [l["step"] for l in evals] == [4, 8, 12]

def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at

def fields(data):
    at, out = 0, {}
    while at < len(data):
        key, at = varint(data, at)
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            value, at = varint(data, at)
            if key & 7 == 2:
                value, at = data[at : at + value], at + value
        else:
            value, at = struct.unpack({8: "<d", 4: "<f"}[size], data[at : at + size])[0], at + size
        out[key >> 3] = value
    return out

curves = {}
files = sorted(glob.glob("run/tensorboard/DeepSpeedJobName/events.out.tfevents.*"))
assert len(files) == int(sys.argv[1]), files
for name in files:
    data, at, first = open(name, "rb").read(), 0, True
    while at < len(data):
        size = struct.unpack("<Q", data[at : at + 8])[0]
        event = fields(data[at + 12 : at + 12 + size])
        at += 16 + size
        assert (event.get(3) == b"brain.Event:2") == first
        if not first:
            value = fields(fields(event[5])[1])
            curves.setdefault(value[1].decode(), {})[event.get(2, 0)] = value[2]
        first = False

def near(a, b):
    return abs(a - b) <= 1e-6 * abs(b)

def check(tag, expected):
    assert curves[tag].keys() == expected.keys(), (tag, curves[tag], expected)
    assert all(near(curves[tag][s], v) for s, v in expected.items()), (tag, curves[tag], expected)
    with open("csv/tiny/" + tag.replace("/", "_") + ".csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", tag.split("/")[-1]] and ["step", header[1]] not in rows
    assert {int(s): float(v) for s, v in rows} == expected and len(rows) == len(expected), (tag, rows)

check("Train/Samples/train_loss", {8 * l["step"]: l["loss"] for l in steps})
check("Train/Samples/lr", {8 * l["step"]: l["lr"] for l in steps})
check("Train/Samples/elapsed_time_ms_forward", {8 * l["step"]: l["phase_ms"]["forward"] for l in steps})
check("train/loss", {l["step"]: l["loss"] for l in steps})
check("train/grad_norm", {l["step"]: l["grad_norm"] for l in steps})
check("train/tokens_per_s", {l["step"]: l["tokens_per_s"] for l in steps})
check("train/mfu", {l["step"]: l["mfu"] for l in steps})
check("validation/loss", {l["step"]: l["val_loss"] for l in evals})
for name, value in (("memory", "memory_bytes"), ("comm", "comm_bytes")):
    for tag in steps[0][value]:
        check(f"{name}/{tag}", {l["step"]: l[value][tag] for l in steps if tag in l[value]})
assert "Train/Samples/loss_scale" not in curves
for l in steps:
    assert l["phase_ms"]["forward"] > 0 and l["phase_ms"]["backward"] > 0 and l["phase_ms"]["step"] > 0, l
    assert sum(l["phase_ms"].values()) <= l["step_ms"], l
prometheus = dict(l.rsplit(" ", 1) for l in open("tiny.prom") if not l.startswith("#"))
assert prometheus['ds_train_steps_total{job="tiny"}'].strip() == "12"
assert near(float(prometheus['ds_train_loss{job="tiny"}']), steps[-1]["loss"])
assert near(float(prometheus['ds_train_validation_loss{job="tiny"}']), evals[-1]["val_loss"])
PY
}

@test "all monitors tell what metrics.jsonl has, also of a run that goes on" {
  ds-launch -n 2 ds-train cfg.json --out plain --quiet
  all_on
  ds-launch -n 2 ds-train cfg.json --out run --steps 8 2>told
  grep -q '^ds_train_steps_total{job="tiny"} 8$' tiny.prom
  run grep -c 'time (ms) | forward: [0-9.]* | backward: [0-9.]* | reduce: [0-9.]* | step: [0-9.]* | all: [0-9.]*$' told
  assert_output 2
  run cat told
  assert_output --partial 'step 6: time (ms)'
  assert_output --partial 'communication of rank 0 in steps 1 to 8'
  assert_output --regexp 'dp.reduce_scatter +[1-9][0-9]* +[0-9.]+ .iB +[0-9.]+ +[0-9.]+'
  run cat flops.txt
  assert_output --regexp '^work of rank 0 of 2 in step 2: [0-9]+ parameters in the model, 256 tokens of all ranks'
  assert_output --regexp 'forward +[0-9]+ +[0-9.]+ MFLOP'
  assert_output --regexp 'matmul +[0-9]+ +[0-9.]+ MFLOP'
  ds-train cfg.json --out run --resume latest 2>told
  run cat told
  assert_output --partial 'flops_profiler.profile_step: step 2 was taken before this start: it is not reported'
  assert_output --partial 'communication of rank 0 in steps 9 to 12'
  check_files 2
  # They change no bit.
  assert_equal "$(losses run)" "$(losses plain)"
}

@test "a run that asks for no monitor has no file of theirs and takes no times" {
  ds-train cfg.json --out run --quiet --set steps=2
  assert_equal "$(cd run && ls)" "$(printf 'latest\nmetrics.jsonl\nstep-00000002')"
  run ! grep -q phase_ms run/metrics.jsonl
}

@test "comms_logger takes the operations that it is told" {
  sed -i 's/"steps": 12/"steps": 4, "comms_logger": {"prof_all": false, "prof_ops": ["all_gather", "tp.all_reduce"]}/' cfg.json
  run -0 --separate-stderr ds-launch -n 2 ds-train cfg.json --out run
  [[ $stderr == *'dp.all_gather '* && $stderr != *'dp.reduce_scatter'* ]] || fail "$stderr"
  [[ $stderr == *"comms_logger.prof_ops: rank 0 had no operation 'tp.all_reduce'"* ]] || fail "$stderr"
}

@test "what monitors cannot write is refused before anything is written" {
  touch file
  refused 2 'tensorboard.output_path: cannot write in file/' --set tensorboard.enabled=true --set tensorboard.output_path=file
  refused 2 'csv_monitor.output_path: cannot write in file/' --set csv_monitor.enabled=true --set csv_monitor.output_path=file
  refused 2 'prometheus.file: cannot write in none' --set prometheus.file=none/tiny.prom
  refused 2 'prometheus.file: cannot write in none' --set prometheus.file=none/tiny.prom --check
  refused 2 'tensorboard.job_name: "a/../b" leads out of output_path' --set tensorboard.enabled=true \
    --set tensorboard.job_name=a/../b
  refused 2 'csv_monitor.job_name: "/tmp/x" leads out of output_path' --set csv_monitor.enabled=true \
    --set csv_monitor.job_name=/tmp/x --check
  refused 2 'prometheus.file: refused/metrics.jsonl is a file that the run writes itself' \
    --set prometheus.file=refused/metrics.jsonl
  refused 2 'prometheus.file: ./refused/step-00000002/x is a file that the run' --set prometheus.file=./refused/step-00000002/x
  refused 2 'prometheus.file: here is the file of flops_profiler.output_file, too' --set prometheus.file=here \
    --set flops_profiler.enabled=true --set flops_profiler.output_file="$PWD/here"
  run -2 --separate-stderr ds-train cfg.json --set csv_monitor.enabled=true
  [[ $stderr == *'csv_monitor.output_path: is missing, and there is no run directory'* ]] || fail "$stderr"
}

@test "a directory of monitors may be named by way of one that does not exist yet" {
  ds-train cfg.json --out run --quiet --steps 2 --set csv_monitor.enabled=true --set csv_monitor.output_path=new/../csv
  assert [ -e csv/DeepSpeedJobName/train_loss.csv ]
  assert [ ! -e new ]
}

# As with a link: an appended line would be in a file that nobody has named, and a pipe would be waited for.
@test "no monitor writes through a link or into a pipe" {
  mkdir -p csv/DeepSpeedJobName
  cp text.txt data.txt
  local file=csv/DeepSpeedJobName/train_loss.csv
  for make in "ln -s ../../data.txt" "ln data.txt" mkfifo mkdir "cp data.txt"; do
    $make $file
    for check in "" --check; do
      run -2 --separate-stderr timeout 20 ds-train cfg.json --out run $check --set csv_monitor.enabled=true \
        --set csv_monitor.output_path=csv
      [[ $stderr == *"csv_monitor.output_path: "*"$file"* ]] || fail "$make: $stderr"
    done
    rm -r $file
  done
  cmp text.txt data.txt
  assert [ ! -e run ]
}

# metrics.jsonl is written first, and contains the step that a monitor could not take.
@test "a monitor that fails later ends the run as save.on_error says, and loses no line" {
  mkdir -p csv/DeepSpeedJobName
  monitored() { # with a full disk for one of the files, from the third of its changes on
    head -c 64 /dev/zero >log
    RANK=0 LD_PRELOAD="$DS_BIN/../lib/libds_crash_shim.so" DS_CRASH_LOG="$PWD/log" DS_CRASH_AT=2 DS_CRASH_MODE=sticky \
      DS_CRASH_ERRNO=28 DS_CRASH_DIR="$(realpath csv)/DeepSpeedJobName/train_mfu.csv" \
      ds-train cfg.json --out "$@" --set csv_monitor.enabled=true --set csv_monitor.output_path=csv
  }
  run -1 --separate-stderr monitored stopped
  [[ $stderr == *'cannot write csv/DeepSpeedJobName/train_mfu.csv: No space left on device'* ]] || fail "$stderr"
  assert_equal "$(losses stopped | wc -l)" 1
  run -0 --separate-stderr monitored goes-on --set save.on_error=continue
  assert_equal "$(grep -c 'train_mfu.csv: No space left' <<<"$stderr")" 1
  assert_equal "$(losses goes-on | wc -l)" 12
  # The header, and both runs' lines: of the first its only step.
  assert_equal "$(wc -l <csv/DeepSpeedJobName/train_loss.csv)" 14
}

@test "a trace has the first steps of all ranks, and changes no bit" {
  ds-launch -n 4 ds-train cfg.json --out plain --quiet --set pipeline.stages=2
  ds-launch -n 4 ds-train cfg.json --out run --quiet --set pipeline.stages=2 --trace trace.json
  assert_equal "$(losses run)" "$(losses plain)"
  /usr/bin/python3 - <<'PY'
import collections, json
events = json.load(open("trace.json"))["traceEvents"]
tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
# Perfetto identifies threads by their numbers alone if that of a process is 0, and drops a span that overlaps an end by
# 1 ns.
assert len({tid for _, tid in tracks}) == len(tracks) and all(pid > 0 for pid, _ in tracks), tracks
spans = collections.defaultdict(list)
for e in events:
    if e["ph"] == "X":
        assert e["ts"] >= 0 and e["dur"] >= 0, e
        spans[e["pid"] - 1, tracks[e["pid"], e["tid"]]].append(e)
assert {rank for rank, _ in spans} == {0, 1, 2, 3}
for rank in range(4):
    steps = [e for e in spans[rank, "steps"] if e["name"] == "step"]
    assert [e["args"]["number"] for e in steps] == [1, 2, 3, 4, 5], steps
    names = collections.Counter(e["name"] for e in spans[rank, "step"])
    # Two ranks of dp have 8 samples in two micro-batches of 2.
    for name, count in {"Forward": 10, "Backward": 10, "finish gradients": 5, "judge": 5, "update": 5, "publish": 5, "verdict": 5}.items():
        assert names[name] == count, (rank, names)
    assert any(name == "dp.reduce_scatter" for track in tracks.values() for name in [e["name"] for e in spans[rank, track]]), rank
for track, all in spans.items():  # beside each other, or in each other
    open_until = []
    for begin, length, name in sorted((int(e["ts"] * 1000), -round(e["dur"] * 1000), e["name"]) for e in all):  # ns
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or begin - length <= open_until[-1], (track, name, begin)
        open_until.append(begin - length)
PY
}

@test "a trace is of a run that trains, in a place that takes it" {
  ds-train cfg.json --quiet --steps 2 --trace short.json
  assert_equal "$(grep -o '"name":"step"' short.json | wc -l)" 3 # two steps, and the track of what is in them
  refused 2 '--trace: cannot write in none' --trace none/trace.json
  refused 2 '--trace: refused/latest is a file that the run writes itself' --trace refused/latest
  for option in --check --eval '--generate=x'; do
    run -2 --separate-stderr ds-train cfg.json --trace trace.json "$option"
    [[ $stderr == *"--trace"* ]] || fail "$stderr"
  done
  assert [ ! -e trace.json ]
}

@test "no report is written over what the run reads" {
  ds-train cfg.json --out first --quiet --steps 2
  ds-ckpt-merge first -o hfm --format hf --quiet
  ds-ckpt-merge first -o w.safetensors --quiet
  cp cfg.json copy.json
  sed 's/"model": {[^}]*}/"model": {"path": "hfm"}/' cfg.json >hf.json
  find . -type f ! -name before -exec sha256sum {} + >before
  reports() { # file, arguments
    local file=$1 where
    shift
    for where in "--trace $file" "--set prometheus.file=$file" "--output $file" "--check --output $file" \
      "--check --pattern $file" "--check --plan $file" \
      "--set flops_profiler.enabled=true --set flops_profiler.output_file=$file"; do
      run -2 --separate-stderr ds-train "$@" --out refused $where
      [[ $stderr == *"$file"* ]] || fail "$where: $stderr"
    done
  }
  reports copy.json copy.json
  reports text.txt cfg.json
  cp text.txt more.txt
  sha256sum more.txt >>before
  reports more.txt cfg.json --set data.validation=more.txt
  reports hfm/config.json hf.json
  reports w.safetensors cfg.json --weights w.safetensors
  reports first/step-00000002/model.h5 cfg.json --resume first
  reports first/metrics.jsonl cfg.json --resume first/step-00000002
  reports hfm/config.json cfg.json --weights hfm/model.safetensors
  local mode
  for mode in "--generate a --max-tokens 4" --eval "--check --generate a --max-tokens 4"; do
    run -2 --separate-stderr ds-train cfg.json --weights hfm $mode --output text.txt
    [[ $stderr == *'--output: text.txt is an input of this run, by data.train'* ]] || fail "$mode: $stderr"
  done
  sha256sum --check --quiet before
  # A new file beside them is nobody's.
  ds-train hf.json --out run --quiet --steps 2 --trace hfm/trace.json
}

@test "what a run names itself is no place for its monitors, and theirs none for a report" {
  local csv="--set csv_monitor.enabled=true --set csv_monitor.output_path=csv --set csv_monitor.job_name=j"
  local where name file=csv/j/train_loss.csv
  reports_refused() { # file, text, further arguments
    local file=$1 text=$2
    shift 2
    for where in "--trace $file" "--set prometheus.file=$file" "--output $file" \
      "--set flops_profiler.enabled=true --set flops_profiler.output_file=$file"; do
      refused 2 "$text" "$@" $where
    done
  }
  reports_refused ./refused "refused is "
  reports_refused csv "csv is where csv_monitor makes its directory" $csv
  mkdir -p csv/j
  reports_refused $file "$file is a file of csv_monitor, too" $csv
  reports_refused csv/j/events.out.tfevents.1 "is a file of tensorboard, too" --set tensorboard.enabled=true \
    --set tensorboard.output_path=csv/j --set tensorboard.job_name=.
  for name in step-00000002 latest lock metrics.jsonl; do
    for where in csv_monitor tensorboard; do
      refused 2 "$where.output_path: refused/$name is a file that the run writes itself" --set $where.enabled=true \
        --set $where.output_path=refused --set $where.job_name=$name
    done
  done
  # A file that begins as those of csv_monitor do.
  (printf 'step,loss\r\n' && cat text.txt) >$file
  cp $file kept
  refused 2 "csv_monitor.output_path: $file is an input of this run, by data.train" --set data.train=$file $csv
  cmp $file kept
  printf 'step,other\r\n1,2\r\n' >$file
  refused 2 "$file is not a file of csv_monitor, which begins with \"step,loss\"" $csv
}

@test "a report or a directory that is a link to itself is refused before anything is written" {
  ln -s loop loop
  local where
  for where in "--trace loop" "--set prometheus.file=loop" \
    "--set flops_profiler.enabled=true --set flops_profiler.output_file=loop" \
    "--set csv_monitor.enabled=true --set csv_monitor.output_path=loop" \
    "--set tensorboard.enabled=true --set tensorboard.output_path=loop"; do
    refused 2 "Too many levels of symbolic links" $where
  done
  refused 2 "File name too long" --set csv_monitor.enabled=true --set csv_monitor.output_path=new \
    --set csv_monitor.job_name="$(printf '%300s' '' | tr ' ' a)"
  ln -s nowhere dangling
  refused 2 "a link that leads to nothing" --set csv_monitor.enabled=true --set csv_monitor.output_path=dangling
}

@test "a monitor that cannot be written leaves no run behind" {
  ln -s /nowhere/there dangling
  for path in "tensorboard.output_path=/proc/x" "csv_monitor.output_path=/proc/x/y" "csv_monitor.output_path=dangling" \
    "csv_monitor.job_name=$(printf '%300s' '' | tr ' ' a)"; do
    run -2 --separate-stderr ds-train cfg.json --out run --set tensorboard.enabled=true --set csv_monitor.enabled=true --set "$path"
    [[ $stderr == *"${path%%.*}.output_path: "* ]] || fail "$stderr"
    assert [ ! -e run/metrics.jsonl ]
    assert [ ! -e run/tensorboard ]
  done
  ds-train cfg.json --out run --quiet
}

@test "a run that ends because it diverges leaves its trace and its last numbers" {
  run -1 ds-launch -n 2 ds-train cfg.json --out run --quiet --trace trace.json --set prometheus.file=run.prom --set fp16.enabled=true \
    --set fp16.initial_scale_power=6 --set fp16.hysteresis=1 --set fp16.min_loss_scale=32 --set optimizer.params.lr=1e4
  /usr/bin/python3 -c 'import json; assert len(json.load(open("trace.json"))["traceEvents"]) > 10'
  assert [ -s run.prom ]
  assert_equal "$(tail -1 run/metrics.jsonl | grep -o '"type":"memory"')" '"type":"memory"'
  run -1 ds-train cfg.json --out fast --quiet --set optimizer.params.lr=1e30 --set prometheus.file=fast.prom --set steps_per_print=5
  local steps
  steps=$(grep -c '"type":"step"' fast/metrics.jsonl)
  grep -q "^ds_train_steps_total.* $steps$" fast.prom
}

@test "tiles of offloaded states and bytes of messages are in a trace" {
  ds-launch -n 2 ds-train cfg.json --out run --quiet --steps 3 --trace trace.json --set zero_optimization.offload_optimizer.device=nvme \
    --set zero_optimization.offload_optimizer.nvme_path=. --set zero_optimization.sub_group_size=4096
  /usr/bin/python3 - <<'PY'
import json
events = json.load(open("trace.json"))["traceEvents"]
tiles = [e for e in events if e["name"] == "update of a tile"]
assert len(tiles) >= 3 * 2 * 2 and {e["args"]["number"] for e in tiles} >= {0, 1}, tiles
assert all(e["args"]["slice_bytes"] > 0 for e in events if e["name"] == "dp.reduce_scatter")
PY
}
