#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch computes as the attention of an Evoformer, for tests/parity/evoformer_test.cc.

    python3 tests/golden/make_evoformer.py        # needs torch, safetensors; a second

tests/golden/evoformer/ holds for each case
  <case>.safetensors
    q, k, v, dout             bf16 [B,N,T,H,D]  multiples of 1/64 of unit size, which fp16 has as well
    bias1                     f32 [B,N,1,1,T]   0, and -1e9 or -inf where a key is masked
    bias2                     bf16 [B,1,H,T,T]  only where the case has it
    o, dq, dk, dv             f64 [B,N,T,H,D]   the reference: every operation in fp64; dq = dL/dq of L = sum(o * dout)
    dbias1, dbias2            f64               dL/dbias, the shapes of the biases
  errors.json                 {case: {tensor: {dtype: {"max_abs", "rel_l2"}}}}: the error of PyTorch's plain
                              implementation in fp32, bf16 and fp16, every tensor in that dtype, against the reference

Cases: "row", row-wise attention of an MSA (AlphaFold 2, supplementary algorithm 7) with masked residues; "triangle",
around the starting node (algorithm 13), N = T; "padded", a mask of -inf and no bias of pairs; "masked", a sequence whose
residues all are masked with -1e9. There, fp32 has no room for the scores beside the mask; PyTorch's error is taken with
the largest bias1 of each sequence subtracted, which changes nothing that is exact.

Deterministic: fixed seeds, one thread.
"""

import json
import math
import pathlib

import torch
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).parent / "evoformer"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {  # B, N, T, H, D, the mask's value, bias2
    "row": (2, 3, 19, 2, 8, -1e9, True),
    "triangle": (1, 13, 13, 2, 8, -1e9, True),
    "padded": (1, 2, 33, 1, 16, -math.inf, False),
    "masked": (1, 3, 21, 2, 8, -1e9, True),
}


def attention(q, k, v, bias1, bias2):
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))  # [B,N,H,T,D]
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2) + bias1
    if bias2 is not None:
        scores = scores + bias2
    return (torch.softmax(scores, -1) @ v).transpose(2, 3)


def run(inputs, dtype):
    leaves = {name: x.detach().clone().to(dtype).detach().requires_grad_() for name, x in inputs.items() if name != "dout"}
    o = attention(leaves["q"], leaves["k"], leaves["v"], leaves["bias1"], leaves.get("bias2"))
    o.backward(inputs["dout"].to(dtype))
    return {"o": o.detach()} | {"d" + name: x.grad for name, x in leaves.items()}


def make(name, B, N, T, H, D, value, pairs):
    torch.manual_seed(sum(map(ord, name)))

    def values(*shape):
        return (torch.randn(shape) * 64).round().clamp(-255, 255) / 64

    inputs = {x: values(B, N, T, H, D) for x in ("q", "k", "v", "dout")}
    hidden = torch.rand(B, N, 1, 1, T) < 0.3
    if name == "masked":
        hidden[:, -1] = True
    inputs["bias1"] = torch.where(hidden, value, 0.0)
    if pairs:
        inputs["bias2"] = values(B, 1, H, T, T)
    want = run(inputs, torch.float64)
    moved = inputs | {"bias1": inputs["bias1"] - inputs["bias1"].amax(-1, keepdim=True)}
    errors = {tensor: {} for tensor in want}
    for dtype_name, dtype in DTYPES.items():
        for tensor, x in run(moved, dtype).items():
            e = x.double() - want[tensor]
            errors[tensor][dtype_name] = {"max_abs": e.abs().max().item(), "rel_l2": (e.norm() / want[tensor].norm()).item()}
    stored = {x: (y if x == "bias1" else y.bfloat16()).contiguous() for x, y in inputs.items()}
    save_file(stored | {x: y.contiguous() for x, y in want.items()}, OUT / f"{name}.safetensors")
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    errors = {name: make(name, *case) for name, case in CASES.items()}
    (OUT / "errors.json").write_text(json.dumps(errors, indent=1) + "\n")
