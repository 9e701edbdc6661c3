#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny GPT-2 models with DeepSpeed's gates and experts in place of some MLPs (deepspeed 0.19.8, transformers 5).

usage: make_moe.py [DIRECTORY]

Writes gpt2-moe-<k>/ for k = 1, 2, 3, gpt2-moe-residual/ and gpt2-moe-pyramid/, whose layers are DeepSpeed's MoE itself, the
latter with another number of experts in each: config.json with our section `moe`, model.safetensors under DeepSpeed's names, and
expected.safetensors with input_ids and targets i32 [B,T], and in fp64 logits [B,T,V], loss [1], balance [1] (the sum of the gates'
losses), grad.<parameter> of loss + 0.05 * balance, and train.loss [11], the losses before each of ten AdamW steps as in
make_fixtures.py, and after the last. No noise; a gate of one keeps the first tokens, by "random" numbers that fall.
Seeds are those with which fp32 chooses and keeps the same experts in all steps.
"""

import copy
import json
import os
import pathlib
import sys

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1",
                  MASTER_ADDR="127.0.0.1", MASTER_PORT="29871")

import deepspeed
import torch
import torch.nn.functional as F
import transformers
from deepspeed.moe import sharded_moe
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from make_fixtures import SMALL_GPT2, all_fp64, initial_model, loss_of, sparse_batch
from safetensors.torch import save_file

EXPERTS, BALANCE, STEPS, LAYERS = 4, 0.05, 10, 4
MOE = {"1": {"k": 1, "capacity_factor": 0.9, "use_rts": False},
       "2": {"k": 2, "capacity_factor": 0.8, "top2_2nd_expert_sampling": False},
       "3": {"k": 3, "capacity_factor": 0.7},
       "residual": {"k": 2, "capacity_factor": 0.8, "top2_2nd_expert_sampling": False, "use_residual": True},
       "pyramid": {"num_experts": [3, 5], "k": 2, "capacity_factor": 0.8, "top2_2nd_expert_sampling": False,
                   "use_residual": True}}


class Gate(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.wg = torch.nn.Linear(hidden, EXPERTS, bias=False)


class Inner(torch.nn.Module):
    def __init__(self, hidden, expert):
        super().__init__()
        self.gate = Gate(hidden)
        self.experts = Experts(expert, EXPERTS)


class Layer(torch.nn.Module):
    """What DeepSpeed's MOELayer computes on one rank."""

    def __init__(self, hidden, expert, keys):
        super().__init__()
        self.k, self.factor = keys["k"], keys["capacity_factor"]
        self.deepspeed_moe = Inner(hidden, expert)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        logits = self.deepspeed_moe.gate.wg(rows)
        factor = self.factor
        if self.k == 1:
            falling = torch.linspace(1, 0.5, len(rows)).unsqueeze(1)
            sharded_moe.exp_selection_uniform_map[torch.device("cpu")] = lambda shape: falling.expand(shape)
            result = sharded_moe.top1gating(logits, factor, 1)
        elif self.k == 2:
            result = sharded_moe.top2gating(logits, factor, 1, top2_2nd_expert_sampling=False)
        else:
            result = sharded_moe.topkgating(logits, self.k, factor, 1)
        self.loss, weights, mask, _ = result
        self.mask = mask.any(2)
        sent = torch.einsum("sec,sm->ecm", mask.to(rows.dtype), rows)
        outputs = self.deepspeed_moe.experts(sent.unsqueeze(0)).squeeze(0)
        return torch.einsum("sec,ecm->sm", weights.to(rows.dtype), outputs).reshape(x.shape)


class Whole(MoE):
    """DeepSpeed's own layer, which notes the loss and the choices of its gate."""

    def __init__(self, hidden, expert, experts, keys):
        super().__init__(hidden, expert, num_experts=experts, min_capacity=1,
                         **{key: value for key, value in keys.items() if key != "num_experts"})

    def forward(self, x):
        hook = self.deepspeed_moe.gate.register_forward_hook(self.note)
        output, self.loss, _ = super().forward(x)
        hook.remove()
        return output

    def note(self, gate, inputs, result):
        experts, indices = result[2:4]  # of each choice; -1: dropped
        self.mask = F.one_hot(indices.long() + 1, experts + 1)[..., 1:].any(0)


