#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention and its error, for tests/parity/attention_test.cc.

    python3 tests/golden/make_attention.py        # needs torch, safetensors; a second

tests/golden/attention/ holds for each case
  <case>.safetensors
    q, dout        bf16 [B,T,H,D]  multiples of 1/64 of unit size, which fp16 has as well
    k, v           bf16 [B,S,G,D]
    o, dq, dk, dv  f64             the reference: every operation in fp64; dq = dL/dq of L = sum(o * dout)
  errors.json      {case: {tensor: {dtype: {"max_abs", "rel_l2"}}}}: the error of scaled_dot_product_attention on the CPU
                   in fp32, bf16 and fp16, every tensor in that dtype, against the reference

Deterministic: fixed seeds, one thread.
"""

import json
import math
import pathlib

import torch
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).parent / "attention"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {  # B, T, S, H, G, D, causal
    "causal": (1, 97, 97, 2, 2, 16, True),
    "grouped": (2, 33, 33, 4, 2, 24, True),
    "long": (1, 13, 211, 1, 1, 32, False),
}


def plain(q, k, v, causal):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v


def run(inputs, dtype, causal, groups):
    leaves = {name: x.to(dtype).detach().requires_grad_() for name, x in inputs.items() if name != "dout"}
    q, k, v = (x.transpose(1, 2) for x in leaves.values())
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if dtype == torch.float64:
        o = plain(q, k, v, causal)
    else:
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    o = o.transpose(1, 2)
    o.backward(inputs["dout"].to(dtype))
    return {"o": o.detach()} | {"d" + name: x.grad for name, x in leaves.items()}


def make(name, B, T, S, H, G, D, causal):
    torch.manual_seed(sum(map(ord, name)))

    def values(*shape):
        return (torch.randn(shape) * 64).round().clamp(-255, 255) / 64

    inputs = {"q": values(B, T, H, D), "k": values(B, S, G, D), "v": values(B, S, G, D), "dout": values(B, T, H, D)}
    want = run(inputs, torch.float64, causal, H // G)
    errors = {tensor: {} for tensor in want}
    for dtype_name, dtype in DTYPES.items():
        for tensor, x in run(inputs, dtype, causal, H // G).items():
            e = x.double() - want[tensor]
            errors[tensor][dtype_name] = {"max_abs": e.abs().max().item(), "rel_l2": (e.norm() / want[tensor].norm()).item()}
    save_file({x: y.bfloat16().contiguous() for x, y in inputs.items()} | {x: y.contiguous() for x, y in want.items()},
              OUT / f"{name}.safetensors")
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    errors = {name: make(name, *case) for name, case in CASES.items()}
    (OUT / "errors.json").write_text(json.dumps(errors, indent=1) + "\n")
