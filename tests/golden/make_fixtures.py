#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole-model fixtures: what PyTorch computes on tiny GPT-2, Llama, Qwen2, Qwen3 and BERT models of odd sizes.

    python3 tests/golden/make_fixtures.py [NAME ...]        # needs torch, transformers >= 5, safetensors; seconds

Each tests/golden/<name>/ holds
  config.json, model.safetensors   as transformers writes them: fp32 weights, dropout 0, Hugging Face names
  expected.safetensors
    input_ids, targets      i32 [B,T]; target t is the token after input t, for BERT one at its place; -100 = ignored
    fp64.logits             f64 [B,T,V]   the reference: every operation in fp64, RoPE angles and softmax included
    fp64.loss               f64 [1]       mean cross-entropy over the targets that are not ignored
    fp64.token_losses       f64 [B*T]     what it is the mean of; 0 where the target is ignored
    fp64.grad.<parameter>   f64           d loss / d parameter; a tied embedding has one entry
    bf16.*, fp16.*          f32           the same reference for the weights rounded to that type: the arithmetic of a
                                          16-bit run is measured against it, not the rounding of the weights
    train.<dtype>.loss      f64 [11]      loss before each of ten AdamW steps on the one batch, and after the last
    train.<dtype>.grad_norm f64 [10]      global gradient norm before clipping
  expected_errors.json      {tensor: {dtype: {"max_abs", "rel_l2"}}}: the error of PyTorch itself in fp32, bf16 and fp16
                            against the reference of that dtype, for "logits", "loss", "token_losses" and
                            "grad.<parameter>"

Training: AdamW, lr 1e-3, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1 on tensors of two or more dims and 0 on the
others, clipping at norm 1 (g *= min(1, 1/(norm + 1e-6))). <dtype> is fp64, fp32, bf16 or fp16. bf16 and fp16: 16-bit parameters and
gradients, fp32 master and moments, parameters = master rounded after each step.

What PyTorch does in 16 bits (model.to(dtype), attn_implementation="eager", CPU): matrix products accumulate in fp32 and
round once; every intermediate tensor is rounded to the dtype. GPT-2's and BERT's softmax and LayerNorm take and give 16-bit
tensors;
Llama and Qwen take the softmax, RMSNorm's statistics and the RoPE angles in fp32 and round cos, sin and the normalised x
before the weight is applied. Logits are 16-bit; the loss is taken in fp32 from them. fp16 gradients come from a static
loss scale of 1024, in training too, and are unscaled in fp32.

BERT's errors are the larger of two attentions of PyTorch's, "eager" and its fused "sdpa", transformers' default, which also
trains it: like every fused attention that takes the sum that the softmax's gradient subtracts from the rounded output,
and where every row sees all keys this decides the error of queries and keys.

