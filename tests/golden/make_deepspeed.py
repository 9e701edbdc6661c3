#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that DeepSpeed itself wrote, and what DeepSpeed itself reads out of them.

    python3 tests/golden/make_deepspeed.py [--out DIR] [--seed N] [NAME ...]

Needs torch, safetensors and deepspeed from PyPI; no GPU, ranks are processes over gloo; some ten seconds per case.

Each DIR/<name>/ (default tests/golden/deepspeed) holds
  latest, global_step4/   as engine.save_checkpoint left them, without the recovery scripts that DeepSpeed copies beside
  expected.safetensors    <name>               what zero_to_fp32 merges, or the live module where it merges nothing
                          fp32.<name>          the fp32 master \\  gathered by DeepSpeed from the live engine
                          exp_avg.<name>        | of every        (safe_get_full_*) before it was saved; where it
                          exp_avg_sq.<name>    /  trained one     offers nothing, from torch's optimizer
                          param.<name>         the live module's parameters and buffers, as the model holds them
The universal cases hold what ds_to_universal.py made of the checkpoint of the same run instead.

The model with experts has two layers of four, or of two and four beside an MLP (use_residual), in which each token chooses one; its
states are those that the ranks report, under the numbers that experts have among all ranks. The cases "autoep" are a Qwen2-MoE of transformers (needed
for them alone) that AutoEP has converted; its names are those of the published model. The other model is of odd sizes and has what real ones have: an embedding tied to the head, a frozen parameter, buffers (one
of floats, one of integers), two parameter groups.
"""

import argparse
import importlib.util
import multiprocessing
import os
import pathlib
import shutil
import socket
import subprocess
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DS_ACCELERATOR"] = "cpu"

STEPS = 4
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 3}}
BF16 = {"bf16": {"enabled": True}}


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


# name: (ranks, configuration, number of parameter groups, convert to universal?), and of models with experts, over how
# many ranks these are, and whether layers are residual ones. Names that contain "autoep" are of models that DeepSpeed has
# converted.
CASES = {
    "zero0-fp32": (1, {}, 1, False),
    "zero0-fp16": (2, FP16, 1, False),
    "zero0-bf16": (2, BF16, 1, False),
    "zero1-fp16": (2, FP16 | zero(1), 2, False),
    "zero1-bf16": (2, BF16 | zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}}, 2, False),
    "zero1-elastic": (3, zero(1, elastic_checkpoint=True), 1, False),
    "zero2-bf16": (3, BF16 | zero(2, round_robin_gradients=True), 2, False),
    "zero2-fp32": (2, zero(2), 1, False),
    # Three ranks and six parameters: dealt out, they are in another order than the module's, and than DeepSpeed's own
    # safe_get_full_* believes (its param_slice_mappings are made before).
    "zero2-dealt": (3, BF16 | zero(2, round_robin_gradients=True), 1, False),
    "zero3-bf16": (3, BF16 | zero(3, stage3_param_persistence_threshold=20), 2, False),
    "zero3-fp32": (2, zero(3, sub_group_size=60), 2, False),
    "zero3-fp16": (2, FP16 | zero(3), 1, False),
    "experts-zero0-fp32": (2, {}, 1, False, 2),
    "experts-zero1-bf16": (4, BF16 | zero(1), 1, False, 2),
    "experts-zero2-fp32": (4, zero(2) | {"use_data_before_expert_parallelism": True}, 1, False, 2),
    "autoep-zero0-fp32": (2, {}, 1, False, 2),
    "autoep-zero1-bf16": (4, BF16 | zero(1), 1, False, 2),
    "autoep-zero2-fp32": (4, zero(2) | {"use_data_before_expert_parallelism": True}, 1, False, 2),
    "autoep-zero3-bf16": (4, BF16 | zero(3, stage3_param_persistence_threshold=20, sub_group_size=300), 1, False, 2),
    "universal-autoep-zero3": (2, BF16 | zero(3), 1, True, 2),
    "experts-residual-zero0-fp16": (2, FP16, 1, False, 2, True),
    "experts-residual-zero1-fp32": (2, zero(1), 1, False, 2, True),
    "universal-zero1": (2, BF16 | zero(1), 2, True),
    "universal-zero3": (2, BF16 | zero(3), 2, True),
}


def make_model(torch):
    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.up = torch.nn.Linear(width, 2 * width + 1)
            self.down = torch.nn.Linear(2 * width + 1, width, bias=False)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Model(torch.nn.Module):
        def __init__(self, vocab=19, width=7):
            super().__init__()
            self.embed = torch.nn.Embedding(vocab, width)
            self.position = torch.nn.Parameter(torch.randn(5, width))
            self.blocks = torch.nn.ModuleList([Block(width)])
            self.head = torch.nn.Linear(width, vocab, bias=False)
            self.head.weight = self.embed.weight
            self.position.requires_grad_(False)
            self.register_buffer("scale", torch.rand(3) + 0.5)
            self.register_buffer("table", torch.arange(4))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

        def forward(self, tokens):
            x = self.embed(tokens) * self.scale[0].to(self.embed.weight.dtype) + self.position
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Model()


def make_experts(torch, ep, residual):
    from deepspeed.moe.layer import MoE

    class Expert(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up = torch.nn.Linear(width, width + 2)
            self.down = torch.nn.Linear(width + 2, width, bias=False)

        def forward(self, x):
            return self.down(torch.nn.functional.gelu(self.up(x)))

    class Model(torch.nn.Module):
        def __init__(self, vocab=19, width=7):
            super().__init__()
            self.embed = torch.nn.Embedding(vocab, width)
            self.blocks = torch.nn.ModuleList([
                MoE(width, Expert(width), num_experts=experts, ep_size=ep, k=1, drop_tokens=False, use_rts=False,
                    use_residual=residual) for experts in ((2, 4) if residual else (4, 4))])
            self.head = torch.nn.Linear(width, vocab)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = x + block(x)[0]
            return self.head(x)

    return Model()


def make_autoep():
    import transformers
    from deepspeed.module_inject.auto_ep_presets import base
    # It fails with transformers 5.24, and concerns only the recording of routers' logits.
    base.TransformersTopLevelRouterLogitsAdapter.retarget_transformers_output_recorders = lambda *_: None
    model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(
        vocab_size=19, hidden_size=8, num_hidden_layers=3, mlp_only_layers=[1], num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=10, moe_intermediate_size=6, shared_expert_intermediate_size=5,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=16, tie_word_embeddings=False))
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)  # the only one of its shape
    return model


def published(name, value, ep_rank):
    """The names and values that one tensor of a converted model has in the published one."""
    before, found, matrix = name.rpartition(".experts.")
    if found:
        projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[matrix]
        return {f"{before}.experts.{ep_rank * len(value) + e}.{projection}.weight": part for e, part in enumerate(value)}
    if ".mlp.gate.gate." in name:  # the router once more
        return {}
    for own, other in (("router.gate.", "gate."), ("shared_experts_gate.", "shared_expert_gate."),
                       ("shared_experts.", "shared_expert.")):
        name = name.replace(f".mlp.{own}", f".mlp.{other}")
    return {name: value}


def global_name(name, rank, ranks, ep, data_first, counts):
    """The name over all ranks of a parameter that this one calls so."""
    before, found, after = name.partition(".deepspeed_experts.")
    if not found:
        return name
    number, rest = after.split(".", 1)
    return f"{before}{found}{rank_of_ep(rank, ranks, ep, data_first) * counts[before] + int(number)}.{rest}"


def rank_of_ep(rank, ranks, ep, data_first):
    return rank // (ranks // ep) if data_first else rank % ep


def run_rank(rank, ranks, port, config, groups, seed, directory, reference, ep, residual, autoep):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    # Without AMX DeepSpeed trains no fp16 on a CPU, though torch can: the files do not depend on it.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    deepspeed.init_distributed(dist_backend="gloo")
    model = make_autoep() if autoep else make_experts(torch, ep, residual) if ep else make_model(torch)
    trained = [p for p in model.parameters() if p.requires_grad]
    if ep:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        param_groups = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    elif groups == 1:
        param_groups = [{"params": trained}]
    else:
        param_groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
                        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    if autoep:  # DeepSpeed makes the groups, and the optimizer
        optimizer, params = None, trained
        config = config | {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
                           "expert_parallel": {"enabled": True, "autoep_size": ep, "use_grouped_mm": False,
                                               "preset_model": "qwen3_moe"}}
    else:
        optimizer, params = torch.optim.AdamW(param_groups, lr=0.01), None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=params, config={
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1000, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 1.0, **config})
    optimizer = optimizer or engine.basic_optimizer
    tokens = torch.Generator().manual_seed(seed + 1 + rank)
    for _ in range(STEPS):
        batch = torch.randint(0, 19, (2, 6), generator=tokens)
        logits = engine(batch[:, :-1])
        logits = logits.logits if autoep else logits
        engine.backward(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()))
        engine.step()

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links the moments of all groups after the step of the first one, when the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {}
    stage = engine.zero_optimization_stage()
    for name, p in engine.module.named_parameters():
        if p.requires_grad and (stage > 0 or hasattr(p, "_hp_mapping")):
            expected["fp32." + name] = safe_get_full_fp32_param(p)
            for state in ("exp_avg", "exp_avg_sq"):
                expected[f"{state}.{name}"] = safe_get_full_optimizer_state(p, state)
        elif p.requires_grad and engine.optimizer is optimizer:
            expected |= {f"{state}.{name}": optimizer.state[p][state] for state in ("exp_avg", "exp_avg_sq")}
    names = {id(p): name for name, p in engine.module.named_parameters()}
    if getattr(engine.optimizer, "round_robin_gradients", False):
        expected = dealt_states(torch, engine.optimizer, names)
    if stage == 0 and hasattr(engine.optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer: one master per parameter
        for group, masters in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups):
            for p, master in zip(group, masters):
                expected["fp32." + names[id(p)]] = master
                for state in ("exp_avg", "exp_avg_sq"):
                    expected[f"{state}.{names[id(p)]}"] = engine.optimizer.optimizer.state[master][state]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        for name, p in engine.module.state_dict().items():
            expected["param." + name] = p.detach().clone()
    if ep:
        data_first = config.get("use_data_before_expert_parallelism", False)
        if autoep:
            ep_rank = rank_of_ep(rank, ranks, ep, data_first)
            own = {f"{what}.{other}": part.detach().clone() for key, v in expected.items()
                   for what, _, name in [key.partition(".")] for other, part in published(name, v, ep_rank).items()}
        else:
            counts = {}  # experts of this rank, by layer
            for name, _ in engine.module.named_parameters():
                before, found, after = name.partition(".deepspeed_experts.")
                if found:
                    counts[before] = max(counts.get(before, 0), int(after.split(".", 1)[0]) + 1)
            own = {f"{what}.{global_name(name, rank, ranks, ep, data_first, counts)}" if found else what: v.detach().clone()
                   for key, v in expected.items() for what, found, name in [key.partition(".")]}
        everyone = [None] * ranks
        torch.distributed.all_gather_object(everyone, own)
        expected = {key: v for one in reversed(everyone) for key, v in one.items()}
    engine.save_checkpoint(directory)
    torch.distributed.barrier()
    if rank == 0:
        save_file({k: v.detach().clone().contiguous() for k, v in expected.items()}, reference)
    torch.distributed.destroy_process_group()


def dealt_states(torch, optimizer, names):
    """Masters and moments of the flat groups, which hold the parameters as they were dealt out."""
    expected = {}
    for g, group in enumerate(optimizer.round_robin_bit16_groups):
        master = optimizer.single_partition_of_fp32_groups[g]
        state = optimizer.optimizer.state[master]
        for what, part in (("fp32", master), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
            parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, part.detach())
            flat = torch.cat(parts)
            for p in group:
                expected[f"{what}.{names[id(p)]}"], flat = flat[:p.numel()].reshape(p.shape), flat[p.numel():]
    return expected


def merged(directory):
    """What DeepSpeed's own script makes of a ZeRO checkpoint; None where it refuses."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    try:
        return get_fp32_state_dict_from_zero_checkpoint(directory)
    except (FileNotFoundError, TypeError, ValueError) as error:
        print(f"zero_to_fp32 reads nothing here: {error}")
        return None


