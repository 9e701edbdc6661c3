#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU: attention_bench beside PyTorch's scaled_dot_product_attention, in turns.

    attention_peer.py BENCH [ROUNDS [ISA]]        BENCH: the program attention_bench

The shapes of attention_bench that train: GFLOP/s forward and backward in fp32 and bf16 with one thread, medians over the
rounds, and their ratios. Counted are the products of visible pairs, 4 D forward and 10 D backward, although PyTorch may
compute more. Both are timed in processor time, so that other programs disturb them less. Needs torch.
"""
import statistics
import subprocess
import sys
import time

import torch

rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
SHAPES = {"gpt2": (4, 512, 12, 12, 64), "llama": (1, 1024, 16, 4, 128)}  # B, T, H, G, D
TURNS = 7
torch.set_num_threads(1)


def ours():
    lines = subprocess.run([sys.argv[1], *sys.argv[3:4]], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = (line.split() for line in lines[2:])
    return {(r[0], r[1]): (float(r[3]), float(r[5])) for r in rows if r[0] in SHAPES and r[2] == "1"}


def least(f):
    f()
    times = []
    for _ in range(TURNS):
        begin = time.process_time()
        f()
        times.append(time.process_time() - begin)
    return min(times)


def theirs():
    rates = {}
    for name, (B, T, H, G, D) in SHAPES.items():
        flops = B * H * (T * T - T * (T - 1) / 2) * D
        for dtype_name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            q, k, v = (torch.randn(B, T, heads, D).to(dtype).transpose(1, 2).requires_grad_() for heads in (H, G, G))

            def forward():
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)

            o = forward()
            dout = torch.randn_like(o)
            fwd = least(lambda: forward())
            bwd = least(lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True))
            rates[name, dtype_name] = 4e-9 * flops / fwd, 10e-9 * flops / bwd
    return rates


found = [(ours(), theirs()) for _ in range(rounds)]
print(f"{'shape':6} {'type':5}  {'fwd ours':>9} {'torch':>7} {'ratio':>6}  {'bwd ours':>9} {'torch':>7} {'ratio':>6}")
for row in found[0][0]:
    line = f"{row[0]:6} {row[1]:5}"
    for way in (0, 1):
        mine, peer = (statistics.median(f[side][row][way] for f in found) for side in (0, 1))
        line += f"  {mine:9.1f} {peer:7.1f} {mine / peer:6.2f}"
    print(line)
