#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is learnt of JSONL, by datasets' reader, transformers' tokenizer and trl's collator, for tests/unit/token_files_test.cc.

    tests/golden/make_masks.py    # with datasets, transformers, torch and trl; seconds

data/masks-KIND.jsonl are records of the kinds text, prompt and messages, data/masks.json of each kind [ids, labels]: one
record after the other, each with an end-of-text token behind it. Tokens of no label are -100. A prompt's seam is where
trl has it: of prompts whose last token would merge with the completion, which trl warns of and we encode apart, there
are none.
"""

import json
import pathlib
import random

import datasets
import transformers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

HERE = pathlib.Path(__file__).parent
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
          "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
          "{% endif %}{{ '\n' }}{% endfor %}")


def records():
    draw = random.Random(4)
    words = [w for name in ("corpus.txt", "unicode.txt")
             for w in (HERE / "tokenizers" / name).read_text().split() if "<|" not in w]

    def some(most):
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    yield "text", [{"text": some(20), "number": i} for i in range(6)]
    yield "prompt", [{"prompt": some(9) + draw.choice(["\n", ":", " ?\n"]), "completion": " " + some(9)}
                     for _ in range(12)]
    yield "messages", [{"messages": [{"role": "system", "content": some(5)}] +
                        [{"role": role, "content": some(6)} for _ in range(draw.randint(1, 3))
                         for role in ("user", "assistant")]} for _ in range(6)]


def main():
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizers/qwen2/tokenizer.json"))
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    collate = DataCollatorForLanguageModeling(pad_token_id=end)
    expected = {"document_token": end}
    for kind, rows in records():
        path = HERE / "data" / f"masks-{kind}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=draw) + "\n" for row, draw in zip(rows, [True, False] * 99)))
        ids, labels = [], []
        for row in datasets.load_dataset("json", data_files=str(path), split="train"):
            if kind == "messages":
                out = tokenizer.apply_chat_template(row["messages"], chat_template=CHATML, return_dict=True,
                                                    return_assistant_tokens_mask=True)
                tokens, mask = out["input_ids"] + [end], out["assistant_masks"] + [0]
            elif kind == "prompt":
                prompt = tokenizer(row["prompt"])["input_ids"]
                tokens = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [end]
                assert tokens[:len(prompt)] == prompt
                mask = [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
            else:
                tokens = tokenizer(row["text"])["input_ids"] + [end]
                mask = [1] * len(tokens)
            batch = collate([{"input_ids": tokens, "labels": [t if m else -100 for t, m in zip(tokens, mask)]}])
            ids += batch["input_ids"][0].tolist()
            labels += batch["labels"][0].tolist()
        expected[kind] = [ids, labels]
    (HERE / "data/masks.json").write_text(json.dumps(expected) + "\n")


main()
