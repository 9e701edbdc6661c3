#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Probabilities of tokens after the filters of transformers.

    python3 tests/golden/make_sampling.py        # needs torch and transformers >= 5; seconds

tests/golden/sampling/expected.json
  logits    [[...], ...]    fp32 numbers; no two of a row are equal
  text      [...]           the tokens so far, for the repetition penalty
  cases     a row, settings by the names of ds-infer, and the probabilities of all tokens: in fp64, by the processors of
            transformers in the order in which generate() applies them
"""

import json
import pathlib

import torch
from transformers.generation import logits_process as lp

ROWS, VOCAB = 3, 47
TEXT = [3, 3, 11, 40]
SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.001},
    {"temperature": 1000.0},
    {"top_k": 5},
    {"top_k": 46},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.2},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.8, "min_p": 0.2},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "temperature": 0.8, "top_k": 10},
]


def probabilities(logits, settings):
    processors = []
    if "repetition_penalty" in settings:
        processors.append(lp.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "temperature" in settings:
        processors.append(lp.TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(lp.TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(lp.TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        processors.append(lp.MinPLogitsWarper(settings["min_p"]))
    z = logits.double().unsqueeze(0)
    for processor in processors:
        z = processor(torch.tensor([TEXT]), z)
    return torch.softmax(z, -1)[0]


def main():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * torch.tensor([[1.0], [3.0], [9.0]])
    assert all(len(set(row.tolist())) == VOCAB for row in logits)
    cases = [
        {"row": row, **settings, "probabilities": probabilities(logits[row], settings).tolist()}
        for row in range(ROWS)
        for settings in SETTINGS
    ]
    folder = pathlib.Path(__file__).parent / "sampling"
    folder.mkdir(exist_ok=True)
    body = {"logits": logits.tolist(), "text": TEXT, "cases": cases}
    (folder / "expected.json").write_text(json.dumps(body, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
