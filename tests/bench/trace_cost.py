#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ds-train --trace costs, and whether its steps take what metrics.jsonl says: two ranks, in turns.

    tests/bench/trace_cost.py BUILD     # a minute; BUILD/bin has the tools
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

CONFIG = {"model": {"type": "gpt2", "vocab_size": 256, "n_positions": 256, "n_embd": 256, "n_layer": 4, "n_head": 4},
          "data": {"train": "book.txt", "seq_length": 256}, "train_micro_batch_size_per_gpu": 4,
          "gradient_accumulation_steps": 2, "steps": 5, "threads": 1,
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def run(bin_dir, directory, name, traced, *settings):
    """Milliseconds of the steps; with a trace, also those of rank 0 there."""
    command = [bin_dir / "ds-launch", "-n", "2", bin_dir / "ds-train", "c.json", "--out", name, "--set", "save.every=0",
               *(word for s in settings for word in ("--set", s)), *(["--trace", f"{name}.json"] if traced else [])]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    lines = map(json.loads, (directory / name / "metrics.jsonl").read_text().splitlines())
    steps = [line["step_ms"] for line in lines if line["type"] == "step"]
    if not traced:
        return steps, None
    events = json.loads((directory / f"{name}.json").read_text())["traceEvents"]
    track = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return steps, sum(e["dur"] / 1e3 for e in events
                      if e["ph"] == "X" and e["name"] == "step" and e["pid"] == 1 and track[1, e["tid"]] == "steps")


def main():
    bin_dir = pathlib.Path(sys.argv[1]).resolve() / "bin"
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        (directory / "book.txt").write_text("In the beginning God created the heaven and the earth. " * 4000)
        (directory / "c.json").write_text(json.dumps(CONFIG))
        plain, traced, agree = [], [], []
        for turn in range(6):
            plain += run(bin_dir, directory, f"plain{turn}", False)[0][1:]
            steps, spans = run(bin_dir, directory, f"traced{turn}", True)
            traced += steps[1:]
            agree.append(spans / sum(steps))
        off, on = statistics.median(plain), statistics.median(traced)
        print(f"step {off:.1f} ms without a trace, {on:.1f} with one: {on / off:.4f}")
        print("trace over metrics.jsonl:", ", ".join(f"{x:.4f}" for x in agree))
        steps, spans = run(bin_dir, directory, "pipeline", True, "pipeline.stages=2")
        print(f"of a pipeline of two stages: {spans / sum(steps):.4f}")


if __name__ == "__main__":
    main()
