#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The logits of a router in bf16, as transformers 5 rounds them.

usage: make_router_dtype.py [DIRECTORY]

Writes router_dtype/: config.json and model.safetensors of a Mixtral of one layer, in bf16, and expected.safetensors with input_ids
and targets i32 [B,T] and router_logits fp32 [B*T,E], which are numbers of bf16. The layer's attention adds nothing, so that nothing
is rounded before the router but embeddings and their norms; logits are large, so that rounding them changes their softmax.
"""

import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file


def main():
    torch.manual_seed(21)
    config = transformers.MixtralConfig(
        vocab_size=47, hidden_size=32, intermediate_size=18, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, sliding_window=None, num_local_experts=6, num_experts_per_tok=2,
        bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("o_proj.weight"):
                p.zero_()
            elif p.dim() > 1:
                p.copy_((1.2 if "gate.weight" in name else 0.3) * torch.randn(p.shape))
    model = model.to(torch.bfloat16)
    tokens = torch.randint(0, config.vocab_size, (2, 10))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False, output_router_logits=True).router_logits[0]
    assert logits.dtype == torch.bfloat16
    chosen = logits.float().sort(descending=True).values
    assert (chosen[:, 1] > chosen[:, 2]).all()  # no tie decides which experts are chosen
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    directory = root / "router_dtype"
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    save_file({"input_ids": inputs.to(torch.int32), "targets": targets.to(torch.int32), "router_logits": logits.float()},
              directory / "expected.safetensors")


if __name__ == "__main__":
    main()
