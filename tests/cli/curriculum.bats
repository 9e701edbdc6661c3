#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Growing sequences, from the shell: metrics contain their lengths, a resumed run continues with the same bits, and no
# arrangement of ranks changes a bit.

bats_require_minimum_version 1.5.0

load tiny

grows='{"enabled": true, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
  "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 8}}'

lengths() { grep '"type":"step"' "$1/metrics.jsonl" | sed 's/.*"seq_length":\([0-9]*\).*/\1/' | tr '\n' ' '; }
tokens() { grep '"type":"step"' "$1/metrics.jsonl" | sed 's/.*"tokens":\([0-9]*\).*/\1/' | tr '\n' ' '; }

@test "sequences grow by the schedule, and their tokens are counted" {
  ds-train cfg.json --out r --quiet --steps 10 --set curriculum_learning="$grows" --set eval.every=4
  assert_equal "$(lengths r)" "8 8 16 16 16 24 24 32 32 32 "
  assert_equal "$(tokens r)" "64 64 128 128 128 192 192 256 256 256 "
  ds-train cfg.json --out whole --quiet --steps 2
  run grep -c '"type":"step".*seq_length' whole/metrics.jsonl
  assert_output 0
}

@test "a run that grows is resumed bit for bit, with other ranks, and evaluations move nothing" {
  ds-launch -n 2 ds-train cfg.json --out whole --quiet --steps 10 --set curriculum_learning="$grows"
  for more in '-n 2 zero_optimization.stage=3' '-n 4 zero_optimization.stage=1' '-n 2 pipeline.stages=2' '-n 1 eval.every=3'; do
    read -r n ranks set <<<"$more"
    rm -rf half
    ds-launch -n 2 ds-train cfg.json --out half --quiet --steps 5 --set curriculum_learning="$grows" --set eval.every=2
    ds-launch "$n" "$ranks" ds-train cfg.json --out half --quiet --steps 10 --resume latest \
      --set curriculum_learning="$grows" --set "$set"
    assert_equal "$(losses half)" "$(losses whole)"
    assert_equal "$(lengths half)" "$(lengths whole)"
  done
  merged whole whole.safetensors
  merged half half.safetensors
  cmp whole.safetensors half.safetensors
}

@test "what is predicted of steps of several lengths is what they send and take" {
  local steps
  for steps in 2 10; do
    set -- --steps $steps --set curriculum_learning="$grows" --set tensor_parallel.tp_size=2
    ds-launch -n 2 ds-train cfg.json --out run$steps --quiet "$@"
    ds-launch -n 2 ds-train cfg.json --check --json "$@" >check.json
    python3 - run$steps $steps <<'PYTHON'
import json, sys
check, steps, sent = json.load(open("check.json")), int(sys.argv[2]), []
for line in map(json.loads, open(sys.argv[1] + "/metrics.jsonl")):
    if line["type"] == "step":
        sent.append({k: v for k, v in line["comm_bytes"].items() if not k.endswith(".stats")})
    if line["type"] == "memory":
        for rank in line["ranks"]:
            assert rank["predicted_bytes"] == rank["counted_bytes"], rank
            assert "bounds" not in rank, rank
for name, mean in check.get("mean_comm_bytes_per_step", check["comm_bytes_per_step"]).items():
    assert abs(sum(s.get(name, 0) for s in sent) / steps - mean) < 1, name
for name, last in check["comm_bytes_per_step"].items():
    assert sent[-1].get(name, 0) == last, name
PYTHON
  done
  # Part of a run may not come to the steps that take most.
  ds-launch -n 2 ds-train cfg.json --out run2 --quiet --steps 4 --resume latest "${@:3}"
  tail -1 run2/metrics.jsonl | grep -q '"bounds":{"comm":"at most","scratch":"at most"}'
  run ds-memreport run2/metrics.jsonl
  assert_line --regexp '^ *scratch .* (exact|at most)$'
}

@test "what does not fit, or is not there, is refused before anything is written" {
  refused 2 'curriculum_learning.schedule_config.total_curriculum_step: is missing' --set curriculum_learning.enabled=true \
    --set curriculum_learning.schedule_type=fixed_linear
  refused 4 '"custom" is not supported yet' --set curriculum_learning="$grows" --set curriculum_learning.schedule_type=custom
  refused 4 'curriculum_learning.enabled: a layout of sparse attention' --set curriculum_learning="$grows" \
    --set sparse_attention.mode=local
}
