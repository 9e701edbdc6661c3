#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Learning rates and momenta of DeepSpeed's and transformers' schedules, for tests/unit/lr_schedule_test.cc.

    tests/golden/make_schedules.py LR_SCHEDULES     # needs torch, transformers; half a minute

LR_SCHEDULES is deepspeed/runtime/lr_schedules.py; of deepspeed this file alone is loaded. schedules.json holds a case a
line:
  scheduler  the section of a configuration; optimizer.params.lr is `lr`
  lr_at      [step, rate] of some steps; step n is the one behind n others
  lr_sum     the sum over the first 10000 steps n of (n mod 97 + 1) times the rate, so that none is left out
  beta_at, beta_sum  the same of the first beta, where the schedule moves it; `beta2` is the other one
"""

import importlib.util
import json
import pathlib
import random
import sys
import types

import torch
from transformers import optimization

OUT = pathlib.Path(__file__).parent / "schedules.json"
STEPS = 10000


def load(path):
    logger = types.SimpleNamespace(warning=lambda *_: None, info=lambda *_: None)
    package, utils = types.ModuleType("deepspeed"), types.ModuleType("deepspeed.utils")
    utils.logger = logger
    sys.modules.update({"deepspeed": package, "deepspeed.utils": utils})
    spec = importlib.util.spec_from_file_location("lr_schedules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def optimizer(lr):
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr, betas=(0.9, 0.999))


def transformers_schedule(opt, kind, p):
    total, warmup = p["total_num_steps"] if "total_num_steps" in p else None, p["warmup_num_steps"]
    if kind == "Linear":
        return optimization.get_linear_schedule_with_warmup(opt, warmup, total)
    if kind == "Cosine":
        return optimization.get_cosine_with_min_lr_schedule_with_warmup(
            opt, warmup, total, min_lr_rate=p["min_lr_ratio"])
    if kind == "CosineRestarts":
        return optimization.get_cosine_with_hard_restarts_schedule_with_warmup(opt, warmup, total, p["num_cycles"])
    if kind == "WSD":
        # Its own warm-up begins at min_lr_ratio, ours at 0, so it is asked for none where that is not 0.
        return optimization.get_wsd_schedule(
            opt, warmup, p["decay_num_steps"], num_training_steps=total, warmup_type="linear",
            decay_type=p["decay_type"], min_lr_ratio=p["min_lr_ratio"])
    return optimization.get_inverse_sqrt_schedule(opt, warmup, p.get("timescale"))


def record(module, kind, params, lr):
    opt = optimizer(lr)
    if hasattr(module, kind):
        schedule = getattr(module, kind)(opt, **params)
    else:
        schedule = transformers_schedule(opt, kind, params)
    group = opt.param_groups[0]
    rates, betas = [], []
    end = params.get("total_num_steps", STEPS)
    for n in range(STEPS):
        # Behind its end transformers' cosine rises again.
        rates.append(group["lr"] if n <= end or kind != "Cosine" else rates[end])
        betas.append(group["betas"])
        opt.step()
        schedule.step()
    some = sorted({*range(24), *range(24, STEPS, 631), STEPS - 1,
                   *(n + d for k in ("warmup_num_steps", "total_num_steps", "cycle_first_step_size")
                     for n in (params.get(k, 0), 2 * params.get(k, 0)) for d in (-1, 0, 1) if 0 <= n + d < STEPS)})
    weight = [n % 97 + 1 for n in range(STEPS)]
    case = {"scheduler": {"type": kind, "params": params}, "lr": lr, "lr_at": [[n, rates[n]] for n in some],
            "lr_sum": sum(w * r for w, r in zip(weight, rates))}
    if kind == "OneCycle" and params.get("cycle_momentum", True):
        case |= {"beta_at": [[n, betas[n][0]] for n in some], "beta2": betas[5][1],
                 "beta_sum": sum(w * b[0] for w, b in zip(weight, betas))}
    return case


def cases(rng):
    def steps(most):
        return rng.choice([1, 2, 3, 10, 100, rng.randint(1, most), rng.randint(1, most)])

    for _ in range(6):
        for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
            p = {"warmup_num_steps": steps(4000), "warmup_type": rng.choice(["log", "linear"])}
            if kind == "WarmupCosineLR":
                p |= {"warmup_min_ratio": rng.choice([0.0, 0.125]), "cos_min_ratio": rng.choice([0.0, 1e-4, 0.3])}
            else:
                p |= {"warmup_min_lr": rng.choice([0.0, 1e-6]), "warmup_max_lr": rng.choice([1e-3, 3e-4])}
            if kind != "WarmupLR":
                p["total_num_steps"] = rng.choice([9000, 12000, 500])
            yield kind, p
        p = {"lr_range_test_min_lr": rng.choice([1e-3, 1e-5]), "lr_range_test_step_size": steps(3000),
             "lr_range_test_step_rate": rng.choice([1.0, 5.0, 0.25]), "lr_range_test_staircase": rng.random() < 0.5}
        yield "LRRangeTest", p
    for i in range(16):
        p = {"cycle_min_lr": rng.choice([1e-5, 0.0]), "cycle_max_lr": rng.choice([1e-3, 0.1]),
             "cycle_first_step_size": steps(3000)}
        if i % 2:
            p["cycle_second_step_size"] = steps(3000)
        if i % 3 == 1:
            p["cycle_first_stair_count"] = rng.choice([1, 4, 7, 500])
        if i % 6 == 4:
            p["cycle_second_stair_count"] = rng.choice([0, 3])
        if i % 4 >= 2:
            p |= {"decay_step_size": steps(1000), "decay_lr_rate": rng.choice([0.0, 0.5])}
        if i % 5 == 4:
            p["cycle_momentum"] = False
        elif i % 3 == 2:
            p |= {"cycle_min_mom": 0.5, "cycle_max_mom": 0.95}
        if i % 8 == 7:
            p["decay_mom_rate"] = 1e-7
        yield "OneCycle", p
    for _ in range(4):
        for kind in ("Linear", "Cosine", "CosineRestarts", "WSD", "InverseSqrt"):
            p = {"warmup_num_steps": rng.choice([0, 1, 10, rng.randint(1, 2000)])}
            if kind != "InverseSqrt":
                p["total_num_steps"] = rng.choice([9000, 10000, 12000, 3000])
            elif rng.random() < 0.5:
                p["timescale"] = rng.choice([1, 77, 4000])
            elif p["warmup_num_steps"] == 0:
                p["warmup_num_steps"] = 30
            if kind == "Cosine":
                p["min_lr_ratio"] = rng.choice([0.0, 0.1])
            if kind == "CosineRestarts":
                p["num_cycles"] = rng.choice([1, 3, 4])
            if kind == "WSD":
                ratio = rng.choice([0.0, 0.1])
                p |= {"decay_num_steps": rng.choice([1, 500, 900]), "decay_type": rng.choice(["linear", "cosine", "1-sqrt"]),
                      "min_lr_ratio": ratio}
                if ratio > 0:
                    p["warmup_num_steps"] = 0
            yield kind, p


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    module = load(sys.argv[1])
    rng = random.Random(22)
    lines = [json.dumps(record(module, kind, p, rng.choice([1e-3, 3e-4, 0.02]))) for kind, p in cases(rng)]
    OUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{OUT}: {len(lines)} cases")


if __name__ == "__main__":
    main()
