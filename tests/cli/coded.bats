#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models that are stored as codes (golden/make_coded.py) as every tool takes them: the same bytes as from the same model with
# matrices in fp32.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  for method in gptq awq int4 int8; do
    for model in $method $method-decoded; do
      cp -r "$DS_SOURCE/tests/golden/coded/model-$model" $model
      cp "$DS_SOURCE/tests/golden/tokenizers/llama3/tokenizer.json" $model
    done
  done
}

# The tensors of a safetensors file in the order of their names, which is not that of a file whose types differ.
tensors() {
  python3 - "$1" <<'PY'
import hashlib, json, sys
raw = open(sys.argv[1], "rb").read()
size = 8 + int.from_bytes(raw[:8], "little")
for name, t in sorted(json.loads(raw[8:size]).items()):
    if name != "__metadata__":
        begin, end = t["data_offsets"]
        print(name, t["dtype"], t["shape"], hashlib.sha256(raw[size + begin:size + end]).hexdigest())
PY
}

@test "texts of a model stored as codes are those of the decoded model" {
  cat >in.jsonl <<'JSON'
{"prompt": "The licence", "max_tokens": 12, "temperature": 0}
{"prompt": "It was", "max_tokens": 8, "seed": 5, "logprobs": 1, "prompt_logprobs": true}
JSON
  for method in gptq awq int4 int8; do
    for dtype in fp16 fp32; do
      local use=(--set fp16.enabled=$([[ $dtype == fp16 ]] && echo true || echo false))
      ds-infer $method in.jsonl "${use[@]}" >codes.jsonl
      ds-infer $method-decoded in.jsonl "${use[@]}" >decoded.jsonl
      assert_equal "$(grep -c '"text"' codes.jsonl)" 2
      if [[ $method == int8 ]]; then # whose rows of activations are coded, too, unless its matrices are decoded
        run ! cmp -s codes.jsonl decoded.jsonl
        while IFS= read -r line; do ds-infer $method "${use[@]}" <<<"$line"; done <in.jsonl | cmp - codes.jsonl
        ds-infer $method in.jsonl "${use[@]}" --activations work | cmp - decoded.jsonl
        ds-infer $method in.jsonl "${use[@]}" --weights work >codes.jsonl
      fi
      cmp codes.jsonl decoded.jsonl
      ds-infer $method in.jsonl "${use[@]}" --activations int8 >integers.jsonl
      run ! cmp -s integers.jsonl decoded.jsonl
      while IFS= read -r line; do ds-infer $method "${use[@]}" --activations int8 <<<"$line"; done <in.jsonl |
        cmp - integers.jsonl
    done
  done
}

# Products of codes give each row the bits that it has alone; so do those of decoded matrices in passes of one token.
@test "texts of a model stored as codes are those of the decoded model, also on a GPU: on the simulator" {
  local sim=$DS_BIN/../lib/libds_cuda_sim.so
  [[ -e $sim ]] || skip "this build has no CUDA"
  export DS_CUDA_PLUGIN=$sim
  cat >in.jsonl <<'JSON'
{"prompt": "The licence", "max_tokens": 12, "temperature": 0}
{"prompt": "It was", "max_tokens": 8, "seed": 5, "logprobs": 1}
JSON
  params() { ds-infer --check "$@" | awk '$1 == "params" {print $2 $3}'; }
  for fp16 in true false; do
    local use=(--set device=cuda --set "fp16.enabled=$fp16" --batch 1 --chunk 1)
    for method in gptq awq int4 int8; do
      ds-infer $method in.jsonl "${use[@]}" >codes.jsonl
      ds-infer $method-decoded in.jsonl "${use[@]}" >decoded.jsonl
      assert_equal "$(grep -c '"text"' codes.jsonl)" 2
      assert [ "$(params $method in.jsonl "${use[@]}")" != "$(params $method-decoded in.jsonl "${use[@]}")" ]
      if [[ $method == int8 ]]; then # whose rows of activations are coded, too, unless its matrices are decoded
        run ! cmp -s codes.jsonl decoded.jsonl
        ds-infer $method in.jsonl "${use[@]}" --weights work >codes.jsonl
      fi
      cmp codes.jsonl decoded.jsonl
    done
    for form in int8 int4 w8a8; do
      ds-infer gptq-decoded in.jsonl "${use[@]}" --weights $form >codes.jsonl
      assert_equal "$(grep -c '"text"' codes.jsonl)" 2
      run ! cmp -s codes.jsonl decoded.jsonl
    done
  done
}

@test "runs, merges and shards of a model stored as codes are those of the decoded model" {
  for method in gptq awq int4 int8; do
    for model in $method $method-decoded; do
      ds-train cfg.json --set "model={\"path\": \"$model\"}" --out run-$model --quiet --steps 2
      ds-ckpt-merge $model -o merged-$model --format hf --dtype fp32 --quiet
      ds-shard $model -o step-$model --dp 2 --quiet
      ds-ckpt-merge step-$model -o step-$model.safetensors --dtype fp32 --quiet
    done
    assert_equal "$(losses run-$method)" "$(losses run-$method-decoded)"
    cmp <(tensors merged-$method/model.safetensors) <(tensors merged-$method-decoded/model.safetensors)
    cmp merged-$method/config.json merged-$method-decoded/config.json
    run ! grep quantization_config merged-$method/config.json
    cmp <(tensors step-$method.safetensors) <(tensors step-$method-decoded.safetensors)
  done
}

@test "a model whose codes cannot be read is refused with file, key and value" {
  refused_model() { # text, status
    run --separate-stderr ds-infer "$1" <<<'{"prompt": "The"}'
    assert_equal "$status" "$2"
    [[ $stderr == *"$3"* ]] || fail "$stderr"
  }
  sed -i 's/"bits": 4/"bits": 3/' gptq/config.json
  refused_model gptq 4 'gptq/config.json:26:2: quantization_config: "bits" 3 of weights in "gptq" (there is 4, 8) is not supported'
  run --separate-stderr ds-ckpt-merge gptq -o x --format hf
  assert_equal "$status" 4
  [[ $stderr == *'gptq/config.json: quantization_config: "bits" 3'* ]] || fail "$stderr"
  sed -i 's/"dynamic": true/"dynamic": false/' int8/config.json
  refused_model int8 4 '"config_groups.group_0.input_activations.dynamic" false'
  sed -i 's/"group_size": 32/"group_size": 16/' awq/config.json
  refused_model awq 3 "down_proj.scales' is fp16 [2,32], and 'model.layers.0.mlp.down_proj.qweight' is int32 [64,4]: its shape is [4,32], by group_size 16"
  sed -i 's/"quant_method": "compressed-tensors"/"quant_method": "hqq"/' int4/config.json
  refused_model int4 4 'quantization_config: "quant_method" "hqq" (there is "fp8", "gptq", "awq", "compressed-tensors")'
  cp gptq/model.safetensors alone.safetensors
  run --separate-stderr ds-train cfg.json --set 'model={"path": "gptq-decoded/config.json"}' --weights alone.safetensors --steps 1
  assert_equal "$status" 3
  [[ $stderr == *"a part of a matrix of codes, which are read if the config.json beside the file"* ]] || fail "$stderr"
}
