#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models in GGUF files (golden/make_gguf.py) as a run, a merge and a shard take them: the same text, losses and files as from
# the Hugging Face directories of the same weights.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  golden=$DS_SOURCE/tests/golden
  for model in llama3 qwen2; do
    cp -r "$golden/gguf/text-$model" $model
    cp "$golden/tokenizers/$model/tokenizer.json" $model
    cp "$golden/gguf/text-$model.gguf" $model.gguf
  done
  # As the published one says: a text begins with this token.
  echo '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}' \
    >llama3/tokenizer_config.json
}

# with MODEL ARGUMENT...: a run of cfg.json with the published model.
with() {
  local model=$1
  shift
  ds-train cfg.json --set "model={\"path\": \"$model\"}" "$@"
}

@test "text and losses of a GGUF file are those of its directory" {
  for model in llama3 qwen2; do
    for dtype in fp32 bf16; do
      local use=(--set bf16.enabled=$([[ $dtype == bf16 ]] && echo true || echo false))
      want=$(with $model "${use[@]}" --generate "The licence" --temperature 0 --max-tokens 24 --json 2>/dev/null)
      [[ $want == *'"tokens"'* ]] || fail "$want"
      run --separate-stderr with $model.gguf "${use[@]}" --generate "The licence" --temperature 0 --max-tokens 24 --json
      assert_success
      assert_output "$want"
      assert_equal "$(with $model.gguf "${use[@]}" --eval 2>/dev/null)" "$(with $model "${use[@]}" --eval 2>/dev/null)"
    done
  done
}

@test "a run that starts from a GGUF file has the losses of one that starts from the directory" {
  with llama3.gguf --out a --quiet --steps 3
  with llama3 --out b --quiet --steps 3
  assert_equal "$(losses a)" "$(losses b)"
  run -0 ds-train cfg.json --resume a --set 'model={"path": "llama3"}' --generate The --max-tokens 2
  cp llama3.gguf blob # a name without the suffix
  with blob --out c --quiet --steps 1
  assert_equal "$(losses c)" "$(losses b | head -1)"
}

@test "a merge makes a Hugging Face directory of a GGUF file, with its tokenizer" {
  for model in llama3 qwen2; do
    ds-ckpt-merge $model.gguf -o out-$model --format hf --dtype fp16 --quiet
    for file in tokenizer.json tokenizer_config.json generation_config.json config.json; do
      assert [ -s out-$model/$file ]
    done
    cmp <(ds-ckpt-merge out-$model -o - --dtype fp32 --quiet) <(ds-ckpt-merge $model -o - --dtype fp32 --quiet)
    assert_equal "$(with out-$model --generate "The licence" --temperature 0 --max-tokens 24 2>/dev/null)" \
      "$(with $model --generate "The licence" --temperature 0 --max-tokens 24 2>/dev/null)"
    ds-shard $model.gguf -o step-$model --dp 2 --quiet
    ds-shard $model -o other-$model --dp 2 --quiet
    cmp <(ds-ckpt-merge step-$model -o - --dtype fp32 --quiet) <(ds-ckpt-merge other-$model -o - --dtype fp32 --quiet)
  done
  ds-ckpt-merge "$golden/gguf/mixtral.gguf" -o mixtral --format hf 2>err.txt
  grep -q "contains no tokenizer" err.txt
}

@test "a GGUF file that cannot be used is refused with the reason" {
  mkdir inside
  cp llama3.gguf inside/model.gguf
  cp llama3/config.json inside
  run --separate-stderr with inside --eval
  assert_failure
  [[ $stderr == *"name that, inside/model.gguf, in model.path"* ]] || fail "$stderr"
  head -c 30000 llama3.gguf >short.gguf
  run --separate-stderr with short.gguf --eval
  assert_failure
  [[ $stderr == *"short.gguf"*"truncated"* ]] || fail "$stderr"
  sed 's/llama-bpe/llama-xyz/' llama3.gguf >other.gguf
  run --separate-stderr with other.gguf --eval
  assert_failure
  [[ $stderr == *"'tokenizer.ggml.pre' is \"llama-xyz\""*"name another with data.tokenizer"* ]] || fail "$stderr"
  assert_equal "$(with other.gguf --eval --set data.tokenizer=llama3 2>/dev/null)" "$(with llama3 --eval 2>/dev/null)"
}
