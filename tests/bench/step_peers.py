#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole training steps on a CPU, in turns: ds-train beside PyTorch, eager and compiled, and beside DeepSpeed's ZeRO-2.

    python3 tests/bench/step_peers.py BUILD_DIR [CONFIG [ROUNDS [STEPS]]] [--only NAME,...]

ds-train, eager and compiled PyTorch run one process with all threads; `ds-train zero-2` and `deepspeed` run two ranks of
half the threads and half of the batch each. Models are transformers' of the configuration's shape with SDPA's attention;
bf16 keeps fp32 masters and moments, and AdamW is the fused one. Experts are computed by transformers' implementation
EXPERTS (default grouped_mm; or batched_mm, eager). Tokens are random. A figure is the median of the steps of
all rounds after the first two of each process, and its range. Needs torch, transformers; deepspeed for its row.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time


def read_config(path):
    with open(path) as f:
        return json.loads(re.sub(r"//[^\n]*", "", f.read()))


def make_model(config):
    import transformers
    shape = {k: v for k, v in config["model"].items() if k != "type"}
    kind = config["model"]["type"]
    none = dict(bos_token_id=None, eos_token_id=None)
    if kind == "gpt2":
        drop = dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **drop, **none))
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **none))
    if kind == "qwen3_moe":
        shape["experts_implementation"] = os.environ.get("EXPERTS", "grouped_mm")
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **none))
    raise SystemExit(f"{kind}: only gpt2, llama and qwen3_moe are needed here")


def torch_steps(config, bf16, steps, threads, compiled):
    import torch
    import torch.nn.functional as F
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    model = make_model(config)
    params = list(model.parameters())
    master = [torch.nn.Parameter(p.detach().float().clone()) for p in params] if bf16 else params
    if bf16:
        model.to(torch.bfloat16)
    settings = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(master, lr=settings["lr"], betas=tuple(settings["betas"]), weight_decay=0.1, fused=True)
    batch, length = config["train_batch_size"], config["data"]["seq_length"]

    def loss_of(tokens):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    loss_fn = torch.compile(loss_of) if compiled else loss_of
    for _ in range(steps):
        tokens = torch.randint(0, config["model"]["vocab_size"], (batch, length + 1))
        start = time.monotonic()
        model.zero_grad()
        loss_fn(tokens).backward()
        if bf16:
            for m, p in zip(master, params):
                m.grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(master, 1.0, foreach=True)
        optimizer.step()
        if bf16:
            with torch.no_grad():
                torch._foreach_copy_(params, [m.detach() for m in master])
        print(json.dumps({"tokens_per_s": batch * length / (time.monotonic() - start)}), flush=True)


def deepspeed_steps(config, bf16, steps):
    import torch
    import torch.nn.functional as F
    import deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    model = make_model(config)
    batch, length = config["train_batch_size"], config["data"]["seq_length"]
    micro = max(1, batch // world)
    settings = config["optimizer"]["params"]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": settings["lr"], "betas": settings["betas"], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": bf16}, "gradient_clipping": 1.0})
    for _ in range(steps):
        tokens = torch.randint(0, config["model"]["vocab_size"], (micro, length + 1))
        start = time.monotonic()
        logits = engine(input_ids=tokens[:, :-1], use_cache=False).logits
        engine.backward(F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()
        if rank == 0:
            print(json.dumps({"tokens_per_s": micro * world * length / (time.monotonic() - start)}), flush=True)


def rates(text):
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [x["tokens_per_s"] for x in found if x.get("type", "step") == "step"][2:]


def run(command, **environment):
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout


def ours(args, bf16, ranks, threads):
    with tempfile.TemporaryDirectory() as work:
        train = [f"{args.build}/bin/ds-train", args.config, "--quiet", "--steps", str(args.steps), "--out", f"{work}/run",
                 "--set", f'bf16={{"enabled": {json.dumps(bf16)}}}', "--set", f"threads={threads}"]
        if ranks > 1:
            batch = max(ranks, read_config(args.config)["train_batch_size"])
            train += ["--set", "zero_optimization.stage=2", "--set", f"train_batch_size={batch}"]
            train = [f"{args.build}/bin/ds-launch", "-n", str(ranks), "--"] + train
        run(train)
        with open(f"{work}/run/metrics.jsonl") as f:
            return rates(f.read())


def peer(args, name, bf16, threads):
    me = [os.path.abspath(__file__), args.build, args.config, "1", str(args.steps), "--peer", name, "--bf16", str(int(bf16))]
    if name == "deepspeed":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        return rates(run(launcher + me, DS_ACCELERATOR="cpu", OMP_NUM_THREADS=str(max(1, threads // 2)),
                         PATH=os.path.dirname(sys.executable) + ":" + os.environ["PATH"]))
    return rates(run([sys.executable] + me, OMP_NUM_THREADS=str(threads)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("config", nargs="?", default="configs/gpt2-124m.json")
    parser.add_argument("rounds", nargs="?", type=int, default=2)
    parser.add_argument("steps", nargs="?", type=int, default=6)
    parser.add_argument("--only", default="ds-train,eager,compiled,ds-train zero-2,deepspeed")
    parser.add_argument("--types", default="bf16,fp32")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--bf16", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    if args.peer == "deepspeed":
        return deepspeed_steps(read_config(args.config), bool(args.bf16), args.steps)
    if args.peer:
        return torch_steps(read_config(args.config), bool(args.bf16), args.steps, threads, args.peer == "compiled")
    for kind in args.types.split(","):
        found = {name: [] for name in args.only.split(",")}
        for _ in range(args.rounds):
            for name in found:
                bf16 = kind == "bf16"
                if name == "ds-train":
                    found[name] += ours(args, bf16, 1, threads)
                elif name == "ds-train zero-2":
                    found[name] += ours(args, bf16, 2, max(1, threads // 2))
                else:
                    found[name] += peer(args, name, bf16, threads)
        for name, values in found.items():
            print(f"{os.path.basename(args.config):18} {kind}  {name:16} {statistics.median(values):6.0f} tokens/s "
                  f"({min(values):.0f} to {max(values):.0f})", flush=True)


if __name__ == "__main__":
    main()
