#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-infer: lines of JSON in, lines of JSON out, each with the bytes that it has alone.

bats_require_minimum_version 1.5.0

load infer

@test "each line has the bytes that it has alone, at any size, order and number of ranks" {
  trained
  lines >in.jsonl
  infer in.jsonl >all.jsonl
  assert_equal "$(wc -l <all.jsonl)" 7
  while IFS= read -r line; do infer <<<"$line"; done <in.jsonl >alone.jsonl
  cmp all.jsonl alone.jsonl
  infer - <in.jsonl | cmp - all.jsonl
  for sizes in "--batch 1" "--batch 3 --chunk 4" "--chunk 1 --cache 64" "--batch 2 --context 60 --cache 60"; do
    # shellcheck disable=SC2086
    infer in.jsonl $sizes | cmp - all.jsonl
  done
  tac in.jsonl | infer | tac | cmp - all.jsonl
  infer in.jsonl --unordered | sort | cmp - <(sort all.jsonl)
  ds-launch -n 2 ds-infer run in.jsonl | cmp - all.jsonl
  ds-launch -n 2 ds-infer run in.jsonl --set pipeline.stages=2 | cmp - all.jsonl
  lines | ds-launch -n 2 ds-infer run --set tensor_parallel.tp_size=2 >tp.jsonl
  assert_equal "$(wc -l <tp.jsonl)" 7
  infer in.jsonl --output file.jsonl
  cmp file.jsonl all.jsonl
}

@test "members of results" {
  trained
  lines | infer >all.jsonl
  assert_equal "$(each 'd["id"]' <all.jsonl | tr '\n' ' ')" "1 2 3 4 5 6 7 "
  assert_equal "$(each 'd["schema"]' <all.jsonl | sort -u)" '"ds-infer/1"'
  assert_equal "$(each 'd.get("finish_reason")' <all.jsonl | sort -u | tr '\n' ' ')" '"length" null '
  assert_equal "$(sed -n 3p all.jsonl | each 'len(d["tokens"]), len(d["logprobs"]), len(d["logprobs"][0]["top_logprobs"])')" "[5, 5, 2]"
  assert_equal "$(sed -n 3p all.jsonl | each 'max(t["logprob"] for t in d["logprobs"]) <= 0')" true
  assert_equal "$(sed -n 4p all.jsonl | each 'len(d["prompt_logprobs"])')" 20
  assert_equal "$(sed -n 5p all.jsonl | each '[c["index"] for c in d["choices"]], len(set(c["text"] for c in d["choices"]))')" "[[0, 1, 2], 3]"
  # The first of several texts is the text alone.
  infer <<<'{"prompt": "The words", "max_tokens": 12, "seed": 9}' | each 'd["tokens"]' >one
  sed -n 5p all.jsonl | each 'd["choices"][0]["tokens"]' | cmp - one
  # As ds-train writes it.
  ds-train cfg.json --resume run --generate 'The words' --max-tokens 20 --temperature 0 --json | whole 'd["text"]' >theirs
  sed -n 1p all.jsonl | each 'd["text"]' | cmp - theirs
}

@test "logarithms of probabilities are the losses of training, for given tokens as for written ones" {
  trained
  infer <<<'{"prompt": "The words", "max_tokens": 20, "logprobs": true, "seed": 1}' >written.jsonl
  each '[116 if False else t["logprob"] for t in d["logprobs"]]' <written.jsonl >a
  python3 -c 'import json, sys; d = json.loads(sys.stdin.read()); print(json.dumps({"prompt": list(b"The words") + d["tokens"], "max_tokens": 0, "prompt_logprobs": True}))' <written.jsonl >given.jsonl
  infer given.jsonl | each '[t["logprob"] for t in d["prompt_logprobs"]][8:]' | cmp - a
  # The validation loss of a whole text is the mean.
  head -c 33 text.txt >some.txt
  python3 -c 'import json, sys; print(json.dumps({"prompt": list(open("some.txt", "rb").read()), "max_tokens": 0, "prompt_logprobs": True}))' |
    infer | each '-sum(t["logprob"] for t in d["prompt_logprobs"]) / 32' >ours
  ds-train cfg.json --resume run --eval --set data.validation=some.txt --set eval.batches=1 --json \
    --set train_batch_size=1 --set train_micro_batch_size_per_gpu=1 | whole 'd["val_loss"]' >theirs
  python3 -c 'import sys; a, b = (float(open(f).read()) for f in sys.argv[1:]); assert abs(a - b) < 2e-7 * abs(b), (a, b)' ours theirs
}

