#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness with ds-infer: a model "ds-infer", whose requests of a kind are one run.

    ds_lm_eval.py run --model ds-infer --model_args model=DIR --tasks TASK...
    ... --model_args model=DIR,options="--dtype fp32 --batch 16",tool="ds-launch -n 2 ds-infer",texts="--draft DIR"

The options of `texts` are for written texts alone. Contexts that are too long lose their beginning. Texts spell special tokens out. Chat templates are not applied.
"""
import json, shlex, subprocess
try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:  # the class also works by itself
    LM, register_model = object, lambda name: lambda model: model

SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"}
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("ds-infer")
class DsInfer(LM):
    def __init__(self, model, options="", texts="", tool="ds-infer", batch_size=None, max_batch_size=None, device=None):
        super().__init__()  # the harness always names a device and sizes of batches, which ds-infer chooses by itself
        self.texts = shlex.split(texts)
        self.command = lambda mode: [*shlex.split(tool), *mode, "--cut", *shlex.split(options), model]

    def run(self, mode, lines):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        done = subprocess.run(self.command(mode), input=text, stdout=subprocess.PIPE, encoding="utf-8")
        results = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode or len(results) != len(lines):
            bad = next((f"request {r['line']} {r['error']}" for r in results if "error" in r), "it has stopped")
            raise RuntimeError(f"ds-infer: {bad} (status {done.returncode})")
        return results

    def loglikelihood(self, requests, disable_tqdm=False):
        lines = [{"context": r.args[0], "continuations": [r.args[1]]} for r in requests]
        return [(r["scores"][0]["logprob"], r["scores"][0]["is_greedy"]) for r in self.run(["score"], lines)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        scores = iter(self.run(["score"], [{"text": r.args[0]} for r in requests if r.args[0]]))
        return [next(scores)["logprob"] if r.args[0] else 0.0 for r in requests]

    def generate_until(self, requests, disable_tqdm=False):
        return [r["text"] for r in self.run(self.texts, [self.line(r.args[0], dict(r.args[1])) for r in requests])]

    def line(self, context, asked):
        until, samples = asked.pop("until", None) or [], asked.pop("do_sample", None)
        lengths = [n for n in [asked.pop(name, None) for name in LENGTHS] if n is not None]
        if unknown := asked.keys() - SAMPLING:
            raise ValueError(f"ds-infer: {sorted(unknown)} of generation_kwargs is not available")
        line = {"prompt": context, "max_tokens": int((lengths or [256])[0]), "temperature": 0} | asked
        line["stop"] = [s for s in ([until] if isinstance(until, str) else until) if s]
        return line | ({"temperature": 0} if samples is False else {})


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate
    cli_evaluate()
