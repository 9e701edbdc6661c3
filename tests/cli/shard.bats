#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-shard as a user meets it: every layout and back with the same bytes, with and without optimizer state, its
# refusals, and that a refusal writes nothing. The checkpoint is the stored one of format version 1 (2 ranks, bf16).

bats_require_minimum_version 1.5.0

setup() {
  PATH=$DS_BIN:$PATH
  cd "$BATS_TEST_TMPDIR" || exit 1
  cp -r "$DS_SOURCE/tests/golden/checkpoint-v1" run
}

refuses() {
  local code=$1 text=$2
  shift 2
  run --separate-stderr ds-shard "$@"
  echo "status $status, stderr: $stderr"
  [ "$status" -eq "$code" ]
  [ -z "$output" ]
  [[ $stderr == "ds-shard: error: "*"$text"* ]]
  [ ! -e out ]
  [ -z "$(find . -name '.*tmp*')" ]
}

@test "safetensors to every layout and back: the same bytes" {
  ds-ckpt-merge run -o a.safetensors --quiet
  for dp in 1 2 3 7; do
    for stage in 0 1 2 3; do
      ds-shard a.safetensors -o out --dp $dp --stage $stage --quiet
      [ "$(find out -name 'rank-*.h5' | wc -l)" -eq $dp ]
      ds-ckpt-merge out -o b.safetensors --verify --quiet
      cmp a.safetensors b.safetensors
      rm -r out
    done
  done
}

@test "from layout to layout, with optimizer state, step and counters" {
  ds-ckpt-merge run -o a.safetensors --optimizer --quiet
  ds-shard run -o three --dp 3 --stage 3 --quiet
  ds-shard three -o one --quiet
  ds-ckpt-merge one -o b.safetensors --optimizer --quiet
  cmp a.safetensors b.safetensors
  ds-shard a.safetensors -o five --dp 5 --stage 2 --quiet # the file alone carries all of it
  ds-ckpt-merge five -o c.safetensors --optimizer --quiet
  cmp a.safetensors c.safetensors
  for key in step optimizer_step consumed_samples seed loss_scaler skipped_steps work_dtype data model_config; do
    diff <(grep "^\"$key\":" run/step-00000003/manifest.json) <(grep "^\"$key\":" five/step-00000003/manifest.json)
  done
}

