#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ds-memreport predicts of runs on the CPU, beside what they count and what of the process is resident.

    python3 tests/bench/memory_matrix.py BUILD_DIR WORK_DIR [FILTER]

Every run is ds-launch -n RANKS ds-train over this file's text. Predicted: ds-memreport CONFIG --json, before the run.
Counted: counted_bytes of the last line of metrics.jsonl, of every rank. `states`: the tags of model states. `else`: the
tag of the others that is furthest off. `resident`: of the rank whose resident memory is furthest from its base and
what it counted. Exits 1 where a bound of the last lines is not kept.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

STATES = {"params", "grads", "grad_accum", "master", "optimizer"}
GPT = {"type": "gpt2", "vocab_size": 1003, "n_positions": 512, "n_embd": 256, "n_layer": 6, "n_head": 8}
LLAMA = {"type": "llama", "vocab_size": 2048, "max_position_embeddings": 512, "hidden_size": 192,
         "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
         "tie_word_embeddings": False}
MODELS = {"gpt2": GPT, "llama": LLAMA}
TYPES = {"fp32": [], "bf16": ["bf16.enabled=true"], "fp16": ["fp16.enabled=true"]}
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


def settings_of(precision, keys):
    batch = [] if any("micro_batch_size" in key for key in keys) else ["train_micro_batch_size_per_gpu=2"]
    return [x for key in (*TYPES[precision], *batch, *keys) for x in ("--set", key)]


def off(predicted, counted):
    """How far the prediction is from the count, as a part of it."""
    return 0.0 if predicted == counted else abs(predicted - counted) / max(counted, 1)


def measure(bin, work, model, ranks, precision, keys):
    shutil.rmtree(work / "run", ignore_errors=True)
    settings = settings_of(precision, keys)
    report = subprocess.run([bin / "ds-memreport", f"{model}.json", "-n", str(ranks), "--device", "cpu", "--json",
                             *settings], cwd=work, check=True, capture_output=True, text=True)
    subprocess.run([bin / "ds-launch", "-n", str(ranks), "ds-train", f"{model}.json", "--out", "run", "--steps", "3",
                    "--quiet", *settings], cwd=work, check=True, capture_output=True,
                   env={**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""})
    predicted = {}
    for group in json.loads(report.stdout)["groups"]:
        predicted.update((rank, group["memory_bytes"]) for rank in group["ranks"])
    with open(work / "run" / "metrics.jsonl", encoding="utf-8") as lines:
        memory = json.loads(lines.readlines()[-1])
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
    return states, other, total, resident, largest, base


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("build", type=lambda p: Path(p).resolve() / "bin")
    parser.add_argument("work", type=Path)
    parser.add_argument("filter", nargs="?", default="")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    (a.work / "text.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 4, encoding="utf-8")
    for name, model in MODELS.items():
        (a.work / f"{name}.json").write_text(json.dumps(
            {"model": model, "data": {"train": "text.txt", "seq_length": 256},
             "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}), encoding="utf-8")
    print("model  ranks type  states  else              total  resident  counted MiB  base MiB  keys")
    rows = []
    for model in MODELS:
        for ranks, precision, keys in RUNS:
            name = f"{model} {ranks} {precision} {' '.join(keys)}"
            if a.filter not in name:
                continue
            try:
                row = measure(a.build, a.work, model, ranks, precision, keys)
            except subprocess.CalledProcessError as e:
                sys.exit(f"memory_matrix: error: {name}: {e.stderr}")
            rows.append(row)
            states, (other, tag), total, resident, counted, base = row
            print(f"{model:6} {ranks:5} {precision:5} {states:6.2%} {other:7.2%} {tag if other else '':10}"
                  f"{total:6.2%} {resident:+9.2%} {counted / 2**20:12.1f} {base / 2**20:9.1f}  {' '.join(keys)}", flush=True)
    worst = (max(r[0] for r in rows), max(r[1][0] for r in rows), max(abs(r[3]) for r in rows))
    exact = sum(r[0] == 0 and r[1][0] == 0 for r in rows)
    print(f"{len(rows)} runs, {exact} of them exact in every tag of every rank; at most: model states {worst[0]:.2%}, "
          f"another tag {worst[1]:.2%}, resident memory {worst[2]:.2%}")
    sys.exit(worst[0] > 0 or worst[1] > 0.02 or worst[2] > 0.1)


if __name__ == "__main__":
    main()
