#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lines of mixed length through ds-infer and through transformers' generate, on the CPU, in turns.

    infer_peer.py DS-INFER MODEL [ROUNDS [THREADS [LINES [NEW]]]]

MODEL is a model directory of Hugging Face; weights may be random. Prompts are token ids, 16 to 320 of them, and each line
writes NEW tokens (64), greedily, without an end. transformers gets all lines in one batch, padded on the left, in bf16;
and one line by itself. Figures are new tokens per second: medians over rounds. The start of the processes and the
loading of weights do not count.
"""
import json
import os
import random
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM

tool, path = sys.argv[1], sys.argv[2]
rounds, threads, lines, new = (int(sys.argv[i]) if len(sys.argv) > i else d for i, d in ((3, 3), (4, 2), (5, 32), (6, 64)))
torch.set_num_threads(threads)
os.environ["OMP_NUM_THREADS"] = str(threads)
random.seed(1)
vocab = json.load(open(os.path.join(path, "config.json")))["vocab_size"]
prompts = [[random.randrange(vocab) for _ in range(random.randint(16, 320))] for _ in range(lines)]


def ours(prompts):
    text = "".join(json.dumps({"prompt": p, "max_tokens": new, "ignore_eos": True}) + "\n" for p in prompts)
    run = subprocess.run([tool, path, "--tokenizer", "bytes", "--temperature", "0", "--context", "512", "--batch",
                          str(len(prompts)), "-v"], input=text, capture_output=True, text=True, check=True)
    seconds = float(next(l for l in run.stderr.splitlines() if " new tokens in " in l).split(" new tokens in ")[1].split()[0])
    return len(prompts) * new / seconds, [json.loads(l)["tokens"] for l in run.stdout.splitlines()]


def theirs(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    return len(prompts) * new / (time.perf_counter() - begin), out[:, longest:].tolist()


model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
for given in (prompts, prompts[:1]):
    rates = {"ds-infer": [], "transformers": []}
    for _ in range(rounds):
        mine, ids = ours(given)
        other, reference = theirs(given)
        rates["ds-infer"].append(mine)
        rates["transformers"].append(other)
    same = sum(a == b for x, y in zip(ids, reference) for a, b in zip(x, y))
    a, b = (statistics.median(r) for r in rates.values())
    print(f"{len(given)} lines: ds-infer {a:.1f} new tokens/s, transformers {b:.1f}: {a / b:.2f} times; "
          f"{same} of {len(given) * new} greedy tokens are the same")