@test "texts end at stop strings and stop tokens, without them" {
  trained
  infer <<<'{"prompt": "The words", "max_tokens": 30, "seed": 5}' >free.jsonl
  local text tokens
  text=$(each 'd["text"][7:9]' <free.jsonl)
  infer <<<"{\"prompt\": \"The words\", \"max_tokens\": 30, \"seed\": 5, \"stop\": [\"never there\", $text]}" >stopped.jsonl
  assert_equal "$(each 'd["finish_reason"]' <stopped.jsonl)" '"stop"'
  python3 -c 'import json; f, s = (json.loads(open(n).read()) for n in ("free.jsonl", "stopped.jsonl")); assert s["text"] == f["text"][:f["text"].find(f["text"][7:9])], s'
  tokens=$(each 'd["tokens"][4]' <free.jsonl)
  infer <<<"{\"prompt\": \"The words\", \"max_tokens\": 30, \"seed\": 5, \"stop_token_ids\": [$tokens]}" >stopped.jsonl
  python3 -c 'import json; f, s = (json.loads(open(n).read()) for n in ("free.jsonl", "stopped.jsonl")); assert s["tokens"] == f["tokens"][:f["tokens"].index(f["tokens"][4])], s; assert s["finish_reason"] == "stop"'
  infer <<<"{\"prompt\": \"The words\", \"max_tokens\": 30, \"seed\": 5, \"stop_token_ids\": [$tokens], \"min_tokens\": 25}" |
    each 'len(d["tokens"]) >= 25' | grep -qx true
}

