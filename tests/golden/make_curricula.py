#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lengths of sequences that DeepSpeed's curricula come to, for tests/unit/curriculum_test.cc.

    tests/golden/make_curricula.py DATA_PIPELINE    # deepspeed/runtime/data_pipeline; a second

Of deepspeed curriculum_scheduler.py and its constants are loaded alone. curricula.json holds a case a line:
  curriculum  the section curriculum_learning of a configuration
  length_at   [step, tokens] of some steps, from 1
  length_sum  the sum over the first 10000 steps n of (n mod 97 + 1) times the tokens, so that none is left out
"""

import importlib.util
import json
import pathlib
import random
import sys
import types

OUT = pathlib.Path(__file__).parent / "curricula.json"
STEPS = 10000


def load(folder):
    package, utils = types.ModuleType("deepspeed"), types.ModuleType("deepspeed.utils")
    utils.logger = types.SimpleNamespace(warning=lambda *_: None, info=lambda *_: None)
    pipeline = types.ModuleType("data_pipeline")
    pipeline.__path__ = [folder]
    sys.modules.update({"deepspeed": package, "deepspeed.utils": utils, "data_pipeline": pipeline})
    for name in ("constants", "curriculum_scheduler"):
        path = pathlib.Path(folder) / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"data_pipeline.{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def configurations():
    draw = random.Random(11)
    for kind in ("fixed_linear", "fixed_root"):
        for low, high, total, step in ((8, 1024, 15000, 8), (64, 64, 10, 8), (8, 2048, 3000, 8), (80, 1000, 700, 16),
                                       (1, 77, 9999, 1), (13, 515, 4321, 7), (128, 4096, 1, 64)):
            schedule = {"total_curriculum_step": total, "difficulty_step": step}
            if kind == "fixed_root":
                schedule["root_degree"] = draw.randint(1, 5)
            yield {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": low, "max_difficulty": high,
                   "schedule_type": kind, "schedule_config": schedule}
    for lengths, steps in (([64, 128, 512], [100, 5000]), ([16, 24, 40, 96, 1024], [1, 2, 3, 9999])):
        yield {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": lengths[0],
               "max_difficulty": lengths[-1], "schedule_type": "fixed_discrete",
               "schedule_config": {"difficulty": lengths, "max_step": steps}}


def main():
    scheduler = load(sys.argv[1])
    draw, lines = random.Random(5), []
    for config in configurations():
        s = scheduler.CurriculumScheduler(dict(config, schedule_config=dict(config["schedule_config"])))
        kept = {1, 2, 3, STEPS} | {draw.randint(1, STEPS) for _ in range(30)}
        at, total = [], 0
        for n in range(1, STEPS + 1):
            length = s.update_difficulty(n)
            total += (n % 97 + 1) * length
            if n in kept:
                at.append([n, length])
        lines.append(json.dumps({"curriculum": config, "length_at": at, "length_sum": total}))
    OUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


main()
