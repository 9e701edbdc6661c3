#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of Arrow and Parquet for tests/cli/arrow.bats, and what they say as JSONL beside them.

    tests/golden/make_arrow.py    # needs pyarrow; a second

texts, prompts and messages, each as .jsonl, .parquet (snappy, two row groups, a column that nobody reads), .arrow (a
stream, as `datasets` writes it) and .feather (a file of Arrow's, compressed with lz4); hostile ones are named bad-*.
"""

import json
import pathlib

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

OUT = pathlib.Path(__file__).parent / "arrow"


def write(name, rows, schema=None):
    (OUT / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    table = pa.Table.from_pylist([dict(r, unread=float(i)) for i, r in enumerate(rows)], schema=schema)
    pa.parquet.write_table(table, OUT / f"{name}.parquet", row_group_size=len(rows) // 2, compression="snappy")
    with pa.OSFile(str(OUT / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    pa.feather.write_feather(table, OUT / f"{name}.feather", compression="lz4")


def main():
    OUT.mkdir(exist_ok=True)
    words = "the quick brown fox jumps over a lazy dog and runs on".split()
    text = [" ".join(words[(i * j) % len(words)] for j in range(1, 3 + i % 9)) for i in range(40)]
    write("texts", [{"text": t} for t in text])
    write("prompts", [{"prompt": t[:9], "completion": t[9:] + "\u00e9."} for t in text])
    write("messages", [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}]}
                       for t in text])
    good = (OUT / "texts.parquet").read_bytes()
    (OUT / "bad-cut.parquet").write_bytes(good[: len(good) // 2])
    (OUT / "bad-bits.parquet").write_bytes(good[:40] + bytes(b ^ 0x55 for b in good[40:90]) + good[90:])
    stream = (OUT / "texts.arrow").read_bytes()
    (OUT / "bad-cut.arrow").write_bytes(stream[: len(stream) * 2 // 3])
    (OUT / "bad-empty.arrow").write_bytes(b"ARROW1\0\0")
    null = pa.table({"text": pa.array(["a", None, "b"])})
    pa.parquet.write_table(null, OUT / "bad-null.parquet")
    pa.parquet.write_table(pa.table({"other": [1, 2]}), OUT / "bad-columns.parquet")
    pa.parquet.write_table(pa.table({"text": [1, 2]}), OUT / "bad-type.parquet")
    # A bomb: a string of 256 MiB that takes a few kilobytes.
    pa.parquet.write_table(pa.table({"text": pa.array(["a" * (1 << 28)], pa.large_string())}),
                           OUT / "bad-bomb.parquet", compression="zstd", use_dictionary=False)


main()
