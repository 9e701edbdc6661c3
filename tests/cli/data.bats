#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-train on the data files of others: the same tokens give the same losses, whatever holds them; resuming, refusals.

bats_require_minimum_version 1.5.0

load tiny

# One stream of tokens (the bytes of the text) in every format.
setup() {
  tiny_setup
  python3 - <<'PY'
import json, struct
text = open("text.txt", "rb").read()[:9000].decode().encode("ascii", "replace")
open("cut.txt", "wb").write(text)
u16 = b"".join(struct.pack("<H", c) for c in text)
open("nano.bin", "wb").write(u16)
open("llmc.bin", "wb").write(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253) + u16)
open("meg.bin", "wb").write(b"".join(struct.pack("<i", c) for c in text))
cuts = [0, 1000, 1001, 5000, len(text)]
lengths = [b - a for a, b in zip(cuts, cuts[1:])]
open("meg.idx", "wb").write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 4, 3) + struct.pack("<4i", *lengths) +
                            struct.pack("<4q", *[4 * c for c in cuts[:-1]]) + struct.pack("<3q", 0, 1, 4))
with open("lines.jsonl", "w") as f:
    for begin in range(0, len(text), 700):
        f.write(json.dumps({"id": begin, "text": text[begin : begin + 700].decode()}) + "\n")
PY
}

# The tensors of a run, without the header, which describes its data.
tensors() {
  merged "$1" "$1.safetensors" >/dev/null
  python3 -c 'import struct, sys
f = open(sys.argv[1], "rb")
f.seek(struct.unpack("<Q", f.read(8))[0], 1)
sys.stdout.buffer.write(f.read())' "$1.safetensors"
}

@test "the same tokens train alike, whatever file holds them, and resume bit for bit" {
  ds-train cfg.json --out want --quiet --set data.train=cut.txt
  tensors want >want.tensors
  for file in nano.bin llmc.bin meg meg.idx lines.jsonl; do
    rm -rf got
    ds-launch -n 2 ds-train cfg.json --out got --quiet --set data.train=$file --steps 5
    ds-train cfg.json --out got --quiet --set data.train=$file --resume latest
    diff <(losses want) <(losses got)
    tensors got >got.tensors
    cmp want.tensors got.tensors
  done
  run -3 ds-train cfg.json --out got --quiet --set data.train=nano.bin --steps 14 --resume latest # was lines.jsonl
}

@test "a run goes on with the same index and the same reading only" {
  ds-train cfg.json --out run --quiet --set data.train=meg --steps 2
  run -3 ds-train cfg.json --out run --set data.train=meg.bin --set data.format=bin --set data.token_dtype=int32 --resume latest
  assert_output --partial "data.train has 1 files, but the run was started with 2"
  printf '\2' | dd of=meg.idx bs=1 seek=$((34 + 4 * 12 + 8)) conv=notrunc status=none # documents of 2 and 2 sequences
  run -3 ds-train cfg.json --out run --set data.train=meg --resume latest
  assert_output --partial "meg.idx' has other content"
}

@test "what is wrong with a data file is told before the run" {
  head -c 1500 llmc.bin >short.bin
  refused 3 "short.bin' begins with llm.c's magic number" --set data.train=short.bin
  printf '\377\377\377\377' | dd of=meg.idx bs=1 seek=38 conv=notrunc status=none
  refused 3 "index 'meg.idx': sequence 1 has -1 tokens" --set data.train=meg
  printf '{"text": "good"}\n{"txt": "bad"}\n' >bad.jsonl
  refused 3 "bad.jsonl:2: the object has no member \"text\"" --set data.train=bad.jsonl
  refused 2 "mix tokens and text" --set data.train='["nano.bin", "lines.jsonl"]'
  refused 2 "has several datasets" --set data.train="$DS_SOURCE/tests/golden/data/several.h5"
  refused 4 "h5repack" --set data.train="$DS_SOURCE/tests/golden/data/chunked.h5"
}

@test "conversations and weighted files train, and resume bit for bit" {
  python3 - <<'PY'
import json
with open("chat.jsonl", "w") as f:
    for i in range(200):
        f.write(json.dumps({"messages": [{"role": "user", "content": f"{i} + 1 = ?"},
                                         {"role": "assistant", "content": str(i + 1)}]}) + "\n")
PY
  for data in '"train": "chat.jsonl"' '"train": ["nano.bin", "meg"], "weights": [0.3, 2], "split": 0'; do
    sed "s/\"train\": \"text.txt\"/$data/" cfg.json >own.json
    rm -rf whole parts
    ds-train own.json --out whole --quiet
    ds-launch -n 2 ds-train own.json --out parts --quiet --steps 5
    ds-train own.json --out parts --quiet --resume latest
    diff <(losses whole) <(losses parts)
    merged whole whole.safetensors
    merged parts parts.safetensors
    cmp whole.safetensors parts.safetensors
  done
  run -3 ds-train own.json --out parts --resume latest --set data.weights='[1, 2]'
  assert_output --partial "data.weights is [1, 2], but the run was started with [0.3, 2]"
  refused 2 "give data.validation, or set data.split to 0" --set data.weights='[2]'
}

