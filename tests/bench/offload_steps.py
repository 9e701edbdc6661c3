#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The time of a training step with states in memory, in a file, late, and with a server; with parameters in memory and in
a file, micro-batches in turn, layers in turn or in tiles; with inputs of layers that are computed again in memory and in a file; and of
attaching.

usage: offload_steps.py BUILD DIR [RANKS [STEPS [ROUNDS]]]

BUILD: a build directory. DIR: a directory of the disk. Prints the median step of each, as a ratio to memory, the time that
a step waits for what is offloaded, the share that is hidden, what rank 0 reads in a step, and how long a run takes from
its start to its first step where the server has its state already.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

build, disk = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
ranks, steps, rounds = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((3, 2), (4, 8), (5, 3)))
os.environ["PATH"] = build + "/bin:" + os.environ["PATH"]

CONFIG = {
    "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "data": {"train": "text.txt", "seq_length": 64},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


def write_config(zero, sections=None):
    config = dict(CONFIG, steps=steps)
    config["zero_optimization"] = dict(CONFIG["zero_optimization"], **zero)
    config.update(sections or {})
    with open("cfg.json", "w", encoding="utf-8") as f:
        json.dump(config, f)


def run(out, zero, sections):
    write_config(zero, sections)
    subprocess.run(["ds-launch", "-n", str(ranks), "ds-train", "cfg.json", "--out", out, "--quiet"], check=True,
                   stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open(out + "/metrics.jsonl", encoding="utf-8")]
    taken = [line for line in lines if line["type"] == "step" and "step_ms" in line][1:]
    moved = [line["offload"] for line in taken if "offload" in line]
    return {"ms": statistics.median(line["step_ms"] for line in taken),
            "wait": statistics.median(m["wait_ms"] for m in moved) if moved else 0.0,
            "hidden": statistics.median(m.get("hidden", 0) for m in moved) if moved else 0.0,
            "read": statistics.median(m["read_bytes"] for m in moved) / 1e6 if moved else 0.0}, \
        tuple(line["loss"] for line in lines if line["type"] == "step")


def seconds_to_go_on(out, zero):
    """Of a run that has nothing left to train: it starts, takes the state over, and ends."""
    write_config(zero)
    begin = time.time()
    subprocess.run(["ds-launch", "-n", str(ranks), "ds-train", "cfg.json", "--out", out, "--quiet", "--resume",
                    "latest"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.time() - begin


class Server:
    def __init__(self, name, *where):
        self.name = name
        self.process = subprocess.Popen(["ds-offload", "serve", name, *where], stderr=subprocess.DEVNULL)
        while '"runs": true' not in subprocess.run(["ds-offload", "ls", "--json"], capture_output=True, text=True,
                                                   check=True).stdout:
            time.sleep(0.05)

    def end(self):
        subprocess.run(["ds-offload", "rm", self.name], check=True)
        self.process.wait()


def states(**offload):
    return {"offload_optimizer": offload}


def parameters(device):
    # Layers are not kept between their uses, as those of a model that is larger than its memory.
    return {"stage": 3, "stage3_max_reuse_distance": 8_000_000, "stage3_prefetch_bucket_size": 8_000_000,
            "offload_param": {"device": device, "nvme_path": disk} if device != "none" else {"device": "none"}}


def main():
    nvme = {"device": "nvme", "nvme_path": disk}
    breadth = {"pipeline": {"schedule": "breadth-first", "virtual_stages": CONFIG["model"]["n_layer"] + 2}}
    inputs, inputs_nvme = ({"activation_checkpointing": dict(granularity="layer", **where)}
                           for where in ({}, {"nvme_path": disk}))
    cases = {
        "memory": (states(device="none"), None),
        "nvme": (states(**nvme), None),
        "nvme, delayed": (states(**nvme, delayed_update=True, delayed_update_start=1), None),
        "server, memory": (states(device="server", name="bench"), None),
        "server, disk": (states(device="server", name="bench"), None),
        "parameters": (parameters("none"), None),
        "parameters, breadth first": (parameters("none"), breadth),
        "parameters, nvme": (parameters("nvme"), None),
        "parameters, nvme, breadth first": (parameters("nvme"), breadth),
        "parameters, tiles": (dict(parameters("none"), stage3_tile_size=600_000), None),
        "parameters, nvme, tiles": (dict(parameters("nvme"), stage3_tile_size=600_000), None),
        "inputs": (states(device="none"), inputs),
        "inputs, nvme": (states(device="none"), inputs_nvme),
    }
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        with open("text.txt", "w", encoding="utf-8") as f:
            f.write("The quick brown fox jumps over the lazy dog. " * 20000)
        found, starts, losses, of_tiles = {c: [] for c in cases}, {c: [] for c in cases}, set(), set()
        for r in range(rounds):
            for case, (zero, sections) in cases.items():
                server = None
                if case.startswith("server"):
                    server = Server("bench", *(["--shm"] if case == "server, memory" else ["--path", disk]))
                row, loss = run(f"{case}-{r}", zero, sections)
                found[case].append(row)
                if "delayed" not in case:
                    (of_tiles if "tiles" in case else losses).add(loss)
                if server or case == "memory":
                    starts[case].append(seconds_to_go_on(f"{case}-{r}", zero))
                if server:
                    server.end()
        assert len(losses) == len(of_tiles) == 1, "losses differ"
        median = {c: {k: statistics.median(row[k] for row in found[c]) for k in found[c][0]} for c in cases}
        print(f"{'':<32} {'step ms':>9} {'ratio':>6} {'waits ms':>9} {'hidden':>7} {'read MB':>8} {'goes on s':>9}")
        for case, m in median.items():
            base = median[case.split(",")[0] if case.startswith(("parameters", "inputs")) else "memory"]["ms"]
            goes_on = f"{statistics.median(starts[case]):>9.2f}" if starts[case] else ""
            print(f"{case:<32} {m['ms']:>9.1f} {m['ms'] / base:>6.2f} {m['wait']:>9.1f} {m['hidden']:>7.2f} "
                  f"{m['read']:>8.1f} {goes_on}")
        print(f"{ranks} ranks, medians of {rounds} rounds of {steps} steps")


main()