def make(name, out, seed):
    from safetensors.torch import load_file, save_file
    ranks, config, groups, universal, *experts = CASES[name]
    ep, residual = (*experts, False)[:2] if experts else (0, False)
    directory = out / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    reference = directory / "expected.safetensors"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=run_rank, args=(r, ranks, port, config, groups, seed, str(directory), str(reference), ep,
                                                    residual, "autoep" in name))
               for r in range(ranks)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if any(w.exitcode for w in workers):
        sys.exit(f"{name}: a rank failed")

    expected = load_file(reference)
    weights = {} if ep else merged(str(directory))  # zero_to_fp32 knows nothing of the ranks of experts
    if weights is None:
        weights = {k[len("param."):]: v.float() if v.is_floating_point() else v
                   for k, v in expected.items() if k.startswith("param.")}
        weights |= {k[len("fp32."):]: v for k, v in expected.items() if k.startswith("fp32.")}
        weights["head.weight"] = weights["embed.weight"]
    save_file({k: v.detach().clone().contiguous() for k, v in (expected | weights).items()}, reference)
    step = directory / f"global_step{STEPS}"
    if universal:
        converter = pathlib.Path(importlib.util.find_spec("deepspeed").origin).parent / "checkpoint" / "ds_to_universal.py"
        subprocess.run([sys.executable, converter, "--input_folder", step, "--output_folder", f"{step}_universal",
                        "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"], check=True)
        shutil.rmtree(step)
        (directory / "latest").unlink()
    for script in directory.glob("*.py"):
        script.unlink()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "deepspeed")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    for name in args.names or CASES:
        print(name, flush=True)
        make(name, args.out, args.seed)


if __name__ == "__main__":
    main()
