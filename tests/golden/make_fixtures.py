#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole-model fixtures: what PyTorch computes on tiny GPT-2, Llama, Qwen2, Qwen3, Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE,
GLM-4.5, DeepSeek-V2, DeepSeek-V3 and BERT models of odd sizes.

    python3 tests/golden/make_fixtures.py [NAME ...]        # needs torch, transformers >= 5, safetensors; seconds
    python3 tests/golden/make_fixtures.py --find-seed NAME  # of a model with experts: the seed in SEEDS; minutes

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

Models with experts: weights as published, with three matrices for each expert; parameters in expected.safetensors under the
names of transformers 5, in which the experts of a block are batches. In addition
    balanced.loss           f64 [1]       loss + 0.05 * the sum over blocks of E / (k n^2) * sum_e count_e * sum p_e, taken
                                          from transformers' router logits over the n tokens whose target is not ignored
    balanced.balance        f64 [1]       that sum, without the coefficient
    balanced.grad.<name>    f64           the gradients of balanced.loss; PyTorch's own error in fp32 is in
                                          expected_errors.json
    pooled.loss             f64 [1]       loss + 0.05 * transformers' load_balancing_loss_func, which pools the blocks, counts
                                          all tokens and does not divide by k
    pooled.grad.<router>    f64           the gradients of that, of the routers alone
    global.balance          f64 [1]       the mean over the sequences, each of which is a micro-batch, of the sum over blocks of
                                          E / n * sum_e share_e * sum p_e, where share_e is that of all choices of the sequences
                                          so far and n and p are of the sequence
    global.grad.<router>    f64           the gradients of 0.05 * global.balance, of the routers alone
GLM-4.5 and DeepSeek have neither loss in transformers, so there is no pooled.*. For balanced.* p of GLM-4.5 and DeepSeek-V3 is
their sigmoids divided by their sum. The biases of their routers are numbers that every type has, and nothing moves them.
PyTorch and we, in any dtype, must choose the same experts, or there is nothing to compare. So seeds are those with which each
expert has tokens, PyTorch chooses the same experts in every dtype and in all steps of training, and each token's last chosen expert
is ahead of the first that is not chosen: by MARGIN of the spread of its logits at first, with weights rounded to 16 bits too, and
by TRAINED_MARGIN in training.

The errors of models with experts are the larger of two, too: of transformers' "eager" attention and experts, and of
"sdpa" and "batched_mm", each of which also trains them (train.<dtype>.eager.*, train.<dtype>.*): a few small tensors of few tokens would make one of them a matter of luck.

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

BATCH, STEPS = 2, 10
SEQUENCE, SPARSE_SEQUENCE = 19, 9  # with experts: fewer tokens, of which none has a tie to decide
MARGIN, TRAINED_MARGIN, BALANCE = 0.02, 0.002, 0.05
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LOSS_SCALE = 1024.0

