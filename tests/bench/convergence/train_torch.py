#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the GPT-2 of one of our configurations with PyTorch, to compare its validation loss with ds-train's.

    scripts/get-text
    ds-launch -n 2 ds-train configs/gpt2-10m.json --out runs/gpt2-10m
    python3 tests/bench/convergence/train_torch.py configs/gpt2-10m.json --output runs/gpt2-10m-torch.jsonl
    python3 tests/bench/convergence/train_torch.py --compare runs/gpt2-10m/metrics.jsonl runs/gpt2-10m-torch.jsonl

Everything but the arithmetic is the same: model (transformers' GPT2LMHeadModel), split, samples and their order
(libds/data's permutation), batch size, AdamW with decay on tensors of two or more dims, clipping, learning rate per
step, bf16 parameters and gradients with fp32 master and moments. Initial weights come from the same distribution, or,
with --weights, from a safetensors file. Prints lines of metrics.jsonl. Needs torch, transformers, numpy, safetensors.
"""

import argparse
import json
import math
import re
import sys
import time

import numpy as np


def read_config(path):
    """JSON with // comments; in our configurations no string holds two slashes."""
    with open(path) as f:
        return json.loads(re.sub(r"//[^\n]*", "", f.read()))


def philox4x32(counter, key0, key1):
    """Four uint32 arrays in, the first lane of Philox4x32-10 out."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(key0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(key1), p0 & low
        key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF
        key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


def permutation(n, seed, epoch):
    """libds/data/sampler.cc: all of Permutation(n, seed, epoch), walked in parallel."""
    half = max(1, (max(n - 1, 0).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    half = np.uint64(half)
    x = np.arange(n, dtype=np.uint64)
    todo = np.ones(n, bool)
    while todo.any():
        left, right = x[todo] >> half, x[todo] & mask
        for r in range(6):
            zero = np.zeros_like(right)
            f = philox4x32((right & np.uint64(0xFFFFFFFF), right >> np.uint64(32), zero + np.uint64(epoch), zero), seed,
                           0xDA7A0000 + r)
            left, right = right, left ^ (f & mask)
        x[todo] = left << half | right
        todo = x >= n
    return x.astype(np.int64)


class Batches:
    def __init__(self, tokens, seq_length, seed):
        self.tokens, self.seq_length, self.seed = tokens, seq_length, seed
        self.num_samples = (len(tokens) - 1) // seq_length
        self.orders = {}

    def sample(self, k):
        return self.tokens[k * self.seq_length:k * self.seq_length + self.seq_length + 1]

    def at(self, consumed, count):
        rows = []
        for position in range(consumed, consumed + count):
            epoch, index = divmod(position, self.num_samples)
            if epoch not in self.orders:
                self.orders = {epoch: permutation(self.num_samples, self.seed, epoch)}
            rows.append(self.sample(self.orders[epoch][index]))
        return np.stack(rows)

    def sequential(self, first, count):
        return np.stack([self.sample(k) for k in range(first, min(first + count, self.num_samples))])


def learning_rate(config, t):
    """Of the step after t + 1 applied steps: DeepSpeed's WarmupCosineLR; constant without a scheduler."""
    lr = config["optimizer"]["params"]["lr"]
    scheduler = config.get("scheduler")
    if scheduler is None:
        return lr
    assert scheduler["type"] == "WarmupCosineLR", "only WarmupCosineLR is needed here"
    p = scheduler["params"]
    warmup = max(2, p.get("warmup_num_steps", 1000))
    total = p.get("total_num_steps", config["steps"])
    floor, start = p.get("cos_min_ratio", 1e-4), p.get("warmup_min_ratio", 0.0)
    if t < 0:
        return 0.0
    if t < warmup:
        done = t / warmup if p.get("warmup_type", "log") == "linear" else math.log(t + 1) / math.log(warmup)
        return lr * (start + (1 - start) * done)
    done = min(1.0, (t - warmup + 1) / max(1, total - warmup))
    return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def train(config, args):
    import torch
    import torch.nn.functional as F
    import transformers

    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(config.get("seed", 1234))
    device = torch.device(args.device)
    data, batch = config["data"], config["train_batch_size"]
    seq_length = data["seq_length"]
    files = [data["train"]] if isinstance(data["train"], str) else data["train"]
    tokens = np.concatenate([np.fromfile(f, np.uint8) for f in files]).astype(np.int64)
    cut = len(tokens) - int(data["split"] * len(tokens))
    seed = data.get("seed", config.get("seed", 1234))
    training, validation = Batches(tokens[:cut], seq_length, seed), Batches(tokens[cut:], seq_length, seed)

    assert config["model"]["type"] == "gpt2"
    shape = dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)  # the defaults of an inline model
    shape.update((k, v) for k, v in config["model"].items() if k != "type")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
    if args.weights:
        from safetensors.torch import load_file
        found = load_file(args.weights)
        missing, unexpected = model.load_state_dict(found, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
    model.to(device)
    master = [torch.nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    model.to(torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32)
    params = list(model.parameters())
    settings = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(
        [{"params": [m for m in master if m.dim() >= 2], "weight_decay": settings.get("weight_decay", 0.0)},
         {"params": [m for m in master if m.dim() < 2], "weight_decay": 0.0}],
        lr=settings["lr"], betas=tuple(settings["betas"]), eps=settings.get("eps", 1e-8))
    clip = config.get("gradient_clipping", 1.0)

    def loss_of(samples, reduction):
        samples = torch.from_numpy(samples).to(device)
        logits = model(input_ids=samples[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), samples[:, 1:].flatten(), reduction=reduction)

    def evaluate():
        total = 0.0
        with torch.no_grad():
            for first in range(0, validation.num_samples, batch):
                total += loss_of(validation.sequential(first, batch), "sum").item()
        return total / (validation.num_samples * seq_length)

    out = open(args.output, "w") if args.output else sys.stdout

    def say(**line):
        print(json.dumps(line), file=out, flush=True)

    steps, every = config["steps"], config.get("eval", {}).get("every", 0)
    for step in range(1, steps + 1):
        start = time.monotonic()
        lr = learning_rate(config, step - 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        model.zero_grad()
        loss = loss_of(training.at((step - 1) * batch, batch), "mean")
        loss.backward()
        for m, p in zip(master, params):
            m.grad = p.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(master, clip if clip > 0 else math.inf)
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(master, params):
                p.copy_(m)
        ms = (time.monotonic() - start) * 1e3
        say(type="step", step=step, loss=loss.item(), grad_norm=norm.item(), lr=lr, tokens=batch * seq_length,
            tokens_per_s=batch * seq_length / ms * 1e3, step_ms=ms)
        if step == steps or (every and step % every == 0):
            say(type="eval", step=step, val_loss=evaluate())


def compare(ours, theirs):
    def curve(path):
        with open(path) as f:
            lines = [json.loads(line) for line in f]
        return {x["step"]: x["val_loss"] for x in lines if x["type"] == "eval"}

    a, b = curve(ours), curve(theirs)
    steps = sorted(a.keys() & b.keys())
    assert steps, "the files share no evaluated step"
    for step in steps:
        print(f"step {step:6d}  ds-train {a[step]:.5f}  torch {b[step]:.5f}  {(a[step] / b[step] - 1) * 100:+.2f} %")
    return 0 if a[steps[-1]] <= 1.01 * b[steps[-1]] else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="configuration file")
    parser.add_argument("--compare", nargs=2, metavar=("OURS", "TORCH"),
                        help="compare validation losses; exit 1 if ours ends more than 1 %% above PyTorch's")
    parser.add_argument("--output", help="write metrics.jsonl lines here")
    parser.add_argument("--weights", help="initial weights, safetensors under Hugging Face names")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as ds-train's --set")
    args = parser.parse_args()
    if args.compare:
        sys.exit(compare(*args.compare))
    if not args.config:
        parser.error("a configuration file is needed")
    config = read_config(args.config)
    for assignment in args.set:
        key, _, value = assignment.partition("=")
        *path, leaf = key.split(".")
        place = config
        for part in path:
            place = place.setdefault(part, {})
        try:
            place[leaf] = json.loads(value)
        except json.JSONDecodeError:
            place[leaf] = value
    train(config, args)


if __name__ == "__main__":
    main()
