#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-train on text with a tokenizer: training, generation, resuming, refusals.

bats_require_minimum_version 1.5.0

load tiny

golden() { echo "$DS_SOURCE/tests/golden/tokenizers/$1"; }

setup() {
  tiny_setup
  sed -i 's/"vocab_size": 256/"vocab_size": 1600/; s/"steps": 12/"steps": 2/' cfg.json
}

@test "text is trained on with each kind of tokenizer, and written" {
  for kind in gpt2 llama2 llama2-sp bert-uncased gpt2-files; do
    run -0 ds-train cfg.json --out "run-$kind" --set data.tokenizer="$(golden $kind)"
    assert_output --partial "step 2  loss"
    run -0 ds-train cfg.json --resume "run-$kind" --set data.tokenizer="$(golden $kind)" --generate "The licence" \
      --max-tokens 20 --json
    # Whole characters: the document is UTF-8, and the text follows the prompt.
    python3 -c 'import json, sys
d = json.load(sys.stdin)
assert len(d["tokens"]) <= 20 and d["tokens"] and max(d["tokens"]) < 1600, d' <<<"$output"
  done
}

@test "the ids of a run do not depend on ranks or threads" {
  for i in $(seq 60); do cat text.txt; done >long.txt # more than one piece to encode
  set=(--set data.tokenizer="$(golden qwen2)" --set data.train=long.txt)
  ds-train cfg.json --out one --quiet "${set[@]}" --set threads=1
  ds-launch -n 2 ds-train cfg.json --out two --quiet "${set[@]}" --set threads=3
  diff <(losses one) <(losses two)
}

@test "--tokenize says each warning of a tokenizer once" {
  mkdir tokenizer
  cp "$(golden gpt2)/tokenizer.json" tokenizer
  echo '{"tokenizer_class": "Qwen2Tokenizer"}' >tokenizer/tokenizer_config.json
  run --separate-stderr -0 ds-train cfg.json --check --set data.tokenizer=tokenizer --tokenize "a b"
  [ "$(grep -c 'transformers 5 prepares a text' <<<"$stderr")" = 1 ] || fail "$stderr"
}

@test "--tokenize shows the tokens before an error that does not concern them" {
  mkdir tokenizer
  cp "$(golden gpt2)/tokenizer.json" tokenizer
  echo '{"eos_token": "<far>"}' >tokenizer/tokenizer_config.json
  shows() {
    run --separate-stderr "-$1" ds-train cfg.json --check --set data.tokenizer=tokenizer --tokenize "a b" "${@:3}"
    [[ $output == *"eos_token  tokenizer_config.json"* && $stderr == *"$2"* ]] || fail "$output $stderr"
  }
  id=$(python3 -c 'import json; print(1 + json.load(open("tokenizer/tokenizer.json"))["added_tokens"][-1]["id"])')
  shows 4 "tokenizer/tokenizer_config.json: eos_token: $id is no token of the model, whose vocabulary has $id" \
    --set model.vocab_size="$id"
  shows 2 "data.train: no file 'nowhere'" --set data.train=nowhere
  echo '{"other": 3}' >bad.jsonl
  shows 3 "bad.jsonl:1: the object has no member" --set data.train=bad.jsonl
}

