#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ds-infer beside llama.cpp on the same GGUF files, on the CPU, in turns: tokens per second and their ratios.

    llama_peer.py LLAMA-BENCH DS-INFER FILE.gguf... [--rounds N] [--threads N] [--prompt N] [--generate N] [--tokenizer T]
                  [--activations FORM]

Each turn is a process of either program, which runs a prompt and a text of new tokens twice: the first time does not
count. Figures are medians over turns, ratios medians of the ratios within a turn.
"""
import argparse
import json
import os
import statistics
import subprocess

parser = argparse.ArgumentParser()
parser.add_argument("llama_bench")
parser.add_argument("ds_infer")
parser.add_argument("files", nargs="+")
for name, default in (("rounds", 5), ("threads", 2), ("prompt", 512), ("generate", 64)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--tokenizer", help="for files without one: bytes")
parser.add_argument("--activations", help="ds-infer's option")
o = parser.parse_args()
lengths = ["-p", str(o.prompt), "-n", str(o.generate), "-r", "1"]


def lines_of(words):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout


def theirs(file):
    tests = json.loads(lines_of([o.llama_bench, "-m", file, *lengths, "-t", str(o.threads), "-ngl", "0", "-o", "json"]))
    return {"pp" if t["n_gen"] == 0 else "tg": t["avg_ts"] for t in tests}


def ours(file):
    more = ["--tokenizer", o.tokenizer] if o.tokenizer else []
    more += ["--activations", o.activations] if o.activations else []
    text = lines_of([o.ds_infer, "bench", file, *lengths, "--set", f"threads={o.threads}", "--json", *more])
    return {json.loads(line)["test"][:2]: json.loads(line)["tokens_per_s"] for line in text.splitlines()}


for file in o.files:
    turns = [(ours(file), theirs(file)) for _ in range(o.rounds)]
    for test, tokens in (("pp", o.prompt), ("tg", o.generate)):
        a, b, ratio = (statistics.median(values) for values in
                       ([t[0][test] for t in turns], [t[1][test] for t in turns], [t[0][test] / t[1][test] for t in turns]))
        print(f"{os.path.basename(file)} {test}{tokens}, {o.threads} threads: ds-infer {a:.1f} tokens/s, llama.cpp {b:.1f}: "
              f"{ratio:.2f} times", flush=True)
