#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What other estimators of training memory say, beside what ds-train counts on the same models and cuts.

    python3 tests/bench/memory_peers.py BUILD_DIR WORK_DIR [--cookbook DIR] [--megatron DIR] [--text FILE]

The peers: DeepSpeed's estimate_zero{2,3}_model_states_mem_needs, `accelerate estimate-memory`, and of checkouts
calc_transformer_mem.py (EleutherAI's cookbook) and theoretical_memory_usage.py (Megatron-LM). They are asked through
their own code, by this Python; one that is not there is named in the output. cookbook+ is the cookbook with flags for
what it does not read. The count is memory_bytes of metrics.jsonl, of rank 0, after two steps of a real run on the CPU.
"""
import argparse
import contextlib
import functools
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed looks for a GPU when it is imported
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

MIB = 2**20
STATES = ("params", "grads", "grad_accum", "master", "optimizer", "buckets")  # the tags of model states
LLAMA = {"type": "llama", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
         "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024}
MODELS = {
    "gpt2-10m": {"type": "gpt2", "vocab_size": 256, "n_positions": 256, "n_embd": 384, "n_layer": 6, "n_head": 6},
    "gpt2-124m": {"type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-untied": {**LLAMA, "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class Run:
    model: str
    stage: int
    bf16: bool = True
    ranks: int = 2
    tp: int = 1
    pp: int = 1
    sequence: int = 128
    micro_batches: int = 2

    @property
    def dp(self):
        return self.ranks // (self.tp * self.pp)

    def __str__(self):
        cut = "x".join(f"{axis}{n}" for axis, n in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if n > 1)
        return f"{self.model:13}{cut:8}{self.stage:5}  {'bf16' if self.bf16 else 'fp32'}"


RUNS = [Run(model, stage) for model in MODELS for stage in range(4)]
RUNS += [Run("gpt2-124m", stage, bf16=False) for stage in range(4)]
RUNS += [Run("gpt2-124m", stage, tp=2) for stage in (0, 1, 3)] + [Run("gpt2-124m", stage, pp=2) for stage in (0, 1, 3)]
RUNS += [Run("llama-untied", stage, ranks=4, tp=2) for stage in (1, 3)]


def count(run, args):
    """Of a real run: rank 0's bytes by tag, the parameters of the model, and those of rank 0 before ZeRO cuts them."""
    config = {
        "model": MODELS[run.model], "data": {"train": args.text, "split": 0, "seq_length": run.sequence}, "steps": 2,
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": run.micro_batches, "device": "cpu",
        "bf16": {"enabled": run.bf16}, "zero_optimization": {"stage": run.stage},
        "tensor_parallel": {"tp_size": run.tp}, "pipeline": {"stages": run.pp},
    }
    bin_dir, file, out = args.build.resolve() / "bin", args.work / "config.json", args.work / "run"
    file.write_text(json.dumps(config))
    shutil.rmtree(out, ignore_errors=True)

    def ds_train(*options):
        command = [bin_dir / "ds-launch", "-q", "-n", str(run.ranks), bin_dir / "ds-train", file, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{run}: {done.stderr}")
        return done.stdout

    plan = json.loads(ds_train("--check", "--json"))
    ds_train("--quiet", "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)  # its checkpoint is large
    tags = [line for line in lines if line["type"] == "step"][-1]["memory_bytes"]
    return tags, plan["num_params"], plan["stages"][0]["num_params"]


def cut_by_stage(run, params, grads, optimizer):
    """Bytes per parameter of a rank: stage 1 cuts the optimizer's over dp, 2 the gradients' too, 3 all."""
    return [b / run.dp if run.stage >= s else b for b, s in ((params, 3), (grads, 2), (optimizer, 1))]


# Each peer answers with what it claims of: the model's params, a rank's states, its total, and the terms of states.


def quietly(function, *args):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        result = function(*args)
    return result, said.getvalue()


def config_dir(run, args):
    """A directory with the model's config.json, as transformers writes it."""
    import transformers
    keys = dict(MODELS[run.model])
    transformers.AutoConfig.for_model(keys.pop("type"), **keys).save_pretrained(args.work / run.model)
    return args.work / run.model


@functools.cache
def deepspeed_params(directory):
    import transformers
    from deepspeed.runtime.zero.stage3 import model_to_params
    config = transformers.AutoConfig.from_pretrained(directory)
    return model_to_params(transformers.AutoModelForCausalLM.from_config(config))


def deepspeed(run, args):
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    params, largest = deepspeed_params(config_dir(run, args))
    needs = {2: lambda: stage_1_and_2.estimate_zero2_model_states_mem_needs(params, run.ranks, cpu_offload=False),
             3: lambda: stage3.estimate_zero3_model_states_mem_needs(params, largest, run.ranks, cpu_offload=False)}
    return {"params": params, "states": needs[run.stage]()[1] if run.stage in needs else None}


def accelerate(run, args):
    from accelerate.commands import estimate
    # The Hub's word on the model is all that the command needs a network for.
    estimate.verify_on_hub = lambda *_: SimpleNamespace(config={"": ""}, library_name="transformers")
    asked = [str(config_dir(run, args)), "--dtypes", "float16" if run.bf16 else "float32"]
    asked += ["--library_name", "transformers"]
    ((_, _, size, training),), _ = quietly(estimate.gather_data, estimate.estimate_command_parser().parse_args(asked))
    return {"params": size / (2 if run.bf16 else 4), "states": max(training.values())}  # what the command prints


def run_script(file, replaced, names):
    """The names that a script defines. Hundredths of a GiB, which it would print, are too coarse for small models."""
    source = functools.reduce(lambda text, old: text.replace(old, replaced[old]), replaced, file.read_text())
    exec(compile(source.replace(":.2f}", ":.9f}"), file, "exec"), names)
    return names


def cookbook(run, args, by_hand=False):
    script = run_script(args.cookbook / "calc/calc_transformer_mem.py", {}, {"__name__": ""})
    asked = ["--hf_model_name_or_path", config_dir(run, args), "--num-gpus", run.ranks, "-tp", run.tp, "-pp", run.pp,
             "-z", run.stage, "-s", run.sequence, "-b", 1]
    asked += [] if run.bf16 else ["--disable-mixed-precision"]
    model = MODELS[run.model]
    if by_hand and model["type"] == "llama":  # of GPT-2 it reads all that it has flags for
        asked += ["-nl", 3, "-kv", model["num_key_value_heads"] / model["num_attention_heads"]]
    said = quietly(lambda: script["calc_mem"](script["config_parser"]().parse_args([str(a) for a in asked])))[1]
    gib = {key: float(value) * 2**30 for key, value in re.findall(r"^(.*?) Memory.*: ([\d.]+) GiB", said, re.M)}
    terms = [gib[f"Per-GPU {term}"] for term in ("Model", "Gradient", "Optimizer")]
    return {"params": gib["Total Model"] / (2 if run.bf16 else 4), "terms": terms, "states": sum(terms),
            "total": gib["Per-GPU"], "buffers": gib["Per-GPU Communication"]}


def megatron(run, args):
    script = run_script(args.megatron / "megatron/training/theoretical_memory_usage.py",
                        {"from .utils import is_hybrid_model, print_rank_0": ""},
                        {"is_hybrid_model": lambda _: False, "print_rank_0": print})
    m = MODELS[run.model]
    llama = m["type"] == "llama"
    hidden, heads = (m["hidden_size"], m["num_attention_heads"]) if llama else (m["n_embd"], m["n_head"])
    unit = 128 * run.tp  # --make-vocab-size-divisible-by
    asked = SimpleNamespace(
        hidden_size=hidden, num_attention_heads=heads, kv_channels=hidden // heads, group_query_attention=llama,
        num_query_groups=m.get("num_key_value_heads"), num_layers=m["num_hidden_layers" if llama else "n_layer"],
        ffn_hidden_size=m["intermediate_size"] if llama else 4 * hidden, swiglu=llama, add_bias_linear=not llama,
        normalization="RMSNorm" if llama else "LayerNorm", padded_vocab_size=-(-m["vocab_size"] // unit) * unit,
        untie_embeddings_and_output_weights=not m.get("tie_word_embeddings", True), multi_latent_attention=False,
        num_experts=None, moe_shared_expert_intermediate_size=None, moe_latent_size=None, mtp_num_layers=None,
        world_size=run.ranks, data_parallel_size=run.dp, tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp, virtual_pipeline_model_parallel_size=None, seq_length=run.sequence,
        expert_tensor_parallel_size=run.tp, expert_model_parallel_size=1, micro_batch_size=1, sequence_parallel=False,
        recompute_granularity=None, use_distributed_optimizer=run.stage >= 1)
    (states, _, total), said = quietly(script["report_theoretical_memory"], asked, run.micro_batches, True)
    answer = {"params": 1e9 * float(re.search(r"Total number of parameters in billions: ([\d.]+)", said)[1])}
    if run.bf16 and run.stage <= 1:  # all that it has
        answer.update(states=states * MIB, total=total * MIB)
    return answer


PEERS = {"DeepSpeed": deepspeed, "accelerate": accelerate, "cookbook": cookbook,
         "cookbook+": functools.partial(cookbook, by_hand=True), "Megatron": megatron}
CLAIMS = {
    "DeepSpeed": "params, optimizer states and gradients per GPU at stages 2 and 3; asks for no precision, tp or pp",
    "accelerate": "'training with Adam' in one process, whose largest of four terms it prints; asks for no ranks",
    "cookbook": "a GPU's total, states by term; reads config.json, takes stage, GPUs, tp, pp, sequence and batch",
    "cookbook+": "the same, told of a llama's three MLP matrices and key and value heads (-nl, -kv)",
    "Megatron": "weights and optimizer, and total, of the most loaded GPU, bf16; its distributed optimizer as stage 1"}


def cell(value, *references):
    if value is None:
        return "-".rjust(9 + 7 * len(references))
    return f"{value / MIB:9.1f}" + "".join(f"{value / reference:7.2f}" for reference in references)


def print_table(title, columns, cells, runs=RUNS):
    print(f"\n{title}\n\n{'model':13}{'cut':8}stage  type{columns}")
    for run in runs:
        print(f"{run}{''.join(cells(run))}")


def print_tables(peers, counted, said):
    print("\nParameters of the model, millions; of each peer also over ours\n")
    print(f"{'model':13}{'ours':>9}" + "".join(f"{name:>18}" for name in peers))
    for run in (next(run for run in RUNS if run.model == model) for model in MODELS):
        ours, theirs = counted[run][1], (said[run][name].get("params") for name in peers)
        print(f"{run.model:13}{ours / 1e6:9.2f}" +
              "".join(f"{n / 1e6:11.2f}{n / ours:7.3f}" if n else "-".rjust(18) for n in theirs))

    def states(run):
        tags, _, psi = counted[run]
        count = sum(tags.get(tag, 0) for tag in STATES)
        paper = psi * sum(cut_by_stage(run, *((2, 2, 12) if run.bf16 else (4, 4, 8))))
        own = [cell(count), cell(paper), f"{count / paper:7.2f}"]
        return own + [cell(said[run][name].get("states"), count, paper) for name in peers]

    print_table(f"Model states of rank 0, MiB. count: {' + '.join(STATES)}.\npaper: 2+2+12 bytes (fp32: 4+4+8) for each"
                " parameter of the rank, cut by stage; c/p: count over paper.\nOf peers: MiB, over count, over paper.",
                f"{'count':>9}{'paper':>9}{'c/p':>7}" + "".join(f"{name:>23}" for name in peers), states)

    total = [name for name in peers if any("total" in said[run][name] for run in RUNS)]
    everything = {run: sum(counted[run][0].values()) for run in RUNS}
    print_table("All memory of rank 0, MiB. count: all tags. Of peers that claim a total: MiB, over count.\n"
                "buffers: what of the cookbook's total are buffers for communication.",
                f"{'count':>9}" + "".join(f"{name:>16}" for name in total) + f"{'buffers':>9}",
                lambda run: [cell(everything[run]), *(cell(said[run][n].get("total"), everything[run]) for n in total),
                             cell(said[run].get("cookbook", {}).get("buffers"))])

    def terms(run):
        psi = said[run]["cookbook"]["params"] / (run.tp * run.pp)
        right = cut_by_stage(run, *((2, 4, 12) if run.bf16 else (4, 4, 8)))
        return [f"{size / psi:12.1f}{should:6.1f}" for size, should in zip(said[run]["cookbook"]["terms"], right)]

    if "cookbook" in peers:
        print_table("The cookbook's terms, bytes for each parameter of a rank (its own number over tp and pp),\n"
                    "and what they should be: 2+4+12 by its own account (fp32: 4+4+8), cut by stage over dp.",
                    "".join(f"{term:>18}" for term in ("model", "gradients", "optimizer")), terms,
                    [run for run in RUNS if run.tp * run.pp > 1 or not run.bf16])

    tags = sorted({tag for row, _, _ in counted.values() for tag in row}, key=lambda tag: (tag not in STATES, tag))
    print_table("The count by tag, MiB", "".join(f"{tag:>12}" for tag in tags),
                lambda run: [f"{counted[run][0].get(tag, 0) / MIB:12.1f}" for tag in tags])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--cookbook", type=Path, default="cookbook", help="a checkout (default ./cookbook)")
    parser.add_argument("--megatron", type=Path, default="Megatron-LM", help="a checkout (default ./Megatron-LM)")
    parser.add_argument("--text", default="LICENSE", help="what the models are trained on")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    packages = ("deepspeed", "accelerate", "transformers", "torch")
    print(*(f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name in packages), sep=", ")
    peers = {}
    for name, peer in PEERS.items():
        try:
            peer(RUNS[-1], args)
            peers[name] = peer
            print(f"{name}: {CLAIMS[name]}")
        except (ImportError, OSError) as error:
            print(f"{name}: not asked: {error}")
    counted, said = {}, {}
    for run in RUNS:
        print(run, file=sys.stderr)
        counted[run] = count(run, args)
        said[run] = {name: peer(run, args) for name, peer in peers.items()}
    print_tables(peers, counted, said)


if __name__ == "__main__":
    main()
