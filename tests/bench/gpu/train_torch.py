#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps of one of our configurations (GPT-2 or Qwen2) in PyTorch: tokens/s, MFU and memory, beside
`cuda_bench step` of the same file.

    python3 tests/bench/gpu/train_torch.py configs/gpu/gpt2-124m.json

Model, micro-batch, accumulation, optimizer and clipping are the configuration's; tokens are random and lie on the GPU.
What follows is chosen for PyTorch's speed:
  --recipe bf16      parameters and activations in bf16, with fp32 master weights, fp32 sums of gradients and fp32
                     moments: 18 bytes a parameter that stay, as ours without the 16-bit gradients, each of which a hook
                     adds to its fp32 sum and frees as soon as it is there
  --recipe autocast  fp32 parameters under torch.autocast(bfloat16)
  --compile model    torch.compile of the whole model; `layer` compiles one block and runs it for all, with the addition
                     to the residual stream moved into the next block so that it is fused with the norm there as well:
                     less to compile
  --attention auto   the fastest of SDPA's backends (cuDNN, flash, memory-efficient) at this model's shape, with groups
                     of heads or with k and v repeated; one that fails in training gives way to the next
  --pad-vocab 64     the vocabulary rounded up, which makes PyTorch's product faster; MFU counts the model's own
Fused AdamW, clip_grad_norm_ with foreach, and no waiting for the GPU between steps.
"""

import argparse
import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

import measure


class Shape:
    """The model of a configuration under common names."""

    def __init__(self, config, pad_vocab):
        m = config["model"]
        self.family = m["type"]
        assert self.family in ("gpt2", "qwen2"), self.family
        gpt2 = self.family == "gpt2"
        self.vocab = m["vocab_size"]
        self.padded_vocab = -(-self.vocab // pad_vocab) * pad_vocab
        self.hidden = m["n_embd" if gpt2 else "hidden_size"]
        self.layers = m["n_layer" if gpt2 else "num_hidden_layers"]
        self.heads = m["n_head" if gpt2 else "num_attention_heads"]
        self.kv_heads = self.heads if gpt2 else m.get("num_key_value_heads", self.heads)
        self.head_dim = self.hidden // self.heads
        self.intermediate = 4 * self.hidden if gpt2 else m["intermediate_size"]
        self.positions = m["n_positions" if gpt2 else "max_position_embeddings"]
        self.eps = m.get("layer_norm_epsilon", 1e-5) if gpt2 else m.get("rms_norm_eps", 1e-6)
        self.theta = m.get("rope_theta", 1e4)
        self.tied = m.get("tie_word_embeddings", gpt2)
        assert self.tied, "only tied embeddings are needed here"

    def num_params(self):
        C, F_, KV = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        if self.family == "gpt2":
            block = 4 * C * C + 4 * C + 2 * C * F_ + F_ + C + 4 * C
            return self.layers * block + (self.vocab + self.positions) * C + 2 * C
        block = 2 * C * C + 2 * C * KV + C + 2 * KV + 3 * C * F_ + 2 * C
        return self.layers * block + self.vocab * C + C

    def flops_per_token(self, T):
        """libds/model: 6 per parameter of a matrix product, 12 L C T for attention (all pairs, PaLM's convention)."""
        C, F_, KV = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        block = 4 * C * C + 2 * C * F_ if self.family == "gpt2" else 2 * C * C + 2 * C * KV + 3 * C * F_
        return 6 * (self.layers * block + self.vocab * C) + 12 * self.layers * self.heads * self.head_dim * T


ATTENTION = {"repeat": False}  # k and v repeated to all heads, or groups inside SDPA


def attend(q, k, v):
    """[B,T,H,D] each; causal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[1] == k.shape[1]:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif ATTENTION["repeat"]:
        times = q.shape[1] // k.shape[1]
        o = F.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1),
                                           is_causal=True)
    else:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2).flatten(2)


class Gpt2Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(s.hidden, eps=s.eps), nn.LayerNorm(s.hidden, eps=s.eps)
        self.c_attn, self.c_proj = nn.Linear(s.hidden, 3 * s.hidden), nn.Linear(s.hidden, s.hidden)
        self.c_fc, self.c_back = nn.Linear(s.hidden, s.intermediate), nn.Linear(s.intermediate, s.hidden)

    def forward(self, x, delta, cos, sin):
        """The residual stream before `delta` is added to it -> the same, one block on."""
        if delta is not None:
            x = x + delta
        qkv = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.c_proj(attend(*qkv.unbind(2)))
        return x, self.c_back(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class RmsNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotate(x, cos, sin):
    """x [B,T,H,D]; half rotation, as Hugging Face's."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Qwen2Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.sizes = (s.hidden, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim)
        self.head_dim = s.head_dim
        self.norm_1, self.norm_2 = RmsNorm(s.hidden, s.eps), RmsNorm(s.hidden, s.eps)
        self.qkv = nn.Linear(s.hidden, sum(self.sizes))  # q, k and v in one product
        self.o = nn.Linear(s.hidden, s.hidden, bias=False)
        self.gate_up = nn.Linear(s.hidden, 2 * s.intermediate, bias=False)
        self.down = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x, delta, cos, sin):
        if delta is not None:
            x = x + delta
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)) for p in self.qkv(self.norm_1(x)).split(self.sizes, -1))
        x = x + self.o(attend(rotate(q, cos, sin), rotate(k, cos, sin), v))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x, self.down(F.silu(gate) * up)


