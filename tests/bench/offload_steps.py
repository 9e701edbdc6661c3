#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The time of a training step with states in memory, in a file, and with a server, in turns; and of attaching.

usage: offload_steps.py BUILD DIR [RANKS [STEPS [ROUNDS]]]

BUILD: a build directory. DIR: a directory of the disk. Prints the median step of each tier, as a ratio to memory, the
time that a step waits for what is offloaded, and how long a run takes from its start to its first step where the
server has its state already.
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


def write_config(offload):
    config = dict(CONFIG, steps=steps)
    config["zero_optimization"] = dict(CONFIG["zero_optimization"], offload_optimizer=offload)
    with open("cfg.json", "w", encoding="utf-8") as f:
        json.dump(config, f)


def run(out, offload):
    write_config(offload)
    subprocess.run(["ds-launch", "-n", str(ranks), "ds-train", "cfg.json", "--out", out, "--quiet"], check=True,
                   stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open(out + "/metrics.jsonl", encoding="utf-8")]
    taken = [line for line in lines if line["type"] == "step" and "step_ms" in line][1:]
    waits = [line["offload"]["wait_ms"] for line in taken if "offload" in line]
    return (statistics.median(line["step_ms"] for line in taken), statistics.median(waits) if waits else 0.0,
            [line["loss"] for line in lines if line["type"] == "step"])


def seconds_to_go_on(out, offload):
    """Of a run that has nothing left to train: it starts, takes the state over, and ends."""
    write_config(offload)
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


def main():
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        with open("text.txt", "w", encoding="utf-8") as f:
            f.write("The quick brown fox jumps over the lazy dog. " * 20000)
        tiers = {
            "memory": {"device": "none"},
            "nvme": {"device": "nvme", "nvme_path": disk},
            "server, memory": {"device": "server", "name": "bench"},
            "server, disk": {"device": "server", "name": "bench"},
        }
        times, waits, starts, losses = ({t: [] for t in tiers}, {t: [] for t in tiers}, {t: [] for t in tiers}, set())
        for r in range(rounds):
            for tier, offload in tiers.items():
                server = None
                if offload["device"] == "server":
                    server = Server("bench", *(["--shm"] if tier == "server, memory" else ["--path", disk]))
                ms, wait, loss = run(f"{tier}-{r}", offload)
                losses.add(tuple(loss))
                times[tier].append(ms)
                waits[tier].append(wait)
                starts[tier].append(seconds_to_go_on(f"{tier}-{r}", offload))
                if server:
                    server.end()
        assert len(losses) == 1, "losses differ"
        base = statistics.median(times["memory"])
        print(f"{'states':<16} {'step ms':>9} {'ratio':>6} {'waits ms':>9} {'goes on s':>9}")
        for tier in tiers:
            ms = statistics.median(times[tier])
            print(f"{tier:<16} {ms:>9.1f} {ms / base:>6.2f} {statistics.median(waits[tier]):>9.1f} "
                  f"{statistics.median(starts[tier]):>9.2f}")
        print(f"{ranks} ranks, medians of {rounds} rounds of {steps} steps")


main()
