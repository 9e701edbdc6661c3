#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-ckpt-merge as a user meets it: its output, its refusals and their exit codes, and that a refusal writes nothing.
# The checkpoint is the stored one of format version 1 (2 ranks, bf16, with optimizer state).

setup() {
  merge=$DS_BIN/ds-ckpt-merge
  cd "$BATS_TEST_TMPDIR" || exit 1
  cp -r "$DS_SOURCE/tests/golden/checkpoint-v1" run
  step=run/step-00000003
}

# refuses CODE TEXT ARGUMENTS...: exit code, message on stderr with the tool's name, nothing on stdout, no output file.
refuses() {
  local code=$1 text=$2
  shift 2
  run --separate-stderr "$merge" "$@"
  echo "status $status, stderr: $stderr"
  [ "$status" -eq "$code" ]
  [ -z "$output" ]
  [[ $stderr == "ds-ckpt-merge: error: "*"$text"* ]]
  [ ! -e out.safetensors ] && [ ! -e out.h5 ]
  [ -z "$(find . -name '.*tmp*')" ]
}

# Changes one byte of a file in place.
damage() {
  local byte
  byte=$(od -An -tu1 -j "$2" -N 1 "$1")
  printf '%b' "\\x$(printf %x $((byte ^ 16)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

bats_require_minimum_version 1.5.0

@test "a run directory merges to safetensors, with a table on stdout" {
  run --separate-stderr "$merge" run -o out.safetensors
  [ "$status" -eq 0 ]
  [ -z "$stderr" ]
  [[ $output == *"checkpoint  run/step-00000003"* ]]
  [[ $output == *"tensors     5"* ]]
  [[ $output == *"dtype       bf16"* ]]
  [ "$(head -c 300 out.safetensors | tr -d '\0' | grep -c '"__metadata__":{"format":"pt","lm_head.weight":"wte.weight"}')" -eq 1 ]
}

@test "the table and the file agree about bytes; --json says the same" {
  run "$merge" "$step" -o out.h5 --dtype fp32 --optimizer --verify --json
  [ "$status" -eq 0 ]
  [[ $output == *'"schema": "ds-ckpt-merge/1"'* ]]
  [[ $output == *'"tensors": 20,'* ]]
  [[ $output == *'"parameters": 155,'* ]]
  [[ $output == *'"verified": true,'* ]]
  [[ $output == *"\"bytes\": $(stat -c %s out.h5),"* ]]
}

@test "the same checkpoint always gives the same bytes" {
  "$merge" run -o a.safetensors
  "$merge" "$step" -o b.safetensors --verify --quiet
  cmp a.safetensors b.safetensors
}

@test "an existing output is replaced in one step" {
  echo old > out.safetensors
  "$merge" run -o out.safetensors
  [ "$(stat -c %s out.safetensors)" -gt 100 ]
}

@test "no arguments" { refuses 2 "DIR is missing"; }
@test "no output" { refuses 2 "out is missing" run; }
@test "an unknown option names the nearest" { refuses 2 "did you mean '--verify'" run -o out.h5 --verfy; }
@test "an unknown dtype" { refuses 2 "fp64" run -o out.h5 --dtype fp64; }
@test "an unknown format" { refuses 2 "gguf" run -o out.h5 --format gguf; }
@test "a suffix that says nothing" { refuses 2 "the suffix does not choose a format" run -o out.bin; }
@test "an output inside the checkpoint" { refuses 2 "inside a checkpoint step" run -o "$step/model.h5"; }
@test "an output that is a directory" { refuses 2 "is a directory" run -o run --format hdf5; }
@test "an output in a directory that is not there" { refuses 2 "there is no directory no" run -o no/out.h5; }
@test "a Hugging Face directory wants a config.json" {
  "$merge" run -o a.safetensors --quiet
  refuses 2 "name one with --config" a.safetensors -o out --format hf
  echo '{"model_type": "gpt2"}' > config.json
  "$merge" a.safetensors -o out --format hf --config config.json --quiet
  grep -q '"torch_dtype": "bfloat16"' out/config.json
  refuses 2 "out: is not empty" run -o out --format hf --config config.json
  refuses 2 "there are no files of a tokenizer" run -o new --format hf --config config.json --tokenizer run
  [ ! -e new ]
}
# Never with the real /dev: a file that replaces a node would replace that one.
@test "an output that is no regular file stays what it is" {
  mkfifo pipe.h5
  ln -s pipe.h5 link.h5
  refuses 2 "is a device, a pipe or a socket" run -o pipe.h5
  refuses 2 "is a device, a pipe or a socket" run -o link.h5
  [ -p pipe.h5 ] && [ -L link.h5 ]
}

@test "a stream has the bytes of the file, and nothing else" {
  "$merge" run -o a.safetensors --quiet
  "$merge" run -o - --output report.txt | cmp a.safetensors
  grep -q "output      -" report.txt
  "$merge" run -o - --optimizer | head -c 100 | wc -c | grep -qx 100
  refuses 2 "only one safetensors file" run -o - --format hdf5
  refuses 2 "a stream can only go to standard output" run -o /proc/self/fd/1 --format safetensors
  refuses 2 "give --json an --output FILE" run -o - --json
  [ ! -e ./- ]
}

@test "--only of a tied name finds and names the owner" {
  cat >cfg.json <<'JSON'
{"model": {"type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2},
 "data": {"train": "cfg.json", "seq_length": 8}, "train_micro_batch_size_per_gpu": 1, "steps": 1, "device": "cpu",
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
JSON
  "$DS_BIN/ds-train" cfg.json --out tied --quiet --set data.format=text
  "$merge" tied -o hf --format hf --quiet
  # As transformers writes it: the tied name is nowhere in the file.
  /usr/bin/python3 - <<'PY'
import json, struct
f = open("hf/model.safetensors", "rb").read()
n = struct.unpack("<Q", f[:8])[0]
head = json.loads(f[8:8 + n])
head["__metadata__"] = {"format": "pt"}
text = json.dumps(head).encode()
open("hf/model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + f[8 + n:])
PY
  for source in tied hf; do
    run --separate-stderr "$merge" "$source" -o out.safetensors --only lm_head.weight
    [ "$status" -eq 0 ]
    [[ $stderr == *"warning: --only lm_head.weight: 'lm_head.weight' is tied to 'transformer.wte.weight', under whose name it is written"* ]]
    [[ $output == *"tensors     1"* ]]
    grep -q transformer.wte.weight out.safetensors
    rm out.safetensors
  done
  refuses 3 "no parameter matches 'lm_head.bias'" hf -o out.safetensors --only lm_head.bias
}

@test "parts, shards and steps" {
  "$merge" run -o part.safetensors --only 'h.*' --only wte.weight --quiet
  /usr/bin/python3 - <<'PY'
import json, struct
f = open("part.safetensors", "rb")
header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
names = set(header) - {"__metadata__"}
assert "wte.weight" in names and all(n == "wte.weight" or n.startswith("h.") for n in names), names
PY
  refuses 3 "no parameter matches 'x*'" run -o out.h5 --only 'x*'
  "$merge" run -o shards --format safetensors --max-shard-size 100B --quiet
  [ "$(ls shards/*.safetensors | wc -l)" -gt 1 ]
  "$merge" shards -o again.safetensors --quiet
  "$merge" run -o whole.safetensors --quiet --verify
  cmp <(tail -c 310 again.safetensors) <(tail -c 310 whole.safetensors)
  "$merge" run --tag step-00000003 -o tagged.safetensors --quiet
  cmp tagged.safetensors whole.safetensors
  refuses 2 "not '../run'" run --tag ../run -o out.h5
  refuses 1 "there is no step-00000009" run --tag step-00000009 -o out.h5
  refuses 2 "--max-shard-size: '5 apples'" run -o shards2 --format safetensors --max-shard-size '5 apples'
}

@test "back to a checkpoint for one rank, with the optimizer's state" {
  "$merge" run -o one --format checkpoint --verify --quiet
  "$merge" run -o a.safetensors --optimizer --quiet
  "$merge" one -o b.safetensors --optimizer --quiet
  cmp a.safetensors b.safetensors
  h5dump -H one/step-00000003/model.h5 | grep -q '"wte.weight"'
}

@test "h5dump writes 16-bit tensors as raw bytes in the type of the file" {
  local name=wte.weight type bytes
  for type in fp16 bf16; do
    "$merge" run -o half.h5 --dtype "$type" --quiet
    "$merge" run -o half.safetensors --dtype "$type" --only "$name" --quiet
    h5dump -d "/$name" -b FILE -o raw half.h5 >/dev/null
    bytes=$(stat -c %s raw)
    ((bytes > 0))
    cmp raw <(tail -c "$bytes" half.safetensors)
    h5dump -d "/$name" -b NATIVE -o raw half.h5 >/dev/null
    [ "$(stat -c %s raw)" -eq $((2 * bytes)) ]
    rm half.h5 half.safetensors raw
  done
}

@test "an output that is a link goes to where the link leads" {
  echo old > model.h5
  ln -s model.h5 link.h5
  ln -s new.h5 dangling.h5
  "$merge" run -o link.h5 --quiet
  "$merge" run -o dangling.h5 --quiet
  [ -L link.h5 ] && [ -L dangling.h5 ]
  cmp model.h5 new.h5
  [ "$(stat -c %s model.h5)" -gt 100 ]
}

@test "the files of a run are no outputs" {
  mkdir "$step/sub"
  for name in latest metrics.jsonl lock; do
    refuses 2 "is a name that runs use themselves" run -o run/$name --format hdf5
  done
  refuses 2 "inside a checkpoint step" run -o "$step/sub/new.h5"
  ln -s run/latest link.h5
  refuses 2 "is a name that runs use themselves" run -o link.h5
  [ "$(cat run/latest)" = step-00000003 ]
}

@test "a killed merge leaves nothing" {
  for signal in TERM INT KILL; do
    env --default-signal=INT "$merge" run -o big.safetensors --optimizer --dtype fp32 --quiet &
    kill -$signal $! 2>/dev/null || true
    wait $! || true
    [ -z "$(find . -name '.*tmp*')" ]
    rm -f big.safetensors
  done
}

@test "a checkpoint that is not there" { refuses 1 "absent: no such file or directory" absent -o out.h5; }
@test "a file for a checkpoint" { refuses 4 "not a supported kind of file" run/latest -o out.h5; }

@test "a directory without checkpoints" {
  mkdir empty
  refuses 1 "no checkpoint and no model in this directory" empty -o out.h5
}

# warns TEXT: the newest complete step is merged, and one warning gives the reason.
warns() {
  run --separate-stderr "$merge" run -o out.h5
  echo "status $status, stderr: $stderr"
  [ "$status" -eq 0 ]
  [[ $stderr == "ds-ckpt-merge: warning: $1; using the newest complete step, run/step-00000003" ]]
  [[ $output == *"checkpoint  run/step-00000003"* ]]
}

@test "an empty latest is a warning" {
  : > run/latest
  warns "run/latest: names '', which is not a step"
}

@test "a latest that leads out of the run is not followed" {
  cp -r run elsewhere
  echo ../elsewhere/step-00000003 > run/latest
  warns "run/latest: names '../elsewhere/step-00000003', which is not a step"
}

@test "a latest that names a step which is gone is a warning" {
  echo step-00000009 > run/latest
  warns "run/latest: names step-00000009, which does not exist or is not complete"
}

@test "a missing latest is a warning" {
  rm run/latest
  warns "run/latest is missing"
}

@test "damaged data is an error, and no other step is merged in its place" {
  cp -r "$step" run/step-00000002
  damage "$step/rank-00000.h5" 2050
  refuses 3 "step-00000003/rank-00000.h5: checksum mismatch in /param/wte.weight@0" run -o out.safetensors
  cp run/step-00000002/rank-00000.h5 "$step"
  damage "$step/manifest.json" 2000
  refuses 3 "step-00000003/manifest.json: checksum mismatch" run -o out.safetensors
}

@test "a missing manifest" {
  rm "$step/manifest.json"
  run --separate-stderr "$merge" run -o out.h5
  [ "$status" -eq 3 ]
  [[ $stderr == *"warning: skipping run/step-00000003: "*"does not exist or is not complete; there is no other complete step" ]]
  [ ! -e out.h5 ]
}

@test "a truncated manifest" {
  truncate -s 4000 "$step/manifest.json"
  refuses 3 "manifest.json: does not end like a manifest" "$step" -o out.h5
}

@test "an edited manifest" {
  sed -i 's/"seed": 4/"seed": 3/' "$step/manifest.json"
  refuses 3 "damaged or was edited" "$step" -o out.h5
}

@test "a missing shard" {
  rm "$step/rank-00001.h5"
  refuses 3 "rank-00001.h5: shard of rank 1 is missing" "$step" -o out.h5
}

@test "a truncated shard" {
  truncate -s -1 "$step/rank-00001.h5"
  refuses 3 "27779 bytes, the manifest says 27780" "$step" -o out.h5
}

@test "a flipped bit in a shard's structure" {
  damage "$step/rank-00000.h5" 40
  refuses 3 "rank-00000.h5: damaged" "$step" -o out.h5
}

@test "a flipped bit in a shard's data" {
  damage "$step/rank-00000.h5" 2050
  refuses 3 "checksum mismatch in /param/wte.weight@0" "$step" -o out.safetensors
}

@test "--verify names every bad file, also those that a merge does not read" {
  damage "$step/rank-00000.h5" 2065
  damage "$step/rank-00001.h5" 100
  damage "$step/model.h5" 1000
  refuses 3 "rank-00000.h5: checksum mismatch in /master/wte.weight@0" "$step" -o out.h5 --verify
  [[ $stderr == *"rank-00001.h5: damaged"* ]]
  [[ $stderr == *"model.h5: damaged"* ]]
}

@test "shards that changed places" {
  mv "$step/rank-00000.h5" x && mv "$step/rank-00001.h5" "$step/rank-00000.h5" && mv x "$step/rank-00001.h5"
  refuses 3 "the manifest says" "$step" -o out.h5
}

@test "a full disk leaves no output" {
  (
    ulimit -f 1
    refuses 1 "File too large" "$step" -o out.safetensors --dtype fp32 --optimizer
  )
}

@test "a Hugging Face directory takes the tokenizer along" {
  mkdir model && cp "$DS_SOURCE"/tests/golden/gpt2/*.json "$DS_SOURCE"/tests/golden/gpt2/model.safetensors model/
  rm -f model/expected*
  cp "$DS_SOURCE"/tests/golden/tokenizers/gpt2/tokenizer.json model/
  echo '{"temperature": 0.7}' > model/generation_config.json
  "$merge" model -o copy --format hf --verify --quiet
  cmp model/tokenizer.json copy/tokenizer.json
  cmp model/generation_config.json copy/generation_config.json
  cmp model/model.safetensors copy/model.safetensors
  rm model/tokenizer.json
  echo '{"temperature": 0.5}' > model/generation_config.json
  run --separate-stderr "$merge" model -o bare --format hf
  [ "$status" -eq 0 ]
  [[ $stderr == *"warning: bare: no files of a tokenizer in model"* ]]
  touch bytes && echo '{}' > tokenizer.json # of no run
  run --separate-stderr "$merge" run -o plain --format hf
  [ -z "$stderr" ]
  [ ! -e plain/tokenizer.json ]
}

@test "a directory through a link; the working directory is refused; one path for two outputs too" {
  for to in empty full/; do
    mkdir $to && ln -sfn $to link
    "$merge" run -o link --format hf --quiet
    [ -L link ] && [ -e $to/model.safetensors ]
  done
  mkdir here && cd here
  run --separate-stderr "$merge" ../run -o . --format hf
  [ "$status" -eq 2 ]
  [[ $stderr == *"is the working directory"* ]]
  cd ..
  refuses 2 "name the same file" run -o out.safetensors --output out.safetensors
  echo '[]' > list.json
  refuses 2 "list.json: is not a JSON object" run -o out --format hf --config list.json
}

@test "names that HDF5 cannot hold are refused, not changed" {
  for names in '"a/./b"' '"/a"' '"a/"' '"a", "a/b"'; do
    /usr/bin/python3 - "$names" <<'PY'
import json, struct, sys
names = json.loads("[" + sys.argv[1] + "]")
rows = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
header = json.dumps(rows).encode()
open("odd.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + b"x" * len(names))
PY
    refuses 4 "HDF5 cannot hold a tensor named" odd.safetensors -o out.h5
    run --separate-stderr "$DS_BIN/ds-shard" odd.safetensors -o out
    [ "$status" -eq 4 ]
    [[ $stderr == *"odd.safetensors: HDF5 cannot hold a tensor named"* ]]
    "$merge" odd.safetensors -o copy.safetensors --verify --quiet
  done
}

# safetensors FILE {name: [dtype, shape, bytes]...} [metadata], in Python.
safetensors() {
  /usr/bin/python3 - "$@" <<'PY'
import json, struct, sys
path, rows, meta = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3]) if len(sys.argv) > 3 else None
header, data = {} if meta is None else {"__metadata__": meta}, b""
for name, (dtype, shape, value) in rows.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
    data += value
text = json.dumps(header, separators=(",", ":")).encode()
text += b" " * (-len(text) % 8)
open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)
PY
}

@test "what a file says of itself goes through shards and HDF5 into what is made of it" {
  for meta in '{"format": "pt"}' '{"author": "me", "format": "np", "note": "z\u00fc" * 20}' '{"a": "x" * 100000}' '{}'; do
    safetensors a.safetensors '{"w": ["F32", [2], bytes(8)]}' "$meta"
    "$DS_BIN/ds-shard" a.safetensors -o shards --dp 2 --stage 3 --quiet
    "$merge" shards -o b.safetensors --verify --quiet
    "$merge" a.safetensors -o c.safetensors --quiet
    "$merge" a.safetensors -o a.h5 --verify --quiet
    "$merge" a.h5 -o d.safetensors --quiet
    /usr/bin/python3 - "$meta" <<'PY'
import json, struct, sys
for name in "abcd":
    f = open(name + ".safetensors", "rb")
    assert json.loads(f.read(struct.unpack("<Q", f.read(8))[0])).get("__metadata__", {}) == eval(sys.argv[1]), name
PY
    rm -r shards ./*.safetensors a.h5
  done
}

@test "weights beyond the range of the type are counted" {
  safetensors a.safetensors '{"fine": ["F32", [1], struct.pack("<f", 65504)],
    "large": ["F32", [4], struct.pack("<4f", 1e6, -1e9, float("inf"), 1)]}'
  run --separate-stderr "$merge" a.safetensors -o b.safetensors --dtype fp16 --verify
  [ "$status" -eq 0 ]
  [[ $stderr == "ds-ckpt-merge: warning: b.safetensors: 2 weights exceed the range of the type and are now infinite, among them some of 'large'" ]]
  run --separate-stderr "$merge" a.safetensors -o b.safetensors --dtype bf16
  [ -z "$stderr" ]
}

@test "a type that cannot be converted is named before anything is written" {
  safetensors a.safetensors '{"a": ["F32", [1], bytes(4)], "b": ["F8_E4M3", [4], bytes(4)]}'
  refuses 4 "a.safetensors: 'b' is fp8_e4m3, and cannot be shown as bf16" a.safetensors -o b.safetensors --dtype bf16
  "$merge" a.safetensors -o b.safetensors --dtype bf16 --only a --quiet
}

@test "standard output that is closed, or the report's too" {
  run -1 bash -c "'$merge' run -o - >&-"
  [[ $output == *"standard output"* ]]
  run --separate-stderr bash -c "'$merge' run -o - --output /dev/stdout >file"
  [ "$status" -eq 2 ]
  [[ $stderr == *"name the same file"* ]]
  [ ! -s file ]
  "$merge" run -o - --output /dev/null >/dev/null
}

@test "an unreadable dataset is in nobody's way who does not want it; a file without any is no model" {
  /usr/bin/python3 - <<'PY'
import h5py
with h5py.File("a.h5", "w") as f:
    f["a"] = [1.0, 2.0]
    f["s"] = "words"
h5py.File("none.h5", "w").close()
PY
  refuses 4 "tensor 's' has elements of type" a.h5 -o out.safetensors
  refuses 4 "tensor 's' has elements of type" a.h5 -o out.safetensors --only '*'
  "$merge" a.h5 -o a.safetensors --only a --verify --quiet
  refuses 3 "none.h5: contains no tensor" none.h5 -o out.safetensors
}

@test "shards with more tensors than their index names" {
  "$merge" run -o shards --format safetensors --max-shard-size 100B --quiet
  /usr/bin/python3 - <<'PY'
import json
index = json.load(open("shards/model.safetensors.index.json"))
del index["weight_map"]["h.1.ln.bias"]
json.dump(index, open("shards/model.safetensors.index.json", "w"))
PY
  run --separate-stderr "$merge" shards -o out.safetensors
  [ "$status" -eq 0 ]
  [[ $stderr == *"does not name 1 of the tensors in its shards, which are left out; the first is 'h.1.ln.bias' of model-"* ]]
}

@test "a model that AutoEP converted becomes the published one again" {
  cat >config.json <<'JSON'
{"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 3,
 "mlp_only_layers": [1], "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 10, "moe_intermediate_size": 6,
 "shared_expert_intermediate_size": 5, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 16,
 "tie_word_embeddings": false}
JSON
  cat >tensors.py <<'PY'
import json, struct
def tensors(path):
    f = open(path, "rb")
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    header.pop("__metadata__", None)
    data = f.read()
    return {name: (t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}
PY
  local name
  for name in autoep-zero2-fp32 autoep-zero3-bf16 universal-autoep-zero3; do
    rm -rf deepspeed model step
    cp -r "$DS_SOURCE/tests/golden/deepspeed/$name" deepspeed
    cp config.json deepspeed
    "$merge" deepspeed -o model --format hf --quiet --verify
    PYTHONPATH=. /usr/bin/python3 - <<'PY'
from tensors import tensors
model, expected = tensors("model/model.safetensors"), tensors("deepspeed/expected.safetensors")
assert model == {name[6:]: t for name, t in expected.items() if name.startswith("param.")}
assert "model.layers.2.mlp.experts.3.up_proj.weight" in model
PY
    # Moments of experts, as batches in a step and one by one again.
    "$merge" deepspeed -o direct.safetensors --optimizer --quiet
    "$merge" deepspeed -o step --format checkpoint --quiet
    "$merge" step -o again.safetensors --optimizer --quiet
    PYTHONPATH=. /usr/bin/python3 -c 'from tensors import tensors
assert tensors("direct.safetensors") == tensors("again.safetensors")'
  done
}

@test "a DeepSpeed directory whose latest is gone or wrong is read by its tag" {
  cp -r "$DS_SOURCE/tests/golden/deepspeed/zero1-bf16" zero
  "$merge" zero -o a.safetensors --quiet
  echo global_step99 >zero/latest
  refuses 3 "zero/latest: names 'global_step99', which does not exist or contains no model states (tags: global_step4)" zero -o out.h5
  rm zero/latest
  refuses 2 "zero: there is no file 'latest' to choose a tag (tags: global_step4)" zero -o out.h5
  "$merge" zero --tag global_step4 -o b.safetensors --quiet
  cmp a.safetensors b.safetensors
  refuses 1 "there is no tag 'global_step5' (tags: global_step4)" zero --tag global_step5 -o out.h5
  refuses 4 "one rank's part of a DeepSpeed checkpoint" \
    zero/global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt -o out.h5
}

@test "more shards than a process may open files" {
  safetensors a.safetensors '{f"w{i}": ["F32", [1], struct.pack("<f", i)] for i in range(200)}'
  "$merge" a.safetensors -o shards --format safetensors --max-shard-size 4B --quiet
  [ "$(ls shards | wc -l)" -eq 201 ]
  (
    ulimit -n 64
    "$merge" shards -o b.safetensors --verify --quiet
  )
  cmp <(tail -c 800 a.safetensors) <(tail -c 800 b.safetensors)
}

@test "a file is refused that the disk has no room for" {
  # 64 TiB of holes, more than a test machine has.
  /usr/bin/python3 - <<'PY'
import json, struct
bytes = 1 << 46
header = json.dumps({"w": {"dtype": "U8", "shape": [bytes], "data_offsets": [0, bytes]}}).encode()
f = open("huge.safetensors", "wb")
f.write(struct.pack("<Q", len(header)) + header)
try:
    f.truncate(8 + len(header) + bytes)
except OSError:
    open("too-large-here", "w")
PY
  [ ! -e too-large-here ] || skip "this file system has no files of 64 TiB"
  refuses 1 "are free" huge.safetensors -o out.safetensors
  run --separate-stderr "$DS_BIN/ds-shard" huge.safetensors -o out
  [ "$status" -eq 1 ]
  [[ $stderr == *"are free"* ]]
  [ ! -e out ]
}

@test "neither report nor model goes over what a checkpoint is made of" {
  local -r before=$(sha256sum run/latest $step/*)
  refuses 2 "is inside a checkpoint step" run -o a.safetensors --output $step/manifest.json
  refuses 2 "is inside a checkpoint step" run -o a.safetensors --output $step/rank-00000.h5
  refuses 2 "is a name that runs use themselves" run -o a.safetensors --output run/latest
  [ "$(sha256sum run/latest $step/*)" == "$before" ]
  "$merge" run -o shards --format safetensors --max-shard-size 100B --quiet
  local -r shard=$(ls shards/model-*.safetensors | head -1)
  refuses 2 "$shard: is a file of the source shards" shards -o "$shard" --only 'h.0*'
  refuses 2 "is a file of the source" shards -o shards/../shards/model.safetensors.index.json --format safetensors
  cp -r "$DS_SOURCE/tests/golden/deepspeed/zero1-bf16" zero
  refuses 2 "is inside a checkpoint step" zero -o zero/global_step4/mp_rank_00_model_states.pt --format safetensors
  refuses 2 "is inside a checkpoint step" zero -o zero/global_step4/x.safetensors
  cp -r "$DS_SOURCE/tests/golden/deepspeed/universal-zero1" universal
  refuses 2 "is a name that runs use themselves" universal -o universal/latest_universal --format safetensors
  refuses 2 "is a name that runs use themselves" run -o run/step-00000010 --format hf
  [ ! -e a.safetensors ]
  # Nor over a file that is read, or that belongs to a model.
  cp -r "$DS_SOURCE/tests/golden/gpt2" hf
  refuses 2 "is a file of the source hf" hf -o hf/config.json --format safetensors
  refuses 2 "--output hf/config.json: is a file of a model" hf -o out.h5 --output hf/config.json
  refuses 2 "--output $shard: is a file of a model" shards -o out.h5 --output "$shard"
  "$merge" run -o model --format safetensors --quiet
  refuses 2 "--output ./model: is also DIR" model -o out.h5 --output ./model
  # Files that only have the names of a checkpoint's parts are overwritten.
  mkdir -p results/step-00000100/eval other
  "$merge" run -o results/step-00000100/eval/x.safetensors --quiet --output other/latest
  "$merge" run -o results/step-00000100/eval/x.safetensors --quiet --output other/latest
}

@test "the report goes to pipes and descriptors, and goes on where they stand" {
  echo before >log
  "$merge" run -o a.safetensors --output /dev/stdout >>log
  "$merge" run -o a.safetensors --output /dev/stderr 2>>log
  "$merge" run -o a.safetensors --output /dev/fd/5 5>>log
  [ "$(head -1 log)" == before ]
  [ "$(grep -c '^checkpoint  run' log)" -eq 3 ]
  "$merge" run -o a.safetensors --output /dev/stdout | grep -q '^tensors     5'
  "$merge" run -o a.safetensors --output >(cat >log2)
  "$DS_BIN/ds-shard" run -o sharded --output >(cat >log3)
  refuses 2 "--output /dev/fd/77" run -o out.h5 --output /dev/fd/77
  touch private && chmod 600 private
  "$merge" run -o a.safetensors --output private
  [ "$(stat -c %a private)" == 600 ]
  "$merge" run -o a.safetensors --output "$(printf '%0255d' 0)"
}

@test "an empty directory keeps its mode, and its owner" {
  mkdir -m 2750 private
  "$merge" run -o private --format checkpoint --quiet
  [ "$(stat -c %a private)" == 2750 ]
  ((EUID == 0)) || return 0
  mkdir theirs && chown 65534:65534 theirs
  "$merge" run -o theirs --format checkpoint --quiet
  [ "$(stat -c %u:%g theirs)" == 65534:65534 ]
  mkdir -m 1777 sticky && mkdir -m 777 sticky/out
  chmod 755 . # nobody comes in
  local nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups)
  "${nobody[@]}" true || skip "no other users here"
  "${nobody[@]}" test -x . -a -r run/latest || skip "others cannot come here"
  cp "$merge" "${merge%/bin/*}"/lib/libds.so* . # where they were built, others may not be able to go
  LD_LIBRARY_PATH=. "${nobody[@]}" ./ds-ckpt-merge run -o sticky/out --format checkpoint --quiet
  [ "$(stat -c %u sticky/out)" == 0 ]
  [ "$(ls -A sticky/out)" == $'latest\nstep-00000003' ]
}

@test "a config.json that the weights do not fit is refused, one of another family's is not judged" {
  cp -r "$DS_SOURCE"/tests/golden/{llama,gpt2} .
  "$merge" llama -o whole --format hf --quiet
  refuses 3 "does not fit the config.json of the output" llama -o out --format hf --config gpt2
  safetensors part.safetensors '{"model.norm.weight": ["F32", [1], b"1234"]}'
  refuses 3 "model.embed_tokens.weight is missing" part.safetensors -o out --format hf --config llama
  sed 's/LlamaForCausalLM/LlamaForSequenceClassification/' llama/config.json >other.json
  "$merge" part.safetensors -o other --format hf --config other.json --quiet
  for text in '[1]' 5 null; do
    cp -r llama bad && printf %s "$text" >bad/config.json
    refuses 3 "bad/config.json: is not a JSON object" bad -o out --format hf
    rm -r bad
  done
  sed 's/"rope_theta"/"no_such_rope_theta"/; s/"silu"/"gelu"/' llama/config.json >odd.json
  run --separate-stderr "$merge" llama -o odd --format hf --config odd.json
  [ "$status" -eq 0 ]
  [[ $stderr == *"cannot check whether the weights fit the config.json of the output: config.json"*hidden_act* ]]
  # Tensors that transformers would ignore are reported.
  /usr/bin/python3 - <<'PY'
import json, struct
data = open("whole/model.safetensors", "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header, body = json.loads(data[8:8 + n]), data[8 + n:]
header["v_head.weight"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(body), len(body) + 4]}
text = json.dumps(header).encode()
open("more.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + body + b"1234")
PY
  run --separate-stderr "$merge" more.safetensors -o more --format hf --config llama
  [ "$status" -eq 0 ]
  [[ $stderr == *"warning: "*"v_head.weight is not a parameter of the model"* ]]
}

@test "the config.json beside a DeepSpeed checkpoint is its model's" {
  cp -r "$DS_SOURCE/tests/golden/deepspeed/zero1-bf16" zero
  refuses 2 "name one with --config" zero -o out --format hf
  echo '{"train_batch_size": 8}' >zero/config.json # of something else
  refuses 2 "name one with --config" zero -o out --format hf
  echo '{"model_type": "mine", "architectures": ["Mine"]}' >zero/config.json
  echo '{}' >zero/tokenizer_config.json
  "$merge" zero -o mine --format hf --quiet
  grep -q '"model_type": "mine"' mine/config.json
  [ -e mine/tokenizer_config.json ]
  "$DS_BIN/ds-shard" zero -o sharded --quiet
  "$merge" sharded -o again --format hf --quiet
  grep -q '"model_type": "mine"' again/config.json
  # Naming the tag's directory means the same.
  "$merge" zero/global_step4 -o tag --format hf --quiet
  diff -r mine tag
}

@test "a mounted empty directory is filled" {
  unshare --map-root-user --mount true || skip "no mounts of our own here"
  mkdir volume
  unshare --map-root-user --mount --propagation private bash -c '
    set -e
    mount -t tmpfs -o size=8m tmpfs volume
    "$1" run -o volume --format checkpoint --verify --quiet >/dev/null
    ls -A volume >listing
    "$1" volume -o a.safetensors --optimizer --quiet
    mkdir volume/inner && mount -t tmpfs tmpfs volume/inner
    "$(dirname "$1")/ds-shard" run -o volume/inner --dp 3 --quiet
    "$1" volume/inner -o c.safetensors --optimizer --quiet
    rm -r volume/inner/*
    ! (ulimit -f 1; "$1" run -o volume/inner --format checkpoint --quiet 2>/dev/null)
    [ -z "$(ls -A volume/inner)" ]' - "$merge"
  [ "$(cat listing)" == $'latest\nstep-00000003' ]
  "$merge" run -o b.safetensors --optimizer --quiet
  cmp a.safetensors b.safetensors
  cmp a.safetensors c.safetensors
}

@test "a name as long as file systems take" {
  local -r file=$(printf '%0243d' 0).safetensors dir=$(printf '%0255d' 0)
  "$merge" run -o "$file" --quiet
  "$merge" run -o "$dir" --format checkpoint --quiet
  "$merge" "$dir" -o b.safetensors --quiet
  cmp "$file" b.safetensors
}
