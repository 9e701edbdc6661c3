# SPDX-License-Identifier: Apache-2.0
"""Our logits beside those of transformers, judged by the two-times rule: our error against an fp64 run of the same model
is at most twice that of transformers in the same type, plus 1e-6 of the logits' scale (max-abs) and 1e-6 (relative L2)."""

import copy
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "golden"))
from make_fixtures import all_fp64  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def our_logits(bin_dir, model_dir, weights, ids, dtype):
    """[B,T,V] of ids [B,T] by dump_logits."""
    batch, length = ids.shape
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        ids.to(torch.int32).numpy().tofile(scratch / "ids")
        subprocess.run([bin_dir / "dump_logits", model_dir, weights, scratch / "ids", str(batch), str(length),
                        scratch / "logits", dtype], check=True)
        return torch.from_numpy(np.fromfile(scratch / "logits", np.float32)).reshape(batch, length, -1)


def errors(got, want):
    d = got.double() - want
    return d.abs().max().item(), (d.norm() / want.norm()).item()


def load(auto, model_dir, dtype=torch.float32):
    """The model, and what transformers says about tensors of the file that it misses or has no use for."""
    model, info = auto.from_pretrained(model_dir, attn_implementation="eager", dtype=dtype, output_loading_info=True)
    wrong = {k: sorted(v) for k, v in info.items() if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    return model.eval(), wrong


def exact_logits(auto, config, state, ids):
    """With every operation in fp64."""
    config = copy.deepcopy(config)
    config.dtype = None
    with all_fp64():
        model = auto.from_config(config, attn_implementation="eager")
        model.load_state_dict({k: v.double() for k, v in state.items()})
        logits = model.eval()(input_ids=ids).logits
    assert logits.dtype == torch.float64
    return logits


def compare(name, auto, model_dir, weights, bin_dir, ids, dtypes=DTYPES):
    """Prints a line per type; True if all pass."""
    passed = True
    with torch.no_grad():
        for dtype in dtypes:
            model, _ = load(auto, model_dir, DTYPES[dtype])
            # The reference uses the weights as rounded to the type.
            want = exact_logits(auto, model.config, model.state_dict(), ids)
            theirs = errors(model(input_ids=ids).logits, want)
            ours = errors(our_logits(bin_dir, model_dir, weights, ids, dtype), want)
            scale = want.abs().max().item()
            good = ours[0] <= 2 * theirs[0] + 1e-6 * scale and ours[1] <= 2 * theirs[1] + 1e-6
            print(f"{name:9} {dtype}  max abs {ours[0]:.2e} (transformers {theirs[0]:.2e}, scale {scale:.3g})  "
                  f"rel L2 {ours[1]:.2e} ({theirs[1]:.2e})  {'ok' if good else 'FAILED'}", flush=True)
            passed &= good
    return passed