@test "a published model's tokenizer is used, and printed; bytes can be asked for" {
  mkdir model
  cat >model/config.json <<'JSON'
{"model_type": "gpt2", "vocab_size": 1600, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
JSON
  python3 - <<'PY'
import json
c = json.load(open("cfg.json"))
c["model"] = {"path": "model"}
json.dump(c, open("cfg.json", "w"))
PY
  run -0 ds-train cfg.json --check
  assert_output --partial '"tokenizer": "bytes"'
  cp "$(golden gpt2)/tokenizer.json" model
  run -0 ds-train cfg.json --check
  assert_output --partial '"tokenizer": "model"'
  run -0 ds-train cfg.json --check --set data.tokenizer=auto --set model.path=model/config.json
  assert_output --partial '"tokenizer": "model"'
  run -0 ds-train cfg.json --check --set data.tokenizer=bytes
  assert_output --partial '"tokenizer": "bytes"'
}

@test "another tokenizer than the run's is a mismatch that names both" {
  ds-train cfg.json --out run --quiet --set data.tokenizer="$(golden gpt2)"
  run -3 ds-train cfg.json --out run --resume latest --steps 3 --set data.tokenizer="$(golden qwen2)"
  assert_output --regexp "data.tokenizer is BPE .*, and the run was started with BPE .*, of which added_tokens and model"
  run -3 ds-train cfg.json --out run --resume latest --steps 3
  assert_output --partial "data.tokenizer is bytes"
  run -0 ds-train cfg.json --out run --resume latest --steps 3 --set data.tokenizer="$(golden gpt2)/tokenizer.json"
}

@test "a tokenizer that was saved again, or whose padding changed, is that of the run" {
  cp -r "$(golden gpt2)" tok
  ds-train cfg.json --out run --quiet --set data.tokenizer=tok
  /usr/bin/python3 -c 'import json
d = json.load(open("tok/tokenizer.json"))
d["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
json.dump(dict(reversed(d.items())), open("tok/tokenizer.json", "w"), indent=3)'
  echo '{"pad_token": "<|endoftext|>", "add_bos_token": true, "bos_token": "<|endoftext|>"}' >tok/tokenizer_config.json
  run -0 ds-train cfg.json --out run --resume latest --steps 3 --set data.tokenizer=tok
  refute_output --partial "data.tokenizer is"
  echo '{"additional_special_tokens": ["the"]}' >tok/special_tokens_map.json
  run -3 ds-train cfg.json --out run --resume latest --steps 4 --set data.tokenizer=tok
  assert_output --partial "of which added_tokens differs, by this file or those beside it"
}

@test "an end that is no token of the model is refused where text is written, by its file" {
  cp -r "$(golden gpt2)" tok
  echo '{"eos_token_id": [3, 99999]}' >tok/generation_config.json
  run -0 ds-train cfg.json --out run --quiet --set data.tokenizer=tok
  run -4 ds-train cfg.json --resume run --generate word --max-tokens 2 --set data.tokenizer=tok
  assert_output --partial "tok/generation_config.json: eos_token_id: 99999 is no token of the model"
  run -4 ds-train cfg.json --check --tokenize word --set data.tokenizer=tok
  assert_output --partial "tok/generation_config.json: eos_token_id: 99999 is no token of the model"
}

@test "ids beyond the model's vocabulary are found before the first step" {
  run -3 ds-train cfg.json --set model.vocab_size=600 --set data.tokenizer="$(golden gpt2)"
  assert_output --regexp "data file 'text.txt': its token [0-9]+ has the id [0-9]+ by data.tokenizer"
  run -3 ds-train cfg.json --check --set model.vocab_size=600 --set data.tokenizer="$(golden gpt2)"
  assert_output --partial "vocabulary of 600"
}

@test "a tokenizer that is missing, broken or of another kind" {
  run -2 ds-train cfg.json --out run --set data.tokenizer=nowhere
  assert_output --partial "tokenizer 'nowhere': no such file or directory"
  mkdir empty
  run -2 ds-train cfg.json --out run --set data.tokenizer=empty
  assert_output --partial "has no tokenizer.json"
  run -2 ds-train cfg.json --out run --set 'data.tokenizer=""'
  mkdir nmt broken
  sed 's/"normalizer":null/"normalizer":{"type":"Nmt"}/' \
    "$(golden gpt2)/tokenizer.json" >nmt/tokenizer.json
  run -4 ds-train cfg.json --out run --set data.tokenizer=nmt
  assert_output --partial "nmt/tokenizer.json: normalizer: normalizer 'Nmt' is not supported"
  head -c 3000 "$(golden gpt2)/tokenizer.json" >broken/tokenizer.json
  run -3 ds-train cfg.json --out run --set data.tokenizer=broken
  assert_output --partial "broken/tokenizer.json"
  [[ ! -e run ]]
  run -1 env TMPDIR=/nowhere ds-train cfg.json --out run --set data.tokenizer="$(golden gpt2)"
  assert_output --partial "TMPDIR"
}

@test "a merge finds the run's own tokenizer from any directory, or says that it does not" {
  cp -r "$(golden gpt2)" tok
  ds-train cfg.json --out run --quiet --set data.tokenizer=tok
  mkdir -p sub/tok && cp "$(golden qwen2)/tokenizer.json" sub/tok/
  cd sub
  ds-ckpt-merge ../run -o hf --format hf --quiet
  cmp hf/tokenizer.json ../tok/tokenizer.json
  # Other text in the same place is another tokenizer; files that went away are none.
  cp tok/tokenizer.json ../tok/tokenizer.json
  run -0 ds-ckpt-merge ../run -o other --format hf
  assert_output --partial "tok does not exist, or is not the tokenizer of the run"
  assert [ ! -e other/tokenizer.json ]
  ds-ckpt-merge ../run -o named --format hf --tokenizer tok --quiet
  cmp named/tokenizer.json tok/tokenizer.json
}

@test "text is written with the tokenizer of the run" {
  ds-train cfg.json --out run --quiet --set data.tokenizer="$(golden gpt2)"
  run -3 ds-train cfg.json --resume run --generate word --max-tokens 2
  assert_output --regexp "data.tokenizer is bytes, but run/step-[0-9]+ was trained with BPE"
  run -3 ds-train cfg.json --resume run --generate word --max-tokens 2 --set data.tokenizer="$(golden qwen2)"
  run -0 ds-train cfg.json --resume run --generate word --max-tokens 2 --set data.tokenizer="$(golden gpt2)"
}

@test "files of tokens do not hide a tokenizer that is not there" {
  head -c 4000 /dev/zero >zero.bin
  run -2 ds-train cfg.json --check --set data.train=zero.bin --set data.tokenizer=nowhere
  assert_output --partial "'nowhere': no such file or directory"
}

@test "--check --tokenize shows ids, pieces, and the file that names each special token" {
  mkdir tok && cp "$(golden llama2-sp)/tokenizer.model" tok
  cat >tok/tokenizer_config.json <<'JSON'
{"tokenizer_class": "LlamaTokenizer", "legacy": false, "eos_token": "<|im_end|>"}
JSON
  echo '{"eos_token_id": [2, 7]}' >tok/generation_config.json
  run -0 ds-train cfg.json --check --set data.tokenizer=tok --tokenize 'The</s><|im_end|>'
  assert_output --partial "tokenizer tok: SentencePiece of 1000 ids, tokenizer.model xxh3 "
  assert_output --regexp "1000  <\|im_end\|> +eos_token +tokenizer_config.json"
  assert_output --regexp " 2  </s> +tokenizer.model"
  assert_output --regexp " 1  <s> +bos_token +class LlamaTokenizer"
  assert_output --partial "a completion ends with 2 or 7 or 1000"
  ds-train cfg.json --check --json --set data.tokenizer=tok --tokenize 'The</s><|im_end|>' |
    /usr/bin/python3 -c 'import json, sys
d = json.load(sys.stdin)["tokenized"]
assert [t["id"] for t in d["tokens"]][-2:] == [2, 1000] and d["tokens"][-2]["piece"] == "</s>", d
assert d["ends"] == [2, 7, 1000] and d["adds_bos"], d'
  run -0 ds-train cfg.json --check --json --tokenize 'ab'
  assert_output --partial '"piece": "a"'
  run -2 ds-train cfg.json --tokenize x
  assert_output --partial "--check"
  run -3 ds-train cfg.json --check --set data.tokenizer=tok/generation_config.json --tokenize x
  assert_output --partial "generation_config.json"
}

@test "a text that spells out </s> is warned of where SentencePiece cuts it" {
  for i in $(seq 40); do echo "one</s>two and many other words, as many as a sample of the run needs, $i"; done >spelt.txt
  set=(--set data.tokenizer="$(golden llama2-sp)" --set data.train=spelt.txt)
  run -0 ds-train cfg.json --check "${set[@]}"
  assert_output --regexp "warning: .*tokenizer.model: texts spell out '</s>', which SentencePiece cuts into pieces"
  mkdir tok && cp "$(golden llama2-sp)/tokenizer.model" tok
  echo '{"tokenizer_class": "LlamaTokenizer", "legacy": false}' >tok/tokenizer_config.json
  run -0 ds-train cfg.json --check "${set[@]}" --set data.tokenizer=tok
  refute_output --partial "spell out"
}

@test "versions of transformers that differ are a warning" {
  mkdir tok && cp "$(golden llama2-sp)/tokenizer.model" tok
  echo '{"tokenizer_class": "LlamaTokenizer", "legacy": true}' >tok/tokenizer_config.json
  run -0 ds-train cfg.json --check --set data.tokenizer=tok --set data.validation=text.txt --set data.split=0
  assert_output --partial "warning: tokenizer 'tok': without \"legacy\": false in tokenizer_config.json, transformers 4"
  assert_equal "$(grep -c "tokenizer 'tok'" <<<"$output")" 1
}

@test "every end token of generation_config.json and config.json ends a completion" {
  mkdir model && cp "$(golden gpt2)/tokenizer.json" model
  cat >model/config.json <<'JSON'
{"model_type": "gpt2", "vocab_size": 1600, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
JSON
  /usr/bin/python3 - <<'PY'
import json
c = json.load(open("cfg.json"))
c["model"] = {"path": "model"}
json.dump(c, open("cfg.json", "w"))
PY
  ds-train cfg.json --out run --quiet
  tokens() { ds-train cfg.json --resume run --generate "The" --temperature 0 --max-tokens 6 --json 2>/dev/null |
    /usr/bin/python3 -c 'import json, sys; print(*json.load(sys.stdin)["tokens"])'; }
  read -r -a all <<<"$(tokens)"
  assert_equal "${#all[@]}" 6
  echo "{\"eos_token_id\": [1599, ${all[0]}]}" >model/generation_config.json
  assert_equal "$(tokens)" ""
  echo '{"eos_token_id": 1599}' >model/generation_config.json
  assert_equal "$(tokens)" "${all[*]}"
  sed -i "s/\"n_head\": 2/\"n_head\": 2, \"eos_token_id\": ${all[0]}/" model/config.json
  assert_equal "$(tokens)" ""
}

@test "do_lower_case beside a tokenizer.json, and a class that only config.json names" {
  mkdir tok && cp "$(golden bert-uncased)/tokenizer.json" tok
  ids() { ds-train cfg.json --check --json --set data.tokenizer=tok --tokenize 'The THE the' |
    /usr/bin/python3 -c 'import json, sys; print(len({t["id"] for t in json.load(sys.stdin)["tokenized"]["tokens"]}))'; }
  assert_equal "$(ids)" 1
  echo '{"tokenizer_class": "BertTokenizer", "do_lower_case": false}' >tok/tokenizer_config.json
  run ids
  refute_output 1
  echo '{"do_lower_case": false}' >tok/tokenizer_config.json
  run -0 ds-train cfg.json --check --set data.tokenizer=tok
  assert_output --partial "warning: tokenizer 'tok': do_lower_case is false in tokenizer_config.json, and not in tokenizer.json"
  echo '{"model_type": "bert"}' >tok/config.json
  run ids
  refute_output 1
}