NO_SPECIAL_TOKENS = dict(bos_token_id=None, eos_token_id=None)
LLAMA_SIZES = dict(vocab_size=89, hidden_size=40, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, **NO_SPECIAL_TOKENS)
SMALL_GPT2 = dict(vocab_size=41, n_positions=24, n_embd=28, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                  attn_pdrop=0.0, **NO_SPECIAL_TOKENS)
LATENT_SIZES = dict(hidden_size=32, intermediate_size=26, num_hidden_layers=2, num_attention_heads=4, kv_lora_rank=20,
                    qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=8, moe_intermediate_size=12, n_routed_experts=6,
                    num_experts_per_tok=2, n_shared_experts=2, max_position_embeddings=64, rms_norm_eps=1e-5,
                    **NO_SPECIAL_TOKENS)
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
    # The window is shorter than the sequence.
    "mixtral": transformers.MixtralConfig(
        vocab_size=47, hidden_size=28, intermediate_size=18, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, sliding_window=5, num_local_experts=5, num_experts_per_tok=2,
        **NO_SPECIAL_TOKENS),
    "olmoe": transformers.OlmoeConfig(
        vocab_size=43, hidden_size=32, intermediate_size=14, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, num_experts=8, num_experts_per_tok=3, pad_token_id=None,
        **NO_SPECIAL_TOKENS),
    # The first layer is dense.
    "qwen2_moe": transformers.Qwen2MoeConfig(
        vocab_size=41, hidden_size=32, intermediate_size=26, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, mlp_only_layers=[0], moe_intermediate_size=12, num_experts=6,
        num_experts_per_tok=2, shared_expert_intermediate_size=22, rope_parameters=THETA_1E6, **NO_SPECIAL_TOKENS),
    # The middle layer is dense; head_dim * heads = 56 is not the hidden size.
    "qwen3_moe": transformers.Qwen3MoeConfig(
        vocab_size=37, hidden_size=32, intermediate_size=26, num_hidden_layers=3, num_attention_heads=4, head_dim=14,
        num_key_value_heads=2, max_position_embeddings=32, mlp_only_layers=[1], moe_intermediate_size=14, num_experts=6,
        num_experts_per_tok=2, norm_topk_prob=True, rope_parameters=THETA_1E6, **NO_SPECIAL_TOKENS),
    # The first layer is dense; 8 of 16 dimensions of a head turn; the experts of a token are those of one of two groups.
    "glm4_moe": transformers.Glm4MoeConfig(
        vocab_size=41, hidden_size=32, intermediate_size=26, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=32, attention_bias=True, use_qk_norm=True, first_k_dense_replace=1,
        moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=2, n_group=2, topk_group=1,
        routed_scaling_factor=1.8, num_mtp_layers=0, partial_rotary_factor=0.5, **NO_SPECIAL_TOKENS),
    # Tokens choose among the experts of two of three groups; YaRN scales scores, too. The norms of latents have an epsilon
    # of their own.
    "deepseek_v2": transformers.DeepseekV2Config(
        **LATENT_SIZES, vocab_size=41, q_lora_rank=22, first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=3,
        topk_group=2, routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 16}),
    # Queries without a latent, as in DeepSeek-V2-Lite, and biases.
    "deepseek_v2_lite": transformers.DeepseekV2Config(
        **LATENT_SIZES, vocab_size=37, q_lora_rank=None, first_k_dense_replace=0, topk_method="greedy", attention_bias=True),
    # The first layer is dense; tokens choose two of the three experts of one of two groups.
    "deepseek_v3": transformers.DeepseekV3Config(
        **LATENT_SIZES, vocab_size=43, num_key_value_heads=4, q_lora_rank=22, first_k_dense_replace=1, n_group=2, topk_group=1,
        routed_scaling_factor=1.5, num_mtp_layers=0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 16}),
}
# Those that --find-seed finds, but for seeds with which PyTorch's own errors in 16 bits, our yardstick, are small by luck.
SEEDS = {"mixtral": 3390, "olmoe": 105640, "qwen2_moe": 610780, "qwen3_moe": 111430, "glm4_moe": 2570,
         "deepseek_v2": 2820, "deepseek_v2_lite": 26910, "deepseek_v3": 2430}


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


def is_sparse(config):
    return hasattr(config, "num_experts_per_tok")


def new_model(config, **kwargs):
    masked = config.model_type == "bert"
    if is_sparse(config):
        kwargs.setdefault("experts_implementation", "eager")
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    return auto.from_config(config, **kwargs)


EAGER = {"attn_implementation": "eager"}


def build(config, state, implementations=EAGER):
    model = new_model(config, **implementations)
    model.load_state_dict(state, strict=True)
    return model


def implementations_of(config, dtype):
    """Those whose errors are compared; the last one trains."""
    if dtype == torch.float64 or not (config.model_type == "bert" or is_sparse(config)):
        return [EAGER]
    usual = {"attn_implementation": "sdpa"}
    if is_sparse(config):
        usual["experts_implementation"] = "batched_mm"
    return [EAGER, usual]


