#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the corpus of token_files_fuzz_test into this directory: small data files that are read (good-*), and what a
careless reader would follow: sums that wrap around, places outside, lines that never end.

    python3 make.py
"""
import pathlib
import struct

HERE = pathlib.Path(__file__).parent


def index(name, lengths, places, documents, tokens, code=8, sequences=None, entries=None):
    """An index of Megatron-LM and its .bin; the counts of the header are those of the lists unless given."""
    sequences = len(lengths) if sequences is None else sequences
    entries = len(documents) if entries is None else entries
    (HERE / f"{name}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, sequences, entries)
        + struct.pack(f"<{len(lengths)}i{len(places)}q{len(documents)}q", *lengths, *places, *documents)
    )
    (HERE / f"{name}.bin").write_bytes(tokens)


def llm_c(name, magic, version, count, tokens):
    (HERE / f"{name}.bin").write_bytes(struct.pack("<256I", magic, version, count, *[0] * 253) + tokens)


def lines(name, *texts):
    (HERE / f"{name}.jsonl").write_bytes(b"\n".join(texts))


index("good-empty-sequences", [0, 2, 0], [0, 0, 4], [0, 0, 3, 3], b"\1\0\2\0")
index("count-wraps", [2], [0], [0, 1], b"\1\0\2\0", sequences=2**64 // 12 + 1)
index("entries-wrap", [2], [0], [0, 1], b"\1\0\2\0", entries=2**61 + 2)
index("negative-length", [4, -2], [0, 8], [0, 2], b"\1\0\2\0")
index("length-outside", [2**31 - 1], [0], [0, 1], b"\1\0\2\0", code=5)
index("place-outside", [1, 1], [0, 2**62], [0, 2], b"\1\0\2\0")
index("place-before", [1, 1], [0, -2], [0, 2], b"\1\0\2\0")
index("overlapping", [2, 2], [0, 0], [0, 2], b"\1\0\2\0")
index("documents-go-back", [1, 1], [0, 2], [0, 2, 1, 2], b"\1\0\2\0")
index("floats", [1], [0], [0, 1], b"\0\0\0\0", code=7)
llm_c("good-one-token", 20240801, 7, 1, b"\1\2\3\0")
llm_c("count-of-ones", 20240520, 1, 2**32 - 1, b"\1\2")
llm_c("count-wraps-to-size", 20240801, 7, 2**30, b"")
llm_c("examples", 20240522, 1, 1, b"\1\2")
lines("good-forms", b'\xef\xbb\xbf{"text":"a"}', b"", b' {"b":[{"text":1}],"text":"\\u00e9\\ud83d\\ude42"}\r', b"\t")
lines("nested", b'{"text":"a","b":' + b"[" * 5000)
lines("half-a-surrogate", b'{"text":"\\ud83d"}')
lines("overlong-utf8", b'{"text":"\xc0\xaf"}')
lines("good-long-number", b'{"text":"a","b":1' + b"0" * 5000 + b"}")
lines("two-texts", b'{"text":"a","text":"b"}')
lines("open-string", b'{"text":"a')