Deterministic: fixed seeds, one thread. Another CPU may move the last bits of the fp32 and 16-bit numbers.
"""

import contextlib
import json
import os
import pathlib
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

BATCH, SEQUENCE, STEPS = 2, 19, 10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LOSS_SCALE = 1024.0

NO_SPECIAL_TOKENS = dict(bos_token_id=None, eos_token_id=None)
LLAMA_SIZES = dict(vocab_size=89, hidden_size=40, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, **NO_SPECIAL_TOKENS)
SMALL_GPT2 = dict(vocab_size=41, n_positions=24, n_embd=28, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                  attn_pdrop=0.0, **NO_SPECIAL_TOKENS)
THETA_1E6 = {"rope_type": "default", "rope_theta": 1e6}
MODELS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_positions=40, n_embd=36, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        **NO_SPECIAL_TOKENS),
    "llama": transformers.LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=False),
    # Wavelengths lie below, inside and above the ramp of the llama3 scaling.
    "llama-tied": transformers.LlamaConfig(
        **LLAMA_SIZES, tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    "qwen2": transformers.Qwen2Config(
        vocab_size=83, hidden_size=42, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=48, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=THETA_1E6, **NO_SPECIAL_TOKENS),
    # head_dim * heads = 56 is not the hidden size.
    "qwen3": transformers.Qwen3Config(
        vocab_size=101, hidden_size=36, intermediate_size=58, num_hidden_layers=2, num_attention_heads=4, head_dim=14,
        num_key_value_heads=2, max_position_embeddings=48, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=THETA_1E6, **NO_SPECIAL_TOKENS),
    # Settings that the models above leave at their defaults. Small, but with biases of 26 elements and more: with
    # fewer, PyTorch's own error, our yardstick, is a matter of luck.
    "gpt2-untied": transformers.GPT2Config(
        **SMALL_GPT2, activation_function="gelu", n_inner=38, tie_word_embeddings=False,
        scale_attn_by_inverse_layer_idx=True),
    "gpt2-unscaled": transformers.GPT2Config(**SMALL_GPT2, activation_function="silu", scale_attn_weights=False),
    "llama-bias": transformers.LlamaConfig(
        vocab_size=43, hidden_size=32, intermediate_size=26, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True,
        **NO_SPECIAL_TOKENS),
    # The middle layer alone has a window, which is shorter than the sequence.
    "qwen2-window": transformers.Qwen2Config(
        vocab_size=37, hidden_size=24, intermediate_size=26, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_sliding_window=True, sliding_window=5,
        max_window_layers=0, layer_types=["full_attention", "sliding_attention", "full_attention"],
        **NO_SPECIAL_TOKENS),
    "bert": transformers.BertConfig(
        vocab_size=79, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=58,
        max_position_embeddings=24, type_vocab_size=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=0, **NO_SPECIAL_TOKENS),
}


@contextlib.contextmanager
def all_fp64():
    """The models cast to fp32 by name in places (RMSNorm, softmax, RoPE); inside, those names mean fp64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(torch.float32)


def new_model(config, **kwargs):
    masked = config.model_type == "bert"
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    return auto.from_config(config, **kwargs)


def build(config, state, attention="eager"):
    model = new_model(config, attn_implementation=attention)
    model.load_state_dict(state, strict=True)
    return model


def attentions_of(config, dtype):
    return ["eager", "sdpa"] if config.model_type == "bert" and dtype != torch.float64 else ["eager"]


def initial_model(config, seed):
    """Larger weights than a real initialisation, so that every term of every gradient is far from zero."""
    model = new_model(config, dtype=torch.float32)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            is_gain = p.dim() == 1 and name.endswith("weight")
            p.copy_(1.0 + 0.1 * noise if is_gain else (0.1 if p.dim() == 1 else 0.15) * noise)
    return model


def batch(vocab_size, seed):
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (BATCH, SEQUENCE + 1), generator=rng)
    tokens[:, 3] = tokens[:, 1]  # a repeated id: its embedding gradient is a sum
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    targets[0, 0] = targets[0, 7] = targets[1, -1] = -100
    return inputs, targets


def masked_batch(vocab_size, seed):
    """Sixteen positions are predicted: their share of the mean is exact in every type. Two inputs are the padding token 0,
    whose row of the embedding has no gradient of look-ups, but one of the projection."""
    rng = torch.Generator().manual_seed(seed + 2)
    tokens = torch.randint(1, vocab_size, (BATCH, SEQUENCE), generator=rng)
    tokens[:, 3] = tokens[:, 1]
    inputs, targets = tokens.clone(), torch.full_like(tokens, -100)
    for t in range(2, SEQUENCE - 1, 2):
        targets[:, t] = tokens[:, t]
        inputs[:, t] = 4
    inputs[0, 5] = inputs[1, 9] = 0
    return inputs, targets


