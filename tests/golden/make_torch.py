#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save, and what is in them, for tests/unit/torch_file_test.cc.

    python3 tests/golden/make_torch.py        # needs torch >= 2.6, numpy, safetensors; a second

tests/golden/torch/ holds
  types.pt             a state dict with every element type that safetensors can name, and complex numbers
  views.pt             strided, transposed, broadcast, shared and empty tensors, a Parameter, nested dicts, and values
                       that are no tensors: numpy's, a Namespace, sets, sizes, dtypes, devices
  protocol4.pt         a state dict of a module, pickled with protocol 4
  training.pt          a training checkpoint: the state dict under "model", the optimizer beside it
  old.pt               as torch.save wrote before 1.6
  program.pt           a TorchScript archive
  <stem>.safetensors   the tensors of <stem>.pt, contiguous, under the names that libds gives them
tests/fuzz/corpus/torch/ holds files that a careless reader runs, or reads beyond their end.
"""

import argparse
import collections
import os
import pathlib
import zipfile

import numpy
import torch
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).parent / "torch"
CORPUS = pathlib.Path(__file__).parent.parent / "fuzz" / "corpus" / "torch"


def save(stem, value, tensors, **options):
    torch.save(value, OUT / f"{stem}.pt", **options)
    save_file({k: v.detach().contiguous().clone() for k, v in tensors.items()}, OUT / f"{stem}.safetensors")


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.value = function, arguments

    def __reduce__(self):
        return self.value


def hostile():
    """Files that torch.load would obey with weights_only=False, and others that claim more than they hold."""
    CORPUS.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(2), "x": Call(os.system, "true")}, CORPUS / "system.pt")
    torch.save({"w": torch.ones(2), "x": Call(eval, "1")}, CORPUS / "eval.pt")
    torch.save({"w": torch.ones(3, 5)[:, ::2].t()}, CORPUS / "strided.pt")
    with zipfile.ZipFile(CORPUS / "strided.pt") as z:
        entries = {name: z.read(name) for name in z.namelist()}

    def repack(name, changed, method=zipfile.ZIP_STORED):
        with zipfile.ZipFile(CORPUS / name, "w", method) as z:
            for key, data in changed.items():
                z.writestr(key, data)

    repack("repacked.pt", entries)
    repack("deflated.pt", entries, zipfile.ZIP_DEFLATED)
    pickled = entries["strided/data.pkl"]
    repack("short.pt", entries | {"strided/data/0": entries["strided/data/0"][:-4]})
    repack("stride.pt", entries | {"strided/data.pkl": pickled.replace(b"K\x02", b"K\x7f")})
    repack("big.pt", entries | {"strided/byteorder": b"big"})


def main():
    hostile()
    OUT.mkdir(exist_ok=True)
    torch.manual_seed(3)

    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
              torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
    types = {str(d).removeprefix("torch."): (torch.rand(3, 5) * 9).to(d) for d in dtypes}
    save("types", types | {"complex": torch.zeros(2, dtype=torch.complex64)}, types)

    base = torch.arange(2 * 3 * 5 * 7, dtype=torch.float32).view(2, 3, 5, 7)
    matrix = torch.randn(23, 17)
    views = {
        "base": base, "permuted": base.permute(3, 1, 0, 2), "sliced": base[:, 1:, ::2, 3:], "reversed": base[1, 2],
        "transposed": matrix.t(), "column": matrix[:, 4], "every_third": matrix[::3, ::5],
        "broadcast": matrix[0].expand(6, 17), "broadcast_column": matrix[:, :1].expand(23, 4), "scalar": matrix[3, 3],
        "empty": torch.empty(0, 4), "one": torch.ones(1, 1, 1), "parameter": torch.nn.Parameter(torch.randn(4)),
    }
    nested = {"layers": {0: {"weight": torch.randn(2, 2)}, 1: {"weight": torch.randn(3)}}}
    rest = {
        "array": numpy.arange(4.0), "number": numpy.float32(1.5), "namespace": argparse.Namespace(a=1, b=[2, "x"]),
        "set": {1, 2}, "size": torch.Size([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "none": None,
        "big": 2**100, "negative": -5, "text": "grün", "bytes": b"\x00\xff", "float": 0.1, "tuple": (1, (2, 3), ()),
        "counts": collections.OrderedDict(a=1), "complex": 1 + 2j, "true": True, "long list": list(range(2000)),
    }
    save("views", views | nested | rest,
         views | {"layers.0.weight": nested["layers"][0]["weight"], "layers.1.weight": nested["layers"][1]["weight"]})

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save("protocol4", module.state_dict(), module.state_dict(), pickle_protocol=4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    save("training", {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, module.state_dict())
    torch.save(module.state_dict(), OUT / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), str(OUT / "program.pt"))


if __name__ == "__main__":
    main()
