#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ds-memreport predicts of runs on the CPU, beside what they count, what of the process is resident, and how long
their steps take.

    python3 tests/bench/run_matrix.py BUILD_DIR WORK_DIR [FILTER]

Every run is ds-launch -n RANKS ds-train over this file's text. Predicted: ds-memreport CONFIG --json, before the run.
Counted: counted_bytes of the last line of metrics.jsonl, of every rank. `states`: the tags of model states. `else`: the
tag of the others that is furthest off. `resident`: of the rank whose resident memory is furthest from its base and
what it counted. `step ms`: predicted by the rates of ops and links as they are before the run, and the median of the
steps behind the first two, by the clock. Exits 1 where a bound on memory is not kept; times are only shown.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

STATES = {"params", "grads", "grad_accum", "master", "optimizer"}
GPT = {"type": "gpt2", "vocab_size": 1003, "n_positions": 512, "n_embd": 256, "n_layer": 6, "n_head": 8}
LLAMA = {"type": "llama", "vocab_size": 2048, "max_position_embeddings": 512, "hidden_size": 192,
         "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
         "tie_word_embeddings": False}
MODELS = {"gpt2": GPT, "llama": LLAMA}
TYPES = {"fp32": [], "bf16": ["bf16.enabled=true"], "fp16": ["fp16.enabled=true"]}
OPERATIONS = "reduce_scatter,all_gather,all_reduce,all_to_all,broadcast,sendrecv"
WARM_UP, STEPS = 2, 9
LAYER = "activation_checkpointing.granularity=layer"
SELECTIVE = "activation_checkpointing.granularity=selective"


def stage(n):
    return f"zero_optimization.stage={n}"


def pipeline(stages, schedule, chunks=1):
    return [f"pipeline.stages={stages}", f"pipeline.schedule={schedule}", f"pipeline.virtual_stages={chunks}"]


# Ranks, type, keys; each with both models.
RUNS = [
    (1, "fp32", []),
    (1, "bf16", []),
    (1, "fp16", []),
    (1, "bf16", ["gradient_accumulation_steps=4"]),
    (1, "bf16", [LAYER]),
    (1, "fp32", [LAYER, "activation_checkpointing.interval=2"]),
    (1, "bf16", [SELECTIVE, "data.seq_length=512"]),
    (1, "bf16", ["save.async=true"]),
    (1, "fp32", ["train_micro_batch_size_per_gpu=8", "threads=2"]),
    (2, "bf16", [stage(0)]),
    (2, "bf16", [stage(1)]),
    (2, "bf16", [stage(2)]),
    (2, "bf16", [stage(3)]),
    (2, "fp32", [stage(1), "gradient_accumulation_steps=3"]),
    (2, "fp32", [stage(2), "gradient_accumulation_steps=3", "reduce_order=micro"]),
    (2, "fp16", [stage(3), LAYER, "zero_optimization.stage3_param_persistence_threshold=0"]),
    (2, "bf16", [stage(2), "zero_optimization.reduce_bucket_size=200000", "zero_optimization.overlap_comm=false"]),
    (2, "bf16", [stage(1), "communication.backend=mpi"]),
    (2, "bf16", [stage(0), "communication_data_type=fp32"]),
    (2, "bf16", ["tensor_parallel.tp_size=2"]),
    (2, "fp32", ["tensor_parallel.tp_size=2", "tensor_parallel.sequence_parallel=true"]),
    (2, "bf16", ["tensor_parallel.tp_size=2", LAYER, "activation_checkpointing.partition_activations=true"]),
    (2, "bf16", ["sequence_parallel_size=2"]),
    (2, "bf16", ["sequence_parallel_size=2", "sequence_parallel_mode=ring", stage(3)]),
    (2, "bf16", [*pipeline(2, "gpipe"), "gradient_accumulation_steps=4", stage(0)]),
    (2, "fp32", [*pipeline(2, "1f1b"), "gradient_accumulation_steps=4", stage(1)]),
    (2, "bf16", [*pipeline(2, "interleaved", 2), "gradient_accumulation_steps=4", stage(1)]),
    (2, "bf16", [*pipeline(2, "zb-h1"), "gradient_accumulation_steps=4", stage(1), LAYER]),
    (3, "bf16", [stage(3)]),
    (4, "bf16", [stage(2)]),
    (4, "bf16", ["tensor_parallel.tp_size=2", stage(2)]),
    (4, "fp32", ["tensor_parallel.tp_size=2", *pipeline(2, "1f1b"), "gradient_accumulation_steps=2", stage(1)]),
    (4, "bf16", [*pipeline(2, "1f1b"), "gradient_accumulation_steps=3", stage(1), SELECTIVE]),
]


class Row(NamedTuple):
    states: float
    other: tuple[float, str]
    total: float
    resident: float
    counted: int
    base: int
    predicted_ms: float
    step_ms: float

    @property
    def time_error(self):
        return self.predicted_ms / self.step_ms - 1


def settings_of(precision, keys):
    batch = [] if any("micro_batch_size" in key for key in keys) else ["train_micro_batch_size_per_gpu=2"]
    return [x for key in (*TYPES[precision], *batch, *keys) for x in ("--set", key)]


def off(predicted, counted):
    """How far the prediction is from the count, as a part of it."""
    return 0.0 if predicted == counted else abs(predicted - counted) / max(counted, 1)


