#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Updates of AdamW on the CPU: ds-offload's beside PyTorch's fused AdamW and DeepSpeed's CPUAdam, in turns.

    offload_update_peers.py BUILD_DIR [PARAMS [ROUNDS [THREADS]]]

One parameter with an fp32 master, both moments in fp32 and a bf16 copy of it, which each side writes: ds-offload in the
same pass, the others by copying it. Needs torch; deepspeed where it is there. Parameters per second, medians over the
rounds, and ratios.
"""
import json
import os
import statistics
import subprocess
import sys
import time

import torch

build = sys.argv[1]
params = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000_000
rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
threads = int(sys.argv[4]) if len(sys.argv) > 4 else len(os.sched_getaffinity(0))
torch.set_num_threads(threads)
os.environ["OMP_NUM_THREADS"] = str(threads)


def ours():
    command = [f"{build}/bin/ds-offload", "bench", "--params", str(params), "--optimizer", "AdamW,AdamW8bit,Lion",
               "--loops", "3", "--threads", str(threads), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    rates = {f"ds-offload {row['optimizer']}": row["params_per_s"] for row in report["updates"]}
    rates["ds-offload AdamW, share of memory"] = report["updates"][0]["gb_per_s"] / report["memory_gb_per_s"]
    return rates


class Peer:
    def __init__(self, name, make):
        self.name = name
        self.master = torch.nn.Parameter(torch.zeros(params))
        self.master.grad = torch.full((params,), 1e-5)
        self.rounded = torch.zeros(params, dtype=torch.bfloat16)
        self.optimizer = make([self.master])
        self.step()

    def step(self):
        start = time.perf_counter()
        self.optimizer.step()
        with torch.no_grad():
            self.rounded.copy_(self.master)
        return time.perf_counter() - start

    def rate(self):
        return params / statistics.median(self.step() for _ in range(3))


makers = {"torch AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1, fused=True)}
try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    makers["DeepSpeedCPUAdam"] = lambda p: DeepSpeedCPUAdam(p, lr=1e-4, weight_decay=0.1)
except Exception as e:  # not installed, or its extension does not build here
    print(f"without DeepSpeed: {e}", file=sys.stderr)

rates = {}
for _ in range(rounds):
    found = ours()
    for name, make in makers.items():  # one at a time has its memory
        try:
            found[name] = Peer(name, make).rate()
        except Exception as e:
            print(f"without {name}: {e}", file=sys.stderr)
    for name, rate in found.items():
        rates.setdefault(name, []).append(rate)

print(f"{params} parameters, {threads} threads, {rounds} rounds")
ours_rate = statistics.median(rates["ds-offload AdamW"])
for name, values in rates.items():
    middle = statistics.median(values)
    if "share" in name:
        print(f"{name}: {middle:.2f} ({min(values):.2f} to {max(values):.2f})")
    else:
        print(f"{name:28} {middle / 1e6:8.1f} million parameters/s ({min(values) / 1e6:.1f} to {max(values) / 1e6:.1f}); "
              f"ds-offload AdamW is {ours_rate / middle:.2f} times")