@test "bad lines have an error in their place, and the others run" {
  trained
  cat >in.jsonl <<'JSON'
{"id": 1, "prompt": "a", "max_tokens": 2}
nonsense
{"id": 3, "prompt": "a", "max_tokens": 2, "temperatur": 1}
{"id": 4, "prompt": ""}
{"id": 5, "prompt": "a", "max_tokens": 200}
{"id": 6, "prompt": "a", "response_format": {"type": "json_object"}}
{"id": 7, "messages": 3, "prompt": "a"}
{"id": 8, "prompt": "a", "top_p": 1.5}
{"id": 9, "prompt": [1, 256]}
{"id": 10, "prompt": "a", "prompt": "b"}
{"id": 11}
[1, 2]
{"id": 13, "prompt": "a", "n": 0}
{"id": 14, "prompt": "a", "logit_bias": {"1": 2}}
{"id": 15, "prompt": "a", "seed": -1}
{"id": 16, "prompt": "a", "stop": [""]}

{"id": 18, "prompt": "a", "max_tokens": 2}
JSON
  run -1 --separate-stderr infer in.jsonl
  assert_equal "${#lines[@]}" 17
  printf '%s\n' "${lines[@]}" >out.jsonl
  assert_equal "$(each 'd.get("line")' <out.jsonl | tr '\n' ' ')" "null 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 null "
  assert_equal "$(each '"text" in d' <out.jsonl | grep -c true)" 2
  [[ $stderr == *"in.jsonl:3: temperatur is unknown: did you mean temperature?"* ]]
  [[ $stderr == *"in.jsonl:5: 1 tokens of the prompt and 200 new ones exceed the context of 64"* ]]
  [[ $stderr == *"in.jsonl:6: response_format is not honoured"* ]]
  [[ $stderr == *"in.jsonl:10: has two members"* ]]
  [[ $stderr == *"in.jsonl:2: is not JSON"* ]]
  [[ $stderr == *"in.jsonl:8: top_p is 1.5: give a number from"* ]]
  python3 -c 'print("{\"a\":" * 100 + "1" + "}" * 100); print("[" * 100000)' >deep.jsonl
  run -1 infer deep.jsonl
  assert_output --partial "is nested more than 64 deep"
  : | infer >empty
  assert [ ! -s empty ]
  # Nothing to score is no reason to end the run, and requests do not stay in results.
  run -1 --separate-stderr infer <<<'{"prompt": [3], "max_tokens": 0, "prompt_logprobs": true}
{"prompt": [3], "max_tokens": 1, "prompt_logprobs": true}
{"prompt": [3, 4], "max_tokens": 1, "n": 2, "logprobs": true, "prompt_logprobs": true}
{"prompt": [3], "top_logprobs": 2}
{"prompt": [3], "logprobs": 2, "top_logprobs": 2}
{"prompt": [3], "n": 1000, "max_tokens": 60, "logprobs": 90}'
  printf '%s\n' "${lines[@]}" >out.jsonl
  assert_equal "$(each '"error" in d, d.get("prompt_logprobs"), "logprobs" in d' <out.jsonl | tr '\n' ' ')" \
    '[true, null, false] [false, [], false] [false, null, false] [true, null, false] [true, null, false] [true, null, false] '
  assert_equal "$(sed -n 3p out.jsonl | each '[len(c.get("prompt_logprobs", [])) for c in d["choices"]]')" "[1, 0]"
  # Bytes of tokens that are no text by themselves.
  infer <<<'{"prompt": "a", "max_tokens": 40, "seed": 2, "logprobs": 1}' |
    each 'all(t["bytes"] == [t["id"]] if t["id"] > 127 else t["token"] == chr(t["id"]) for t in d["logprobs"])' | grep -qx true
}

@test "members of a line come back as they stood there" {
  trained
  echo ' {"id": 12345678901234567890123, "f": 1.50e10, "s": "a\"}{,", "step": [1,{"need": 2}], "prompt": "a" , "text": 3, "max_tokens": 2} ' |
    infer >out.jsonl
  assert_regex "$(cat out.jsonl)" '^\{"schema":"ds-infer/[0-9]+","id": 12345678901234567890123,"f": 1.50e10,"s": "a\\"\}\{,","step": \[1,\{"need": 2\}\],"prompt": "a","max_tokens": 2,"text":"'
  each 'len(d["tokens"])' <out.jsonl | grep -qx 2
  run -1 --separate-stderr infer <<<'{"prompt": "a", "max_new_tokens": 1}'
  [[ $stderr == *"max_new_tokens is not honoured"* ]]
}

@test "OpenAI's batch format" {
  trained
  cat >in.jsonl <<'JSON'
{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "The", "max_tokens": 4, "temperature": 0, "n": 1}}
{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "The", "unknown": 4}}
JSON
  run -1 --separate-stderr infer in.jsonl
  printf '%s\n' "${lines[@]}" >out.jsonl
  assert_equal "$(each 'd["custom_id"], d["response"] is None, d["error"] is None' <out.jsonl | tr '\n' ' ')" '["a", false, true] ["b", true, false] '
  assert_equal "$(head -1 out.jsonl | each 'd["response"]["body"]["usage"]["completion_tokens"]')" 4
  assert_equal "$(tail -1 out.jsonl | each 'd["error"]["message"]')" '"unknown is unknown"'
}