@test "moments without their step" {
  ds-ckpt-merge run -o a.safetensors --optimizer --quiet
  /usr/bin/python3 - <<'PY'
import json, struct
data = open("a.safetensors", "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + n])
del header["__metadata__"]["libds"]
text = json.dumps(header).encode()
open("b.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + data[8 + n:])
PY
  run --separate-stderr ds-shard b.safetensors -o out
  [ "$status" -eq 0 ]
  [[ $stderr == *"b.safetensors: holds moments of an optimizer, but not its step"* ]]
}

@test "the same through HDF5" {
  ds-ckpt-merge run -o a.safetensors --optimizer --quiet
  ds-ckpt-merge run -o a.h5 --optimizer --quiet
  ds-shard a.h5 -o two --dp 2 --stage 3 --quiet
  ds-ckpt-merge two -o b.safetensors --optimizer --quiet
  cmp a.safetensors b.safetensors
  ds-ckpt-merge a.h5 -o c.safetensors --optimizer --quiet
  cmp a.safetensors c.safetensors
  for key in step optimizer_step consumed_samples seed loss_scaler skipped_steps work_dtype data model_config; do
    diff <(grep "^\"$key\":" run/step-00000003/manifest.json) <(grep "^\"$key\":" two/step-00000003/manifest.json)
  done
}

@test "a hostile HDF5 file" {
  /usr/bin/python3 - <<'PY'
data = bytearray(open("run/step-00000003/rank-00000.h5", "rb").read())
data[60:400] = b"\xff" * 340
open("bad.h5", "wb").write(data)
PY
  refuses 3 "bad.h5: HDF5 cannot" bad.h5 -o out
  echo "not HDF5 at all, whatever it is called" > bad.h5
  refuses 3 "bad.h5: not an HDF5 file" bad.h5 -o out
}

@test "the view of the shards is the merge" {
  ds-shard run -o out --dp 3 --quiet
  ds-ckpt-merge out -o m.h5 --quiet
  /usr/bin/python3 - <<'PY'
import h5py
view, merged = h5py.File("out/step-00000003/model.h5"), h5py.File("m.h5")
assert len(merged) > 3 and set(merged) <= set(view)
for name in merged:
    assert view[name].shape == merged[name].shape and (view[name][...] == merged[name][...]).all(), name
PY
}

@test "tensors of many dtypes and no dims, and those without elements" {
  /usr/bin/python3 - <<'PY'
import json, struct
rows, data = {}, b""
for name, dtype, shape, size in [("a", "F64", [3], 8), ("b.0.w", "F32", [5, 7], 4), ("b.0.i", "I64", [], 8),
                                 ("b.1.w", "F32", [5, 7], 4), ("c/d", "BF16", [4], 2), ("m", "BOOL", [3], 1),
                                 ("q", "F8_E4M3", [6], 1), ("none", "U8", [0, 9], 1), ("u", "U16", [2, 1], 2)]:
    n = size
    for d in shape:
        n *= d
    rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + n]}
    data += bytes((7 * i + len(data)) % 2 if dtype == "BOOL" else (7 * i + len(data)) % 120 for i in range(n))
header = json.dumps(rows).encode()
open("x.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + data)
PY
  ds-ckpt-merge x.safetensors -o a.safetensors --verify --quiet
  ds-shard x.safetensors -o out --dp 4 --stage 3 --quiet
  ds-ckpt-merge out -o b.safetensors --verify --quiet
  cmp a.safetensors b.safetensors
  ds-ckpt-merge out -o m.h5 --verify --quiet
  ds-shard m.h5 -o from_h5 --dp 2 --quiet
  run -0 ds-shard show --parameters from_h5
  [[ $output == *"q  fp8_e4m3  [6]: "* ]]
}

@test "show: table, parameters, JSON" {
  run -0 --separate-stderr ds-shard show run
  [ -z "$stderr" ]
  [[ $output == *"ranks       2"* ]]
  [ "$(grep -cE '^ +[01] ' <<<"$output")" -eq 2 ]
  run -0 ds-shard show run --parameters
  [[ $output == *"lm_head.weight  bf16"*"tied to wte.weight"* ]]
  ds-shard show run --json --output show.json
  /usr/bin/python3 - <<'PY'
import json
s = json.load(open("show.json"))
assert s["schema"] == "ds-shard/1" and s["world_size"] == 2 and len(s["ranks"]) == 2
assert s["mesh"] is None and "dp" not in s  # from an older libds, which did not write it
owned = sum(o["count"] for p in s["parameters"] for o in p["owners"])
assert owned == sum(r["elements"] for r in s["ranks"]) == 155
assert sum(r["master_bytes"] for r in s["ranks"]) == 4 * 155
PY
}

@test "a source that is not there" { refuses 1 "absent: no such file or directory" absent -o out; }
@test "no source" { refuses 2 "SRC is missing" -o out; }
@test "no directory" { refuses 2 "--out DIR is missing" run; }
@test "no ranks" { refuses 2 "--dp" run -o out --dp 0; }
@test "stage 4" { refuses 2 "--stage" run -o out --stage 4; }
@test "a kind of file that is not read" { echo x > x.txt; refuses 4 "not a supported kind of file" x.txt -o out; }
@test "a directory that is not empty" {
  run --separate-stderr ds-shard run -o run
  [ "$status" -eq 2 ]
  [[ $stderr == *"run: is not empty; choose another directory"* ]]
}
@test "a place inside a step" {
  run --separate-stderr ds-shard run -o run/step-00000003/out
  [ "$status" -eq 2 ]
  [[ $stderr == *"is inside a checkpoint step"* ]]
}
@test "show says the slices of tensor-parallel ranks" {
  cp -r "$DS_SOURCE/tests/golden/checkpoint-v2" sliced
  run -0 ds-shard show sliced --parameters
  [[ $output == *"h.0.down.weight  bf16  [7,11]: 0:0-18[:,0:5] 2:18-35[:,0:5] 1:0-21[:,5:11] 3:21-42[:,5:11]"* ]]
  [[ $output == *"ln_f.weight  bf16  [29]: "[02]":0-15 "[02]":15-29"* ]]
  ds-shard show sliced --json --output show.json
  /usr/bin/python3 - <<'PY'
import json
p = {p["name"]: p for p in json.load(open("show.json"))["parameters"]}
assert p["h.0.c_attn.bias"]["owners"][-1]["slice"] == {"dim": 0, "ranges": [[4, 9], [13, 18], [22, 27]]}, p["h.0.c_attn.bias"]
assert "slice" not in p["ln_f.weight"]["owners"][0]
PY
}

@test "slices to whole parameters: the same bytes" {
  cp -r "$DS_SOURCE/tests/golden/checkpoint-v2" sliced
  ds-ckpt-merge sliced -o a.safetensors --optimizer --verify --quiet
  ds-shard sliced -o out --dp 3 --stage 3 --quiet
  ds-ckpt-merge out -o b.safetensors --optimizer --verify --quiet
  cmp a.safetensors b.safetensors
}

@test "show takes no options of sharding" {
  refuses 2 "show accepts a directory" show run --dp 4
  refuses 2 "show accepts a directory" --stage 3 -o out show run
}
@test "a damaged shard" {
  truncate -s -1 run/step-00000003/rank-00001.h5
  refuses 3 "rank-00001.h5: " run -o out
}
@test "damaged data is named with its dataset" {
  offset=$(sed -n 's/.*"master":{"offset":\([0-9]*\).*/\1/p' run/step-00000003/manifest.json | head -1)
  printf '\xff\xfe\xff\xfe' | dd of=run/step-00000003/rank-00000.h5 bs=1 seek="$offset" conv=notrunc status=none
  refuses 3 "rank-00000.h5: checksum mismatch in /master/" run -o out
}
@test "a full disk leaves nothing" {
  ulimit -f 1 # blocks of 1 KiB
  run --separate-stderr ds-shard run -o out --dp 2
  [ "$status" -eq 1 ]
  [[ $stderr == *"File too large"* ]]
  [ ! -e out ] && [ -z "$(find . -name '.*tmp*')" ]
}
@test "a stopped ds-shard leaves nothing" {
  /usr/bin/python3 - <<'PY'
import json, struct
n = 400_000_000
header = json.dumps({"w": {"dtype": "F32", "shape": [n // 4], "data_offsets": [0, n]}}).encode()
with open("big.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(header)) + header)
    f.truncate(8 + len(header) + n)
PY
  ds-shard big.safetensors -o out --dp 2 --quiet &
  pid=$!
  until find . -name '.out.tmp*' | grep -q .; do sleep 0.01; done
  kill -TERM $pid
  status=0
  wait $pid || status=$?
  [ $status -eq 143 ]
  [ ! -e out ] && [ -z "$(find . -name '.*tmp*')" ]
}

@test "a run goes on from what was sharded: weights alone at step 0, everything at a later one" {
  cp "$DS_SOURCE/LICENSE" text.txt
  cat >cfg.json <<'JSON'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 4, "bf16": {"enabled": true}, "reduce_order": "micro",
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "steps": 4, "save": {"every": 2}, "device": "cpu"
}
JSON
  ds-train cfg.json --out whole --quiet
  ds-ckpt-merge whole --tag step-00000002 -o full.safetensors --optimizer --quiet
  ds-shard full.safetensors -o half --dp 3 --stage 3 --quiet
  ds-train cfg.json --resume half --out again --quiet
  ds-ckpt-merge whole -o a.safetensors --optimizer --quiet
  ds-ckpt-merge again -o b.safetensors --optimizer --quiet
  cmp a.safetensors b.safetensors

  # The masters of a file are its weights.
  run -0 ds-train cfg.json --weights full.safetensors --eval
  local -r loss=$(grep -o 'validation loss.*\|loss.*' <<<"$output" | head -1)
  run -0 ds-train cfg.json --weights whole/step-00000002 --eval
  [ "$loss" == "$(grep -o 'validation loss.*\|loss.*' <<<"$output" | head -1)" ] && [ -n "$loss" ]

  ds-ckpt-merge whole -o weights.safetensors --quiet
  ds-shard weights.safetensors -o base --dp 2 --quiet
  ds-train cfg.json --weights weights.safetensors --out from_file --steps 2 --quiet
  run -0 --separate-stderr ds-train cfg.json --resume base --out from_shards --steps 2
  [ -z "$stderr" ]
  ds-ckpt-merge from_file -o a.safetensors --optimizer --quiet
  ds-ckpt-merge from_shards -o b.safetensors --optimizer --quiet
  cmp a.safetensors b.safetensors
}

# A run of one rank: whole/step-00000002 and whole/step-00000004, with its weights and states in full.safetensors.
mesh_setup() {
  cp "$DS_SOURCE/LICENSE" text.txt
  cat >cfg.json <<'JSON'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "reduce_order": "micro",
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "steps": 4, "save": {"every": 2}, "device": "cpu", "threads": 1
}
JSON
  ds-train cfg.json --out whole --quiet
  ds-ckpt-merge whole --tag step-00000002 -o full.safetensors --optimizer --quiet
}
in_mesh() {
  ds-launch -n 8 ds-train cfg.json --set pipeline.stages=2 --set tensor_parallel.tp_size=2 \
    --set zero_optimization.stage=3 --quiet "$@"
}

@test "a mesh: what its ranks save, and a run of them goes on from it" {
  mesh_setup
  run -0 --separate-stderr ds-shard full.safetensors -o mesh --dp 2 --tp 2 --pp 2 --stage 3
  [[ $output == *"ranks       8 (dp 2, pp 2, tp 2)"* ]]
  run -0 ds-shard show mesh
  [[ $output == *"ranks       8 (dp 2, pp 2, tp 2)"* ]]
  ds-ckpt-merge mesh -o back.safetensors --optimizer --verify --quiet
  cmp full.safetensors back.safetensors

  in_mesh --resume mesh --out again
  paste <(grep -o '"loss":[^,]*' whole/metrics.jsonl | tail -n 2) <(grep -o '"loss":[^,]*' again/metrics.jsonl) |
    tr : '\t' | awk '{ d = $2 - $4; if (d < 0) d = -d; if (NF != 4 || d > 1e-5 * $2) exit 1; n++ } END { exit n != 2 }'

  # Rank by rank what the run itself saved.
  ds-shard show again --json --output run.json
  ds-shard whole -o cut --dp 2 --tp 2 --pp 2 --stage 3 --json --output made.json
  ds-shard show cut --json --output cut.json
  /usr/bin/python3 - <<'PY'
import json
run, cut, made = (json.load(open(f"{name}.json")) for name in ("run", "cut", "made"))
for key in ("world_size", "mesh", "stage", "layout", "parameters"):
    assert run[key] == cut[key], key
assert cut["mesh"] == made["mesh"] == {"dp": 2, "pp": 2, "tp": 2, "sp": 1} and made["world_size"] == 8
assert [r["elements"] for r in run["ranks"]] == [r["elements"] for r in cut["ranks"]]
PY
}

@test "meshes of any names: sequence-parallel ranks need no model" {
  ds-ckpt-merge run -o a.safetensors --quiet
  run -0 --separate-stderr ds-shard a.safetensors -o out --dp 3 --sp 2
  [[ $output == *"ranks       6 (dp 3, sp 2)"* ]]
  ds-ckpt-merge out -o b.safetensors --verify --quiet
  cmp a.safetensors b.safetensors
}

@test "every published family over a mesh and back: the same bytes" {
  local model tp
  while read -r model tp; do
    ds-ckpt-merge "$DS_SOURCE/tests/golden/$model" -o a.safetensors --quiet
    for degrees in "--tp $tp" "--pp 3" "--dp 2 --tp $tp --pp 2 --sp 2 --stage 3"; do
      # shellcheck disable=SC2086 # several options
      ds-shard "$DS_SOURCE/tests/golden/$model" -o out $degrees --quiet
      ds-ckpt-merge out -o b.safetensors --verify --quiet
      cmp a.safetensors b.safetensors
      rm -r out
    done
  done <<<$'gpt2 3\nllama 4\nllama-tied 2\nqwen2 1\nqwen3 2\nbert 2'
}

@test "experts over a mesh and back: batches in steps, the same bytes under the published names" {
  local model tp degrees
  while read -r model tp; do
    ds-ckpt-merge "$DS_SOURCE/tests/golden/$model" -o a --format hf --verify --quiet
    for degrees in "--dp 3" "--tp $tp --pp 3" "--dp 2 --tp $tp --pp 2 --sp 2 --stage 3"; do
      # shellcheck disable=SC2086 # several options
      ds-shard "$DS_SOURCE/tests/golden/$model" -o out $degrees --quiet
      h5dump -H out/step-00000000/model.h5 >names
      grep -q 'DATASET "model.layers.2\?1\?.mlp.experts.gate_up_proj"' names
      run -1 grep -E 'experts[.][0-9]|block_sparse_moe' names
      ds-ckpt-merge out -o b --format hf --verify --quiet
      cmp a/model.safetensors b/model.safetensors
      rm -r out b
    done
    rm -r a
  done <<<$'mixtral 1\nolmoe 1\nqwen2_moe 2\nqwen3_moe 2\nglm4_moe 2'
}

@test "the model is named, or found beside its file" {
  cp -r "$DS_SOURCE/tests/golden/llama" model
  cp model/model.safetensors alone.safetensors
  refuses 2 "alone.safetensors: does not contain the model's config.json: name one with --config" \
    alone.safetensors -o out --tp 2
  ds-shard alone.safetensors -o named --tp 2 --config model --quiet
  ds-shard alone.safetensors -o file --tp 2 --config model/config.json --quiet
  ds-shard model/model.safetensors -o beside --tp 2 --quiet
  for dir in named file beside; do [ "$(find $dir -name 'rank-*.h5' | wc -l)" -eq 2 ]; done
}

@test "degrees that do not fit, and models that are not known" {
  refuses 2 "--tp: the model's 4 heads cannot be shared by 3 ranks; 1, 2 or 4 would do" \
    "$DS_SOURCE/tests/golden/llama" -o out --tp 3
  refuses 2 "--tp: the model's intermediate size of 50 cannot be shared by 3 ranks; 1 would do" \
    "$DS_SOURCE/tests/golden/qwen2" -o out --tp 3
  refuses 2 "--pp: 9 parts are more than the 4 layers (embedding and head among them); at most 4 stages have" "$DS_SOURCE/tests/golden/gpt2" -o out --pp 9
  refuses 2 "--partition: \"Mamba\" matches no layer" "$DS_SOURCE/tests/golden/gpt2" -o out --pp 2 --partition type:Mamba
  refuses 2 "--partition needs --pp" "$DS_SOURCE/tests/golden/gpt2" -o out --tp 2 --partition uniform
  refuses 2 "--config needs --tp, --pp, --positions or --upcycle" run -o out --dp 2 --config "$DS_SOURCE/tests/golden/gpt2"
  refuses 2 "are more than 99999 ranks" "$DS_SOURCE/tests/golden/gpt2" -o out --dp 99999 --tp 2
  refuses 2 "--pp" run -o out --pp 0
  refuses 4 "it does not name an architecture; --dp and --sp work with any model" run -o out --tp 2
  refuses 3 "does not fit its config.json" run -o out --tp 3 --config "$DS_SOURCE/tests/golden/gpt2"
  echo '{"architectures": ["MambaForCausalLM"]}' >config.json
  refuses 4 "the architecture [\"MambaForCausalLM\"] is not supported" run -o out --pp 2 --config .
  refuses 2 "show accepts a directory" show run --tp 2
}

@test "the type of most weights is told, not that of the run" {
  ds-ckpt-merge run -o full.safetensors --dtype fp32 --optimizer --quiet # of a run in bf16
  run -0 --separate-stderr ds-shard full.safetensors -o out
  [[ $output == *"dtype       fp32"* ]]
  run -0 --separate-stderr ds-shard show out
  [[ $output == *"dtype       fp32"* ]]
}

@test "--output is a place of its own" {
  refuses 2 "name the same file" run -o out --output out
  refuses 2 "is inside a checkpoint step" show run --output run/step-00000003/rank-00000.h5
}

@test "ds-train says what to do with a DeepSpeed checkpoint" {
  cp "$DS_SOURCE/LICENSE" text.txt
  cat >cfg.json <<'JSON'
{
  "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"train": "text.txt", "seq_length": 32}, "train_batch_size": 4, "steps": 2, "device": "cpu"
}
JSON
  run -4 --separate-stderr ds-train cfg.json --resume "$DS_SOURCE/tests/golden/deepspeed/zero1-bf16" --out out
  [[ $stderr == *"a DeepSpeed checkpoint; make one of ours of it with ds-shard"* ]]
  # Beside a model's config.json it is that model's weights, which are not random.
  cp -r "$DS_SOURCE/tests/golden/deepspeed/zero1-bf16" model
  sed 's/"vocab_size": *[0-9]*/"vocab_size": 256/' "$DS_SOURCE/tests/golden/gpt2/config.json" >model/config.json
  run -4 --separate-stderr ds-train cfg.json --set 'model={"path": "model"}' --out out
  [[ $stderr == *"its weights are in a checkpoint; name model with --weights, too"* ]]
  [ ! -e out ]
}

# Ids that the small vocabularies of the stored models have, as nanoGPT writes them.
token_file() {
  /usr/bin/python3 - <<'PY'
import struct
open("tokens.bin", "wb").write(b"".join(struct.pack("<H", 4 + i * i // 7 % 37) for i in range(6000)))
PY
}

# Loss and norm of each step of a few, of MODEL at a length: trains MODEL LENGTH OUT ARGUMENTS...
trains() {
  local model=$1 length=$2 out=$3
  shift 3
  cat >"$out.json" <<JSON
{
  "model": {"path": "$model"}, "data": {"train": "tokens.bin", "seq_length": $length},
  "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}, "steps": 4, "device": "cpu", "threads": 1
}
JSON
  [[ $model != *bert* ]] || set -- --set 'data.mlm={"mask_token": 1, "cls_token": 2, "sep_token": 3}' "$@"
  ds-train "$out.json" --out "$out" --quiet "$@" >"$out.log"
  grep '"type":"step"' "$out/metrics.jsonl" | grep -o '"\(step\|loss\|grad_norm\)":[^,}]*'
}

@test "positions are repeated for longer sequences: rows, config.json, and nothing else" {
  local model name positions degrees
  while read -r model name positions; do
    cp -r "$DS_SOURCE/tests/golden/$model" "$model"
    echo '{"model_max_length": 7}' >"$model/tokenizer_config.json"
    /usr/bin/python3 - "$model" <<'PY' # as in old files
import json, sys
path = f"{sys.argv[1]}/config.json"
config = json.load(open(path))
if "n_positions" in config:
    config["n_ctx"] = config["n_positions"]
json.dump(config, open(path, "w"))
PY
    ds-ckpt-merge "$model" -o "same-$model" --format hf --quiet
    ds-ckpt-merge "$model" -o "long-$model" --format hf --positions "$positions" --verify --quiet
    cmp "$model/tokenizer_config.json" "long-$model/tokenizer_config.json"
    for degrees in "--dp 1" "--dp 3 --stage 3" "--tp ${name##*:} --pp 2"; do
      # shellcheck disable=SC2086 # several options
      ds-shard "$model" -o out --positions "$positions" $degrees --quiet
      ds-ckpt-merge out -o back --format hf --verify --quiet
      cmp "long-$model/model.safetensors" back/model.safetensors
      cmp "long-$model/config.json" back/config.json
      rm -r out back
    done
    /usr/bin/python3 - "$model" "${name%:*}" "$positions" <<'PY'
import json, struct, sys
model, name, positions = sys.argv[1], sys.argv[2], int(sys.argv[3])
def tensors(path):
    data = open(path, "rb").read()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header.pop("__metadata__")
    return {k: (t["dtype"], t["shape"], data[end + t["data_offsets"][0]:end + t["data_offsets"][1]]) for k, t in header.items()}
old, new = tensors(f"same-{model}/model.safetensors"), tensors(f"long-{model}/model.safetensors")
dtype, (rows, width), data = old.pop(name)
size = len(data) // rows
want = b"".join(data[r % rows * size:][:size] for r in range(positions))
assert new.pop(name) == (dtype, [positions, width], want)
assert old == new and len(old) > 20
old, new = (json.load(open(f"{d}-{model}/config.json")) for d in ("same", "long"))
for key in {"gpt2": ("n_positions", "n_ctx"), "bert": ("max_position_embeddings",)}[model]:
    assert old[key] == rows
    old[key] = positions
assert list(old.items()) == list(new.items())
PY
  done <<<$'gpt2 transformer.wpe.weight:3 101\nbert bert.embeddings.position_embeddings.weight:2 96'
}

@test "a model with repeated positions trains at the old length as before, and at longer ones" {
  local model length
  token_file
  while read -r model length; do
    cp -r "$DS_SOURCE/tests/golden/$model" "$model"
    ds-ckpt-merge "$model" -o "long-$model" --format hf --positions $((4 * length)) --quiet
    trains "$model" "$length" old >want
    [ "$(grep -c loss want)" -eq 4 ]
    diff want <(trains "long-$model" "$length" same)
    ds-shard "$model" -o sharded --positions $((4 * length)) --dp 2 --stage 3 --quiet
    diff <(trains "long-$model" $((4 * length)) long) <(trains "long-$model" $((4 * length)) long2 --weights sharded)
    grep '"type":"step"' long/metrics.jsonl | sed 's/.*"loss":\([^,]*\),.*/\1/' |
      awk 'NR == 1 { first = $1 } END { exit !(NR == 4 && $1 < first) }'
    run -2 ds-train long.json --set 'model={"path": "'"$model"'"}' --check # the original is not that long
    rm -r old same long long2 sharded
  done <<<$'gpt2 40\nbert 24'
}

@test "a run goes on with repeated positions: its states are theirs" {
  token_file
  cp -r "$DS_SOURCE/tests/golden/gpt2" gpt2
  trains gpt2 40 whole | tail -n 6 >want
  trains gpt2 40 half --steps 2 >half.steps
  ds-shard half -o long --positions 90 --quiet
  ds-shard gpt2 -o weights --positions 90 --quiet
  ds-ckpt-merge weights -o long-gpt2 --format hf --quiet
  diff want <(trains long-gpt2 40 again --resume long)
}

@test "masks of the old length are left out" {
  /usr/bin/python3 - <<'PY'
import json, struct
rows, data = {}, b""
for name, shape, n in [("wpe.weight", [4, 3], 12), ("h.0.attn.bias", [1, 1, 4, 4], 16), ("h.0.attn.c_attn.bias", [5], 5)]:
    rows[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * n]}
    data += struct.pack(f"<{n}f", *range(n))
header = json.dumps(rows).encode()
open("model.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + data)
json.dump({"model_type": "gpt2", "n_positions": 4}, open("config.json", "w"))
PY
  run -0 --separate-stderr ds-shard . -o out --positions 6
  [[ $stderr == *"left out, because they are computed from the old length:"*"h.0.attn.bias"* ]]
  run -0 ds-shard show --parameters out
  [[ $output == *"wpe.weight  fp32  [6,3]"* && $output == *"h.0.attn.c_attn.bias"* && $output != *"h.0.attn.bias"* ]]
  run -0 --separate-stderr ds-shard . -o equal --positions 4
  [ -z "$stderr" ]
  run -0 ds-shard show --parameters equal
  [[ $output == *"wpe.weight  fp32  [4,3]"* && $output == *"h.0.attn.bias"* ]]
}

@test "positions that cannot be had" {
  local golden=$DS_SOURCE/tests/golden
  refuses 2 "--positions 39 is fewer than the 40 that the model has" "$golden/gpt2" -o out --positions 39
  for bad in 0 -1 many 16777217 1.5; do refuses 2 "--positions" "$golden/gpt2" -o out --positions "$bad"; done
  for model in llama qwen2 qwen3 mixtral olmoe qwen2_moe qwen3_moe glm4_moe; do
    refuses 2 "a model of type \"$model\" has none" "$golden/$model" -o out --positions 4096
  done
  refuses 2 "show accepts a directory" show run --positions 9
  cp "$golden/gpt2/model.safetensors" alone.safetensors
  refuses 2 "alone.safetensors: does not contain the model's config.json: name one with --config" alone.safetensors -o out --positions 64
  refuses 3 "bert.embeddings.position_embeddings.weight is missing" alone.safetensors -o out --positions 64 --config "$golden/bert"
  refuses 3 "transformer.wpe.weight has 40 rows, but n_positions of config.json is 24" \
    alone.safetensors -o out --positions 64 --config "$golden/gpt2-untied"
  echo '{"model_type": "roberta"}' >config.json
  refuses 4 "not of \"roberta\"" alone.safetensors -o out --positions 64 --config .
  refuses 1 "/proc/out" "$golden/gpt2" -o /proc/out --positions 64
  ds-shard alone.safetensors -o out --positions 64 --config "$golden/gpt2" --quiet
  run -2 --separate-stderr ds-ckpt-merge run -o x.safetensors --positions 64
  [[ $stderr == *"format safetensors takes no positions"* ]]
}
