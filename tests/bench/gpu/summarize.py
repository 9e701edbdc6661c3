#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes summary.md of a results folder of tests/bench/gpu/run: ours beside PyTorch, from ours.jsonl and torch.jsonl.
Runs of one kind are medians; PyTorch's figure is that of its fastest variant."""

import json
import os
import sys


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def lines_of(path):
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f]


def gib(n):
    return f"{n / 2**30:.1f}"


def grouped(lines, section, key):
    groups = {}
    for line in lines:
        if line["section"] == section:
            groups.setdefault(key(line), []).append(line)
    return groups


class Summary:
    def __init__(self, folder):
        self.folder, self.out = folder, []
        self.ours, self.torch = (lines_of(os.path.join(folder, f"{who}.jsonl")) for who in ("ours", "torch"))

    def say(self, line=""):
        self.out.append(line)

    def table(self, *columns):
        self.say("| " + " | ".join(columns) + " |")
        self.say("|" + "---|" * len(columns))

    def row(self, *cells):
        self.say("| " + " | ".join(cells) + " |")

    def head(self):
        self.say("# One GPU, beside PyTorch\n")
        devices = [line for line in self.ours + self.torch if line["section"] == "device"]
        if any(d["small"] for d in devices):
            self.say("**Small shapes: a smoke test, no measurement.**\n")
        for name in dict.fromkeys(f"{d['name']}{', ' + d['versions'] if 'versions' in d else ''}" for d in devices):
            self.say(f"- {name}")

    def steps(self):
        ours = grouped(self.ours, "step", lambda x: x["model"])
        variant = (lambda x: (x["model"], x["recipe"], x["compile"], x["attention"]))
        torch = grouped(self.torch, "step", variant)
        if not ours and not torch:
            return
        self.say("\n## Training steps\n")
        self.say("MFU: 6 FLOP per parameter of a matrix product and 12 L C T per token, over 989 TFLOP/s; then ours over "
                 "the rate of a large product in the same run. Memory in GiB: ours as counted (with the scratch of ops), "
                 "and by what less is free on the device; PyTorch's allocated and reserved.\n")
        self.table("model", "tokens per step", "ours, tokens/s", "PyTorch", "ratio", "MFU ours", "MFU PyTorch",
                   "ours of product", "memory ours", "memory PyTorch")
        rate = (lambda lines: median([x["tokens_per_s"] for x in lines]))
        for model in dict.fromkeys([*ours, *(key[0] for key in torch)]):
            mine = ours.get(model)
            variants = [lines for key, lines in torch.items() if key[0] == model]
            theirs = max(variants, key=rate) if variants else None
            some = (mine or theirs)[0]
            a, b = mine and mine[-1], theirs and theirs[-1]
            fresh_mfu = (lambda x, lines: x["flops_per_token"] * rate(lines) / 989e12)
            self.row(model, f"{some['micro_batches']} x {some['B']} x {some['T']}",
                     f"{rate(mine):.0f}" if mine else "-", f"{rate(theirs):.0f}" if theirs else "-",
                     f"{rate(mine) / rate(theirs):.2f}" if mine and theirs else "-",
                     f"{fresh_mfu(a, mine):.1%}" if mine else "-", f"{fresh_mfu(b, theirs):.1%}" if theirs else "-",
                     f"{median([x['mfu_of_product'] for x in mine]):.1%}" if mine else "-",
                     f"{gib(a['ledger_bytes'] + a['scratch_bytes'])}, {gib(a['memory_bytes'])}" if mine else "-",
                     f"{gib(b['memory_bytes'])}, {gib(b['reserved_bytes'])}" if theirs else "-")
            if a and b and (abs(a["flops_per_token"] / b["flops_per_token"] - 1) > 1e-4
                            or a["parameters"] != b["parameters"]):
                print(f"summarize.py: {model} is not the same model on both sides", file=sys.stderr)
                self.say(f"\n**{model}: not the same model on both sides.**\n")
        self.say("\nEach run:\n")
        self.table("model", "who", "tokens/s", "step ms: median, fastest, slowest", "first step s", "loss")
        for who, lines in (("ours", self.ours), ("PyTorch", self.torch)):
            for x in lines:
                if x["section"] == "step":
                    how = who if who == "ours" else f"PyTorch {x['recipe']}, compile {x['compile']}, {x['attention']}"
                    self.row(x["model"], how, f"{x['tokens_per_s']:.0f}",
                             f"{x['step_ms']:.2f}, {x['min_ms']:.2f}, {x['max_ms']:.2f}", f"{x['first_step_s']:.1f}",
                             f"{x['first_loss']:.4f} -> {x['last_loss']:.4f}")

    def ops(self, section, title):
        key = (lambda x: (x["op"], x["dtype"], x["shape"]))
        ours, torch = grouped(self.ours, section, key), grouped(self.torch, section, key)
        if not ours and not torch:
            return
        unit = next(iter((ours or torch).values()))[0]["unit"]
        self.say(f"\n## {title}\n")
        self.table("op", "shape", f"ours, {unit}", "share", "ours, us", "PyTorch, us", "ratio", "PyTorch's")
        for k in dict.fromkeys([*ours, *torch]):
            mine, theirs = ours.get(k), torch.get(k)
            us = (lambda lines: median([x["us"] for x in lines]))
            notes, their_us = "", None
            if theirs:
                by_note = {}
                for x in theirs:
                    by_note.setdefault(x.get("note", ""), []).append(x)
                their_us = min(us(lines) for lines in by_note.values())
                notes = "; ".join(f"{note} {us(lines):.0f} us" for note, lines in by_note.items() if note)
            self.row(k[0], k[2], f"{median([x['rate'] for x in mine]):.1f}" if mine else "-",
                     f"{median([x['share'] for x in mine]):.1%}" if mine else "-", f"{us(mine):.1f}" if mine else "-",
                     f"{their_us:.1f}" if theirs else "-", f"{their_us / us(mine):.2f}" if mine and theirs else "-",
                     notes)

    def write(self):
        self.head()
        self.steps()
        self.say("\nBelow, a ratio is PyTorch's time over ours: above 1 we are faster.")
        self.ops("attention", "Attention; share of a large product's rate")
        self.ops("gemm", "Matrix products; share of a large product's rate")
        self.ops("ops", "What memory bounds; share of the copy bandwidth")
        skipped = []
        log = os.path.join(self.folder, "log.txt")
        if os.path.exists(log):
            with open(log) as f:
                skipped = [line[3:].strip() for line in f
                           if line.startswith("== ") and any(w in line for w in (": skipped", ": stopped", ": failed"))]
        if skipped:
            self.say("\n## Not done\n")
            for line in skipped:
                self.say(f"- {line}")
        with open(os.path.join(self.folder, "summary.md"), "w") as f:
            f.write("\n".join(self.out) + "\n")


if __name__ == "__main__":
    Summary(sys.argv[1]).write()
