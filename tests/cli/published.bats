#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models as other programs leave them: the choice among several files, names with the prefixes of wrappers, adapters,
# and the output directory of Hugging Face's Trainer.

bats_require_minimum_version 1.5.0

load tiny

setup_file() {
  BATS_TEST_TMPDIR=$BATS_FILE_TMPDIR tiny_setup
  ds-train cfg.json --out run --quiet --steps 2 2>/dev/null
  ds-ckpt-merge run -o model --format hf --quiet
}

setup() {
  tiny_setup
  cp -r "$BATS_FILE_TMPDIR/model" .
}

# renamed DIR PREFIX: model, with PREFIX in front of all names of its tensors.
renamed() {
  mkdir "$1"
  cp model/config.json "$1"
  /usr/bin/python3 - "$1" "$2" <<'PY'
import json, struct, sys
data = open("model/model.safetensors", "rb").read()
size = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8 : 8 + size])
header = {name if name == "__metadata__" else sys.argv[2] + name: t for name, t in header.items()}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
open(sys.argv[1] + "/model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + data[8 + size :])
PY
}

evaluates() { ds-train cfg.json --eval --set "model={\"path\": \"$1\"}" --set data.tokenizer=bytes; }

@test "one file comes before an index that an earlier save has left, with a warning" {
  want=$(evaluates model)
  cp -r model stale
  ds-train cfg.json --out run --quiet --steps 1 --set seed=7
  ds-ckpt-merge run -o other --format hf --max-shard-size 60K --quiet
  cp other/model-* other/model.safetensors.index.json stale
  run --separate-stderr evaluates stale
  assert_success
  assert_output "$want"
  assert_equal "$(grep -c "stale contains model.safetensors and model.safetensors.index.json: model.safetensors is read" \
    <<<"$stderr")" 1
  for tool in "ds-ckpt-merge stale -o a.safetensors" "ds-shard stale -o sharded"; do
    run --separate-stderr $tool
    assert_success
    assert_equal "$(grep -c "stale contains model.safetensors and" <<<"$stderr")" 1
  done
  cmp <(ds-ckpt-merge sharded -o - --quiet) <(ds-ckpt-merge model -o - --quiet)
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --weights stale --check --set 'model={"path": "model"}' \
    --set data.tokenizer=bytes
  assert_success
  assert_equal "$(grep -c "stale contains model.safetensors and" <<<"$stderr")" 1
  rm stale/model.safetensors
  assert [ "$(evaluates stale)" != "$want" ]
}

@test "names behind a wrapper are read, cut and published without it" {
  want=$(evaluates model)
  for prefix in _orig_mod. base_model.model.; do
    rm -rf wrapped published run plain
    renamed wrapped $prefix
    run --separate-stderr evaluates wrapped
    assert_success
    assert_output "$want"
    assert_equal "$stderr" "ds-train: warning: wrapped/model.safetensors: tensor names are read without '$prefix', which a \
wrapper of the model has added"
    ds-ckpt-merge wrapped -o published --format hf --verify --quiet 2>/dev/null
    cmp published/model.safetensors model/model.safetensors
    ds-shard wrapped -o run --tp 2 --pp 2 --quiet 2>/dev/null
    ds-shard model -o plain --tp 2 --pp 2 --quiet
    cmp <(ds-ckpt-merge run -o - --quiet) <(ds-ckpt-merge plain -o - --quiet)
    ds-ckpt-merge wrapped -o same.safetensors --quiet # one file of whatever names is copied as it is
    run ds-train cfg.json --weights same.safetensors --eval --set 'model={"path": "model"}' --set data.tokenizer=bytes
    assert_success
  done
  mkdir odd
  cp model/config.json odd
  sed 's/transformer\.h\.0\./transformer.H.0./g' model/model.safetensors >odd/model.safetensors
  run -3 --separate-stderr evaluates odd
  [[ $stderr == *"names of the file: transformer.H.0."*", transformer.H.0."* ]] || fail "$stderr"
}

@test "an adapter is neither dropped nor taken for a model" {
  echo '{"peft_type": "LORA"}' >model/adapter_config.json
  run -4 --separate-stderr evaluates model
  [[ $stderr == *"model/adapter_config.json: belongs to an adapter of PEFT, which is not supported: merge it"* ]] || fail "$stderr"
  run -4 ds-ckpt-merge model -o out --format hf
  rm model/adapter_config.json
  renamed lora lora_A.
  run -4 --separate-stderr evaluates lora
  [[ $stderr == *"belongs to an adapter of PEFT, which is not applied to the weights"* ]] || fail "$stderr"
}

@test "saves of Hugging Face's Trainer are named" {
  mkdir out
  mv model out/checkpoint-20
  cp -r out/checkpoint-20 out/checkpoint-100
  said="Hugging Face's Trainer has saved checkpoint-20, checkpoint-100"
  for command in "1 ds-ckpt-merge out -o a.safetensors" "1 ds-shard out -o run" "1 ds-memreport out" \
    "2 ds-train cfg.json --weights out" "2 ds-train cfg.json --resume out --out run"; do
    # shellcheck disable=SC2086
    run -"${command%% *}" --separate-stderr ${command#* }
    [[ $stderr == *"$said in it"* ]] || fail "$command: $stderr"
  done
  run -2 --separate-stderr evaluates out
  [[ $stderr == *"config.json"*"$said in it: name one of them"* ]] || fail "$stderr"
  cp out/checkpoint-20/config.json out
  run -2 --separate-stderr evaluates out
  [[ $stderr == *"model.path out: there are no weights in it, but $said there: name one of them"* ]] || fail "$stderr"
  evaluates out/checkpoint-100
  run -2 --separate-stderr ds-train cfg.json --resume out/checkpoint-20 --out run
  [[ $stderr == *"--resume out/checkpoint-20: holds model.safetensors, weights but no state that a run resumes from: start \
from them with --weights out/checkpoint-20"* ]] || fail "$stderr"
}