@test "conversations in a form that the configuration spells out: trained, resumed with the same alone" {
  for i in {1..40}; do
    printf '{"messages": [{"role": "user", "content": "What is %d + 1?"}, {"role": "assistant", "content": "%d."}], "score": NaN}\n' \
      "$i" "$((i + 1))"
  done >chat.ndjson
  local form=(--set 'data.train="chat.ndjson"' --set 'data.chat_template.user="[INST] {content} [/INST]"'
    --set 'data.chat_template.assistant=" {content} </s>"')
  ds-train cfg.json --out r --quiet --steps 3 "${form[@]}"
  ds-train cfg.json --out r --quiet --steps 5 --resume latest "${form[@]}"
  assert_equal "$(losses r | wc -l)" 5
  run -3 --separate-stderr ds-train cfg.json --out r --quiet --steps 6 --resume latest "${form[@]}" \
    --set 'data.chat_template.assistant="{content}</s>"'
  [[ $stderr == *chat.ndjson* ]] || fail "$stderr"
  refused 2 'data.chat_template.assistant: must contain {content} exactly once' --set data.chat_template.assistant=x
  refused 2 'data.chat_template: no data file has messages' --set 'data.chat_template.assistant="{content}"'
}

@test "samples of whole documents train alike on any ranks, and resume bit for bit" {
  for i in {1..60}; do printf '{"text": "%s"}\n' "$(head -c $((i * 7 % 90 + 3)) text.txt | tr -d '"\\\n' | tr '\t' ' ')"; done >documents.jsonl
  local packed=(--set data.train=documents.jsonl --set data.document_token=0 --set data.packing=best_fit --set data.split=0.2)
  ds-train cfg.json --out one --quiet --steps 8 "${packed[@]}"
  ds-launch -n 2 ds-train cfg.json --out two --quiet --steps 4 "${packed[@]}"
  ds-launch -n 4 ds-train cfg.json --out two --quiet --steps 8 --resume latest "${packed[@]}" --set zero_optimization.stage=3
  assert_equal "$(losses two)" "$(losses one)"
  run -3 --separate-stderr ds-train cfg.json --out one --quiet --steps 9 --resume latest "${packed[@]}" --set data.packing=none
  [[ $stderr == *"data.packing is none, but the run was started with best_fit"* ]] || fail "$stderr"
  refused 2 'data.packing: needs data.document_token' --set data.packing=best_fit
}

@test "compressed text and wide ids train as the plain files; other content is refused by its name" {
  python3 - <<'PY'
import gzip, struct
text = open("cut.txt", "rb").read()
open("cut.txt.gz", "wb").write(gzip.compress(text[:4000]) + gzip.compress(text[4000:]))
open("wide.bin", "wb").write(b"".join(struct.pack("<I", c) for c in text))
open("latin1.txt", "wb").write(text + b"na\xefve")
open("chat.jsonl", "w").write('{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "weight": 0}, '
                              '{"role": "assistant", "content": "345678"}]}\n' * 100)
PY
  ds-train cfg.json --out want --quiet --set data.train=cut.txt
  for data in '"cut.txt.gz"' '"wide.bin" --set data.token_dtype=uint32'; do
    rm -rf got
    # shellcheck disable=SC2086 # two options
    ds-train cfg.json --out got --quiet --set data.train=$data
    assert_equal "$(losses got)" "$(losses want)"
  done
  run --separate-stderr ds-train cfg.json --check --set data.train=cut.txt.gz
  assert_equal "$stderr" "ds-train: data file 'cut.txt.gz': 9000 bytes of text, decompressed by gzip"
  run --separate-stderr ds-train cfg.json --check --set data.train=chat.jsonl
  [[ $stderr == *"ds-train: data file 'chat.jsonl': 100 messages of weight 0 are not trained on"* ]] || fail "$stderr"
  run --separate-stderr ds-train cfg.json --check --set data.train=wide.bin --set data.token_dtype=uint16
  [[ $stderr == *"warning: data file 'wide.bin' looks like ids of 4 or more bytes"* ]] || fail "$stderr"
  refused 3 "wide.bin' looks like ids of 4 or more bytes: every second one is almost 0 (set data.token_dtype)" --set data.train=wide.bin
  refused 3 "latin1.txt', line" --set data.train=latin1.txt
  refused 3 'nano.bin:1: this is binary data' --set data.train=nano.bin --set data.format=jsonl
  refused 2 'data.token_dtype: no data file is a .bin' --set data.train=cut.txt --set data.token_dtype=uint32
}