class Head(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.norm = nn.LayerNorm(s.hidden, eps=s.eps) if s.family == "gpt2" else RmsNorm(s.hidden, s.eps)

    def forward(self, x, delta, table, targets):
        logits = F.linear(self.norm(x + delta), table)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model(nn.Module):
    def __init__(self, s, T, device):
        super().__init__()
        self.wte = nn.Embedding(s.padded_vocab, s.hidden)
        self.wpe = nn.Embedding(s.positions, s.hidden) if s.family == "gpt2" else None
        self.blocks = nn.ModuleList(Gpt2Block(s) if s.family == "gpt2" else Qwen2Block(s) for _ in range(s.layers))
        self.head = Head(s)
        for p in self.parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
        # Not buffers: they stay fp32 whatever the parameters become.
        angles = torch.arange(T, device=device).float().outer(
            s.theta**-(torch.arange(0, s.head_dim, 2, device=device).float() / s.head_dim))
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]
        self.row_positions = torch.arange(T, device=device)

    def forward(self, ids, targets):
        x, delta = self.wte(ids), None
        if self.wpe is not None:
            x = x + self.wpe(self.row_positions)
        for block in self.blocks:
            x, delta = block(x, delta, self.cos, self.sin)
        return self.head(x, delta, self.wte.weight, targets)


def use_backend(name, repeat):
    ATTENTION["repeat"] = repeat
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(name == "efficient")
    torch.backends.cuda.enable_math_sdp(name == "math")


def rank_attention(s, B, T, device):
    """[(seconds, backend, repeat)] of forward and backward at the model's shape, fastest first."""
    found = []
    for name in ("cudnn", "flash", "efficient"):
        for repeat in (False, True) if s.heads != s.kv_heads else (False,):
            use_backend(name, repeat)
            q, k, v = (torch.randn(B, T, h, s.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
                       for h in (s.heads, s.kv_heads, s.kv_heads))
            dout = torch.randn(B, T, s.hidden, device=device, dtype=torch.bfloat16)
            try:
                seconds, _ = measure.timed(lambda _: torch.autograd.grad(attend(q, k, v), (q, k, v), dout), device)
                found.append((seconds, name, repeat))
            except RuntimeError as e:
                measure.say(f"  attention {name}{', repeated' if repeat else ''}: {str(e).splitlines()[0]}")
    return sorted(found)


class Trainer:
    def __init__(self, config, args, s, device):
        self.args, self.device = args, device
        self.B, self.T = config["train_micro_batch_size_per_gpu"], config["data"]["seq_length"]
        self.micro_batches = config["gradient_accumulation_steps"]
        self.clip = config.get("gradient_clipping", 1.0)
        torch.manual_seed(1)
        with device:
            self.model = Model(s, self.T, device)
        self.params = list(self.model.parameters())
        self.masters = self.params
        if args.recipe == "bf16":
            self.masters = [nn.Parameter(p.detach().clone()) for p in self.params]
            self.model.to(torch.bfloat16)
            self.params = list(self.model.parameters())
            for m in self.masters:
                m.grad = torch.zeros_like(m)
            for m, p in zip(self.masters, self.params):
                p.register_post_accumulate_grad_hook(lambda p, m=m: self.keep_grad(p, m))
        settings = config["optimizer"]["params"]
        self.optimizer = torch.optim.AdamW(
            [{"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": settings.get("weight_decay", 0.0)},
             {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0}],
            lr=settings["lr"], betas=tuple(settings["betas"]), eps=settings.get("eps", 1e-8), fused=True)
        shape = (self.micro_batches, self.B, self.T)
        self.ids = torch.randint(0, s.vocab, shape, device=device)
        self.targets = self.ids.flatten().roll(-1).view(shape)
        if args.compile == "model":
            self.model.compile()
        if args.compile == "layer":
            for part in (*self.model.blocks, self.model.head):
                part.compile()
        self.first_micro = True

    def keep_grad(self, p, master):
        if self.first_micro:
            master.grad.copy_(p.grad)
        else:
            master.grad.add_(p.grad)
        p.grad = None

    def step(self):
        """The mean loss, on the device."""
        total = torch.zeros((), device=self.device)
        if self.args.recipe == "autocast":
            self.optimizer.zero_grad(set_to_none=True)
        for micro in range(self.micro_batches):
            self.first_micro = micro == 0
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.recipe == "autocast"):
                loss = self.model(self.ids[micro], self.targets[micro])
            (loss / self.micro_batches).backward()
            total += loss.detach() / self.micro_batches
        if self.clip > 0:
            nn.utils.clip_grad_norm_(self.masters, self.clip, foreach=True)
        self.optimizer.step()
        if self.args.recipe == "bf16":
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
        return total


