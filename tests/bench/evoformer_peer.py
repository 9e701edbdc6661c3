#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The attention of an Evoformer on the CPU: evoformer_bench beside PyTorch's plain implementation, eager, in turns.

    evoformer_peer.py BENCH [N [T [H [D [ROUNDS [THREADS]]]]]]        BENCH: the program evoformer_bench

Forward and backward with a mask of keys and a bias of pairs, and the gradients of both, fp32 and bf16: the least
milliseconds of a round, medians over the rounds, their ratios, and by how much a first pass raises the resident memory,
arguments and results apart. One thread is timed in processor time, so that other programs disturb it less. Needs torch.
"""
import math
import os
import statistics
import subprocess
import sys
import time

sizes = [int(x) for x in sys.argv[2:6]]
N, T, H, D = sizes + [256, 256, 4, 32][len(sizes):]
rounds = int(sys.argv[6]) if len(sys.argv) > 6 else 5
threads = int(sys.argv[7]) if len(sys.argv) > 7 else len(os.sched_getaffinity(0))
TURNS = 5
clock = time.process_time if threads == 1 else time.perf_counter  # as evoformer_bench


def ours():
    command = [sys.argv[1], *map(str, (N, T, H, D, threads, TURNS))]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[2:]
    rows = {}
    for line in lines:
        name, fwd, _, bwd, _, scratch, peak = line.split()
        rows[name] = float(fwd), float(bwd), max(float(scratch), float(peak))  # memory that was there is used again
    return rows


def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(key))


def torch_row(name):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    q, k, v = (torch.rand(1, N, T, H, D).to(dtype).requires_grad_() for _ in range(3))
    bias1 = torch.rand(1, N, 1, 1, T).to(dtype).requires_grad_()
    bias2 = torch.rand(1, 1, H, T, T).to(dtype).requires_grad_()
    dout = torch.rand(1, N, T, H, D).to(dtype)
    leaves = [q, k, v, bias1, bias2]

    def forward():
        x, y, z = (a.transpose(2, 3) for a in (q, k, v))
        scores = (x / math.sqrt(D)) @ y.transpose(-1, -2) + bias1 + bias2
        return (torch.softmax(scores, -1) @ z).transpose(2, 3)

    def turn():
        for x in leaves:
            x.grad = None
        start = clock()
        o = forward()
        middle = clock()
        o.backward(dout)
        return middle - start, clock() - middle

    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = status("VmRSS")
    turn()
    results = sum(x.numel() * x.element_size() for x in [*leaves, dout]) / 2**20  # dout stands for o
    peak = status("VmHWM") - before - results
    times = [turn() for _ in range(TURNS)]
    print(1e3 * min(t[0] for t in times), 1e3 * min(t[1] for t in times), peak)


if sys.argv[1] == "--torch":
    torch_row(os.environ["TYPE"])
    sys.exit()
found = {}
for _ in range(rounds):
    for name, row in ours().items():
        found.setdefault((name, "libds"), []).append(row)
    for name in ("fp32", "bf16"):  # a process of its own, which has no memory of others
        command = [sys.executable, __file__, "--torch", *map(str, (N, T, H, D, rounds, threads))]
        out = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "TYPE": name}).stdout
        found.setdefault((name, "torch"), []).append(tuple(map(float, out.split())))

print(f"N {N}, T {T}, H {H}, D {D}, {threads} threads, medians of {rounds} rounds of the least of {TURNS} turns")
print(f"{'':12} {'forward ms':>11} {'backward ms':>12} {'both ms':>9} {'peak MiB':>9}")
for name in ("fp32", "bf16"):
    both = {}
    for who in ("libds", "torch"):
        rows = found[name, who]
        fwd, bwd, peak = (statistics.median(r[i] for r in rows) for i in range(3))
        both[who] = statistics.median(r[0] + r[1] for r in rows), peak
        print(f"{name + ' ' + who:12} {fwd:11.1f} {bwd:12.1f} {both[who][0]:9.1f} {peak:9.1f}")
    ratios = sorted((t[0] + t[1]) / (o[0] + o[1]) for o, t in zip(found[name, "libds"], found[name, "torch"]))
    print(f"{name}: {both['torch'][0] / both['libds'][0]:.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
          f"{both['libds'][1] / both['torch'][1]:.3f} of the memory")
