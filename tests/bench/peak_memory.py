#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ds-memreport predicts that a process takes at most, beside what processes of runs on the CPU have resident.

    python3 tests/bench/peak_memory.py BUILD_DIR WORK_DIR [FILTER]

Every run is ds-launch -n RANKS ds-train over the text of run_matrix.py, which saves twice and is then resumed.
Predicted, by ds-memreport CONFIG --json: what is counted (all tags), the process before it takes anything, and what
there is for a moment at most. Measured, of the rank with most: the process before it took anything (base_bytes of
metrics.jsonl), and the most anonymous memory that was seen from start to end, some 500 times a second, with the usual
share of what is shared. MiB; ratio: that peak over the prediction. Exits 1 where a peak is more than 3 % above the
prediction or more than 8 % below it.
"""
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

from run_matrix import read_arguments

MIB = 2.0**20
TINY = {"type": "gpt2", "vocab_size": 256, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
SMALL = {"type": "gpt2", "vocab_size": 1003, "n_positions": 256, "n_embd": 256, "n_layer": 6, "n_head": 8}
WIDE = {"type": "llama", "vocab_size": 32000, "max_position_embeddings": 256, "hidden_size": 192,
        "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
DEEP = {"type": "gpt2", "vocab_size": 256, "n_positions": 128, "n_embd": 64, "n_layer": 96, "n_head": 2}
MODELS = {"tiny": TINY, "small": SMALL, "wide": WIDE, "deep": DEEP}
BF16, FP16 = "bf16.enabled=true", "fp16.enabled=true"
RUNS = [
    ("tiny", 1, []),
    ("tiny", 1, [BF16]),
    ("tiny", 2, [BF16, "zero_optimization.stage=2"]),
    ("tiny", 2, ["communication.backend=mpi"]),
    ("small", 1, []),
    ("small", 1, [BF16]),
    ("small", 1, [BF16, "save.async=true"]),
    ("small", 2, [FP16, "zero_optimization.stage=1"]),
    ("small", 2, [BF16, "zero_optimization.stage=3"]),
    ("small", 2, ["zero_optimization.stage=2", "communication.backend=mpi"]),
    ("small", 2, [BF16, "tensor_parallel.tp_size=2"]),
    ("small", 2, ["pipeline.stages=2"]),
    ("small", 4, [BF16, "zero_optimization.stage=2"]),
    ("wide", 1, []),
    ("wide", 1, [BF16]),
    ("wide", 2, [BF16, "zero_optimization.stage=3"]),
    ("deep", 1, []),
    ("deep", 2, [BF16, "zero_optimization.stage=1"]),
    ("deep", 4, [BF16, "zero_optimization.stage=1"]),
    ("deep", 8, [BF16, "zero_optimization.stage=1"]),
]


def status_of(pid, name, keys):
    """The sum of these lines in kB of a file of /proc; 0 where the process is gone."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="ascii") as lines:
            return 1024 * sum(int(line.split()[1]) for line in lines if line.split(":")[0] in keys)
    except (OSError, ValueError):
        return 0


class Watch:
    """The peak of every ds-train that runs in a folder."""

    def __init__(self, work, ranks):
        self.work, self.ranks, self.peaks, self.shared, self.pids, self.next_look = work, ranks, {}, {}, [], 0.0

    def look(self):
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + 0.05
            self.pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and self.is_ours(pid)]
            for pid in self.pids:  # before all are there, or when some have left, the parts of the others are larger
                if len(self.pids) == self.ranks:
                    self.shared.setdefault(pid, []).append(status_of(pid, "smaps_rollup", {"Pss_Shmem"}))
        for pid in self.pids:
            self.peaks[pid] = max(self.peaks.get(pid, 0), status_of(pid, "status", {"RssAnon"}))

    def most(self):
        return max(peak + statistics.median(self.shared.get(pid, [0])) for pid, peak in self.peaks.items())

    def is_ours(self, pid):
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8") as name:
                return name.read() == "ds-train\n" and os.readlink(f"/proc/{pid}/cwd") == str(self.work)
        except OSError:
            return False


def measure(bin, work, model, ranks, keys):
    shutil.rmtree(work / "run", ignore_errors=True)
    settings = [x for key in ("train_micro_batch_size_per_gpu=2", *keys) for x in ("--set", key)]
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    report = json.loads(subprocess.run(
        [bin / "ds-memreport", f"{model}.json", "-n", str(ranks), "--device", "cpu", "--json", *settings], cwd=work,
        check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)
    group = report["groups"][report["worst_group"]]
    watch = Watch(work, ranks)
    for steps, more in (4, ["--set", "save.every=2"]), (5, ["--resume", "latest"]):
        with open(work / "errors", "w+", encoding="utf-8") as errors:
            run = subprocess.Popen([bin / "ds-launch", "-n", str(ranks), "ds-train", f"{model}.json", "--out", "run",
                                    "--steps", str(steps), "--quiet", *settings, *more], cwd=work,
                                   stdout=subprocess.DEVNULL, stderr=errors, env=environment)
            while run.poll() is None:
                watch.look()
                time.sleep(0.002)
            errors.seek(0)
            if run.returncode != 0:
                sys.exit(f"peak_memory: error: {model} {ranks} {keys}: {errors.read()}")
    with open(work / "run" / "metrics.jsonl", encoding="utf-8") as lines:
        memory = json.loads(lines.readlines()[-1])["ranks"]
    return (group["device_bytes"], group["process_bytes"], group["momentary_bytes"],
            max(rank["base_bytes"] for rank in memory), watch.most())


def main():
    a = read_arguments(__doc__, MODELS, {"data": {"train": "text.txt", "seq_length": 64}, "steps": 4})
    print("model ranks | predicted: counted  process  moment      most | measured: process      most   ratio  keys")
    good = True
    for model, ranks, keys in RUNS:
        if a.filter not in f"{model} {ranks} {' '.join(keys)}":
            continue
        counted, process, moment, base, peak = measure(a.build, a.work, model, ranks, keys)
        most = counted + process + moment
        good = good and 0.92 * most <= peak <= 1.03 * most
        print(f"{model:5} {ranks:5} | {counted / MIB:18.1f} {process / MIB:8.1f} {moment / MIB:7.1f} {most / MIB:9.1f} |"
              f" {base / MIB:17.1f} {peak / MIB:9.1f} {peak / most:7.3f}  {' '.join(keys)}", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
