#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many real DeepSpeed configurations are read as they are.

    tests/bench/census.py [--ds-train BIN] [--train N] DIR|REPOSITORY.git...

Looks for JSON files that are configurations of DeepSpeed in directories and in bare git repositories (their HEAD), each
content once, and asks ds-train --check for each of them what it says, with a model and a text set beside it. Prints what
is refused, by the sentence that refuses it, and how many are accepted. --train N also trains N steps of a tiny model
with each that is accepted. Files that are no object or name no key of DeepSpeed's are passed over; so are those that an
"auto" batch size or a number of ranks leaves open: these are set here, as their users' programs do.
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

MARKS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps",
         "fp16", "bf16", "zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown"}
NAME = re.compile(r"(deepspeed|ds_|zero|ds-|dsconfig|_ds|offload)", re.I)
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MODEL = {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}


def contents(root):
    """(name, text) of the files under a directory or in a bare repository."""
    if (root / "HEAD").exists():
        git = ["git", "-C", str(root)]
        names = subprocess.run(git + ["ls-tree", "-r", "--name-only", "-z", "HEAD"], capture_output=True,
                               check=True).stdout.decode().split("\0")
        for name in names:
            if name.endswith((".json", ".hjson")) and NAME.search(name):
                yield name, subprocess.run(git + ["show", f"HEAD:{name}"], capture_output=True, check=False).stdout
    else:
        for path in sorted(root.rglob("*.*json")):
            yield str(path.relative_to(root)), path.read_bytes()


def configurations(roots):
    seen = set()
    for root in roots:
        project = root.parent.name if root.name in ("repo", ".git") else root.name
        for name, data in contents(root):
            digest = hashlib.sha256(data).digest()
            if digest in seen or len(data) > 1 << 20:
                continue
            text = data.decode("utf-8", "replace")
            if sum(f'"{mark}"' in text or f"{mark}:" in text for mark in MARKS) < 2:
                continue
            seen.add(digest)
            yield f"{project}:{name}", data


def overrides(text, book, directory):
    # A schedule that names layers belongs to a model with so many.
    layers = re.search(r'"total_layer_num"\s*:\s*(\d+)', text)
    model = dict(MODEL, n_layer=int(layers[1])) if layers else MODEL
    values = [f"model={json.dumps(model)}", f"data.train={book}", "data.seq_length=16", "steps=3"]
    for key, value in (("train_micro_batch_size_per_gpu", 1), ("gradient_accumulation_steps", 1)):
        if re.search(rf'"{key}"\s*:\s*"auto"', text):
            values.append(f"{key}={value}")
    if all(re.search(rf'"{key}"\s*:\s*\d', text) for key in SIZES):
        values.append("train_batch_size=null")  # of as many ranks as there were
    elif re.search(r'"train_batch_size"\s*:\s*"auto"', text) or not re.search(r'"train_(micro_)?batch_size', text):
        values.append("train_batch_size=1")
    if "nvme" in text:
        for section in ("offload_optimizer", "offload_param"):
            if re.search(rf'"{section}"[^}}]*"nvme"', text):
                values.append(f"zero_optimization.{section}.nvme_path={directory}")
    return [word for value in values for word in ("--set", value)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="+", type=pathlib.Path)
    parser.add_argument("--ds-train", default="build/ci/bin/ds-train")
    parser.add_argument("--train", type=int, default=0, metavar="N", help="also train N steps with what is accepted")
    options = parser.parse_args()
    options.ds_train = os.path.abspath(options.ds_train)  # runs have a directory of their own

    results, reasons, failed, templates = collections.Counter(), collections.defaultdict(list), [], 0
    with tempfile.TemporaryDirectory() as directory:
        book = os.path.join(directory, "book.txt")
        pathlib.Path(book).write_text("In the beginning was the word. " * 400)
        for name, data in configurations(options.roots):
            text = data.decode("utf-8", "replace")
            path = os.path.join(directory, "ds_config.json")
            pathlib.Path(path).write_bytes(data)
            command = [options.ds_train, path] + overrides(text, book, directory)
            check = subprocess.run(command + ["--check"], capture_output=True, text=True, check=False)
            if check.returncode == 2 and re.search(r"is not JSON|is invalid JSON", check.stderr):
                templates += 1  # DeepSpeed cannot read them either
                continue
            team = name.startswith("deepspeedai")
            results[team, check.returncode] += 1
            if check.returncode != 0:
                for line in check.stderr.splitlines():
                    if "warning" in line:
                        continue
                    reasons[re.sub(r".*ds_config\.json(:\d+)*: |^  |^ds-train: ", "", line)[:150]].append(name)
                continue
            if options.train > 0:
                run = subprocess.run(command + ["--set", f"steps={options.train}"], capture_output=True, text=True,
                                     check=False, cwd=directory)
                if run.returncode != 0:
                    failed.append(f"{name}: {run.returncode}: {run.stderr.strip().splitlines()[-1:]}")

    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):5} {reason}   e.g. {names[0]}")
    words = {0: "accepted", 2: "with mistakes", 4: "not there yet"}
    print()
    for what, teams in (("all", (False, True)), ("DeepSpeed's own", (True,)), ("of others", (False,))):
        of = {code: sum(results[team, code] for team in teams) for code in {code for _, code in results}}
        total = sum(of.values())
        print(f"{what}: {total} configurations, "
              + ", ".join(f"{n} {words.get(code, f'exit {code}')}" for code, n in sorted(of.items()))
              + f": {100 * of.get(0, 0) / max(total, 1):.1f} % accepted")
    print(f"{templates} more are no JSON")
    for line in failed:
        print("did not train:", line)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
