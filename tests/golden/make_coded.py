#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Models stored as codes, in tests/golden/coded: python3 tests/golden/make_coded.py      needs torch, safetensors, and of
PyPI auto-gptq 0.7.1, autoawq 0.2.9 and compressed-tensors 0.20.1 (of the first two, the files that pack a layer); seconds.

  NAME/            matrices of small layers as config.json and model.safetensors; expected.safetensors has what the packer's own
                   reader makes of them, with scales in fp32, and so exact or rounded to fp32 once
  model-METHOD/    a llama of two layers with the vocabulary of tests/golden/tokenizers/llama3; model-METHOD-decoded/ is the same model
                   with matrices in fp32

The second format of GPTQ is the first one with one added to each zero. Columns of compressed-tensors in the order of activations
(weight_g_idx), which its package no longer writes, are decoded by their definition.
"""
import importlib
import importlib.util
import json
import os
import shutil
import sys
import types

import numpy as np
import torch
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "coded")


def without_init(name):
    """Imports a module of a package whose __init__ needs more than is here."""
    parts = name.split(".")
    root = os.path.dirname(importlib.util.find_spec(parts[0]).origin)
    for i in range(1, len(parts)):
        package = ".".join(parts[:i])
        module = types.ModuleType(package)
        module.__path__ = [os.path.join(root, *parts[1:i])]
        sys.modules.setdefault(package, module)
    return importlib.import_module(name)


QuantLinear = without_init("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
gemm = without_init("awq.modules.linear.gemm")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32  # noqa: E402
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402


def layer(weight, dtype):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
    linear.weight.data = weight.to(dtype)
    return linear


def groups_of(weight, group):
    """The least and the largest number of each group: [N, G]; a last group may be shorter."""
    parts = weight.split(weight.shape[1] if group == -1 else group, dim=1)
    return torch.stack([p.amin(1) for p in parts], 1), torch.stack([p.amax(1) for p in parts], 1)


def gptq(weight, bits, group, sym, order=None, v2=False):
    """(parts of the layer, the matrix in fp32)"""
    placed = weight if order is None else weight[:, order.argsort(stable=True)]
    low, high = groups_of(placed, group)
    low, high = low.clamp(max=0), high.clamp(min=0)
    most = 2**bits - 1
    if sym:
        scales = torch.maximum(-low, high) * 2 / most
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / most
        zeros = torch.round(-low / scales).clamp(1, most)  # the first format has no zero of 0
    scales = scales.half().float()
    packed = QuantLinear(bits, group, weight.shape[1], weight.shape[0], False, weight_dtype=torch.float32)
    # Codes outside 0 to 15 would spoil those beside them.
    clipped = weight.clone()
    g_idx = packed.g_idx if order is None else order
    for k in range(weight.shape[1]):
        s, z = scales[:, g_idx[k]], zeros[:, g_idx[k]]
        clipped[:, k] = (torch.round(weight[:, k] / s + z).clamp(0, most) - z) * s
    packed.pack(layer(clipped, torch.float32), scales, zeros, g_idx.to(torch.int32))
    decoded = packed(torch.eye(weight.shape[1])).t().contiguous()
    qzeros = packed.qzeros
    if v2:
        qzeros = (qzeros.long() + (0x11111111 if bits == 4 else 0x01010101)).to(torch.uint32).view(torch.int32)
    return {"qweight": packed.qweight, "qzeros": qzeros, "scales": packed.scales.half(), "g_idx": packed.g_idx.to(torch.int32)}, decoded


def with_bias(parts, decoded):
    """auto-gptq saves a bias of zeros for each layer that has none."""
    return {**parts, "bias": torch.zeros(decoded.shape[0], dtype=torch.float16)}, decoded


def awq(weight, group):
    low, high = groups_of(weight, group)
    scales = ((high - low) / 15).half()
    zeros = torch.round(-low / scales).clamp(0, 15).to(torch.int32)
    clipped = weight.clone()
    wide = weight.shape[1] if group == -1 else group
    for k in range(weight.shape[1]):
        s, z = scales[:, k // wide].float(), zeros[:, k // wide]
        clipped[:, k] = (torch.round(weight[:, k] / s + z).clamp(0, 15) - z) * s
    # from_linear() asks for a GPU or the CPU by the machine.
    packed = gemm.WQLinear_GEMM.from_linear(layer(clipped, torch.float32), 4, wide, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    parts = {"qweight": packed.qweight.cpu(), "qzeros": packed.qzeros.cpu(), "scales": packed.scales.cpu()}
    decoded = gemm.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, wide)
    return parts, decoded.t().contiguous()


def compressed(weight, scheme, form, dtype=torch.bfloat16):
    args = scheme.weights
    w = weight.to(dtype)
    if args.strategy == "tensor":
        low, high = w.amin().reshape(1), w.amax().reshape(1)
    elif args.strategy == "channel":
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    elif args.strategy == "group":
        low, high = groups_of(w, args.group_size)
    else:
        r, c = args.block_structure
        blocks = [[w[i:i + r, j:j + c] for j in range(0, w.shape[1], c)] for i in range(0, w.shape[0], r)]
        low = torch.stack([torch.stack([b.amin() for b in row]) for row in blocks])
        high = torch.stack([torch.stack([b.amax() for b in row]) for row in blocks])
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": w, "weight_scale": scale.to(dtype)}
    if not args.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    packer = BaseCompressor.get_value_from_registry(form)
    parts = packer.compress(state, scheme)
    decoded = packer.decompress({**parts, "weight_scale": parts["weight_scale"].float()}, scheme)["weight"]
    assert decoded.dtype == torch.float32
    return {key: x.contiguous() for key, x in parts.items()}, decoded


def scheme(weights, inputs=None, targets=("Linear",)):
    return QuantizationScheme(targets=list(targets), weights=weights, input_activations=inputs)


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_TOKENS = {**TOKENS, "type": "float"}


def section(groups, form):
    """As the package writes it. groups: by name, schemes."""
    return {"config_groups": {name: {**json.loads(s.model_dump_json()), **more} for name, (s, more) in groups.items()}, "format": form,
            "global_compression_ratio": None, "ignore": ["lm_head", "re:.*plain"], "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
            "version": "0.20.1"}


def write(name, config, tensors, expected=None):
    folder = os.path.join(OUT, name)
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    if expected is not None:
        save_file(expected, os.path.join(folder, "expected.safetensors"))


def matrices(name, config, layers):
    """layers: by name, (parts, decoded)"""
    tensors = {"plain.weight": torch.arange(6, dtype=torch.float16).reshape(2, 3)}
    expected = {"plain.weight": tensors["plain.weight"].float()}
    for module, (parts, decoded) in layers.items():
        tensors.update({f"{module}.{part}": x for part, x in parts.items()})
        expected[module + ".weight"] = decoded.contiguous()
    write(name, {"model_type": "llama", "quantization_config": config}, tensors, expected)


def all_matrices(rng):
    def matrix(n, k):
        return torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32)) * 0.3

    def order(k, group):
        return torch.from_numpy(rng.permutation(k) // group)

    base = {"quant_method": "gptq", "damp_percent": 0.1, "true_sequential": True, "lm_head": False}
    ways = {"gptq-4-32": (4, 32, True, None, False), "gptq-4-all": (4, -1, True, None, False), "gptq-8-128": (8, 128, True, None, False),
            "gptq-4-64-zeros": (4, 64, False, None, False), "gptq-8-32-zeros": (8, 32, False, None, False),
            "gptq-4-32-v2": (4, 32, False, None, True), "gptq-4-128-order": (4, 128, True, True, False),
            "gptq-8-64-zeros-order": (8, 64, False, True, False), "gptq-4-96-ragged": (4, 96, False, None, False)}
    for name, (bits, group, sym, ordered, v2) in ways.items():
        config = {**base, "bits": bits, "group_size": group, "sym": sym, "desc_act": bool(ordered)}
        if "zeros" in name:
            config["checkpoint_format"] = "gptq"
        if v2:
            config["checkpoint_format"] = "gptq_v2"
        matrices(name, config, {"l.0": gptq(matrix(32, 256), bits, group, sym, order(256, group) if ordered else None, v2)})
    # Symmetric zeros of the second format under the first one's name, as some models are published.
    parts, decoded = gptq(matrix(32, 64), 4, 32, True, None, True)
    del parts["g_idx"]
    matrices("gptq-4-32-misnamed", {**base, "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}, {"l.0": (parts, decoded)})
    for group in [32, 128, -1]:
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
        matrices(f"awq-{'all' if group == -1 else group}", config, {f"l.{i}": awq(matrix(n, 128), group) for i, n in enumerate([32, 96])})

    def ct(name, form, weights, inputs=None, shape=(24, 160), dtype=torch.bfloat16):
        s = scheme(weights, inputs)
        matrices("ct-" + name, section({"group_0": (s, {})}, form), {"l.0": compressed(matrix(*shape), s, form, dtype)})

    int4 = {"num_bits": 4, "type": "int"}
    int8 = {"num_bits": 8, "type": "int"}
    fp8 = {"num_bits": 8, "type": "float"}
    ct("4-32", "pack-quantized", {**int4, "strategy": "group", "group_size": 32})
    ct("4-32-zeros", "pack-quantized", {**int4, "strategy": "group", "group_size": 32, "symmetric": False}, shape=(44, 160))
    ct("4-32-zeros-fp32", "pack-quantized", {**int4, "strategy": "group", "group_size": 32, "symmetric": False}, dtype=torch.float32)
    ct("4-channel", "pack-quantized", {**int4, "strategy": "channel"}, TOKENS, shape=(5, 77))
    ct("8-80", "pack-quantized", {**int8, "strategy": "group", "group_size": 80}, dtype=torch.float16)
    ct("8-channel-zeros", "pack-quantized", {**int8, "strategy": "channel", "symmetric": False}, shape=(30, 96))
    ct("int8-dynamic", "int-quantized", {**int8, "strategy": "channel"}, TOKENS, shape=(40, 112))
    ct("int8-tensor", "int-quantized", {**int8, "strategy": "tensor"}, TOKENS)
    ct("int8-zeros", "int-quantized", {**int8, "strategy": "channel", "symmetric": False})
    ct("int8-zeros-fp32", "naive-quantized", {**int8, "strategy": "group", "group_size": 16, "symmetric": False}, dtype=torch.float32)
    ct("fp8-channel", "float-quantized", {**fp8, "strategy": "channel"}, FP8_TOKENS)
    ct("fp8-tensor", "naive-quantized", {**fp8, "strategy": "tensor"})
    ct("fp8-block", "float-quantized", {**fp8, "strategy": "block", "block_structure": [32, 80]}, FP8_TOKENS)
    ct("fp8-block-ragged", "float-quantized", {**fp8, "strategy": "block", "block_structure": [16, 128]}, FP8_TOKENS, dtype=torch.float32)

    # Groups by name, by expression and by class, each with a form of its own.
    named = scheme({**int8, "strategy": "channel"}, TOKENS, ["m.down"])
    matched = scheme({**fp8, "strategy": "tensor"}, None, ["re:m\\..*proj$"])
    others = scheme({**int4, "strategy": "group", "group_size": 16})
    forms = {"m.down": (named, "int-quantized"), "m.q_proj": (matched, "naive-quantized"), "m.up": (others, "pack-quantized"),
             "x.m.q_proj": (others, "pack-quantized")}
    groups = {"a": (others, {"format": "pack-quantized"}), "b": (matched, {"format": "naive-quantized"}), "c": (named, {"format": "int-quantized"})}
    matrices("ct-mixed", section(groups, "mixed-precision"), {m: compressed(matrix(32, 64), s, form) for m, (s, form) in forms.items()})

    # Columns in the order of activations.
    args = {**int4, "strategy": "group", "group_size": 32}
    s = scheme(args)
    g_idx = order(96, 32).to(torch.int32)
    weight = matrix(24, 96)
    by_group = g_idx.argsort(stable=True)
    parts, _ = compressed(weight[:, by_group], s, "pack-quantized")
    back = by_group.argsort()
    q = unpack_from_int32(parts["weight_packed"], 4, torch.Size(weight.shape))[:, back]
    parts = {**parts, "weight_packed": pack_to_int32(q.contiguous(), 4), "weight_g_idx": g_idx}
    expected = q.float() * parts["weight_scale"].float()[:, g_idx.long()]
    config = section({"group_0": (s, {})}, "pack-quantized")
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    matrices("ct-4-order", config, {"l.0": (parts, expected)})


def models(rng):
    hidden, inner, layers = 32, 64, 2
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
              "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 903,
              "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
              "torch_dtype": "float16", "bos_token_id": 900, "eos_token_id": 901, "attention_bias": False, "mlp_bias": False,
              "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

    def matrix(*shape):
        return torch.from_numpy((rng.standard_normal(shape) * 0.5).astype(np.float16))

    plain = {"model.embed_tokens.weight": matrix(903, hidden), "model.norm.weight": 1 + matrix(hidden)}
    coded = {}
    for l in range(layers):
        p = f"model.layers.{l}."
        for part, n, k in [("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", hidden, hidden), ("self_attn.v_proj", hidden, hidden),
                           ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
                           ("mlp.down_proj", hidden, inner)]:
            coded[p + part] = matrix(n, k).float()
        plain[p + "input_layernorm.weight"] = 1 + matrix(hidden)
        plain[p + "post_attention_layernorm.weight"] = 1 + matrix(hidden)

    int4 = scheme({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False})
    int8 = scheme({"num_bits": 8, "type": "int", "strategy": "channel"}, TOKENS)
    ways = {
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
                 lambda w: with_bias(*gptq(w, 4, 32, False))),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, lambda w: awq(w, 32)),
        "int4": (section({"group_0": (int4, {})}, "pack-quantized"), lambda w: compressed(w, int4, "pack-quantized", torch.float16)),
        "int8": (section({"group_0": (int8, {})}, "int-quantized"), lambda w: compressed(w, int8, "int-quantized", torch.float16)),
    }
    for name, (quantization, pack) in ways.items():
        tensors, decoded = dict(plain), dict(plain)
        for module, w in coded.items():
            parts, matrix_of = pack(w)
            tensors.update({f"{module}.{part}": x for part, x in parts.items()})
            decoded[module + ".weight"] = matrix_of
        write("model-" + name, {**config, "quantization_config": quantization}, tensors)
        write(f"model-{name}-decoded", config, decoded)


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(OUT)
    rng = np.random.default_rng(54)
    all_matrices(rng)
    models(rng)


if __name__ == "__main__":
    sys.exit(main())
