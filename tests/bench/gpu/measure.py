# SPDX-License-Identifier: Apache-2.0
"""What ops_torch.py and train_torch.py share: configurations, the clock, the output. Times are taken as cuda_bench does:
n calls enqueued one after the other and waited for once; the median of several such rounds."""

import json
import re
import sys
import time

import torch

DATASHEET_FLOPS = 989e12  # an H100 SXM's bf16 products without sparsity, as in cuda_bench


def read_config(path, assignments=()):
    """JSON with // comments (in our configurations no string holds two slashes), then KEY=VALUE as of --set."""
    with open(path) as f:
        config = json.loads(re.sub(r"//[^\n]*", "", f.read()))
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        *path, leaf = key.split(".")
        place = config
        for part in path:
            place = place.setdefault(part, {})
        try:
            place[leaf] = json.loads(value)
        except json.JSONDecodeError:
            place[leaf] = value
    return config


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def median(values):
    return sorted(values)[len(values) // 2]


def timed(call, device, small=False, warm_up=3):
    """(seconds of one call, spread of the rounds); call(i) is the i-th call."""
    at = 0

    def round_of(n):
        nonlocal at
        synchronize(device)
        start = time.perf_counter()
        for i in range(at, at + n):
            call(i)
        synchronize(device)
        at += n
        return (time.perf_counter() - start) / n

    round_of(warm_up)
    n = min(max(round((1e-4 if small else 0.02) / min(round_of(2), round_of(2))), 2), 2000)
    rounds = [round_of(n) for _ in range(7)]
    return median(rounds), (max(rounds) - min(rounds)) / median(rounds)


class Records:
    """Lines of JSON, as cuda_bench --json writes them."""

    def __init__(self, path):
        self.file = open(path, "a") if path else None

    def write(self, **members):
        if self.file:
            print(json.dumps(members), file=self.file, flush=True)


def say(*words):
    print(*words, flush=True)


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"


def versions():
    return f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"
