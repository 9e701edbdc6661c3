#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that DeepSpeed itself wrote of a GPT-2 with its MoE layer, whose experts are on two ranks.

usage: make_deepspeed_moe.py [DIRECTORY]

Needs torch, transformers, safetensors and deepspeed; no GPU, ranks are processes over gloo. Each deepspeed-moe/<name>/ holds
  latest, global_step2/   as engine.save_checkpoint left them
  config.json             that of transformers, with our section `moe`
  expected.safetensors    the live module of both ranks, under the names of a model with all experts
"""

import json
import multiprocessing
import os
import pathlib
import shutil
import socket
import sys
import zlib

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DS_ACCELERATOR"] = "cpu"

RANKS, EXPERTS, STEPS = 2, 4, 2
CASES = {"zero0-fp32": {}, "zero1-bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}}


def run_rank(rank, port, config, directory):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed
    import torch
    import transformers
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from safetensors.torch import save_file

    class Layer(MoE):
        def forward(self, x):
            return super().forward(x)[0]

    torch.set_num_threads(1)
    torch.manual_seed(3)
    deepspeed.init_distributed(dist_backend="gloo")
    described = transformers.GPT2Config(vocab_size=23, n_positions=12, n_embd=12, n_layer=2, n_head=2, n_inner=10,
                                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
                                        eos_token_id=None)
    model = transformers.GPT2LMHeadModel(described)
    block = model.transformer.h[1]
    kind = type(block.mlp)
    inner = kind.forward
    kind.forward = lambda self, x: inner(self, x.contiguous())  # DeepSpeed's chunks are not
    block.mlp = Layer(12, block.mlp, num_experts=EXPERTS, ep_size=RANKS, k=1, min_capacity=1)
    for name, p in model.named_parameters():
        if "deepspeed_experts" in name:  # else all experts are copies of one
            seed = zlib.crc32(f"{rank} {name}".encode())
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(seed))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config={
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1000, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, **config})
    tokens = torch.Generator().manual_seed(5 + rank)
    for _ in range(STEPS):
        batch = torch.randint(0, 23, (2, 9), generator=tokens)
        logits = engine(input_ids=batch[:, :-1]).logits
        engine.backward(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()))
        engine.step()
    engine.save_checkpoint(str(directory))
    live = {}
    for name, p in engine.module.state_dict().items():
        if "deepspeed_experts." in name:
            head, tail = name.split("deepspeed_experts.")
            number, rest = tail.split(".", 1)
            name = f"{head}deepspeed_experts.{rank * EXPERTS // RANKS + int(number)}.{rest}"
        elif rank > 0:
            continue
        live[name] = p.detach().clone().contiguous()
    save_file(live, directory / f"rank-{rank}.safetensors")
    if rank == 0:
        described.architectures = ["GPT2LMHeadModel"]
        (directory / "config.json").write_text(
            json.dumps(described.to_diff_dict() | {"moe": {"num_experts": EXPERTS, "min_capacity": 1}}, indent=2) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    from safetensors.torch import load_file, save_file
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent) / "deepspeed-moe"
    for name, config in CASES.items():
        directory = root / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=run_rank, args=(r, port, config, directory)) for r in range(RANKS)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        if any(w.exitcode for w in workers):
            sys.exit(f"{name}: a rank failed")
        parts = [directory / f"rank-{r}.safetensors" for r in range(RANKS)]
        save_file({k: v for part in parts for k, v in load_file(part).items()}, directory / "expected.safetensors")
        for unwanted in [*parts, *directory.glob("*.py")]:
            unwanted.unlink()


if __name__ == "__main__":
    main()