def initial_model(config, seed):
    """Larger weights than a real initialisation, so that every term of every gradient is far from zero."""
    model = new_model(config, dtype=torch.float32)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            is_gain = p.dim() == 1 and name.endswith("weight")
            p.copy_(1.0 + 0.1 * noise if is_gain else (0.1 if p.dim() == 1 else 0.15) * noise)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.randint(-8, 9, b.shape, generator=rng) / 64)
    return model


def batch(vocab_size, seed, sequence=SEQUENCE):
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (BATCH, sequence + 1), generator=rng)
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


def sparse_batch(vocab_size, seed):
    return batch(vocab_size, seed, SPARSE_SEQUENCE)


def loss_of(model, inputs, targets):
    logits = model(input_ids=inputs, use_cache=False).logits
    return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def router_logits(model, inputs):
    """[tokens, E] of each block with experts."""
    return model(input_ids=inputs, use_cache=False, output_router_logits=True).router_logits


def biases(model):
    """Of each block with experts: that of its router; None where routers have none."""
    gates = [m.gate for m in model.modules() if hasattr(m, "gate")]
    return [g.e_score_correction_bias for g in gates if hasattr(g, "e_score_correction_bias")]


def ahead(values, k):
    """By how much the k-th largest value of each row is ahead of the next one, if there is one."""
    if k == values.shape[1]:
        return torch.full_like(values[:, 0], float("inf"))
    ordered = values.sort(descending=True).values
    return ordered[:, k - 1] - ordered[:, k]


def by_choice(config, logits, bias):
    """What experts are chosen by, and how clear the choice of groups is."""
    if bias is None and getattr(config, "topk_method", None) != "group_limited_greedy":
        return logits, None
    scores = logits if bias is None else logits.sigmoid() + bias.to(logits.dtype)
    groups = scores.unflatten(-1, (config.n_group, -1))
    of_group = groups.amax(-1) if bias is None else groups.topk(2).values.sum(-1)
    chosen = torch.zeros_like(of_group).scatter(1, of_group.topk(config.topk_group).indices, 1).bool()
    clear = ahead(of_group, config.topk_group) / scores.std(-1)
    return groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1), clear


def blocks(config, model, inputs):
    """Logits of routers, and by_choice(), of each block."""
    logits = router_logits(model, inputs)
    return [(z, *by_choice(config, z, b)) for z, b in zip(logits, biases(model) or [None] * len(logits), strict=True)]


def counts_of(logits, chosen, targets):
    return F.one_hot(chosen[targets.flatten() != -100], logits.shape[1]).sum((0, 1))


def balance_of(logits, chosen, targets, sigmoid, counts=None):
    """Switch Transformers' loss of one block, for k experts a token, over the tokens that are trained on. counts: those of
    more tokens."""
    counts = counts_of(logits, chosen, targets) if counts is None else counts
    logits = logits[targets.flatten() != -100]
    scores = F.normalize(logits.sigmoid(), p=1, dim=-1) if sigmoid else logits.softmax(-1)
    return logits.shape[1] * (counts / counts.sum() * scores.mean(0)).sum()


def has_sigmoids(config):
    return config.model_type in ("glm4_moe", "deepseek_v3")


def margin_of(logits, values, groups, k, sigmoid):
    """By how much the k-th expert of each token is ahead of the next one, at least; -1 if an expert has no token."""
    if len(values.topk(k).indices.unique()) < logits.shape[1]:
        return -1.0
    spread = logits.sigmoid().std(-1) if sigmoid else logits.std(-1)
    margin = (ahead(values, k) / spread).min().item()
    return margin if groups is None else min(margin, groups.min().item())


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


