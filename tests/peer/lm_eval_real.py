#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/ds_lm_eval.py beside the model class "hf" of lm-evaluation-harness: local tasks of the three kinds of requests.

    pip install 'lm_eval[hf]==0.4.13'
    tests/peer/lm_eval_real.py build/ci/bin

The model has random weights and the tokenizer of tests/golden, in fp32, and no network is used. Logarithms must agree to
1e-5 of their size, greedy flags and texts exactly.
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
import lm_eval.models
import torch
from lm_eval.tasks import TaskManager
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import ds_lm_eval  # noqa: E402,F401  (registers the model)

TASKS = {
    "ends": """output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "whole": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]""",
    "next": """output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: [" the", "\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]""",
}


def make_model(folder):
    golden = ROOT / "tests/golden"
    folder.mkdir()
    shutil.copy(golden / "tokenizers/llama3/tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}))
    published = json.loads((golden / "gguf/text-llama3/config.json").read_text())
    torch.manual_seed(1)
    config = LlamaConfig(**published | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 3})
    config.dtype = torch.float32
    model = LlamaForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else torch.nn.init.ones_(p)
    model.save_pretrained(folder)


def make_tasks(folder):
    folder.mkdir()
    sentences = [s.strip() for s in (ROOT / "LICENSE").read_text().replace("\n", " ").split(". ") if len(s) > 40][:60]
    with open(folder / "data.jsonl", "w") as f:
        for i, s in enumerate(sentences):
            # Some end in blanks, one context is empty, some texts are too long for the model.
            text = s + " " * (i % 3) if i % 10 else (s + " ") * 40
            choices = [" " + sentences[(i + k) % len(sentences)][:12 + k] for k in range(3)] + [" a"]
            document = {"text": text, "context": "" if i == 7 else text, "choices": choices, "gold": i % 4}
            f.write(json.dumps(document) + "\n")
    for name, body in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
            f"test_split: test\n{body}\n")


def results(model, args, tasks, folder):
    return lm_eval.simple_evaluate(model=model, model_args=args, tasks=tasks, task_manager=TaskManager(include_path=str(folder)),
                                   log_samples=True, bootstrap_iters=0)


def answers(result, task):
    return [r for s in sorted(result["samples"][task], key=lambda s: s["doc_id"]) for r in s["filtered_resps"]]


def main():
    os.environ["PATH"] = f"{pathlib.Path(sys.argv[1]).resolve()}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as work:
        os.environ["HF_HOME"] = work
        model, tasks = pathlib.Path(work) / "model", pathlib.Path(work) / "tasks"
        make_model(model)
        make_tasks(tasks)
        for task in TASKS:
            ours = results("ds-infer", {"model": str(model)}, [task], tasks)
            # Whole texts begin after one token that begins texts; "hf" would put its own and the tokenizer's before them.
            once = {"add_bos_token": False} if task == "whole" else {}
            args = {"pretrained": str(model), "dtype": "float32", "batch_size": 4, "device": "cpu"} | once
            theirs = results("hf", args, [task], tasks)
            a, b = answers(ours, task), answers(theirs, task)
            worst = 0.0
            for x, y in zip(a, b, strict=True):
                if isinstance(x, str):  # "hf" leaves out special tokens, which a trained model would not write
                    x = x.replace("<|begin_of_text|>", "")
                    assert x == y, (task, x, y)
                    continue
                (x, greedy), (y, other) = (v if isinstance(v, (list, tuple)) else (v, None) for v in (x, y))
                assert greedy == other, (task, x, y, greedy, other)
                worst = max(worst, abs(x - y) / max(1, abs(y)))
            assert worst < 1e-5, (task, worst)
            texts = [x for x in a if isinstance(x, str)]
            equal = f"{sum(map(len, texts))} characters are the same" if texts else f"logarithms equal to {worst:.1e} of their size"
            metrics = [f"{k.removesuffix(',none')} {v:.7g} ({theirs['results'][task][k]:.7g})"
                       for k, v in ours["results"][task].items() if isinstance(v, float)]
            print(f"{task}: {len(a)} results, {equal}; {', '.join(metrics)}")


main()