def measure_training(config, args, s, device, backend):
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trainer = Trainer(config, args, s, device)
    start = time.perf_counter()
    first_loss = trainer.step().item()
    first_s = time.perf_counter() - start
    assert abs(first_loss - math.log(s.padded_vocab)) < 1.5, f"the first loss is {first_loss}"
    trainer.step()
    measure.synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trainer.step()
    measure.synchronize(device)
    block = 1 if args.small else max(1, round(1 / (time.perf_counter() - start)))
    times, begin = [], time.perf_counter()
    while len(times) < (2 if args.small else 4) or (not args.small and time.perf_counter() - begin < args.seconds):
        start = time.perf_counter()
        for _ in range(block):
            loss = trainer.step()
        measure.synchronize(device)
        times.append((time.perf_counter() - start) / block)
    last_loss = loss.item()
    assert math.isfinite(last_loss), "the loss is no number"

    tokens = trainer.micro_batches * trainer.B * trainer.T
    step_s, flops = measure.median(times), s.flops_per_token(trainer.T)
    rate = tokens / step_s
    cuda = device.type == "cuda"
    memory = torch.cuda.max_memory_allocated() if cuda else 0
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    name = os.path.splitext(os.path.basename(args.config))[0]
    measure.say(f"step {name}: {s.num_params()} parameters, {trainer.micro_batches} x {trainer.B} x {trainer.T} "
                f"tokens; {args.recipe}, compile {args.compile}, attention {backend}")
    measure.say(f"  {rate:.0f} tokens/s; median {step_s * 1e3:.2f} ms, fastest {min(times) * 1e3:.2f}, slowest "
                f"{max(times) * 1e3:.2f} of {len(times)} x {block} steps; first {first_s:.1f} s")
    measure.say(f"  MFU {flops * rate / measure.DATASHEET_FLOPS:.1%} of {measure.DATASHEET_FLOPS * 1e-12:.0f} TFLOP/s; "
                f"memory {memory / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} reserved; "
                f"loss {first_loss:.4f} -> {last_loss:.4f}")
    args.records.write(section="step", model=name, parameters=s.num_params(), micro_batches=trainer.micro_batches,
                       B=trainer.B, T=trainer.T, recipe=args.recipe, compile=args.compile, attention=backend,
                       tokens_per_s=rate, step_ms=step_s * 1e3, min_ms=min(times) * 1e3, max_ms=max(times) * 1e3,
                       steps=len(times) * block, first_step_s=first_s, flops_per_token=flops,
                       mfu=flops * rate / measure.DATASHEET_FLOPS, memory_bytes=memory, reserved_bytes=reserved,
                       first_loss=first_loss, last_loss=last_loss)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--recipe", choices=("bf16", "autocast"), default="bf16")
    parser.add_argument("--compile", choices=("model", "layer", "none"), default="model")
    parser.add_argument("--attention", choices=("auto", "cudnn", "flash", "efficient", "math"), default="auto")
    parser.add_argument("--pad-vocab", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8, help="of steps that count")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="append lines of JSON here")
    parser.add_argument("--small", action="store_true", help="two steps: a smoke test")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as ds-train's --set")
    args = parser.parse_args()
    args.records = measure.Records(args.json)
    config = measure.read_config(args.config, args.set)
    assert config["bf16"]["enabled"], "bf16 only"
    device = torch.device(args.device)
    s = Shape(config, args.pad_vocab)
    measure.say(f"{measure.device_name(device)}, {measure.versions()}")
    args.records.write(section="device", name=measure.device_name(device), versions=measure.versions(),
                       small=args.small)
    choices = [(0.0, args.attention, False)]
    if args.attention == "auto" and device.type == "cuda":
        choices = rank_attention(s, config["train_micro_batch_size_per_gpu"], config["data"]["seq_length"], device)
        for seconds, name, repeat in choices:
            measure.say(f"  attention {name}{', repeated' if repeat else ''}: {seconds * 1e6:.0f} us fwd + bwd")
    for i, (_, name, repeat) in enumerate(choices):
        if device.type == "cuda":
            use_backend(name, repeat)
        try:
            return measure_training(config, args, s, device, name + (", repeated" if repeat else ""))
        except RuntimeError as e:
            if i + 1 == len(choices) or "out of memory" in str(e):
                raise
            measure.say(f"  training with attention {name} failed: {str(e).splitlines()[0]}")
            torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