def threads_of(ranks, keys):
    """Of each rank, as ds-train chooses."""
    asked = [int(key.split("=")[1]) for key in keys if key.startswith("threads=")]
    return asked[0] if asked else max(1, len(os.sched_getaffinity(0)) // ranks)


def measure(bin, work, model, ranks, precision, keys):
    shutil.rmtree(work / "run", ignore_errors=True)
    settings = settings_of(precision, keys)

    def run(program, *arguments):
        return subprocess.run([bin / program, *map(str, arguments)], cwd=work, check=True, capture_output=True,
                              text=True, env={**os.environ, "PATH": f"{bin}:{os.environ['PATH']}",
                                              "CUDA_VISIBLE_DEVICES": ""}).stdout

    run("ds-memreport", "--measure", "machine.json", "-n", ranks, "--threads", threads_of(ranks, keys))
    rates = ["--machine", "machine.json"]
    if ranks > 1:
        run("ds-commbench", "--ranks", ranks, "--op", OPERATIONS, "-b", "4K", "-e", "16M", "-f", 8, "-n", 20,
            "--check", 0, "--save", "links.json")
        rates += ["--links", "links.json"]
    report = json.loads(run("ds-memreport", f"{model}.json", "-n", ranks, "--device", "cpu", "--json", *rates,
                            *settings))
    run("ds-launch", "-n", ranks, "ds-train", f"{model}.json", "--out", "run", "--steps", WARM_UP + STEPS, "--quiet",
        *settings)
    predicted = {}
    for group in report["groups"]:
        predicted.update((rank, group["memory_bytes"]) for rank in group["ranks"])
    with open(work / "run" / "metrics.jsonl", encoding="utf-8") as lines:
        metrics = [json.loads(line) for line in lines]
    step_ms = [line["step_ms"] for line in metrics if line["type"] == "step"][WARM_UP:]
    assert len(step_ms) == STEPS
    memory = metrics[-1]
    assert memory["type"] == "memory" and len(memory["ranks"]) == ranks
    states, other, total, resident, largest = 0.0, (0.0, ""), 0.0, 0.0, 0
    for rank in memory["ranks"]:
        counted, own = rank["counted_bytes"], predicted[rank["rank"]]
        for tag in counted.keys() | own.keys():
            error = off(own.get(tag, 0), counted.get(tag, 0))
            if tag in STATES:
                states = max(states, error)
            else:
                other = max(other, (error, tag))
        sum_counted, sum_own = sum(counted.values()), sum(own.values())
        total = max(total, off(sum_own, sum_counted))
        largest = max(largest, sum_counted)
        error = rank["resident_bytes"] / (rank["base_bytes"] + sum_own) - 1
        resident = max(resident, error, key=abs)
    base = max(rank["base_bytes"] for rank in memory["ranks"])
    return Row(states, other, total, resident, largest, base, report["time"]["step_s"] * 1e3,
               statistics.median(step_ms))


def read_arguments(usage, models, rest):
    """BUILD WORK [FILTER]; WORK gets a text, and a configuration of each model with the rest of its keys."""
    parser = argparse.ArgumentParser(usage=usage)
    parser.add_argument("build", type=lambda p: Path(p).resolve() / "bin")
    parser.add_argument("work", type=lambda p: Path(p).resolve())
    parser.add_argument("filter", nargs="?", default="")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    (a.work / "text.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 4, encoding="utf-8")
    for name, model in models.items():
        (a.work / f"{name}.json").write_text(json.dumps({"model": model} | rest), encoding="utf-8")
    return a


def main():
    a = read_arguments(__doc__, MODELS, {"data": {"train": "text.txt", "seq_length": 256},
                                         "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    print("model  ranks type  states  else              total  resident  counted MiB  base MiB   step ms:"
          " predicted  median            keys")
    rows = []
    for model in MODELS:
        for ranks, precision, keys in RUNS:
            name = f"{model} {ranks} {precision} {' '.join(keys)}"
            if a.filter not in name:
                continue
            try:
                r = measure(a.build, a.work, model, ranks, precision, keys)
            except subprocess.CalledProcessError as e:
                sys.exit(f"run_matrix: error: {name}: {e.stderr}")
            rows.append((ranks, r))
            other, tag = r.other
            print(f"{model:6} {ranks:5} {precision:5} {r.states:6.2%} {other:7.2%} {tag if other else '':10}"
                  f"{r.total:6.2%} {r.resident:+9.2%} {r.counted / 2**20:12.1f} {r.base / 2**20:9.1f}"
                  f" {r.predicted_ms:20.1f} {r.step_ms:7.1f} {r.time_error:+8.1%}   {' '.join(keys)}", flush=True)
    states, other = max(r.states for _, r in rows), max(r.other[0] for _, r in rows)
    resident = max(abs(r.resident) for _, r in rows)
    exact = sum(r.states == 0 and r.other[0] == 0 for _, r in rows)
    print(f"{len(rows)} runs, {exact} of them exact in every tag of every rank; at most: model states {states:.2%}, "
          f"another tag {other:.2%}, resident memory {resident:.2%}")
    cores = len(os.sched_getaffinity(0))
    for name, among in (("all", rows), (f"of at most {cores} ranks, the cores here", [r for r in rows if r[0] <= cores]),
                        (f"of more ranks than {cores} cores", [r for r in rows if r[0] > cores])):
        signed = [r.time_error for _, r in among]
        errors = sorted(abs(e) for e in signed)
        if errors:
            print(f"time of a step, {name}: {len(errors)} runs, off by {statistics.median(errors):.1%} in the median "
                  f"({statistics.median(signed):+.1%} with its sign), {errors[-1]:.1%} at most; "
                  f"{sum(e <= 0.2 for e in errors)} within 20%")
    sys.exit(states > 0 or other > 0.02 or resident > 0.1)


if __name__ == "__main__":
    main()
