#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the fixtures of tests/unit/monitor_test.cc with TensorBoard's own writer and Python's csv, and reads files of a run back.

    make_monitor.py DIR           writes events.tfrecord and Train_Samples_train_loss.csv
    make_monitor.py --check RUN   holds the files of RUN/tensorboard and RUN/csv_monitor to RUN/metrics.jsonl

Needs: pip install tensorboard==2.21.0. Numbers and times are those of the test.
"""
import csv
import glob
import json
import math
import os
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

SCALARS = [
    ("Train/Samples/train_loss", 2.5, 8),
    ("Train/Samples/lr", 0.003, 8),
    ("train/loss", 0.0, 0),  # what protobuf leaves out, and what it does not
    ("train/grad_norm", math.inf, 300),
    ("memory/params", 123456789.0, 2**40 + 5),
    ("validation/loss", -1e-30, 127),
]


def make(directory):
    with open(os.path.join(directory, "events.tfrecord"), "wb") as out:
        writer = RecordWriter(out)
        writer.write(Event(wall_time=1700000000.25, file_version="brain.Event:2").SerializeToString(deterministic=True))
        for n, (tag, value, step) in enumerate(SCALARS):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            event = Event(wall_time=1700000001.5 + n, step=step, summary=summary)
            writer.write(event.SerializeToString(deterministic=True))
        writer.flush()
    # As DeepSpeed's csv_monitor: a writer with its defaults, on a text file.
    with open(os.path.join(directory, "Train_Samples_train_loss.csv"), "w") as out:
        rows = csv.writer(out)
        rows.writerow(["step", "train_loss"])
        for step, value in ((8, 2.5), (16, 0.001), (24, 1e-05), (32, 3.0), (40, math.nan), (48, math.inf), (56, 1e22)):
            rows.writerow([step, value])


def fp32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def check(run):
    lines = [json.loads(line) for line in open(os.path.join(run, "metrics.jsonl"))]
    steps = {l["step"]: l for l in lines if l["type"] == "step"}
    evals = {l["step"]: l for l in lines if l["type"] == "eval"}
    samples = next(l for l in lines if l["type"] == "run")["config"]["train_batch_size"]
    directory = os.path.join(run, "tensorboard", "DeepSpeedJobName")
    events = EventAccumulator(directory, size_guidance={"scalars": 0})
    events.Reload()
    curves = {
        "Train/Samples/train_loss": {n * samples: l["loss"] for n, l in steps.items()},
        "Train/Samples/lr": {n * samples: l["lr"] for n, l in steps.items()},
        "train/loss": {n: l["loss"] for n, l in steps.items()},
        "train/grad_norm": {n: l["grad_norm"] for n, l in steps.items()},
        "train/tokens_per_s": {n: l["tokens_per_s"] for n, l in steps.items()},
        "train/mfu": {n: l["mfu"] for n, l in steps.items()},
        "memory/params": {n: l["memory_bytes"]["params"] for n, l in steps.items()},
        "validation/loss": {n: l["val_loss"] for n, l in evals.items()},
    }
    for tag, curve in curves.items():
        seen = {e.step: e.value for e in events.Scalars(tag)}
        assert seen.keys() == curve.keys(), (tag, seen, curve)
        for step, value in curve.items():
            assert same(seen[step], fp32(value)), (tag, step, seen[step], value)
        name = tag.replace("/", "_") + ".csv"
        with open(os.path.join(run, "csv_monitor", "DeepSpeedJobName", name), newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["step", tag.split("/")[-1]], header
        seen = {int(step): float(value) for step, value in rows}
        assert seen == curve, (tag, seen, curve)
    files = glob.glob(os.path.join(directory, "events.out.tfevents.*"))
    print(f"{run}: {len(files)} event files, {len(events.Tags()['scalars'])} curves, {len(steps)} steps: as metrics.jsonl")


if len(sys.argv) == 3 and sys.argv[1] == "--check":
    check(sys.argv[2])
elif len(sys.argv) == 2:
    make(sys.argv[1])
else:
    sys.exit(__doc__)