def balanced(config, state, inputs, targets, dtype):
    """The losses of models with experts."""
    model = build(config, state).to(dtype)
    k, routers = config.num_experts_per_tok, [n for n, _ in model.named_parameters() if n.endswith("mlp.gate.weight")]
    _, loss = loss_of(model, inputs, targets)
    balance = sum(balance_of(z, v.topk(k).indices, targets, has_sigmoids(config))
                  for z, v, _ in blocks(config, model, inputs))
    (loss + BALANCE * balance).backward()
    result = {"balanced.loss": (loss + BALANCE * balance).detach().reshape(1),
              "balanced.balance": balance.detach().reshape(1)}
    result.update({"balanced.grad." + name: p.grad for name, p in model.named_parameters()})
    if config.model_type in ("glm4_moe", "deepseek_v2", "deepseek_v3"):  # which have no such loss
        return result
    model = build(config, state).to(dtype)
    output = model(input_ids=inputs, use_cache=False, output_router_logits=True)
    _, loss = loss_of(model, inputs, targets)
    (loss + BALANCE * output.aux_loss).backward()
    result["pooled.loss"] = (loss + BALANCE * output.aux_loss).detach().reshape(1)
    result.update({"pooled.grad." + name: model.get_parameter(name).grad for name in routers})
    return result


