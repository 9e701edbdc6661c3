#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The time of training steps of a GPT and of a BERT with dense and with block-sparse attention.

usage: sparse_steps.py BUILD [LAYERS [LENGTH ...]]

BUILD: a build directory. Layers of BERT-base's shape (768 wide, 12 heads) over bytes, bf16, one sample of LENGTH tokens
(4096 and 16384) a step, one rank with all threads. Prints the shorter of two steps behind a first one, tokens/s, and the
time of the dense model's step in times of it.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

build = os.path.abspath(sys.argv[1])
layers = int(sys.argv[2]) if len(sys.argv) > 2 else 2
lengths = [int(x) for x in sys.argv[3:]] or [4096, 16384]
os.environ["PATH"] = build + "/bin:" + os.environ["PATH"]

SHAPE = {"gpt2": lambda n: {"n_positions": n, "n_embd": 768, "n_layer": layers, "n_head": 12, "vocab_size": 259},
         "bert": lambda n: {"max_position_embeddings": n, "hidden_size": 768, "num_hidden_layers": layers,
                            "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 259,
                            "pad_token_id": None}}
SPARSE = {"dense": None,
          "fixed": {"mode": "fixed", "block": 64, "num_local_blocks": 8},
          "local": {"mode": "local", "block": 64, "num_sliding_window_blocks": 9},
          "bigbird": {"mode": "bigbird", "block": 64, "num_random_blocks": 1, "num_sliding_window_blocks": 3},
          "bslongformer": {"mode": "bslongformer", "block": 64, "num_sliding_window_blocks": 3}}


def step_ms(family, length, sparse):
    data = {"train": "text.txt", "seq_length": length}
    if family == "bert":
        data["mlm"] = {"probability": 0.15, "mask_token": 256, "cls_token": 257, "sep_token": 258}
    config = {"model": {"type": family, **SHAPE[family](length)}, "data": data, "bf16": {"enabled": True},
              "train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "steps": 3}
    if sparse is not None:
        config["sparse_attention"] = sparse
    with open("cfg.json", "w", encoding="utf-8") as f:
        json.dump(config, f)
    shutil.rmtree("run", ignore_errors=True)
    subprocess.run(["ds-launch", "-n", "1", "ds-train", "cfg.json", "--out", "run", "--quiet"], check=True,
                   stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open("run/metrics.jsonl", encoding="utf-8")]
    return min([line["step_ms"] for line in lines if line["type"] == "step" and "step_ms" in line][1:])


with tempfile.TemporaryDirectory() as work:
    os.chdir(work)
    with open("text.txt", "w", encoding="utf-8") as f:
        f.write("The quick brown fox jumps over the lazy dog. " * 20000)
    for family in SHAPE:
        for length in lengths:
            dense = None
            for name, sparse in SPARSE.items():
                if sparse is not None and family == "bert":
                    sparse = dict(sparse, attention="bidirectional")
                ms = step_ms(family, length, sparse)
                dense = dense or ms
                print(f"{family} {length:6} {name:12} {ms:9.0f} ms {length / ms * 1000:8.0f} tokens/s "
                      f"{dense / ms:6.2f} times dense", flush=True)
