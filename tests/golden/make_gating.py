#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Choices, weights and losses of DeepSpeed's gates (deepspeed 0.19.8) on random logits, with given random numbers.

usage: make_gating.py [DIRECTORY]

Writes gating/cases.json (the parameters of each case, its capacity, loss and counts) and gating/cases.safetensors
(logits [S,E], noisy [S,E], uniform [S,k], kept [S,k], weights [S,k] of each case).
"""

import json
import pathlib
import sys

import torch
from deepspeed.moe import sharded_moe
from safetensors.torch import save_file

CPU = torch.device("cpu")


def case(seed, tokens, experts, k, factor, least, noise, policy):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) * 1.5
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator)))
    uniform = torch.rand(tokens, experts, generator=generator) * 0.999 + 0.001
    sharded_moe.gumbel_map[CPU] = lambda shape: gumbel
    sharded_moe.exp_selection_uniform_map[CPU] = lambda shape: uniform
    given = logits.clone()  # top2gating adds noise in place
    if k == 1:
        result = sharded_moe.top1gating(given, factor, least, noisy_gate_policy="RSample" if noise else None,
                                        use_rts=True, sparse_routes=True)
    elif k == 2:
        result = sharded_moe.top2gating(given, factor, least, top2_2nd_expert_sampling=noise, sparse_routes=True)
    else:
        result = sharded_moe.topkgating(given, k, factor, least, drop_policy=policy, sparse_routes=True)
    loss, capacity, _, kept, _, weights, counts = result
    tensors = {"logits": logits, "kept": kept.t().contiguous(), "weights": weights.t().contiguous().float()}
    if noise:
        tensors["noisy"] = logits + gumbel
    if k == 1:
        chosen = (logits + gumbel if noise else torch.softmax(logits, 1)).argmax(1, keepdim=True)
        tensors["uniform"] = uniform.gather(1, chosen)
    return {"tokens": tokens, "factor": factor, "min_capacity": least, "noise": noise,
            "policy": "random" if k == 1 else "position" if k == 2 else policy, "capacity": int(capacity),
            "loss": float(loss), "counts": counts.tolist()}, tensors


def main():
    directory = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent) / "gating"
    directory.mkdir(exist_ok=True)
    cases, tensors = [], {}
    for seed in range(128):
        k = [1, 2, 3, 4][seed % 4]
        experts = [4, 5, 8, 7, 16][seed % 5]
        tokens = [16, 24, 33, 10, 40, 18][seed % 6]
        factor = [1.0, 0.5, 1.25, 1.1, 2.0, 0.1, 0.75][seed % 7]
        least = [4, 0, 1, 8][seed // 4 % 4]
        noise = k < 3 and seed // 8 % 2 == 1
        policy = ["probs", "position"][seed // 4 % 2]
        found, of_case = case(seed, tokens, experts, k, factor, least, noise, policy)
        found["name"] = str(seed)
        cases.append(found)
        tensors.update({f"{seed}.{name}": tensor for name, tensor in of_case.items()})
    (directory / "cases.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
    save_file(tensors, directory / "cases.safetensors")


if __name__ == "__main__":
    main()
