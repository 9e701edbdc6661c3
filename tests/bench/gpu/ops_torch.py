#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's ops at the shapes of `cuda_bench ops attention gemm`, under the same names: GB/s of what memory bounds,
TFLOP/s of attention in each of SDPA's backends and of matrix products.

    python3 tests/bench/gpu/ops_torch.py [ops] [attention] [gemm] [--json FILE]

Bytes and FLOP are counted as cuda_bench counts them, whatever the op really moves. RMSNorm, the backward passes of the
norms, SwiGLU and the head are compiled; the rest are PyTorch's own kernels.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import measure

aten = torch.ops.aten


class Bench:
    def __init__(self, args):
        self.device = torch.device(args.device)
        self.small, self.compile = args.small, not args.no_compile
        self.records = measure.Records(args.json)
        self.copy_rate = self.product_rate = None
        measure.say(f"{measure.device_name(self.device)}, {measure.versions()}")
        self.records.write(section="device", name=measure.device_name(self.device), versions=measure.versions(),
                           small=self.small)

    def compiled(self, f):
        return torch.compile(f, dynamic=False) if self.compile else f

    def random(self, *shape, dtype=torch.bfloat16, **options):
        return torch.randn(*shape, device=self.device, dtype=dtype, **options)

    def section(self, name, rate):
        self.name = name
        measure.say(f"\n{name}\n{'op':26} {'dtype':5} {'shape':34} {'median us':>11} {rate:>9} {'share':>8} "
                    f"{'spread':>8}")

    def report(self, op, dtype, shape, timing, work, yardstick, flops, note=""):
        seconds, spread = timing
        rate = work / seconds * (1e-12 if flops else 1e-9)
        share = work / seconds / yardstick
        measure.say(f"{op:26} {dtype:5} {shape:34} {seconds * 1e6:11.1f} {rate:9.1f} {share * 100:6.1f} % "
                    f"{spread * 100:6.1f} %{'  ' + note if note else ''}")
        self.records.write(section=self.name, op=op, dtype=dtype, shape=shape, us=seconds * 1e6, rate=rate,
                           unit="TFLOP/s" if flops else "GB/s", share=share, spread=spread, note=note)

    def timed(self, call):
        return measure.timed(call, self.device, self.small)

    def rotated(self, bytes_, make):
        """As cuda_bench: operands take turns, so that no cache holds them."""
        sets = 2 if self.small else min(max((512 << 20) // bytes_ + 1, 2), 64)
        calls = [make() for _ in range(sets)]
        return measure.timed(lambda i: calls[i % sets](), self.device, self.small, warm_up=sets)

    def memory_bound(self, op, dtype, shape, bytes_, make):
        self.report(op, dtype, shape, self.rotated(bytes_, make), bytes_, self.copies_per_s(), False)

    def copy_bytes(self):
        return 1 << 16 if self.small else 1 << 30

    def copy_timing(self):
        def make():
            n = self.copy_bytes() // 8
            to, from_ = torch.zeros(n, device=self.device), self.random(n, dtype=torch.float32)
            return lambda: to.copy_(from_)
        return self.rotated(self.copy_bytes(), make)

    def copies_per_s(self):
        if self.copy_rate is None:
            self.copy_rate = self.copy_bytes() / self.copy_timing()[0]
        return self.copy_rate

    def product_timing(self, M, N, K, trans_a, trans_b):
        a = self.random(K, M).T if trans_a else self.random(M, K)
        b = self.random(N, K).T if trans_b else self.random(K, N)
        c = torch.zeros(M, N, device=self.device, dtype=torch.bfloat16)
        return self.timed(lambda _: torch.matmul(a, b, out=c))

    def products_per_s(self):
        if self.product_rate is None:
            n = 64 if self.small else 8192
            self.product_rate = 2 * n**3 / self.product_timing(n, n, n, False, True)[0]
        return self.product_rate

    def ops(self):
        self.section("ops", "GB/s")
        R, V = (16, 50) if self.small else (16384, 50257)
        N = 1 << 12 if self.small else 1 << 26
        timing = self.copy_timing()
        self.copy_rate = self.copy_bytes() / timing[0]
        self.report("copy", "fp32", f"{self.copy_bytes() // 8}", timing, self.copy_bytes(), self.copy_rate, False)

        def conversion(to, from_):
            def make():
                y, x = torch.zeros(N, device=self.device, dtype=to), self.random(N, dtype=from_)
                return lambda: y.copy_(x)
            return make
        self.memory_bound("cast from fp32", "bf16", f"{N}", N * 6, conversion(torch.bfloat16, torch.float32))
        self.memory_bound("cast to fp32", "bf16", f"{N}", N * 6, conversion(torch.float32, torch.bfloat16))

        def add():
            x, y = self.random(N), self.random(N)
            z = torch.zeros_like(x)
            return lambda: torch.add(x, y, out=z)
        self.memory_bound("add", "bf16", f"{N}", N * 6, add)

        def layernorm_fwd(C):
            def make():
                x, w, b = self.random(R, C), self.random(C), self.random(C)
                return lambda: torch.native_layer_norm(x, (C,), w, b, 1e-5)
            return make

        def layernorm_bwd(C):
            f = self.compiled(lambda dy, r, x, mean, rstd, w, b: (lambda g: (g[0] + r, g[1], g[2]))(
                aten.native_layer_norm_backward(dy, x, (C,), mean, rstd, w, b, [True, True, True])))

            def make():
                dy, r, x, w, b = self.random(R, C), self.random(R, C), self.random(R, C), self.random(C), self.random(C)
                _, mean, rstd = torch.native_layer_norm(x, (C,), w, b, 1e-5)
                return lambda: f(dy, r, x, mean, rstd, w, b)
            return make
        for C in (64,) if self.small else (768, 1600):
            self.memory_bound("layernorm fwd", "bf16", f"{R}x{C}", 4 * R * C + 8 * R, layernorm_fwd(C))
            self.memory_bound("layernorm bwd + residual", "bf16", f"{R}x{C}", 8 * R * C + 8 * R, layernorm_bwd(C))

        def rms(x, w):
            wide = x.float()
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            return (wide * rstd * w).to(x.dtype), rstd

        def rms_bwd(dy, r, x, rstd, w):
            wide, scaled = x.float() * rstd, dy.float() * w
            dx = (scaled - wide * (scaled * wide).mean(-1, keepdim=True)) * rstd
            return dx.to(x.dtype) + r, (dy.float() * wide).sum(0).to(w.dtype)

        def rmsnorm_fwd(C):
            f = self.compiled(rms)

            def make():
                x, w = self.random(R, C), self.random(C)
                return lambda: f(x, w)
            return make

        def rmsnorm_bwd(C):
            f = self.compiled(rms_bwd)

            def make():
                dy, r, x, w = self.random(R, C), self.random(R, C), self.random(R, C), self.random(C)
                _, rstd = rms(x, w)
                return lambda: f(dy, r, x, rstd, w)
            return make
        for C in (64,) if self.small else (896, 1536):
            self.memory_bound("rmsnorm fwd", "bf16", f"{R}x{C}", 4 * R * C + 4 * R, rmsnorm_fwd(C))
            self.memory_bound("rmsnorm bwd + residual", "bf16", f"{R}x{C}", 8 * R * C + 4 * R, rmsnorm_bwd(C))

        wide = 64 if self.small else 3072

        def gelu_fwd():
            x = self.random(R, wide)
            return lambda: F.gelu(x, approximate="tanh")

        def gelu_bwd():
            dy, x = self.random(R, wide), self.random(R, wide)
            return lambda: aten.gelu_backward(dy, x, approximate="tanh")
        self.memory_bound("gelu fwd", "bf16", f"{R}x{wide}", 4 * R * wide, gelu_fwd)
        self.memory_bound("gelu bwd", "bf16", f"{R}x{wide}", 6 * R * wide, gelu_bwd)

        gated = 64 if self.small else 4864
        swiglu = self.compiled(lambda gate, up: F.silu(gate) * up)

        def swiglu_fwd():
            gate, up = self.random(R, gated), self.random(R, gated)
            return lambda: swiglu(gate, up)
        self.memory_bound("swiglu fwd", "bf16", f"{R}x{gated}", 6 * R * gated, swiglu_fwd)

        # All parameters of a GPT-2 124M: fused AdamW on the masters, then the parameters from them.
        C, L, T = (64, 1, 8) if self.small else (768, 12, 1024)
        Fw = 64 if self.small else 4 * C
        block = [C, C, C * 3 * C, 3 * C, C * C, C, C, C, C * Fw, Fw, Fw * C, C]
        sizes = [V * C, T * C] + L * block + [C, C]
        masters = [torch.nn.Parameter(self.random(n, dtype=torch.float32)) for n in sizes]
        params = [m.detach().to(torch.bfloat16) for m in masters]
        for m in masters:
            m.grad = torch.randn_like(m)
        optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1, fused=True)

        def adamw(_):
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        self.report("adamw", "fp32", f"{sum(sizes)}", self.timed(adamw), 30 * sum(sizes), self.copies_per_s(), False)

    def attention(self):
        self.section("attention", "TFLOP/s")
        shapes = [(16, 1024, 12, 12, 64, True), (8, 1024, 25, 25, 64, True), (16, 1024, 14, 2, 64, True),
                  (8, 1024, 12, 2, 128, True), (16, 1024, 16, 16, 128, True), (4, 4096, 32, 32, 64, True),
                  (4, 4096, 16, 16, 128, True), (4, 4096, 32, 32, 64, False), (4, 4096, 16, 16, 128, False)]
        if self.small:
            shapes = [(1, 64, 2, 1, 64, True), (1, 64, 2, 2, 128, True)]
        for B, T, H, G, D, causal in shapes:
            shape = f"B{B} T{T} H{H}/{G} D{D} {'causal' if causal else 'full'}"
            products = B * H * D * T * (T + 1 if causal else 2 * T) / 2
            for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                for repeated in (False, True) if G != H else (False,):
                    self.one_attention((B, T, H, G, D, causal), shape, products, name, backend, repeated)

    def one_attention(self, sizes, shape, products, name, backend, repeated):
        B, T, H, G, D, causal = sizes
        groups = H if repeated else G  # repeated beforehand: the repetition itself is not timed
        qkv = self.random(B, T, H + 2 * groups, D)
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv.split((H, groups, groups), 2))
        dout = self.random(B, T, H, D).transpose(1, 2)
        note = name + (", k and v repeated" if repeated else "")

        def forward(_):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups != H)
        try:
            with sdpa_kernel(backend):
                with torch.no_grad():
                    timing = self.timed(forward)
                self.report("attention fwd", "bf16", shape, timing, 4 * products, self.products_per_s(), True, note)
                o = forward(0)
                timing = self.timed(lambda _: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True))
                self.report("attention bwd", "bf16", shape, timing, 10 * products, self.products_per_s(), True, note)
        except RuntimeError as e:
            measure.say(f"{'attention':26} bf16  {shape:34} {note}: {str(e).splitlines()[0]}")

    def gemm(self):
        self.section("gemm", "TFLOP/s")
        n = 64 if self.small else 8192
        timing = self.product_timing(n, n, n, False, True)
        self.product_rate = 2 * n**3 / timing[0]
        self.report("matmul NT", "bf16", f"{n}x{n}x{n}", timing, 2 * n**3, self.product_rate, True)

        def product(M, N, K, trans_a, trans_b):
            self.report(f"matmul {'NT'[trans_a]}{'NT'[trans_b]}", "bf16", f"{M}x{N}x{K}",
                        self.product_timing(M, N, K, trans_a, trans_b), 2 * M * N * K, self.products_per_s(), True)

        def linear(R, in_, out, out_in):
            product(R, out, in_, False, out_in)
            product(R, in_, out, False, not out_in)
            product(*((out, in_) if out_in else (in_, out)), R, True, False)
        shapes = [(16384, 768, 3072, None), (8192, 1600, 6400, None), (16384, 896, 4864, 128), (8192, 1536, 8960, 256)]
        if self.small:
            shapes = [(32, 64, 128, None), (32, 64, 128, 64)]
        for R, C, wide, kv in shapes:
            llama = kv is not None
            linear(R, C, C if llama else 3 * C, llama)
            linear(R, C, kv if llama else C, llama)
            linear(R, C, wide, llama)
            linear(R, wide, C, llama)

        def loss(x, w, targets):
            return F.cross_entropy(F.linear(x, w).float(), targets)
        heads = [(16384, 768, 50257), (8192, 1600, 50257), (16384, 896, 151936), (8192, 1536, 151936)]
        if self.small:
            heads = [(32, 64, 50)]
        for R, C, V in heads:
            f = self.compiled(loss)
            x, w = self.random(R, C, requires_grad=True), (self.random(V, C) * 0.02).requires_grad_()
            targets = torch.randint(0, V, (R,), device=self.device)
            timing = self.timed(lambda _: torch.autograd.grad(f(x, w, targets), (x, w)))
            self.report("head and loss, fwd + bwd", "bf16", f"{R}x{V}x{C}", timing, 6 * R * V * C,
                        self.products_per_s(), True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="ops, attention, gemm; without: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="append lines of JSON here")
    parser.add_argument("--small", action="store_true", help="shapes for a smoke test on a CPU")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    sections = args.sections or ["ops", "attention", "gemm"]
    if unknown := set(sections) - {"ops", "attention", "gemm"}:
        parser.error(f"no section {', '.join(unknown)}")
    bench = Bench(args)
    for section in sections:
        getattr(bench, section)()


if __name__ == "__main__":
    main()
