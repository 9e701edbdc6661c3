#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rates of ds-infer with and without a draft, in turns on the same lines, with equal results checked.

    draft_bench.py DS-INFER MODEL DRAFT LINES [ROUNDS [BATCH...]]

LINES: JSON Lines of prompts. For each number of texts at a time (1, 4, 16) and each number of proposed tokens: the median
over rounds of the rate beside that without a draft, and the accepted share. Rates are those of the passes, without loading.
"""
import re
import statistics
import subprocess
import sys

tool, model, draft, lines = sys.argv[1:5]
rounds = int(sys.argv[5]) if len(sys.argv) > 5 else 3
batches = [int(n) for n in sys.argv[6:]] or [1, 4, 16]


def run(*options):
    done = subprocess.run([tool, model, lines, "-v", "--tokenizer", "bytes", *options], capture_output=True, text=True, check=True)
    texts, seconds = re.search(r"(\d+) new tokens in ([0-9.]+) s", done.stderr).groups()
    share = re.search(r"(\d+) of (\d+) proposed", done.stderr)
    return done.stdout, int(texts) / float(seconds), int(share[1]) / int(share[2]) if share else None


for batch in batches:
    for temperature in ("0", "0.8"):
        common = ["--batch", str(batch), "--context", "256", "--temperature", temperature]
        ratios, shares, plain = {}, {}, []
        for _ in range(rounds):
            want, rate, _ = run(*common)
            plain.append(rate)
            for n in (1, 2, 3, 4, 6):
                out, with_draft, shares[n] = run(*common, "--draft", draft, "--draft-tokens", str(n))
                assert out == want, "a draft changed a result"
                ratios.setdefault(n, []).append(with_draft / rate)
        print(f"{batch} at a time, temperature {temperature}: {statistics.median(plain):.0f} tokens/s without a draft;",
              "  ".join(f"{n}: {statistics.median(r):.2f} times, {100 * shares[n]:.0f} %" for n, r in ratios.items()),
              flush=True)
