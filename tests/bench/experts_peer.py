#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts on the CPU, forward and backward with all gradients: experts_bench beside transformers' OLMoE
block, whose experts are a loop (eager) or grouped products, eager and compiled, and beside DeepSpeed's MoE layer.

    experts_peer.py BENCH [ROUNDS [THREADS [SHAPE [PEER,...]]]]        BENCH: the program experts_bench

All take turns; a figure is the median over rounds of milliseconds, of which each round takes the median of three passes
after one that warms up. The peers' routers have random weights, too. DeepSpeed drops no token; its experts are a list of
modules, and it runs in one process over gloo. batched_mm, transformers' third implementation, copies the matrices of an
expert for each choice: 24 GiB for "small". Needs torch and transformers; deepspeed for its row.
"""
import gc
import os
import statistics
import subprocess
import sys
import time

import torch

rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
threads = int(sys.argv[3]) if len(sys.argv) > 3 else 2
SHAPES = {"olmoe": (1024, 2048, 1024, 64, 8), "small": (2048, 768, 256, 64, 8)}  # tokens, hidden, of an expert, E, k
shapes = sys.argv[4].split(",") if len(sys.argv) > 4 else list(SHAPES)
PEERS = ["eager", "grouped_mm", "eager compiled", "grouped_mm compiled", "deepspeed"]
peers = sys.argv[5].split(",") if len(sys.argv) > 5 else PEERS
torch.set_num_threads(threads)


def ours(shape, dtype):
    line = subprocess.run([sys.argv[1], str(threads), "3", shape, dtype], check=True, capture_output=True, text=True).stdout
    _, _, forward, backward, _ = line.split()
    return float(forward), float(backward)


def block_of(shape, implementation):
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    _, hidden, intermediate, experts, chosen = SHAPES[shape]
    config = OlmoeConfig(hidden_size=hidden, intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=chosen,
                         norm_topk_prob=True, experts_implementation=implementation)
    block = OlmoeSparseMoeBlock(config)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return block


def deepspeed_of(shape):
    import deepspeed
    from deepspeed.moe.layer import MoE
    if not torch.distributed.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29517", DS_ACCELERATOR="cpu")
        deepspeed.init_distributed(dist_backend="gloo")
    _, hidden, intermediate, experts, chosen = SHAPES[shape]

    class Expert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = torch.nn.Linear(hidden, 2 * intermediate, bias=False)
            self.down = torch.nn.Linear(intermediate, hidden, bias=False)

        def forward(self, x):
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(torch.nn.functional.silu(gate) * up)

    layer = MoE(hidden, Expert(), num_experts=experts, ep_size=1, k=chosen, drop_tokens=False, use_rts=False)
    layer.set_deepspeed_parallelism()
    return layer


def theirs(shape, dtype, peer):
    torch._dynamo.reset()
    gc.collect()
    name, *how = peer.split()
    module = (deepspeed_of(shape) if name == "deepspeed" else block_of(shape, name)).to(dtype)
    tokens, hidden, *_ = SHAPES[shape]
    call = torch.compile(module) if how else module
    x = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    times = []
    for _ in range(4):
        module.zero_grad()
        begin = time.monotonic()
        y = call(x)
        y = y[0] if isinstance(y, tuple) else y
        middle = time.monotonic()
        y.backward(torch.ones_like(y))
        times.append((middle - begin, time.monotonic() - middle))
    return tuple(1e3 * statistics.median(t[way] for t in times[1:]) for way in (0, 1))


print(f"{'shape':6} {'type':5} {'layer':20} {'forward':>9} {'backward':>9} {'theirs / ours':>14}")
for shape in shapes:
    for dtype_name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found = {}
        for _ in range(rounds):
            for peer in ["ours", *peers]:
                try:
                    t = ours(shape, dtype_name) if peer == "ours" else theirs(shape, dtype, peer)
                except Exception as error:
                    print(f"{shape:6} {dtype_name:5} {peer:20} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                    continue
                found.setdefault(peer, []).append(t)
        base = statistics.median(sum(t) for t in found["ours"])
        for peer, times in found.items():
            forward, backward = (statistics.median(t[way] for t in times) for way in (0, 1))
            ratio = statistics.median(sum(t) for t in times) / base
            print(f"{shape:6} {dtype_name:5} {peer:20} {forward:9.1f} {backward:9.1f} {ratio:14.2f}", flush=True)
