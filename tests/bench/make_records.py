#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Data for reading_bench: a plain text and a JSONL file of the same texts, of this machine's documents.

    tests/bench/make_records.py FOLDER GIGABYTES [--tokenizer]

FOLDER/text.txt and FOLDER/records.jsonl, of texts of 0.1 to 20 KB, each with a newline at its end; when there are none
left they come again. With --tokenizer also FOLDER/tokenizer.json, a byte-level BPE of 32000 tokens trained on them
(needs the package tokenizers).
"""

import argparse
import json
import pathlib


def texts():
    for root in ("/usr/share/doc", "/usr/share/perl", "/usr/include", "/usr/lib/python3", "/usr/lib/python3.11"):
        for path in sorted(pathlib.Path(root).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.suffix in ("", ".h", ".py", ".pod", ".txt", ".md", ".html"):
                try:
                    text = path.read_text("utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                for at in range(0, len(text), 20000):
                    if len(part := text[at:at + 20000].replace("\r", "")) >= 100 and "\0" not in part:
                        yield part.rstrip("\n") + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("--tokenizer", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    all_texts = list(texts())
    size = sum(len(t.encode()) for t in all_texts)
    print(f"{len(all_texts)} texts, {size / 1e6:.0f} MB")
    if args.tokenizer:
        import tokenizers
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(all_texts, vocab_size=32000)
        bpe.save(str(args.folder / "tokenizer.json"))
    plain = "".join(all_texts).encode()
    lines = "".join(json.dumps({"text": t, "id": i, "source": "documents"}, ensure_ascii=False) + "\n"
                    for i, t in enumerate(all_texts)).encode()
    with open(args.folder / "text.txt", "wb") as text, open(args.folder / "records.jsonl", "wb") as records:
        for _ in range(max(1, round(args.gigabytes * 1e9 / len(plain)))):
            text.write(plain)
            records.write(lines)


main()
