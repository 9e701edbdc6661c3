#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Documents, wherever their borders are known: the loss is the mean over the targets of each document alone, on ranks of every
# kind; keys, notes and refusals.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  cat >documents.py <<'PY'
import array, json, os, struct, subprocess, sys

def bin(name, ids):
    open(name, "wb").write(struct.pack("<%dH" % len(ids), *ids))

# Tokens of sequences, and the sequences before the end of each document.
def idx(name, lengths, ends):
    places = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    open(name, "wb").write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(ends)) + struct.pack("<%di" % len(lengths), *lengths)
                           + struct.pack("<%dq" % len(places), *places) + struct.pack("<%dq" % len(ends), *ends))

def jsonl(name, texts):
    open(name, "w").write("".join(json.dumps({"text": t}) + "\n" for t in texts))

# Weights with which tokens depend much on those before them.
def make_weights():
    if os.path.exists("weights.safetensors"): return
    for command in (["ds-train", "cfg.json", "--out", "first", "--quiet", "--steps", "1"], ["ds-ckpt-merge", "first", "-o", "first.safetensors", "--quiet"]):
        subprocess.run(command, check=True)
    file = open("first.safetensors", "rb").read()
    size, = struct.unpack("<Q", file[:8])
    numbers = array.array("f", file[8 + size:])
    for name, tensor in json.loads(file[8:8 + size]).items():
        if len(tensor.get("shape", [])) != 2: continue
        begin, end = (x // 4 for x in tensor["data_offsets"])
        for i in range(begin, end): numbers[i] *= 12
    open("weights.safetensors", "wb").write(file[:8 + size] + numbers.tobytes())

def loss(data, ranks=1, **keys):
    model = {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = {"model": model, "data": {"train": "many.bin", "seq_length": 16, **data}, "train_batch_size": 2, "steps": 1,
              "threads": 1, "eval": {"batches": 0}, "loss_norm": "token", **keys}
    make_weights()
    json.dump(config, open("documents.json", "w"))
    run = subprocess.run(["ds-launch", "-n", str(ranks), "ds-train", "--eval", "documents.json", "--json", "--weights", "weights.safetensors"], capture_output=True, text=True)
    if run.returncode != 0: sys.exit(f"{data}: exit {run.returncode}: {run.stderr}")
    return json.loads(run.stdout)["val_loss"]

# A document alone is a sample, of a run that knows nothing of documents.
def alone(document):
    bin("alone.bin", document)
    targets = len(document) - 1
    return targets * loss({"validation": "alone.bin", "seq_length": targets}), targets

def mean(*documents):
    sums = [alone(d) for d in documents if len(d) > 1]
    return sum(s for s, _ in sums) / sum(n for _, n in sums)

wrong = 0
def check(name, right, data, **keys):
    global wrong
    got = loss(data, **keys)
    if abs(got - right) > 3e-6 * right:
        wrong += 1
        print(f"{name}: {got}, right is {right}")

bin("many.bin", [1, 2, 3, 0, 4, 5, 6, 0] * 8)
A, B, C = [21, 22, 23, 0], [31, 32, 33, 34, 35, 36], [41, 42, 43, 44, 45]
PACKED = {"document_token": 0, "packing": "best_fit"}
PY
}

documents() { python3 -c "from documents import *
$1
sys.exit(wrong)" || fail "see above"; }

@test "packed documents are alone: without the token at the end, in front, in files, cut by the split" {
  documents '
bin("open.bin", A + B)
check("the last one has no token", mean(A, B), {"validation": "open.bin", **PACKED})
bin("front.bin", [0] + A + B)
check("the token in front, read as the end", mean(A, B), {"validation": "front.bin", **PACKED})
check("the token in front", mean([0, 21, 22, 23, 0][:4] + [0], [0] + B), {"validation": "front.bin", "document_token_at": "begin", **PACKED})
bin("b.bin", B); bin("c.bin", C)
files = {"validation": ["b.bin", "c.bin"], **PACKED}
right = mean(B, C)
check("two files", right, files)
check("two ranks", right, files, ranks=2, zero_optimization={"stage": 3})
check("stages", right, files, ranks=2, pipeline={"stages": 2})
check("slices", right, files, ranks=2, tensor_parallel={"tp_size": 2})
check("halves of samples", right, files, ranks=2, sequence_parallel_size=2)
check("rings", right, files, ranks=2, sequence_parallel_size=2, sequence_parallel_mode="ring")
data = [51, 52, 0] * 9 + [61, 62, 63, 0] + B + [0] + C
cut = len(data) - 8  # in B
bin("cut.bin", data)
check("a part of the data", mean(data[cut:cut + 3], C), {"train": "cut.bin", "split": 8.5 / len(data), **PACKED})
'
}

@test "packed documents are alone: by an index, lines of JSON, files of text" {
  documents '
bin("m.bin", B + C); idx("m.idx", [2, 4, 5], [0, 2, 3])
right = mean(B, C)
check("an index, and a token that is nowhere", right, {"validation": "m", **PACKED})
check("an index alone", right, {"train": "m", "validation": "m", "packing": "best_fit"})
bin("n.bin", A + C + [0] + B); idx("n.idx", [4, 6, 6], [0, 1, 2, 3])
check("an index, and tokens in some", mean(A, C + [0], B), {"validation": "n", **PACKED})
check("tokens added", mean(B + [0], C + [0]), {"validation": "m", "add_document_token": True, **PACKED})
check("tokens added in front", mean([0] + B + [0], [0] + C), {"validation": "m", "add_document_token": True, "document_token_at": "begin", **PACKED})
texts = ["hello world", "abc", "xyzzy"]
jsonl("t.jsonl", texts)
ids = [list(t.encode()) for t in texts]
lines = {"train": "t.jsonl", "validation": "t.jsonl"}
check("lines", mean(*ids), {**lines, "packing": "best_fit"})
check("lines with tokens", mean(*[i + [0] for i in ids]), {**lines, **PACKED})
jsonl("some.jsonl", ["hello world|", "abc", "xyzzy|"])
check("lines of which some have it", mean(*[i + [124] for i in ids]), {"train": "some.jsonl", "validation": "some.jsonl", "packing": "best_fit", "document_token": 124})
for i, t in enumerate(texts): open(f"{i}.txt", "w").write(t)
check("files", mean(*ids), {"train": ["0.txt", "1.txt", "2.txt"], "validation": ["0.txt", "1.txt", "2.txt"], "packing": "best_fit"})
'
}

@test "packed documents are alone: by rows of HDF5, as by the same lines of JSON" {
  export golden=$BATS_TEST_DIRNAME/../golden
  documents '
ids = [(31 * i * i + 7 * i) % 100 for i in range(60)]  # as make_data.py has them
rows = [ids[i:i + 10] for i in range(0, 60, 10)]
jsonl("rows.jsonl", ["".join(map(chr, row)) for row in rows])
right, right_with_token = mean(*rows), mean(*[row + [101] for row in rows])
for name in ("rows.jsonl", os.environ["golden"] + "/data/several.h5:/group/rows"):
    data = {"train": name, "validation": name, "packing": "best_fit"}
    check(name, right, data)
    token = {"document_token": 101, **({"add_document_token": True} if ":/" in name else {})}
    check(f"{name} and a token", right_with_token, {**data, **token})
'
}

@test "packed documents are alone: by rows of Parquet and Arrow, as by the same lines of JSON" {
  ds-train --version | grep -q arrow || skip 'this build has no Apache Arrow'
  export golden=$BATS_TEST_DIRNAME/../golden/arrow
  documents '
TOKEN = {"packing": "best_fit", "document_token": 0}
def of(name, keys): return loss({"train": name, "validation": name, "seq_length": 60, **keys})
for keys in ({"packing": "best_fit"}, TOKEN, {**TOKEN, "separate_documents": False}, {"separate_documents": True},
             {"document_token": 0, "document_token_at": "begin"}):
    for kind in "texts", "prompts", "messages":
        name = os.environ["golden"] + "/" + kind
        right = of(name + ".jsonl", keys)
        for table in ".parquet", ".arrow", ".feather":
            got = of(name + table, keys)
            if got != right: sys.exit(f"{kind}{table} {keys}: {got}, right is {right}")
'
}

@test "documents of samples that are cut: separated or not, positions, the loss across borders" {
  documents '
bin("m.bin", A + B + C + [1]); idx("m.idx", [4, 6, 6], [0, 1, 2, 3])
m = {"train": "m", "validation": "m", "seq_length": 15, "split": 0}
del m["split"]
sums = [alone(A), alone(B), alone(C)]
n = sum(k for _, k in sums)
# The token of A predicts the first one of B; nothing ends B.
across, apart = alone(A + B[:1]), sums[0]
with_next = (across[0] + sums[1][0] + sums[2][0]) / (n + 1)
check("an index, no token", sum(s for s, _ in sums) / n, {**m, "separate_documents": True})
check("the token predicts", with_next, {**m, "document_token": 0})
check("it does not", sum(s for s, _ in sums) / n, {**m, "document_token": 0, "loss_across_documents": False})
bin("whole.bin", A + B + C + [1])
whole = loss({"validation": "whole.bin", "seq_length": 15})
check("joined", whole, {**m, "document_token": 0, "separate_documents": False})
if loss({**m, "document_token": 0, "document_positions": "continue"}) in (whole, with_next): sys.exit("positions have no effect")
'
}

@test "what marks documents is said, and where nothing does" {
  python3 -c 'from documents import *
bin("plain.bin", (B + C) * 9)
bin("front.bin", ([0] + B) * 9)
bin("m.bin", B + C); idx("m.idx", [6, 5], [0, 1, 2])'
  local packed=(--set data.document_token=0 --set data.packing=best_fit --set data.split=0 --set data.seq_length=8)
  run --separate-stderr ds-train cfg.json --check "${packed[@]}" --set data.train=many.bin
  assert_success
  run --separate-stderr ds-train cfg.json --check "${packed[@]}" --set data.train=m
  [[ $stderr == *"data file 'm.bin': 2 documents by its index, of which 2 do not end with data.document_token 0"* ]] || fail "$stderr"
  [[ $stderr == *"training data: 2 documents of 11 tokens, the median of 5.5 and the longest of 6; 0 are cut; 2 samples, 68.8 % full"* ]] || fail "$stderr"
  run -0 --separate-stderr ds-train cfg.json --check --json "${packed[@]}" --set data.train=m --set data.validation=many.bin
  python3 - "$output" <<'PY'
import json, sys
documents = json.loads(sys.argv[1])["documents"]
training = {"documents": 2, "tokens": 11, "median_tokens": 5.5, "longest_tokens": 6, "cut": 0, "samples": 2, "full": 0.6875}
validation = {"documents": 16, "tokens": 64, "median_tokens": 4, "longest_tokens": 4, "cut": 0, "samples": 8, "full": 1}
assert documents == {"training": training, "validation": validation}, documents
PY
  run -0 --separate-stderr ds-train cfg.json --check --json
  [[ $output != *'"documents"'* ]] || fail "$output"
  run -2 --separate-stderr ds-train cfg.json --check --json --set data.train=plain.bin --set data.packing=best_fit
  [[ $output == *'"memory_bytes"'* && $stderr == *"data.packing: needs data.document_token"* ]] || fail "$output $stderr"
  run --separate-stderr ds-train cfg.json --steps 1 "${packed[@]}" --set data.train=m
  [[ $stderr == *"2 documents by its index"* ]] || fail "$stderr"
  for packing in best_fit none; do
    run --separate-stderr ds-train cfg.json --steps 1 "${packed[@]}" --set data.train=plain.bin --set data.packing=$packing
    assert_success
    [[ $stderr == *"warning: data.document_token 0 occurs nowhere in 'plain.bin'"* ]] || fail "$stderr"
  done
  refused 2 "data.packing: needs data.document_token: nothing else tells where documents begin in 'plain.bin'" \
    --set data.train=plain.bin --set data.packing=best_fit
  refused 2 "data.separate_documents: needs data.document_token" --set data.train=plain.bin --set data.separate_documents=true
  refused 2 "data.add_document_token: needs data.document_token" --set data.add_document_token=true
  refused 2 "data.document_token_at: needs data.document_token" --set data.document_token_at=begin
  run --separate-stderr ds-train cfg.json --check --set data.train=front.bin "${packed[@]}"
  [[ $stderr == *"begins with data.document_token 0 and does not end with it"*'data.document_token_at to "begin"'* ]] || fail "$stderr"
  run --separate-stderr ds-train cfg.json --check --set data.train=front.bin "${packed[@]}" --set data.document_token_at=begin
  [[ $stderr != *"does not"* ]] || fail "$stderr"
  run --separate-stderr ds-train cfg.json --check --set data.document_positions=continue
  [[ $stderr == *"data.document_positions: has no effect"* ]] || fail "$stderr"
}

@test "a run resumes with the same documents only, on any ranks" {
  python3 -c 'from documents import *
bin("a.bin", (A + C + [0]) * 40 + B)
bin("b.bin", (C + [0] + A) * 40)'
  local data=(--set 'data.train=["a.bin", "b.bin"]' --set data.document_token=0 --set data.seq_length=16)
  for key in data.packing=best_fit data.document_positions=continue data.loss_across_documents=false data.document_token_at=begin; do
    ds-train cfg.json --out "one.$key" --quiet --steps 6 "${data[@]}" --set $key
    ds-launch -n 2 ds-train cfg.json --out "two.$key" --quiet --steps 3 "${data[@]}" --set $key
    ds-launch -n 4 ds-train cfg.json --out "two.$key" --quiet --steps 6 --resume latest "${data[@]}" --set $key --set zero_optimization.stage=3
    assert_equal "$(losses "two.$key")" "$(losses "one.$key")"
    run -3 --separate-stderr ds-train cfg.json --out "one.$key" --quiet --steps 9 --resume latest "${data[@]}"
    local was=${key#*=} is
    case $key in
      data.packing=*) is=none ;;
      data.document_positions=*) is=restart ;;
      data.loss_across_documents=*) is=true ;;
      *) is=end ;;
    esac
    [[ $stderr == *"${key%=*} is $is, but the run was started with $was"* || $stderr == *"${key%=*} is $is here and $was there"* ]] ||
      fail "$key: $stderr"
  done
  ds-train cfg.json --out plain --quiet --steps 2 "${data[@]}"
  run -3 --separate-stderr ds-train cfg.json --out plain --quiet --steps 9 --resume latest "${data[@]}" --set data.separate_documents=false
  [[ $stderr == *"data.separate_documents is false here and true there"* && $stderr != *data.document_token* ]] || fail "$stderr"
  run -3 --separate-stderr ds-train cfg.json --out plain --quiet --steps 9 --resume latest "${data[@]}" --set data.document_token=1
  [[ $stderr == *"data.document_token is 1 here and 0 there"* ]] || fail "$stderr"
  # Other keys than those of the first start, and the same documents.
  ds-train cfg.json --out plain --quiet --steps 4 --resume latest "${data[@]}" --set data.loss_across_documents=true --set data.packing=none
}