def with_experts(model, keys):
    counts = keys.get("num_experts", [EXPERTS] * (LAYERS // 2))
    for block, experts in zip(list(model.transformer.h)[1::2], counts, strict=True):
        if keys.get("use_residual"):
            block.mlp = Whole(model.config.n_embd, block.mlp, experts, keys)
        else:
            block.mlp = Layer(model.config.n_embd, block.mlp, keys)
    return model


def layers(model):
    return [block.mlp for block in model.transformer.h if isinstance(block.mlp, (Layer, Whole))]


def connected(model):
    """Groups of ranks cannot be copied, so copies are made before."""
    for layer in layers(model):
        if isinstance(layer, Whole):
            layer.set_deepspeed_parallelism()
    return model


def start(keys, seed):
    config = transformers.GPT2Config(**{**SMALL_GPT2, "n_layer": LAYERS, "n_inner": 30})
    model = with_experts(initial_model(config, seed), keys)
    rng = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "deepspeed" in name:
                p.copy_((0.5 if "wg" in name else 0.15) * torch.randn(p.shape, generator=rng))
            elif "coefficient" in name:
                p.copy_(0.5 * torch.randn(p.shape, generator=rng))
    inputs, targets = sparse_batch(config.vocab_size, seed + 1)
    targets[targets == -100] = 7  # DeepSpeed's losses of gates are of all tokens, ours of those with a target
    return config, model, inputs, targets


def total_of(model, inputs, targets):
    logits, loss = loss_of(model, inputs, targets)
    return logits, loss, sum(layer.loss for layer in layers(model))


def train(model, inputs, targets):
    params = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [p for _, p in params if p.dim() >= 2], "weight_decay": 0.1},
                                   {"params": [p for _, p in params if p.dim() < 2], "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses, masks = [], []
    for step in range(STEPS + 1):
        _, loss, balance = total_of(model, inputs, targets)
        losses.append(loss.item())
        masks.append([layer.mask for layer in layers(model)])
        if step == STEPS:
            return torch.tensor(losses, dtype=torch.float64), masks
        model.zero_grad()
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def make(number, name, root):
    keys, k = MOE[name], MOE[name]["k"]
    for seed in range(7000 + 100 * number, 7100 + 100 * number):
        config, model, inputs, targets = start(keys, seed)
        with all_fp64():
            exact = copy.deepcopy(model).double()
            losses, masks = train(connected(copy.deepcopy(exact)), inputs, targets)
            logits, loss, balance = total_of(connected(exact), inputs, targets)
            (loss + BALANCE * balance).backward()
        single, single_masks = train(connected(copy.deepcopy(model)), inputs, targets)
        same = all(torch.equal(a, b) for x, y in zip(masks, single_masks) for a, b in zip(x, y))
        dropped = sum(18 * k - mask.sum().item() for mask in masks[0])
        if same and dropped > 0 and (single - losses).abs().max() < 1e-5:
            break
    directory = root / f"gpt2-moe-{name}"
    directory.mkdir(exist_ok=True)
    described = config.to_diff_dict()
    described["architectures"] = ["GPT2LMHeadModel"]
    described["moe"] = {"num_experts": EXPERTS, "k": k, "min_capacity": 1, "expert_interval": 2, "loss_coeff": BALANCE, **keys}
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    save_file({n: p.detach().clone().contiguous() for n, p in model.named_parameters()}, directory / "model.safetensors")
    expected = {"input_ids": inputs.to(torch.int32), "targets": targets.to(torch.int32), "logits": logits.detach(),
                "loss": loss.detach().reshape(1), "balance": balance.detach().reshape(1), "train.loss": losses}
    expected.update({"grad." + name: p.grad for name, p in exact.named_parameters()})
    save_file({n: t.contiguous().clone() for n, t in expected.items()}, directory / "expected.safetensors")
    print(f"{name}: seed {seed}, loss {loss.item():.6f}, balance {balance.item():.4f}, {dropped} choices dropped")


def main():
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    for number, name in enumerate(MOE, 1):
        make(number, name, root)


if __name__ == "__main__":
    main()
