#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lengths of sequences that DeepSpeed's curricula come to, for tests/unit/curriculum_test.cc, and numbers of tokens that
its random-LTD keeps, for random_ltd_test.cc.

    tests/golden/make_curricula.py DATA_PIPELINE    # deepspeed/runtime/data_pipeline; a second

Of deepspeed the schedulers and their constants are loaded alone. curricula.json holds a case a line:
  curriculum  the section curriculum_learning of a configuration
  length_at   [step, tokens] of some steps, from 1
  length_sum  the sum over the first 10000 steps n of (n mod 97 + 1) times the tokens, so that none is left out
random_ltd.json likewise: the numbers of the schedule, kept_at, and `sum`, of n times the tokens kept in step n.
"""

import importlib.util
import json
import pathlib
import random
import sys
import types

HERE = pathlib.Path(__file__).parent
STEPS = 10000


def load(folder):
    package, utils = types.ModuleType("deepspeed"), types.ModuleType("deepspeed.utils")
    utils.logger = types.SimpleNamespace(warning=lambda *_: None, info=lambda *_: None)
    pipeline = types.ModuleType("data_pipeline")
    pipeline.__path__ = [folder]
    routing = types.ModuleType("data_pipeline.data_routing")
    routing.__path__ = [f"{folder}/data_routing"]
    sys.modules.update({"deepspeed": package, "deepspeed.utils": utils, "data_pipeline": pipeline,
                        "data_pipeline.data_routing": routing})
    modules = []
    for name in ("constants", "curriculum_scheduler", "data_routing.scheduler"):
        path = pathlib.Path(folder) / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(f"data_pipeline.{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        modules.append(module)
    return modules[1:]


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


def write(name, cases):
    (HERE / name).write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def random_ltd(scheduler):
    draw, cases = random.Random(6), []
    for low, high, steps, per_step in ((128, 1024, 500, 16), (128, 1024, 20000, 16), (5, 16, 5, 1), (100, 1000, 777, 48),
                                       (64, 64, 10, 8), (7, 4095, 9999, 3), (256, 2048, 3000, 256)):
        s = scheduler.RandomLTDScheduler({
            "total_layer_num": 4, "random_ltd_layer_num": 2, "global_batch_size": 8,
            "layer_token_lr_schedule": {"enabled": False},
            "random_ltd_schedule": {"min_value": low, "max_value": high, "schedule_type": "fixed_linear",
                                    "schedule_config": {"require_steps": steps, "seq_per_step": per_step}}})
        told = {1, 2, 3, STEPS} | {draw.randint(1, STEPS) for _ in range(30)}
        at, total = [], 0
        for n in range(1, STEPS + 1):  # the engine's first step is its number 0
            s.update_seq(n - 1)
            total += n * s.get_current_seq()
            if n in told:
                at.append([n, s.get_current_seq()])
        cases.append({"min_value": low, "max_value": high, "require_steps": steps, "seq_per_step": per_step,
                      "kept_at": at, "sum": total})
    write("random_ltd.json", cases)


def main():
    scheduler, routing = load(sys.argv[1])
    random_ltd(routing)
    draw, cases = random.Random(5), []
    for config in configurations():
        s = scheduler.CurriculumScheduler(dict(config, schedule_config=dict(config["schedule_config"])))
        kept = {1, 2, 3, STEPS} | {draw.randint(1, STEPS) for _ in range(30)}
        at, total = [], 0
        for n in range(1, STEPS + 1):
            length = s.update_difficulty(n)
            total += (n % 97 + 1) * length
            if n in kept:
                at.append([n, length])
        cases.append({"curriculum": config, "length_at": at, "length_sum": total})
    write("curricula.json", cases)


main()
