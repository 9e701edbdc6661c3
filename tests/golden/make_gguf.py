#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""GGUF files, written by PyPI's `gguf` 0.19: python3 tests/golden/make_gguf.py     needs gguf, numpy, safetensors,
sentencepiece; seconds. With transformers 5, accelerate and torch it also compares what their GGUF reader makes of the models.

Each is tests/golden/gguf/NAME.gguf:
  types       a tensor of 3 rows of 512 for each type, of random blocks, and one of a type that is not read; types.safetensors has
              what gguf's dequantize() makes of them
  MODEL       one layer of tests/golden/MODEL, the first with experts, matrices in F16 and vectors in F32, as llama.cpp's converter stores them: names
              of gguf's own table, rows of queries and keys permuted for the architecture "llama", experts in one tensor
  text-NAME   models with the tokenizers of tests/golden/tokenizers; text-NAME/ is the Hugging Face directory of the same weights,
              without the tokenizer
  tokenizer-NAME  a tokenizer alone
"""
import json
import os
import shutil
import sys

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType as T
from safetensors.numpy import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "gguf")


def write(name, arch, fill):
    w = gguf.GGUFWriter(os.path.join(OUT, name + ".gguf"), arch)
    fill(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def types():
    rng = np.random.default_rng(11)
    expected = {}

    def fill(w):
        w.add_head_count(2)
        w.add_context_length(8)
        for kind in [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q4_K, T.Q5_K, T.Q6_K, T.Q2_K]:
            elems, size = gguf.GGML_QUANT_SIZES[kind]
            name = kind.name.lower()
            if elems == 1:
                x = rng.standard_normal((3, 512)).astype(np.float32)
                raw = gguf.quants.quantize(x, kind)
            else:
                raw = rng.integers(0, 256, (3, 512 // elems * size), dtype=np.uint8)
                halves = {T.Q6_K: [208], T.Q8_0: [0], T.Q4_0: [0], T.Q5_0: [0]}.get(kind, [0, 2])  # scales that are finite
                if kind == T.Q2_K:
                    halves = [80, 82]
                for block in range(512 // elems):
                    for at in halves:
                        at += block * size
                        scale = (rng.standard_normal(3) * 0.1).astype(np.float16)
                        raw[:, at:at + 2] = scale.view(np.uint8).reshape(3, 2)
            w.add_tensor(name, raw, raw_dtype=kind)
            if kind != T.Q2_K:
                expected[name] = np.asarray(gguf.quants.dequantize(raw, kind), dtype=np.float32)
    write("types", "llama", fill)
    save_file(expected, os.path.join(OUT, "types.safetensors"))


def permute(x, heads):
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


ARCH = {"llama": "llama", "mixtral": "llama", "gpt2": "gpt2", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}


def add_model(w, config, tensors):
    kind = config["model_type"]
    arch = ARCH[kind]
    gpt2 = arch == "gpt2"
    layers = config["n_layer" if gpt2 else "num_hidden_layers"]
    heads = config["n_head" if gpt2 else "num_attention_heads"]
    hidden = config["n_embd" if gpt2 else "hidden_size"]
    w.add_block_count(layers)
    w.add_context_length(config["n_positions" if gpt2 else "max_position_embeddings"])
    w.add_embedding_length(hidden)
    w.add_head_count(heads)
    w.add_feed_forward_length((config.get("n_inner") or 4 * hidden) if gpt2 else config["intermediate_size"])
    if gpt2:
        w.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        head = config.get("head_dim") or hidden // heads
        w.add_head_count_kv(config["num_key_value_heads"])
        w.add_layer_norm_rms_eps(config["rms_norm_eps"])
        w.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        w.add_rope_dimension_count(head)
        if config.get("head_dim"):
            w.add_key_length(head)
            w.add_value_length(head)
    if arch == "llama":
        w.add_vocab_size(config["vocab_size"])
    if kind == "mixtral" and config["sliding_window"]:
        w.add_sliding_window(config["sliding_window"])
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        w.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers)
    merged = {}
    for name, x in sorted(tensors.items()):
        if arch == "llama" and ".self_attn.q_proj." in name:
            x = permute(x, heads)
        if arch == "llama" and ".self_attn.k_proj." in name:
            x = permute(x, config["num_key_value_heads"])
        if gpt2 and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            x = x.T
        if ".experts." in name:
            before, rest = name.split(".experts.")
            number, part = rest.split(".", 1)
            merged.setdefault(f"{before}.experts.{part}", {})[int(number)] = x
            continue
        merged[name] = x
    if config["model_type"] == "mixtral":  # as the converter names them on the way
        merged = {n.replace("block_sparse_moe.experts", "feed_forward.experts").replace("model.layers", "layers")
                  if "block_sparse_moe.experts" in n else n: x for n, x in merged.items()}
    for name, x in merged.items():
        if isinstance(x, dict):
            x = np.stack([x[i] for i in range(len(x))])
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored, name
        if stored.endswith("ffn_gate_inp_shexp.weight"):
            x = x.squeeze()
        whole = x.ndim == 1 or "ffn_gate_inp" in stored
        w.add_tensor(stored, np.ascontiguousarray(x.astype(np.float32 if whole else np.float16)))


def one_layer(name, layer):
    folder = os.path.join(HERE, name)
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    own = f".{layer}."
    tensors = {key.replace(own, ".0.", 1) if own in key and "layers" in key else key: x
               for key, x in load_file(os.path.join(folder, "model.safetensors")).items()
               if not any(key.startswith(p) and not key.startswith(p[:-1] + own) for p in ("model.layers.", "transformer.h."))}
    config["n_layer" if name == "gpt2" else "num_hidden_layers"] = 1
    return config, tensors


def models():
    # llama.cpp has no Qwen mixtures with dense layers.
    for name in ["llama", "mixtral", "olmoe", "qwen2_moe", "qwen3", "qwen3_moe", "gpt2"]:
        config, tensors = one_layer(name, 1 if name == "qwen2_moe" else 0)
        write(name, ARCH[config["model_type"]], lambda w: add_model(w, config, tensors))


def add_bpe(w, name, pre, eos, eot=None):
    with open(os.path.join(HERE, "tokenizers", name, "tokenizer.json"), encoding="utf-8") as f:
        file = json.load(f)
    tokens = {i: t for t, i in file["model"]["vocab"].items()}
    kinds = {i: gguf.TokenType.NORMAL for i in tokens}
    for t in file["added_tokens"]:
        tokens[t["id"]] = t["content"]
        kinds[t["id"]] = gguf.TokenType.CONTROL if t["special"] else gguf.TokenType.USER_DEFINED
    ids = {t: i for i, t in tokens.items()}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([tokens[i] for i in range(len(tokens))])
    w.add_token_types([kinds[i] for i in range(len(tokens))])
    w.add_token_merges([" ".join(m) for m in file["model"]["merges"]])
    w.add_bos_token_id(ids[file["added_tokens"][0]["content"]])
    w.add_eos_token_id(ids[eos])
    if eot:
        w.add_eot_token_id(ids[eot])
    w.add_add_bos_token(pre == "llama-bpe")
    w.add_chat_template("{{ messages[0].content }}\n")


def add_sentence_piece(w):
    sp = sentencepiece.SentencePieceProcessor(model_file=os.path.join(HERE, "tokenizers", "llama2-sp", "tokenizer.model"))
    kinds = []
    for i in range(sp.get_piece_size()):
        kinds.append(gguf.TokenType.UNKNOWN if sp.is_unknown(i) else gguf.TokenType.CONTROL if sp.is_control(i)
                     else gguf.TokenType.BYTE if sp.is_byte(i) else gguf.TokenType.NORMAL)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([sp.id_to_piece(i).encode() for i in range(sp.get_piece_size())])
    w.add_token_scores([sp.get_score(i) for i in range(sp.get_piece_size())])
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)


def rope_factors(config):
    rule = config["rope_parameters"]
    head = config["head_dim"]
    factors = []
    for i in range(0, head, 2):
        length = 2 * np.pi * rule["rope_theta"] ** (i / head)
        original, low, high = rule["original_max_position_embeddings"], rule["low_freq_factor"], rule["high_freq_factor"]
        smooth = (original / length - low) / (high - low)
        factors.append(1 if length < original / high else rule["factor"] if length > original / low
                       else 1 / ((1 - smooth) / rule["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def texts():
    base = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 903, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float16"}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 8, "bos_token_id": 900, "eos_token_id": [901, 902],
             "attention_bias": False, "mlp_bias": False,
             "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, **base}
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "eos_token_id": [902, 900], "bos_token_id": 900,
             "use_sliding_window": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **base}
    for name, config, pre, eos, eot in [("llama3", llama, "llama-bpe", "<|end_of_text|>", "<|eot_id|>"),
                                        ("qwen2", qwen2, "qwen2", "<|im_end|>", "<|endoftext|>")]:
        rng = np.random.default_rng(7)
        def matrix(*shape):
            return (rng.standard_normal(shape) * 0.5).astype(np.float16)
        tensors = {"model.embed_tokens.weight": matrix(903, 16), "model.norm.weight": 1 + matrix(16)}
        for l in range(2):
            p = f"model.layers.{l}."
            for part, shape in [("self_attn.q_proj", (16, 16)), ("self_attn.k_proj", (8, 16)), ("self_attn.v_proj", (8, 16)),
                                ("self_attn.o_proj", (16, 16)), ("mlp.gate_proj", (32, 16)), ("mlp.up_proj", (32, 16)),
                                ("mlp.down_proj", (16, 32))]:
                tensors[p + part + ".weight"] = matrix(*shape)
                if name == "qwen2" and part[-6:] in ("q_proj", "k_proj", "v_proj"):
                    tensors[p + part + ".bias"] = matrix(shape[0])
            tensors[p + "input_layernorm.weight"] = 1 + matrix(16)
            tensors[p + "post_attention_layernorm.weight"] = 1 + matrix(16)
        def fill(w):
            add_model(w, config, tensors)
            if name == "llama3":
                w.add_tensor("rope_freqs.weight", rope_factors(config))
            add_bpe(w, name, pre, eos, eot)
        write("text-" + name, config["model_type"], fill)
        folder = os.path.join(OUT, "text-" + name)
        os.makedirs(folder)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(config, f, indent=1)
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def compare_with_transformers():
    try:
        import torch
        import transformers
    except ImportError:
        print("without torch and transformers: not compared")
        return
    for name in ["text-llama3", "text-qwen2", "llama"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(OUT, gguf_file=name + ".gguf", dtype=torch.float32)
        folder = os.path.join(OUT, name) if name.startswith("text") else os.path.join(HERE, name)
        own = load_file(os.path.join(folder, "model.safetensors"))
        state = model.state_dict()
        same = [key for key, x in own.items() if key in state]
        assert len(same) > 10, name
        for key in same:
            x = own[key].astype(np.float16 if own[key].ndim > 1 else np.float32).astype(np.float32)
            assert np.array_equal(x, state[key].numpy()), (name, key)
        print(name, len(same), "tensors equal transformers'")


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(OUT)
    types()
    models()
    texts()
    write("tokenizer-gpt2", "gpt2", lambda w: add_bpe(w, "gpt2", "gpt-2", "<|endoftext|>"))
    write("tokenizer-llama2", "llama", add_sentence_piece)
    compare_with_transformers()


if __name__ == "__main__":
    sys.exit(main())
