#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What we write, transformers loads: trains a tiny model of each family with ds-train, merges the checkpoint, loads it in
transformers and compares the logits with ours. Needs torch, transformers >= 5 and a build with its tests; a minute.

    tests/peer/hf_parity.py build/ci/bin [--format hf] [FAMILY ...]

Without --format the checkpoint is merged to one safetensors file, and config.json is the model configuration of its
manifest; with --format hf ds-ckpt-merge writes the whole directory.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

from compare import compare, load

SIZES = {"vocab_size": 259, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
         "max_position_embeddings": 64}
MODELS = {
    "gpt2": {"vocab_size": 256, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {**SIZES, "num_key_value_heads": 2, "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}},
    "qwen2": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**SIZES, "num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "qwen3_moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32, "norm_topk_prob": True, "router_aux_loss_coef": 0.01},
    "glm4_moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "attention_bias": True, "use_qk_norm": True},
    "deepseek_v2": {**SIZES, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
                    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                    "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                                     "mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek_v3": {**SIZES, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
                    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
                    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                                     "mscale": 1.0, "mscale_all_dim": 1.0}},
    "bert": SIZES,
}
MASKS = {"mask_token": 256, "cls_token": 257, "sep_token": 258}


def train_and_merge(family, bin_dir, scratch, merge_format):
    """The directory that transformers is to load."""
    config = {
        "model": {"type": family, **MODELS[family]},
        "data": {"train": str(pathlib.Path(__file__).resolve().parents[2] / "LICENSE"), "seq_length": 48,
                 **({"mlm": MASKS} if family == "bert" else {})},
        "train_batch_size": 8, "steps": 20, "device": "cpu",
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    }
    (scratch / "cfg.json").write_text(json.dumps(config))
    subprocess.run([bin_dir / "ds-train", scratch / "cfg.json", "--out", scratch / "run", "--quiet"], check=True,
                   stdout=subprocess.DEVNULL)
    model_dir = scratch / "model"
    if merge_format == "hf":
        subprocess.run([bin_dir / "ds-ckpt-merge", scratch / "run", "-o", model_dir, "--format", "hf", "--quiet"],
                       check=True, stdout=subprocess.DEVNULL)
        return model_dir
    model_dir.mkdir()
    subprocess.run([bin_dir / "ds-ckpt-merge", scratch / "run", "-o", model_dir / "model.safetensors", "--quiet"],
                   check=True, stdout=subprocess.DEVNULL)
    newest = scratch / "run" / (scratch / "run" / "latest").read_text().strip()
    manifest = json.loads((newest / "manifest.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(manifest["model_config"]))
    return model_dir


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("bin_dir", type=pathlib.Path, help="the folder of ds-train and dump_logits")
    arguments.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(MODELS))
    arguments.add_argument("--format", choices=["safetensors", "hf"], default="safetensors")
    o = arguments.parse_args()
    if unknown := set(o.families) - set(MODELS):
        arguments.error(f"no such family: {', '.join(sorted(unknown))}")
    passed = True
    for family in o.families or MODELS:
        auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
        with tempfile.TemporaryDirectory() as scratch:
            model_dir = train_and_merge(family, o.bin_dir.resolve(), pathlib.Path(scratch), o.format)
            _, wrong = load(auto, model_dir)
            if wrong:
                print(f"{family}: transformers says {wrong}")
                passed = False
            rng = torch.Generator().manual_seed(1)
            # Rows whose residual nearly cancels amplify their rounding: the largest error of few rows would be a matter of luck.
            ids = torch.randint(1, 256, (32, 48), generator=rng)
            passed &= compare(family, auto, model_dir, model_dir, o.bin_dir.resolve(), ids)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main()
