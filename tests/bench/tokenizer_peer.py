#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""MB/s of Hugging Face's tokenizers, and SentencePiece, on one thread: tokenizer_peer.py TEXT FILE...

The whole text in one call, as tokenizer_bench does, and line by line, which is kinder to Hugging Face's: it keeps the
place of every character. Best of two, CPU time.
"""
import os
import sys
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def best_of(turns, body):
    times = []
    for _ in range(turns):
        start = time.process_time()
        body()
        times.append(time.process_time() - start)
    return min(times)


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        text = f.read()
    lines = text.splitlines(keepends=True)
    megabytes = len(text.encode()) / 1e6
    for path in sys.argv[2:]:
        if path.endswith(".json"):
            from tokenizers import Tokenizer
            t = Tokenizer.from_file(path)
            one = lambda x: t.encode(x, add_special_tokens=False).ids
            many = lambda: t.encode_batch_fast(lines, add_special_tokens=False)
        else:
            import sentencepiece
            one = sentencepiece.SentencePieceProcessor(model_file=path).encode
            many = lambda: [one(line) for line in lines]
        whole, by_line = best_of(2, lambda: one(text)), best_of(2, many)
        print(f"{megabytes / whole:8.1f} MB/s, by lines {megabytes / by_line:8.1f}  {len(one(text)):9d} tokens  {path}")


if __name__ == "__main__":
    main()
