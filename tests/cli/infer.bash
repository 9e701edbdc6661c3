# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Lines for ds-infer, and a run that continues them.

load tiny

trained() { ds-train cfg.json --out run --steps 3 --quiet; }
infer() { ds-infer run "$@"; }
# The configuration trains a small Llama from then on, whose matrices have whole groups of 32.
of_llama() {
  python3 - <<'PY'
import json
cfg = json.load(open("cfg.json"))
cfg["model"] = {"type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 128, "max_position_embeddings": 64}
json.dump(cfg, open("cfg.json", "w"))
PY
}
# Values of a member, or of an expression over the object d of each line.
each() { python3 -c 'import json, sys; [print(json.dumps(eval(sys.argv[1], {"d": json.loads(l)}))) for l in sys.stdin]' "$1"; }

# The same for one document.
whole() { python3 -c 'import json, sys; print(json.dumps(eval(sys.argv[1], {"d": json.load(sys.stdin)})))' "$1"; }

lines() {
  cat <<'JSON'
{"id": 1, "prompt": "The words", "max_tokens": 20, "temperature": 0}
{"id": 2, "prompt": " A", "max_tokens": 15, "seed": 3, "temperature": 0.9, "top_k": 20}
{"id": 3, "prompt": [73, 116, 32], "max_tokens": 5, "seed": 4, "top_p": 0.8, "logprobs": 2}
{"id": 4, "prompt": "It was in the year of", "max_tokens": 10, "temperature": 0, "prompt_logprobs": true}
{"id": 5, "prompt": "The words", "max_tokens": 12, "n": 3, "seed": 9}
{"id": 6, "prompt": "The words", "max_tokens": 12, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 9}
{"id": 7, "prompt": "z", "max_tokens": 20, "presence_penalty": 2, "frequency_penalty": 0.5, "temperature": 0}
JSON
}
