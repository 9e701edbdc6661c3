#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the corpus of hdf5_fuzz_test into this directory: small files of h5py, of every structure that HDF5 has for what
is read here and for what is refused (refused-*), each structure being a part of the parser that damage can lead to.
ours.h5 is from this library: `ds-ckpt-merge x.safetensors -o ours.h5` on the file that is written here first.

    python3 make.py [DS_CKPT_MERGE]
"""
import json
import pathlib
import struct
import subprocess
import sys

import h5py
import numpy as np

HERE = pathlib.Path(__file__).parent


def plain(f):
    """What is read: types, shapes, groups, a soft link, attributes at the root and at a dataset."""
    f["wte.weight"] = np.arange(15, dtype="f4").reshape(3, 5)
    f["h/0/bias"] = np.arange(4, dtype="f2")
    f["h/1/bias"] = np.arange(4, dtype="i8")
    f["scalar"] = np.float64(2.5)
    f["flag"] = np.array([True, False])
    f["alias"] = h5py.SoftLink("/h/0/bias")
    f["words"] = "a foreign type"
    f.attrs["format"] = "pt"
    f.attrs["fixed"] = np.bytes_(b"ab")
    f.attrs["number"] = 3
    f["scalar"].attrs["unit"] = "m"


def many(f):
    """Enough links and attributes for B-trees and fractal heaps."""
    for i in range(40):
        f[f"layer.{i}.weight"] = np.full(2, i, "f4")
        f.attrs[f"attribute {i}"] = "value " * 8


def compact(f):
    for name in [b"a", b"b", b"c"]:
        p = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        p.set_layout(h5py.h5d.COMPACT)
        d = h5py.h5d.create(f.id, name, h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((6,)), p)
        d.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(6, dtype="f4"))


def foreign(f):
    """Types that are listed and not read, beside three that are."""
    f["big"] = np.arange(3, dtype=">f4")
    f["compound"] = np.zeros(2, dtype=[("a", "i4"), ("b", "f8", (3,))])
    f["reference"] = np.array([f["big"].ref], dtype=h5py.ref_dtype)
    f.create_dataset("vlen", (2,), dtype=h5py.vlen_dtype(np.int32))[0] = [1, 2, 3]
    f["strings"] = ["x", "yy"]
    f["enum"] = np.array([1], dtype=h5py.enum_dtype({"one": 1, "two": 2}))
    f["complex"] = np.zeros(2, "c8")
    f["type"] = np.dtype("f4")  # a named type
    for name in "abc":
        f[name] = np.arange(3, dtype="u2")


def layout(f):
    l = h5py.VirtualLayout((4,), "f4", maxshape=(None,))
    l[:] = h5py.VirtualSource("other.h5", "a", (4,), maxshape=(None,))[:]
    f.create_virtual_dataset("view", l)


def chain(f):
    g = f
    for _ in range(40):
        g = g.create_group("g")


REFUSED = {
    "chunked": lambda f: f.create_dataset("x", data=np.zeros(20, "f4"), chunks=(3,), maxshape=(None,)),
    "gzip": lambda f: f.create_dataset("x", data=np.zeros(99, "f4"), compression="gzip", shuffle=True, fletcher32=True),
    "external-link": lambda f: f.__setitem__("x", h5py.ExternalLink("/etc/passwd", "/a")),
    "external-data": lambda f: f.create_dataset("x", (4,), "f4", external=[("/etc/passwd", 0, 16)]),
    "view": layout,
    "loop": lambda f: (f.create_group("a"), f.__setitem__("a/b", f["a"])),
    "nested": chain,
    "unwritten": lambda f: f.create_dataset("x", (1 << 40,), "f4"),
}

for version in ["earliest", "latest"]:
    for name, fill in {"plain": plain, "many": many, "foreign": foreign, "compact": compact}.items():
        with h5py.File(HERE / f"{name}-{version}.h5", "w", libver=version) as f:
            fill(f)
    for name, fill in REFUSED.items():
        with h5py.File(HERE / f"refused-{name}-{version}.h5", "w", libver=version) as f:
            fill(f)

if len(sys.argv) > 1:
    rows, end = {"__metadata__": {"format": "pt", "note": "x" * 300}}, 0
    for i in range(6):
        rows[f"h.{i}.weight"] = {"dtype": "BF16", "shape": [2, i], "data_offsets": [end, end + 4 * i]}
        end += 4 * i
    header = json.dumps(rows).encode()
    source = HERE / "x.safetensors"
    source.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(end)))
    subprocess.run([sys.argv[1], source, "-o", HERE / "ours.h5", "--quiet"], check=True)
    source.unlink()