@test "--resume goes on after a kill, to the same bytes" {
  trained
  python3 -c 'import json
for i in range(300): print(json.dumps({"id": i, "prompt": "The words " + str(i), "max_tokens": 30, "seed": i}))' >in.jsonl
  infer in.jsonl >whole.jsonl
  ds-infer run in.jsonl -o out.jsonl &
  local tool=$!
  until_true 60 test -s out.jsonl
  kill -9 $tool
  wait $tool || true
  assert [ -e out.jsonl.progress ]
  assert [ "$(wc -l <out.jsonl)" -lt 300 ]
  printf '{"id": 17, "torn' >>out.jsonl
  run -2 infer in.jsonl -o out.jsonl
  assert_output --partial "is not empty: go on with --resume"
  run -3 infer in.jsonl -o out.jsonl --resume --seed 4
  assert_output --partial "another model, other options"
  sed 1s/words/swords/ in.jsonl >other.jsonl
  run -3 infer other.jsonl -o out.jsonl --resume
  assert_output --partial "line 1 of the input is not the one"
  # A signal stops it after a pass, with its own status.
  local status=0
  ds-infer run in.jsonl -o out.jsonl --resume --batch 1 2>err.txt &
  tool=$!
  until_true 60 grep -q "are complete" err.txt
  kill -TERM $tool
  wait $tool || status=$?
  assert_equal $status 75
  grep -q "go on with --resume" err.txt
  run -3 infer in.jsonl -o out.jsonl --resume --dtype bf16
  # Sizes, threads and the way to the model decide no result.
  (cd run && ds-infer . ../in.jsonl -o ../out.jsonl --resume --batch 5 --set threads=1)
  cmp out.jsonl whole.jsonl
  assert [ ! -e out.jsonl.progress ]
  run -2 infer in.jsonl -o out.jsonl --resume
  assert_output --partial "out.jsonl.progress is missing"
  # Lines that were errors count in the status of the run that goes on; an input that ends early is no success.
  printf '{"prompt": ""}\n{"prompt": "a", "max_tokens": 2}\n{"prompt": "b", "max_tokens": 2}\n' >some.jsonl
  (head -2 some.jsonl; sleep 20) | ds-infer run - -o some.out 2>/dev/null &
  until_true 60 grep -q max_tokens some.out
  kill -9 $!
  wait $! || true
  cp some.out torn.out
  cp some.out.progress torn.out.progress
  run -3 ds-infer run <(head -1 some.jsonl) -o torn.out --resume
  assert_output --partial "answers 1 lines that it did not have"
  assert [ -e torn.out.progress ]
  run -1 infer some.jsonl -o some.out --resume
  assert_equal "$(wc -l <some.out)" 3
  run -2 infer in.jsonl --resume
  assert_output --partial -- "--resume needs --out"
}

@test "answers that wait for a slow line are bounded" {
  trained
  # The first line is slow; the others are short and have 100 kB each.
  python3 -c 'import json
print(json.dumps({"prompt": "a", "max_tokens": 60, "n": 900, "seed": 1}))
for i in range(1200): print(json.dumps({"prompt": "b", "max_tokens": 1, "blob": "x" * 100000}))' >in.jsonl
  python3 -c 'import resource, subprocess
subprocess.run(["ds-infer", "run", "in.jsonl", "--batch", "2"], stdout=open("out.jsonl", "w"), check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)' >kib
  assert_equal "$(wc -l <out.jsonl)" 1201
  assert [ "$(cat kib)" -lt 200000 ]
}

@test "lines come from a pipe as they are written" {
  trained
  mkfifo pipe answers
  timeout 100 ds-infer run pipe >answers 3>&- &
  exec 6<answers 5>pipe
  echo '{"id": 1, "prompt": "a", "max_tokens": 3}' >&5
  read -r -t 60 -u 6 line
  assert_equal "$(each 'd["id"]' <<<"$line")" 1
  echo '{"id": 2, "prompt": "a", "max_tokens": 3}' >&5
  read -r -t 60 -u 6 line
  assert_equal "$(each 'd["id"]' <<<"$line")" 2
  exec 5>&-
  wait $!
  # Several ranks wait as long as the pipe does.
  (lines | head -1; sleep 5; lines | sed -n 2p) |
    ds-launch -n 2 ds-infer run --set pipeline.stages=2 --set communication.timeout_s=3 >slow.jsonl
  cmp slow.jsonl <(lines | head -2 | infer)
}