def over_global_batch(config, state, inputs, targets):
    model, k = build(config, state).to(torch.float64), config.num_experts_per_tok
    balance, counts = 0, 0
    for ids, wanted in zip(inputs.split(1), targets.split(1), strict=True):
        routed = [(z, v.topk(k).indices) for z, v, _ in blocks(config, model, ids)]
        counts = counts + torch.stack([counts_of(z, chosen, wanted) for z, chosen in routed])
        balance = balance + sum(balance_of(z, chosen, wanted, has_sigmoids(config), counts[b])
                                for b, (z, chosen) in enumerate(routed)) / len(inputs)
    (BALANCE * balance).backward()
    result = {"global.balance": balance.detach().reshape(1)}
    result.update({"global.grad." + n: p.grad for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")})
    return result


def train(config, state, dtype, inputs, targets, watch=lambda model: True, implementation=-1):
    """Losses and gradient norms of the AdamW run: parameters in `dtype`, master and moments in fp32 (fp64 for fp64). Ends
    early where `watch`, which sees the model before each step, is not content."""
    scale = FP16_LOSS_SCALE if dtype == torch.float16 else 1.0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    model = build(config, state, implementations_of(config, dtype)[implementation]).to(dtype)
    params = list(model.parameters())
    master = [torch.nn.Parameter(p.detach().to(wide)) for p in build(config, state).parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": [m for m in master if m.dim() >= 2], "weight_decay": 0.1},
         {"params": [m for m in master if m.dim() < 2], "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses, norms = [], []
    for step in range(STEPS + 1):
        if not watch(model):
            break
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


def choices(config, model, inputs):
    with torch.no_grad():
        return [v.topk(config.num_experts_per_tok).indices.sort().values for _, v, _ in blocks(config, model, inputs)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def is_clear(config, state, inputs, targets):
    """Whether every type chooses the same experts, and none by a hair."""
    k = config.num_experts_per_tok

    def margin(model):
        with torch.no_grad():
            return min(margin_of(*block, k, has_sigmoids(config)) for block in blocks(config, model, inputs))

    for dtype in DTYPES.values():
        with all_fp64():
            exact = build(config, {name: v.to(dtype).double() for name, v in state.items()})
            if margin(exact) < MARGIN:
                return False
            want = choices(config, exact, inputs)
        for implementations in implementations_of(config, dtype):
            if not same(want, choices(config, build(config, state, implementations).to(dtype), inputs)):
                return False
    trace = []

    def record(model):
        clear = margin(model) >= TRAINED_MARGIN
        if clear:
            trace.append(choices(config, model, inputs))
        return clear

    with all_fp64():
        train(config, {name: v.double() for name, v in state.items()}, torch.float64, inputs, targets, record)
    if len(trace) < STEPS + 1:
        return False
    for dtype in DTYPES.values():
        agreed = []

        def agrees(model):
            agreed.append(same(trace[len(agreed)], choices(config, model, inputs)))
            return agreed[-1]

        train(config, state, dtype, inputs, targets, agrees)
        if not all(agreed):
            return False
    return True


def start(name, seed):
    config = MODELS[name]
    model = initial_model(config, seed)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    make_batch = masked_batch if config.model_type == "bert" else sparse_batch if is_sparse(config) else batch
    return config, model, state, *make_batch(config.vocab_size, seed + 1)


def find_seed(name):
    for seed in range(2000, 1000000, 10):
        config, _, state, inputs, targets = start(name, seed)
        if is_clear(config, state, inputs, targets):
            return print(f"{name}: seed {seed}")


def make(name, directory, seed):
    config, model, state, inputs, targets = start(name, seed)
    directory.mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert not is_sparse(config) or is_clear(config, state, inputs, targets), f"{name}: seed {seed} routes by a hair"

    expected = {"input_ids": inputs.to(torch.int32), "targets": targets.to(torch.int32)}
    exact = reference(config, state, inputs, targets)
    expected.update({"fp64." + k: v for k, v in exact.items()})
    table = {}
    for key, dtype in DTYPES.items():
        rounded = {k: v.to(dtype).float() for k, v in state.items()}
        want = exact if key == "fp32" else reference(config, rounded, inputs, targets)
        for implementations in implementations_of(config, dtype):
            got = evaluate(build(config, state, implementations).to(dtype), inputs, targets,
                           FP16_LOSS_SCALE if key == "fp16" else 1.0)
            for tensor, value in got.items():
                new, old = errors(value, want[tensor]), table.setdefault(tensor, {}).get(key, {})
                table[tensor][key] = {measure: max(e, old.get(measure, 0.0)) for measure, e in new.items()}
        if key != "fp32":
            expected.update({f"{key}.{k}": v.float() for k, v in want.items()})
    if is_sparse(config):
        with all_fp64():
            want = balanced(config, {k: v.double() for k, v in state.items()}, inputs, targets, torch.float64)
            expected.update(over_global_batch(config, {k: v.double() for k, v in state.items()}, inputs, targets))
        expected.update(want)
        for tensor, value in balanced(config, state, inputs, targets, torch.float32).items():
            table[tensor] = {"fp32": errors(value, want[tensor])}
    for key in DTYPES:
        expected[f"train.{key}.loss"], expected[f"train.{key}.grad_norm"] = train(
            config, state, DTYPES[key], inputs, targets)
        if is_sparse(config):
            expected[f"train.{key}.eager.loss"], expected[f"train.{key}.eager.grad_norm"] = train(
                config, state, DTYPES[key], inputs, targets, implementation=0)
    with all_fp64():
        expected["train.fp64.loss"], expected["train.fp64.grad_norm"] = train(
            config, {k: v.double() for k, v in state.items()}, torch.float64, inputs, targets)

    save_file({k: v.contiguous().clone() for k, v in expected.items()}, directory / "expected.safetensors")
    (directory / "expected_errors.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    worst = {k: max(e[k]["rel_l2"] for e in table.values() if k in e) for k in DTYPES}
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, loss {exact['loss'].item():.6f}, "
          f"worst relative error of PyTorch: " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))
    for key in ("fp64", *DTYPES):
        print(f"  train {key}", " ".join(f"{x:.7f}" for x in expected[f"train.{key}.loss"].tolist()))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if sys.argv[1:2] == ["--find-seed"]:
        return find_seed(sys.argv[2])
    root = pathlib.Path(__file__).resolve().parent
    for index, name in enumerate(MODELS):
        if name in (sys.argv[1:] or MODELS):
            make(name, root / name, seed=SEEDS.get(name, 1000 + 10 * index))


if __name__ == "__main__":
    main()
