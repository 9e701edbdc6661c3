#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ds-ckpt-merge beside DeepSpeed itself: trains and saves anew, merges with both, compares bit by bit.

    python3 tests/peer/deepspeed_real.py [--bin build/dev/bin] [--seed N] [NAME ...]

Needs what tests/golden/make_deepspeed.py needs (torch, deepspeed, safetensors); exits with 77 where they are missing.
For each case of that script: fresh random weights and data, a checkpoint, then
  ds-ckpt-merge CKPT -o OUT --dtype fp32 --optimizer --verify
whose weights must be those of zero_to_fp32 and whose master and moments those of the live optimizer.
"""

import argparse
import pathlib
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "golden"))

try:
    import deepspeed  # noqa: F401
    import torch
    from safetensors.torch import load_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
import make_deepspeed

TIED = {"head.weight": "embed.weight"}


def compare(name, expected, merged, has_master):
    """The number of tensors compared; raises on the first that differs."""
    count = 0
    for key, value in expected.items():
        kind, _, rest = key.partition(".")
        if kind == "param":
            continue  # in the module's own dtype
        if kind in ("fp32", "exp_avg", "exp_avg_sq"):
            if kind == "fp32" and not has_master:
                continue
            key = f"optimizer.{'master' if kind == 'fp32' else kind}.{rest}"
        elif key in TIED:
            key = TIED[key]
        got = merged[key]
        value = value.to(got.dtype) if value.is_floating_point() else value
        if got.dtype != value.dtype or got.shape != value.shape or not torch.equal(
                got.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)):
            raise SystemExit(f"{name}: {key} differs")
        count += 1
    return count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build" / "dev" / "bin")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as out:
        for name in args.names or make_deepspeed.CASES:
            make_deepspeed.make(name, pathlib.Path(out), args.seed)
            directory = pathlib.Path(out) / name
            subprocess.run([args.bin / "ds-ckpt-merge", directory, "-o", directory / "merged.safetensors", "--dtype", "fp32",
                            "--optimizer", "--verify", "--quiet"], check=True)
            count = compare(name, load_file(directory / "expected.safetensors"),
                            load_file(directory / "merged.safetensors"), has_master=name != "zero0-fp32")
            print(f"{name}: {count} tensors, bit for bit", flush=True)


if __name__ == "__main__":
    main()