@test "score: continuations, whole texts in windows" {
  trained
  run -0 --separate-stderr ds-infer score run <<<'{"id": 1, "context": "The words ", "continuations": ["of", " and more"]}'
  assert_equal "$(each '[round(s["logprob"] - sum(t["logprob"] for t in s["tokens"]), 6) for s in d["scores"]], [len(s["tokens"]) for s in d["scores"]]' <<<"${lines[0]}")" '[[0.0, 0.0], [3, 10]]'
  # The continuation that is written is the most likely one, and has the same probabilities.
  infer <<<'{"prompt": "The words", "max_tokens": 9, "temperature": 0, "logprobs": true}' >written.jsonl
  python3 -c 'import json, sys; d = json.loads(sys.stdin.read()); print(json.dumps({"context": d["prompt"], "continuations": [d["text"]]}))' <written.jsonl >in.jsonl
  ds-infer score run in.jsonl >scored.jsonl
  assert_equal "$(each 'd["scores"][0]["is_greedy"]' <scored.jsonl)" true
  cmp <(each '[t["logprob"] for t in d["scores"][0]["tokens"]]' <scored.jsonl) <(each '[t["logprob"] for t in d["logprobs"]]' <written.jsonl)
  # A blank of any kind at the end of a context belongs to the continuation.
  ds-infer score run <<<'{"context": "a\u3000", "continuations": ["b"]}' | each 'len(d["scores"][0]["tokens"])' | grep -qx 4
  run -1 --separate-stderr ds-infer score run <<<'{"context": "", "continuations": ["a"]}'
  [[ $stderr == *"nothing is before the text"* ]]
  python3 -c 'print("{\"context\": \"" + "x" * 80 + "\", \"continuations\": [\"abc\"]}")' >long.jsonl
  run -1 --separate-stderr ds-infer score run long.jsonl
  [[ $stderr == *"82 tokens exceed the context of 64: --cut"* ]]
  ds-infer score run --cut long.jsonl | each 'len(d["scores"][0]["tokens"])' | grep -qx 3
}

@test "bench prints rates" {
  trained
  run -0 ds-infer bench run -p 16,32 -n 8 --parallel 1,2 -r 2
  assert_output --regexp '\| pp16 +\| +[0-9.]+ ± [0-9.]+ \|'
  assert_output --regexp '\| tg8 x2 +\|'
  run -0 ds-infer bench run -p 16 -n 0 -r 1 --json
  assert_output --partial '"test":"pp16"'
  run -2 ds-infer bench run -p 0 -n 0
  run -0 ds-infer bench run -r 1 # no more than the model has positions for
  assert_output --partial "pp63"
  run -2 ds-infer bench run -o x
  assert_output --partial -- "--out has no effect with bench"
  run -2 ds-infer score run --seed 3
  assert_output --partial -- "--seed has no effect with score"
  run -2 ds-infer --dtype bf16 score run
  assert_output --partial -- "--dtype has no effect with score"
}

