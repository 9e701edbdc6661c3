#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/ds_lm_eval.py, the model of lm-evaluation-harness that asks ds-infer, by itself.

bats_require_minimum_version 1.5.0

load tiny

trained() { ds-train cfg.json --out run --steps 3 --quiet; }

@test "the adapter of lm-evaluation-harness asks ds-infer, and needs only Python" {
  trained
  cat >ask.py <<'PY'
import json, os, subprocess, sys, types
sys.path.insert(0, os.environ["DS_SOURCE"] + "/scripts")
import ds_lm_eval

def lines(words, given):
    text = "".join(json.dumps(line) + "\n" for line in given)
    done = subprocess.run(["ds-infer", *words, "run"], input=text, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]

def asks(*requests):
    return [types.SimpleNamespace(args=args) for args in requests]

def refused(error, text, *requests):
    try:
        model.generate_until(asks(*requests))
    except error as e:
        assert text in str(e), e
    else:
        raise AssertionError(requests)

model = ds_lm_eval.DsInfer("run", options="--batch 3 --set threads=1", batch_size=1)
pairs = [("The words ", "of"), ("a", " and more"), ("x" * 80, "abc"), ("z\u00fc", "\u00e9")]
want = lines(["score", "--cut"], [{"context": a, "continuations": [b]} for a, b in pairs])
assert model.loglikelihood(asks(*pairs)) == [(w["scores"][0]["logprob"], w["scores"][0]["is_greedy"]) for w in want]
assert len({r[0] for r in model.loglikelihood(asks(*pairs))}) == 4

# Whole texts begin after a token that "bytes" does not have, so their error is the adapter's.
try:
    model.loglikelihood_rolling(asks(("a text",)))
except RuntimeError as e:
    assert "request 1 the tokenizer has neither" in str(e) and "status 1" in str(e), e
else:
    raise AssertionError("rolling")

told = {"until": ["e", ""], "max_gen_toks": 12, "do_sample": False, "temperature": 0.9}
free = {"max_new_tokens": 9, "temperature": 0.9, "top_k": 5, "do_sample": True}
want = lines(["--cut"], [{"prompt": "The", "max_tokens": 12, "temperature": 0, "stop": ["e"]},
                         {"prompt": "The", "max_tokens": 9, "temperature": 0.9, "top_k": 5},
                         {"prompt": "y" * 90, "max_tokens": 8, "temperature": 0}])
given = [("The", told), ("The", free), ("y" * 90, {"until": None, "max_tokens": 8})]
assert model.generate_until(asks(*given)) == [w["text"] for w in want]
assert told["until"] == ["e", ""]  # settings of the caller are not changed
refused(ValueError, "['num_beams']", ("The", {"num_beams": 2}))
refused(RuntimeError, "request 2 ", ("The", {"max_gen_toks": 3}), ("", {}))
try:
    ds_lm_eval.DsInfer("nowhere").loglikelihood(asks(("a", "b")))
except RuntimeError as e:
    assert "it has stopped (status 2)" in str(e), e
else:
    raise AssertionError("nowhere")
PY
  python3 ask.py
  # A tokenizer with a token that begins texts.
  cp -r "$DS_SOURCE/tests/golden/gguf/text-llama3.gguf" model.gguf
  python3 - <<'PY'
import json, os, subprocess, sys, types
sys.path.insert(0, os.environ["DS_SOURCE"] + "/scripts")
import ds_lm_eval
text = "The licence of these words. " * 30
done = subprocess.run(["ds-infer", "score", "model.gguf"], input=json.dumps({"text": text}), stdout=subprocess.PIPE, text=True, check=True)
got = ds_lm_eval.DsInfer("model.gguf", tool="ds-launch -n 2 ds-infer").loglikelihood_rolling([types.SimpleNamespace(args=(text,))])
assert got == [json.loads(done.stdout)["logprob"]], got
PY
}