def loss_of(model, inputs, targets):
    logits = model(input_ids=inputs, use_cache=False).logits
    return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def token_losses(logits, targets):
    return F.cross_entropy(logits.detach().float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")


def evaluate(model, inputs, targets, scale=1.0):
    """{"logits", "loss", "token_losses", "grad.<parameter>"}; gradients divided by the loss scale in fp32."""
    logits, loss = loss_of(model, inputs, targets)
    (loss * scale).backward()
    result = {"logits": logits.detach(), "loss": loss.detach().reshape(1), "token_losses": token_losses(logits, targets)}
    for name, p in model.named_parameters():
        result["grad." + name] = p.grad if scale == 1.0 else p.grad.float() / scale
    return result


def reference(config, state, inputs, targets):
    with all_fp64():
        result = evaluate(build(config, {k: v.double() for k, v in state.items()}), inputs, targets)
    assert all(t.dtype == torch.float64 for t in result.values())
    return result


def train(config, state, dtype, inputs, targets):
    """Losses and gradient norms of the AdamW run: parameters in `dtype`, master and moments in fp32 (fp64 for fp64)."""
    scale = FP16_LOSS_SCALE if dtype == torch.float16 else 1.0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    model = build(config, state, attentions_of(config, dtype)[-1]).to(dtype)
    params = list(model.parameters())
    master = [torch.nn.Parameter(p.detach().to(wide)) for p in build(config, state).parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": [m for m in master if m.dim() >= 2], "weight_decay": 0.1},
         {"params": [m for m in master if m.dim() < 2], "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses, norms = [], []
    for step in range(STEPS + 1):
        _, loss = loss_of(model, inputs, targets)
        losses.append(loss.item())
        if step == STEPS:
            break
        model.zero_grad()
        (loss * scale).backward()
        for m, p in zip(master, params):
            m.grad = p.grad.to(wide) / scale
        norms.append(torch.nn.utils.clip_grad_norm_(master, 1.0).item())
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(master, params):
                p.copy_(m)
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64)


def errors(got, want):
    d = got.double() - want.double()
    return {"max_abs": d.abs().max().item(), "rel_l2": (d.norm() / want.double().norm()).item()}


def make(name, directory, seed):
    config = MODELS[name]
    directory.mkdir(parents=True, exist_ok=True)
    model = initial_model(config, seed)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    make_batch = masked_batch if config.model_type == "bert" else batch
    inputs, targets = make_batch(config.vocab_size, seed + 1)

    expected = {"input_ids": inputs.to(torch.int32), "targets": targets.to(torch.int32)}
    exact = reference(config, state, inputs, targets)
    expected.update({"fp64." + k: v for k, v in exact.items()})
    table = {}
    for key, dtype in DTYPES.items():
        rounded = {k: v.to(dtype).float() for k, v in state.items()}
        want = exact if key == "fp32" else reference(config, rounded, inputs, targets)
        for attention in attentions_of(config, dtype):
            got = evaluate(build(config, state, attention).to(dtype), inputs, targets,
                           FP16_LOSS_SCALE if key == "fp16" else 1.0)
            for tensor, value in got.items():
                new, old = errors(value, want[tensor]), table.setdefault(tensor, {}).get(key, {})
                table[tensor][key] = {measure: max(e, old.get(measure, 0.0)) for measure, e in new.items()}
        if key != "fp32":
            expected.update({f"{key}.{k}": v.float() for k, v in want.items()})
    for key in DTYPES:
        expected[f"train.{key}.loss"], expected[f"train.{key}.grad_norm"] = train(
            config, state, DTYPES[key], inputs, targets)
    with all_fp64():
        expected["train.fp64.loss"], expected["train.fp64.grad_norm"] = train(
            config, {k: v.double() for k, v in state.items()}, torch.float64, inputs, targets)

    save_file({k: v.contiguous().clone() for k, v in expected.items()}, directory / "expected.safetensors")
    (directory / "expected_errors.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    worst = {k: max(e[k]["rel_l2"] for e in table.values()) for k in DTYPES}
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, loss {exact['loss'].item():.6f}, "
          f"worst relative error of PyTorch: " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))
    for key in ("fp64", *DTYPES):
        print(f"  train {key}", " ".join(f"{x:.7f}" for x in expected[f"train.{key}.loss"].tolist()))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    root = pathlib.Path(__file__).resolve().parent
    for index, name in enumerate(MODELS):
        if name in (sys.argv[1:] or MODELS):
            make(name, root / name, seed=1000 + 10 * index)


if __name__ == "__main__":
    main()