@test "what cannot be run is said before anything is read" {
  trained
  run -2 ds-infer nowhere
  assert_output --partial "nowhere: No such file"
  run -2 ds-infer
  assert_output --partial "MODEL"
  mkdir empty
  run -2 ds-infer empty
  assert_output --partial "neither a run or a step"
  run -2 infer --context 100
  assert_output --partial "exceeds the 64 positions"
  run -2 infer --context 60 --cache 10
  run -2 infer nothing.jsonl
  assert_output --partial "nothing.jsonl: No such file"
  run -2 infer run
  assert_output --partial "run: is a directory"
  run -2 infer in.jsonl --output run/metrics.jsonl
  assert_output --partial "run/metrics.jsonl: is a name that runs use themselves"
  ds-ckpt-merge run -o alone.safetensors --quiet
  run -2 ds-infer alone.safetensors
  assert_output --partial "without a config.json beside them"
  ds-ckpt-merge run -o hf --format hf --quiet
  cmp <(lines | ds-infer hf --tokenizer bytes) <(lines | infer)
  run -0 infer --check
  assert_output --partial "activations"
  run -2 infer --set steps=3
  assert_output --partial "--set steps: this key has no effect on inference"
  run -2 infer --set model.n_layer=1
  assert_output --partial "the model is MODEL's"
  run -2 infer --dtype fp32 --set bf16.enabled=true
  assert_output --partial "--dtype says it already"
  run -2 infer --set tensor_parallel.tp_sise=2
  assert_output --partial "tp_size"
  refute_output --partial "has mistakes"
}

@test "conversations by the tokenizer's template; GGUF files as their directories" {
  local golden=$DS_SOURCE/tests/golden
  cp -r "$golden/gguf/text-llama3" llama3
  cp "$golden/tokenizers/llama3/tokenizer.json" llama3
  echo '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}' \
    >llama3/tokenizer_config.json
  cp "$golden/gguf/text-llama3.gguf" llama3.gguf
  cat >in.jsonl <<'JSON'
{"prompt": "The licence", "max_tokens": 20, "temperature": 0}
{"prompt": "The licence", "max_tokens": 20, "seed": 3, "logprobs": 1}
JSON
  ds-infer llama3 --dtype bf16 in.jsonl >want.jsonl
  ds-infer llama3.gguf in.jsonl | cmp - want.jsonl
  # The template of the file writes the first content alone, and none adds the token that begins a text.
  echo '{"messages": [{"role": "user", "content": "The licence"}], "max_tokens": 8, "temperature": 0}' >chat.jsonl
  ds-infer llama3.gguf chat.jsonl | each 'd["tokens"]' >got
  printf '%s' '{% for m in messages %}<|begin_of_text|>[{{ m.role }}] {{ m.content | trim }}{% endfor %}{% if add_generation_prompt %} ->{% endif %}' >llama3/chat_template.jinja
  ds-infer llama3 chat.jsonl --dtype bf16 | each 'd["tokens"]' >ours
  ds-infer llama3 --dtype bf16 <<<'{"prompt": "[user] The licence ->", "max_tokens": 8, "temperature": 0}' | each 'd["tokens"]' | cmp - ours
  run -1 cmp -s got ours
  echo '{"custom_id": "x", "body": {"messages": [{"role": "user", "content": "The licence"}], "max_tokens": 8, "temperature": 0}}' |
    ds-infer llama3 --dtype bf16 | each 'd["response"]["body"]["choices"][0]["message"]["role"]' | grep -qx '"assistant"'
  printf '%s' '{{ raise_exception("no user") }}' >llama3/chat_template.jinja
  run -1 --separate-stderr ds-infer llama3 chat.jsonl
  [[ $stderr == *"no user"* ]]
  rm llama3/chat_template.jinja
  run -1 --separate-stderr ds-infer llama3 chat.jsonl
  [[ $stderr == *"the tokenizer has no chat template"* ]]
  printf '%s' '{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}' >llama3/chat_template.jinja
  ds-infer llama3 <<<'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}], "max_tokens": 2}' | each '"text" in d' | grep -qx true
  run -1 --separate-stderr ds-infer llama3 <<<'{"messages": [{"role": "user", "content": "a"}], "documents": [{"title": "f"}], "max_tokens": 2}'
  [[ $stderr == *"the chat template does not use documents"* ]]
  run -1 --separate-stderr ds-infer llama3 <<<'{"prompt": "a", "tools": []}'
  [[ $stderr == *"tools needs messages"* ]]
}
