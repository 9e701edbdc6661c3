#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch beside sparse_bench: what `sparse_bench --save DIR` has written, with scaled_dot_product_attention and the same
mask, forward and backward, and with a compiled flex_attention, forward alone (its backward raises on CPUs).

    sparse_peers.py DIR [--threads 2] [--dtype bf16] [--only fixed-4096,...] [--no-flex]
"""
import argparse
import os
import time

import torch

HEADS, DIM = 8, 64


def layout_of(path):
    with open(path) as f:
        block, count, layouts = map(int, f.readline().split())
        rows = [[c == "1" for c in f.readline().strip()] for _ in range(layouts * count)]
    return block, torch.tensor(rows).view(layouts, count, count)


def seconds(f, most=7):
    best, spent, turn = 1e30, 0.0, 0
    while turn < most and (turn < 2 or spent < 2) and (turn < 1 or spent < 30):
        start = time.perf_counter()
        f()
        took = time.perf_counter() - start
        best, spent, turn = min(best, took), spent + took, turn + 1
    return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--only", default="")
    parser.add_argument("--no-flex", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    wanted = [w for w in args.only.split(",") if w]
    print(f"torch {torch.__version__}, {args.threads} threads, {args.dtype}")
    print(f"{'layout':<18} {'sdpa fwd ms':>12} {'sdpa bwd ms':>12} {'flex fwd ms':>12}")
    for name in sorted(os.listdir(args.folder), key=lambda n: (int(n.split("-")[-1][:-4]), n)):
        if not name.endswith(".txt") or (wanted and name[:-4] not in wanted):
            continue
        tokens = int(name.split("-")[-1][:-4])
        block, layout = layout_of(os.path.join(args.folder, name))
        q, k, v = (torch.randn(1, HEADS, tokens, DIM, dtype=dtype, requires_grad=True) for _ in range(3))
        grad = torch.randn_like(q)
        mask = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :tokens, :tokens].tril()[None]
        attend = torch.nn.functional.scaled_dot_product_attention

        def forward():
            with torch.no_grad():
                attend(q, k, v, attn_mask=mask)

        fwd = seconds(forward)
        out = attend(q, k, v, attn_mask=mask)

        def backward():
            torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        bwd = seconds(backward)
        flex = float("nan")
        if not args.no_flex:
            try:
                from torch.nn.attention.flex_attention import create_block_mask, flex_attention

                one = layout.shape[0] == 1

                def visible(b, h, i, j):
                    return layout[0 if one else h, i // block, j // block] & (j <= i)

                met = create_block_mask(visible, 1, None if one else HEADS, tokens, tokens, device="cpu")
                compiled = torch.compile(flex_attention)
                with torch.no_grad():
                    plain = [x.detach() for x in (q, k, v)]
                    compiled(*plain, block_mask=met)
                    flex = seconds(lambda: compiled(*plain, block_mask=met))
            except Exception as e:  # noqa: BLE001: an error of one version is printed
                print(f"  flex_attention: {type(e).__name__}: {str(e).splitlines()[0][:100]}")
        print(f"{name[:-4]:<18} {1e3 * fwd:>12.1f} {1e3 * bwd:>12.1f} {1e3 * flex:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
