#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small data files in the formats of others, for tests/unit/token_files_test.cc.

    python3 tests/golden/make_data.py [--llm-c DIR] [--megatron DIR]      # needs numpy, h5py; a second

Token i of a file is (31 i^2 + 7 i) mod the size of its vocabulary. tests/golden/data/ holds
  gpt2.bin, llama3.bin        llm.c's files, dev/data/data_common.py: 300 tokens, vocabularies of 50257 and 128256
  megatron-<type>.bin, .idx   Megatron-LM's indexed datasets: 17 tokens (vocabulary of 100) in sequences of 5, 2, 0, 9
                              and 1, which are four documents, the third of them without a sequence
  one.h5                      a dataset "tokens" of 300 uint16, vocabulary of 50257
  several.h5                  datasets of 60 integers of all sizes (vocabulary of 100) and of what is refused
  chunked.h5                  a dataset that can grow
  texts.jsonl                 lines of JSON, as Python writes them and as others do

With checkouts of llm.c and Megatron-LM their own writers are run, too (of Megatron-LM without torch, which writing does
not need), and every byte of the files above that are theirs is compared.
"""

import argparse
import importlib.util
import json
import pathlib
import struct
import sys
import tempfile
import types

import h5py
import numpy as np

OUT = pathlib.Path(__file__).parent / "data"
LENGTHS, DOCUMENTS = [5, 2, 0, 9, 1], [0, 2, 3, 3, 5]
MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
LLM_C = {"gpt2.bin": ("gpt-2", 20240520, 1, "<u2", 50257), "llama3.bin": ("llama-3", 20240801, 7, "<u4", 128256)}


def tokens(count, vocabulary, dtype):
    i = np.arange(count, dtype=np.int64)
    return ((31 * i * i + 7 * i) % vocabulary).astype(dtype)


def write_llm_c():
    for name, (_, magic, version, dtype, vocabulary) in LLM_C.items():
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, 300
        (OUT / name).write_bytes(header.tobytes() + tokens(300, vocabulary, dtype).tobytes())


def write_megatron():
    for dtype, code in MEGATRON_CODES.items():
        ids = tokens(sum(LENGTHS), 100, dtype)
        places = np.cumsum([0] + LENGTHS[:-1]) * ids.itemsize
        (OUT / f"megatron-{dtype}.bin").write_bytes(ids.tobytes())
        (OUT / f"megatron-{dtype}.idx").write_bytes(
            b"MMIDIDX\0\0"
            + struct.pack("<QBQQ", 1, code, len(LENGTHS), len(DOCUMENTS))
            + np.array(LENGTHS, "<i4").tobytes()
            + places.astype("<i8").tobytes()
            + np.array(DOCUMENTS, "<i8").tobytes()
        )


def write_hdf5():
    with h5py.File(OUT / "one.h5", "w") as f:
        f["tokens"] = tokens(300, 50257, "<u2")
    with h5py.File(OUT / "several.h5", "w") as f:
        for dtype in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8"):
            f[dtype.strip("<")] = tokens(60, 100, dtype)
        f["group/rows"] = tokens(60, 100, "<i4").reshape(6, 10)
        f["negative"] = np.array([1, 2, -3], "<i2")
        f["huge"] = np.array([1, 2**63 + 5], "<u8")
        f["floats"] = tokens(60, 100, "<f4")
        f["flags"] = np.array([True, False])
        f["big"] = tokens(60, 100, ">i4")
        f["empty"] = np.zeros(0, "<i4")
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_layout(h5py.h5d.COMPACT)
        compact = h5py.h5d.create(f.id, b"compact", h5py.h5t.STD_U16LE, h5py.h5s.create_simple((60,)), layout)
        compact.write(h5py.h5s.ALL, h5py.h5s.ALL, tokens(60, 100, "<u2"))
    with h5py.File(OUT / "chunked.h5", "w") as f:
        f.create_dataset("tokens", data=tokens(60, 100, "<u2"), maxshape=(None,), chunks=(16,))


def write_jsonl():
    lines = [
        json.dumps({"text": "The first text."}),
        json.dumps({"meta": {"text": "not this", "list": [1, -2, 3.5, None, True]}, "text": "Z\u00fcrich \U0001f642\n"}),
        "",
        json.dumps({"text": "Z\u00fcrich \U0001f642\n", "id": 7}, ensure_ascii=False),
        "  \t\r",
        '{ "text" : "" }\r',
        r'{"text":"\u0041\/\\\"\b\f\n\r\t\u0000"}',
    ]
    (OUT / "texts.jsonl").write_bytes("\n".join(lines).encode())  # no newline at the end


def module_of(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(made, name):
    if pathlib.Path(made).read_bytes() != (OUT / name).read_bytes():
        sys.exit(f"{name} is not what the original writes")


class Stub(types.ModuleType):
    """Stands for a module that is imported and not used."""

    def __getattr__(self, name):
        return type(name, (), {})


def check_llm_c(source, scratch):
    for name in ("requests", "tqdm"):
        sys.modules.setdefault(name, Stub(name))
    original = module_of(source / "dev/data/data_common.py", "data_common")
    for name, (model, _, _, dtype, vocabulary) in LLM_C.items():
        original.write_datafile(str(scratch / name), tokens(300, vocabulary, dtype).tolist(), model)
        compare(scratch / name, name)


def check_megatron(source, scratch):
    torch = Stub("torch")
    torch.utils = types.SimpleNamespace(data=types.SimpleNamespace(Dataset=object))
    sys.modules["torch"] = torch
    for name in ("utils", "object_storage_utils"):
        sys.modules[f"megatron.core.datasets.{name}"] = sys.modules[f"megatron.core.{name}"] = Stub(name)
    storage = Stub("msc_utils")
    storage.MultiStorageClientFeature = type("Feature", (), {"is_enabled": staticmethod(lambda: False)})
    storage.maybe_msc = types.SimpleNamespace(open=open)
    sys.modules["megatron.core.msc_utils"] = storage
    sys.modules["megatron.core.utils"].log_single_rank = lambda *_: None
    original = module_of(source / "megatron/core/datasets/indexed_dataset.py", "indexed_dataset")
    for dtype in MEGATRON_CODES:
        bin_path, idx_path = scratch / f"megatron-{dtype}.bin", scratch / f"megatron-{dtype}.idx"
        builder = original.IndexedDatasetBuilder(str(bin_path), dtype=getattr(np, dtype))
        ids = tokens(sum(LENGTHS), 100, dtype)
        pieces = np.split(ids, np.cumsum(LENGTHS)[:-1])
        for begin, end in zip(DOCUMENTS, DOCUMENTS[1:]):
            if begin < end:
                lengths = LENGTHS[begin:end]
                builder.add_document(np.concatenate(pieces[begin:end]), lengths)
            else:
                builder.end_document()
        builder.finalize(str(idx_path))
        compare(bin_path, bin_path.name)
        compare(idx_path, idx_path.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llm-c", type=pathlib.Path)
    parser.add_argument("--megatron", type=pathlib.Path)
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    write_llm_c()
    write_megatron()
    write_hdf5()
    write_jsonl()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.llm_c:
            check_llm_c(arguments.llm_c, pathlib.Path(scratch))
        if arguments.megatron:
            check_megatron(arguments.megatron, pathlib.Path(scratch))


if __name__ == "__main__":
    main()
