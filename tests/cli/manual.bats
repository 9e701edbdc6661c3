#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The examples of ds-config(5), as the page prints them: the first one is gpt.json, those that begin with $ are
# commands, and the others are members of gpt.json. A first line with # gives the number of ranks, the expected exit
# status and message or the expected warning, or marks the block as a line of a data file.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  python3 - "$DS_SOURCE/man/ds-config.5" <<'PY'
import array, json, re, sys

page = open(sys.argv[1]).read()
first, *others = [block.replace("\\e", "\\") for block in re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed$", page, re.M | re.S)]
open("gpt.json", "w").write(first)
commands, examples = open("commands", "w"), open("examples", "w")
for number, block in enumerate(others):
    if block.startswith("$ "):
        commands.write(re.sub(r"^\$ ", "", block, flags=re.M))
        continue
    note, members = re.fullmatch(r"(?:# ([^\n]*)\n)?(.*)", block, re.S).groups()
    note = note or ""
    if line := re.fullmatch(r"a line of (\S+)", note):
        open(line.group(1), "w").write((json.dumps(json.loads(members)) + "\n") * 100)
        continue
    ranks = re.fullmatch(r"on (\d+) ranks", note)
    refused = re.fullmatch(r"exit (\d): (.*)", note)
    warned = re.fullmatch(r"warns: (.*)", note)
    assert not note or ranks or refused or warned, note
    with open(f"{number}.json", "w") as out:
        json.dump({**json.loads(first), **json.loads("{" + members + "}")}, out)
    text = refused.group(2) if refused else warned.group(1) if warned else ""
    print(number, ranks.group(1) if ranks else 1, refused.group(1) if refused else 0, text, file=examples)
array.array("i", list(open("text.txt", "rb").read())).tofile(open("tokens.bin", "wb"))
PY
  for text in book poems held-out; do cp text.txt $text.txt; done
  mkdir disk smollm
  cat >smollm/config.json <<'JSON'
{"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
JSON
}

@test "the examples of ds-config(5) are accepted, or refused as it says" {
  (($(wc -l <examples) > 30))
  while read -r number ranks code text; do
    launch=()
    ((ranks == 1)) || launch=(ds-launch -n "$ranks")
    run --separate-stderr "${launch[@]}" ds-train "$number.json" --check --output plan.txt </dev/null
    # shellcheck disable=SC2154
    [[ $status == "$code" && $stderr == *"$text"* ]] || fail "$(cat "$number.json"): status $status: $stderr"
    [[ -n $text || $stderr != *warning* || $stderr == *"ranks share"* ]] || fail "$(cat "$number.json"): $stderr"
  done <examples
}

@test "the commands of ds-config(5) succeed" {
  OMP_NUM_THREADS=1 bash -e commands
}
