# SPDX-License-Identifier: Apache-2.0
"""Writes a GPT-2 of width 1600 as fp32 safetensors, random bits in every tensor: make_model.py FILE LAYERS."""

import json
import os
import struct
import sys


def main(path, layers, width=1600):
    rows, end = {}, 0

    def add(name, *shape):
        nonlocal end
        begin, end = end, end + 4 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        rows[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}

    add("transformer.wte.weight", 50257, width)
    add("transformer.wpe.weight", 1024, width)
    for i in range(layers):
        block = f"transformer.h.{i}."
        for norm in ("ln_1", "ln_2"):
            add(block + norm + ".weight", width)
            add(block + norm + ".bias", width)
        for name, rows_in, rows_out in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
            add(block + name + ".weight", rows_in * width, rows_out * width)
            add(block + name + ".bias", rows_out * width)
    add("transformer.ln_f.weight", width)
    add("transformer.ln_f.bias", width)

    text = json.dumps({"__metadata__": {"format": "pt"}, **rows}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(1 << 24)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        while end > 0:
            f.write(block[: min(end, len(block))])
            end -= min(end, len(block))


main(sys.argv[1], int(sys.argv[2]))
