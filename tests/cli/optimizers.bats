#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Optimizers from the shell: each trains, resumes bit for bit at another layout, merges with its states, and is refused by
# a run that has another.

bats_require_minimum_version 1.5.0

load tiny

# type, its params, its states
optimizers=(
  'AdamW|"lr":3e-3,"weight_decay":0.1|exp_avg exp_avg_sq'
  'Adam|"lr":3e-3,"adam_w_mode":false,"weight_decay":0.1|exp_avg exp_avg_sq'
  'SGD|"lr":0.05|'
  'SGD|"lr":0.05,"momentum":0.9,"nesterov":true|momentum_buffer'
  'Lion|"lr":3e-4,"weight_decay":0.1|exp_avg'
  'Adagrad|"lr":0.02,"weight_decay":0.1|sum'
  'Muon|"lr":0.02,"adam_lr":3e-3,"weight_decay":0.1|exp_avg exp_avg_sq momentum_buffer'
  'Lamb|"lr":0.02,"weight_decay":0.1|exp_avg exp_avg_sq'
  'AdamW8bit|"lr":3e-3,"weight_decay":0.1|exp_avg exp_avg_sq'
  'AdamW|"lr":3e-3,"weight_decay":0.1,"state_dtype":"bf16"|exp_avg exp_avg_sq'
)

with_optimizer() { # type params
  sed "s|\"optimizer\": .*|\"optimizer\": {\"type\": \"$1\", \"params\": {$2}},|" cfg.json
}

# The states in a merged file, from its header.
states_of() { head -c 100000 "$1" | grep -ao '"optimizer\.[a-z_]*' | sed 's/"optimizer\.//' | sort -u | tr '\n' ' ' | sed 's/ $//'; }

@test "every optimizer resumes bit for bit at another layout, and merges with its states" {
  for row in "${optimizers[@]}"; do
    IFS='|' read -r type params states <<<"$row"
    # DS_SLOW=1: the others, too.
    [[ -n ${DS_SLOW-} || $row == *@(nesterov|Muon|8bit)* ]] || continue
    with_optimizer "$type" "$params" >o.json
    rm -rf whole half
    ds-launch -n 2 ds-train o.json --out whole --quiet --steps 8
    ds-launch -n 2 ds-train o.json --out half --quiet --steps 4
    ds-launch -n 4 ds-train o.json --out half --quiet --steps 8 --resume latest --set zero_optimization.stage=3
    assert_equal "$(losses half)" "$(losses whole)"
    assert [ "$(losses whole | tail -1 | cut -d' ' -f2 | cut -c1-4)" != "$(losses whole | head -1 | cut -d' ' -f2 | cut -c1-4)" ]
    merged whole whole.safetensors
    merged half half.safetensors
    cmp whole.safetensors half.safetensors
    assert_equal "$(states_of whole.safetensors)" "$states"
    ds-ckpt-merge whole --verify -o again.safetensors --quiet
  done
}

# Resuming from a run or step fails with a message, which --check foresees.
refused() { # config out what
  for check in "" --check; do
    # shellcheck disable=SC2086
    run ds-train "$1" $check --out "$2" --resume latest
    assert_failure 3
    assert_output --partial "$3"
    assert_output --partial "or start from the weights: --weights"
  done
}

@test "a run with another optimizer is refused, and told what to do" {
  with_optimizer Lion '"lr":3e-4' >lion.json
  with_optimizer Lamb '"lr":3e-3' >lamb.json
  with_optimizer SGD '"lr":0.05,"momentum":0.9' >momentum.json
  with_optimizer SGD '"lr":0.05' >sgd.json
  local all=(cfg lion momentum ${DS_SLOW:+lamb sgd})
  for made in "${all[@]}"; do
    ds-train $made.json --out $made --quiet --steps 2
    # The same through a file of whole tensors, which contains no configuration.
    merged $made $made.safetensors
    ds-shard $made.safetensors -o $made-sharded --dp 2 --stage 1 --quiet
  done
  for made in "${all[@]}"; do
    for other in "${all[@]}"; do
      [[ $made != "$other" ]] || continue
      [[ -n ${DS_SLOW-} || $made$other == @(cfglion|lionmomentum|momentumcfg) ]] || continue
      refused $other.json $made "and is updated by"
      refused $other.json $made-sharded "and is updated by"
    done
    ds-train $made.json --out $made-sharded --resume latest --quiet --steps 3
    ds-train $made.json --out $made --resume latest --quiet --steps 3
    assert_equal "$(losses $made | tail -1)" "$(losses $made-sharded | tail -1)"
  done
  ds-train cfg.json --out weights --weights lion/step-00000002 --quiet --steps 1
  with_optimizer Adam '"lr":3e-3' >adam.json
  ds-train adam.json --out cfg --resume latest --quiet --steps 4
}

@test "each parameter goes on with its own optimizer, whatever the groups are; frozen ones need none" {
  groups() { sed "s|\"optimizer\": .*|\"optimizer\": {\"params\": {\"lr\": 3e-3}, \"param_groups\": [$1]},|" cfg.json; }
  groups '{"params": "*mlp*", "type": "Lamb"}' >mlp.json
  groups '{"params": "*attn*", "type": "Lamb"}' >attn.json
  ds-train mlp.json --out run --quiet --steps 2
  refused attn.json run "has the state of AdamW (exp_avg, exp_avg_sq) there, and is updated by Lamb"
  # Other rates and decay, in groups or not, are the same optimizer.
  groups '{"params": "*ln_*", "weight_decay": 0.1}, {"params": "*mlp*c_fc*", "type": "Lamb", "lr": 1e-3}, {"params": "*mlp*", "type": "Lamb"}' >more.json
  ds-train more.json --out run --resume latest --quiet --steps 3
  # Parameters that are frozen meanwhile continue without their state, and cannot be trained again without one.
  groups '{"params": "*mlp*", "frozen": true}' >frozen.json
  ds-train frozen.json --out run --resume latest --quiet --steps 4
  ds-train frozen.json --out run --resume latest --quiet --steps 5
  refused mlp.json run "has the state of AdamW (no state) there, and is updated by Lamb"
}

@test "AdamW and AdamW8bit go on from each other's steps, which hold fp32; others do not" {
  with_optimizer AdamW8bit '"lr":3e-3' >coded.json
  with_optimizer AdamW '"lr":3e-3,"state_dtype":"bf16"' >bf16.json
  with_optimizer Lion '"lr":3e-4' >lion.json
  ds-train coded.json --out run --quiet --steps 3
  h5dump -H -d "/exp_avg/transformer.wte.weight@0" run/step-00000003/rank-00000.h5 | grep -q H5T_IEEE_F32LE
  refused lion.json run "has the state of AdamW (exp_avg, exp_avg_sq) there, and is updated by Lion"
  ds-train cfg.json --out run --quiet --steps 4 --resume latest
  ds-train bf16.json --out run --quiet --steps 5 --resume latest
  ds-train coded.json --out run --quiet --steps 6 --resume latest
  # Groups may have a kind each.
  sed 's|"optimizer": .*|"optimizer": {"params": {"lr": 3e-3}, "param_groups": [{"params": "*mlp*", "type": "AdamW8bit"}]},|' cfg.json >some.json
  ds-launch -n 2 ds-train some.json --out run --quiet --steps 8 --resume latest
  ds-train some.json --out whole --quiet --steps 6
  ds-train some.json --out half --quiet --steps 3
  ds-launch -n 4 ds-train some.json --out half --quiet --steps 6 --resume latest --set zero_optimization.stage=3
  assert_equal "$(losses half)" "$(losses whole)"
}

@test "a save in the background has the states of its step, whatever they are kept in" {
  for params in '"lr":3e-3' '"lr":3e-3,"state_dtype":"bf16"'; do
    type=AdamW8bit
    [[ $params != *bf16* ]] || type=AdamW
    with_optimizer $type "$params" | sed 's|"steps": 12|"steps": 6, "save": {"every": 3}|' >now.json
    with_optimizer $type "$params" | sed 's|"steps": 12|"steps": 6, "save": {"every": 3, "async": true}|' >beside.json
    rm -rf now beside
    ds-launch -n 2 ds-train now.json --out now --quiet
    ds-launch -n 2 ds-train beside.json --out beside --quiet
    for step in 3 6; do
      merged now/step-0000000$step now.safetensors
      merged beside/step-0000000$step beside.safetensors
      cmp now.safetensors beside.safetensors
    done
  done
}

@test "8-bit states at another tp_size are encoded again, and that is told once" {
  with_optimizer AdamW8bit '"lr":3e-3' >coded.json
  ds-launch -n 2 ds-train coded.json --out run --quiet --steps 2 --set tensor_parallel.tp_size=2
  run ds-launch -n 2 ds-train coded.json --out run --steps 3 --resume latest --set tensor_parallel.tp_size=2
  assert_success
  refute_output --partial "encoded again"
  run ds-launch -n 2 ds-train coded.json --out run --steps 4 --resume latest
  assert_success
  assert_equal "$(grep -c 'encoded again' <<<"$output")" 1
  assert_output --partial "was made with tensor_parallel.tp_size 2, this run has 1"
}

@test "a step whose optimizer is forged is damaged; its configuration is not looked at" {
  with_optimizer Lion '"lr":3e-4' >lion.json
  ds-train lion.json --out run --quiet --steps 2
  merged run run.safetensors
  forge() { # from, to
    python3 -c 'import json, struct, sys
b = open("run.safetensors", "rb").read(); n = struct.unpack("<Q", b[:8])[0]; h = json.loads(b[8:8 + n])
m = json.loads(h["__metadata__"]["libds"]); m.update(json.loads(sys.argv[1])); h["__metadata__"]["libds"] = json.dumps(m)
t = json.dumps(h).encode(); t += b" " * (-len(t) % 8)
open("forged.safetensors", "wb").write(struct.pack("<Q", len(t)) + t + b[8 + n:])' "$1"
  }
  for value in 5 '""' '["Lion"]' "\"$(printf '%0100d' 0)\""; do
    forge "{\"optimizer\": $value}"
    run ds-shard forged.safetensors -o forged --quiet
    assert_failure 3
    assert_output --partial forged.safetensors
    assert [ ! -e forged ]
  done
  forge '{"config": {"optimizer": 5}}'
  ds-shard forged.safetensors -o forged --quiet
  ds-train lion.json --out forged --resume latest --quiet --steps 3
}

@test "groups of parameters: their own rates, decay, optimizers; frozen ones never move" {
  local groups='{"params": "*wte*", "frozen": true},'
  groups+='{"params": ["*ln_*", "*.bias"], "weight_decay": 0, "lr": 1e-3},'
  groups+='{"params": "*mlp*", "type": "SGD", "lr": 0.05, "momentum": 0.9}'
  with_optimizer AdamW '"lr":3e-3,"weight_decay":0.1' |
    sed "s|\"params\": {\"lr\"|\"param_groups\": [$groups], &|" >groups.json
  ds-launch -n 2 ds-train groups.json --out whole --quiet --steps 6
  ds-launch -n 2 ds-train groups.json --out half --quiet --steps 3
  ds-launch -n 4 ds-train groups.json --out half --quiet --steps 6 --resume latest --set zero_optimization.stage=3
  assert_equal "$(losses half)" "$(losses whole)"
  merged whole whole.safetensors
  merged half half.safetensors
  cmp whole.safetensors half.safetensors
  assert_equal "$(states_of whole.safetensors)" "exp_avg exp_avg_sq momentum_buffer"
  run grep -ac 'optimizer.exp_avg.wte' whole.safetensors
  assert_output 0
  # A file with states can be sharded into a step again.
  ds-shard whole.safetensors -o sharded --dp 2 --stage 2 --quiet
  ds-launch -n 2 ds-train groups.json --out whole --quiet --steps 8 --resume latest
  run ds-shard show sharded
  assert_output --partial "momentum_buffer bytes"
}

@test "what an optimizer does not take is refused with the name of those that do, all at once" {
  with_optimizer Lion '"lr":1e-4,"eps":1e-8,"momentum":0.9' >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "optimizer.params.eps: belongs to AdamW, Adam, Lamb, Adagrad, Muon, AdamW8bit, OneBitAdam, ZeroOneAdam, OneBitLamb; the optimizer is Lion"
  assert_output --partial "optimizer.params.momentum: belongs to SGD, Muon; the optimizer is Lion"
  sed 's|"optimizer": .*|"optimizer": {"param_groups": [{"lr": 1}, 3, {"params": "*", "tpye": "SGD", "betas": [1, 2]}]},|' cfg.json >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "optimizer.param_groups[0].params: is missing"
  assert_output --partial "optimizer.param_groups[1]: must be an object"
  assert_output --partial "optimizer.param_groups[2].tpye: unknown key; did you mean optimizer.param_groups[2].type?"
  assert_output --partial "optimizer.param_groups[2].betas"
  sed 's|"optimizer": .*|"optimizer": {"param_groups": [{"params": "*.bias"}, {"params": ["a", "transformer.h.0.mlp.c_fc.wieght"]}, {"params": "*ln_1.bias", "frozen": true}, {"params": "*ln_1.weight", "type": "Muon"}]},|' cfg.json >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "optimizer.param_groups[1].params: 'a' matches no parameter"
  assert_output --partial "optimizer.param_groups[2].params: all that it matches belongs to groups before it"
  assert_output --partial "optimizer.param_groups[3]: Muon has nothing to update"
  assert_output --partial "matches no parameter of the model; did you mean 'transformer.h.0.mlp.c_fc.weight'?"
  refute_output --partial '\n'
}

@test "hyperparameters that would do nothing, or something else than they say, are told" {
  with_optimizer Lamb '"min_coeff":1e39,"max_coeff":1e-300' >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "optimizer.params.min_coeff"
  assert_output --partial "optimizer.params.max_coeff"
  sed 's|"optimizer": .*|"optimizer": {"param_groups": [{"params": "*", "frozen": true, "lr": 5, "type": "Lion"}]},|' cfg.json >bad.json
  run ds-train bad.json --check
  assert_failure 2
  assert_output --partial "optimizer.param_groups[0].lr: has no effect: the group is frozen"
  assert_output --partial "optimizer.param_groups[0].type: has no effect: the group is frozen"
  sed 's|"optimizer": .*|"optimizer": {"params": {"lr": 1e-3}, "param_groups": [{"params": "*ln_*", "lr": 2e-3}]}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}},|' cfg.json >warm.json
  run ds-train warm.json --check
  assert_success
  assert_output --partial "warning: warm.json:5:78: optimizer.param_groups[0].lr: rises to 1: it follows the schedule in proportion"
}

@test "evaluation takes weights of any optimizer, and looks at no groups" {
  with_optimizer Lion '"lr":3e-4' >lion.json
  ds-train lion.json --out run --quiet --steps 2
  sed 's|"optimizer": .*|"optimizer": {"param_groups": [{"params": "of another model", "lr": 1}]},|' cfg.json >other.json
  assert_equal "$(ds-train other.json --eval --out run --resume latest)" "$(ds-train lion.json --eval --weights run --quiet | sed 's/step 0/step 2/')"
}

@test "what an optimizer keeps and sends is predicted" {
  for type in ${DS_SLOW:+Lion} SGD Lamb Muon AdamW8bit; do
    with_optimizer $type '"lr":1e-3' >o.json
    run ds-launch -n 4 ds-train o.json --out $type --steps 2 --set tensor_parallel.tp_size=2 --quiet
    assert_success
    awk '$2 ~ /^[0-9.]+$/ && $3 ~ /iB$/ && $2 $3 != $4 $5 { print "'$type'", $0; wrong = 1 } END { exit wrong }' <<<"$output"
  done
  # Products of whole matrices are larger than those of a rank's share of a layer.
  with_optimizer Muon '"lr":1e-3' | sed 's/"n_embd": 32/"n_embd": 96/; s/"seq_length": 32/"seq_length": 8/' >o.json
  run ds-launch -n 2 ds-train o.json --out muon --steps 2 --set tensor_parallel.tp_size=2 --quiet
  assert_success
  awk '$2 ~ /^[0-9.]+$/ && $3 ~ /iB$/ && $2 $3 != $4 $5 { print "Muon", $0; wrong = 1 } END { exit wrong }' <<<"$output"
  libds_gb() { ds-memreport o.json -n 1 --dtype bf16 --explain | awk '/^>* *0  /{print $NF; exit}'; }
  with_optimizer AdamW '"lr":1e-3' >o.json
  adamw=$(libds_gb)
  with_optimizer SGD '"lr":1e-3' >o.json
  assert [ -n "$adamw" ]
  assert [ "$adamw" != "$(libds_gb)" ]
  sgd=$(libds_gb)
  with_optimizer AdamW8bit '"lr":1e-3' >o.json
  awk -v a="$adamw" -v s="$sgd" -v c="$(libds_gb)" 'BEGIN { exit !(s < c && c - s < 0.5 * (a - s)) }'
}

# A unit is cut by position: one rank gets the parameters that keep moments, the other those that keep nothing.
@test "where ranks hold unlike states the fullest is predicted" {
  sed 's|"optimizer": .*|"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}, "param_groups": [{"params": ["*attn*", "*mlp.c_fc*", "*wte*", "*wpe*"], "type": "SGD"}]},|' cfg.json >o.json
  ds-launch -n 2 ds-train o.json --out run --steps 1 --quiet >/dev/null
  ds-memreport o.json -n 2 --device cpu --all-ranks --json >predicted.json
  ds-launch -n 2 ds-train o.json --check --json >check.json
  python3 - <<'END'
import json
ranks = [json.loads(line) for line in open("run/metrics.jsonl")][-1]["ranks"]
counted = [r["counted_bytes"]["optimizer"] for r in ranks]
assert max(counted) > 2 * min(counted), counted
groups = json.load(open("predicted.json"))["groups"]
most = max(g["memory_bytes"]["optimizer"] for g in groups)
assert most == max(counted), (most, counted)
needed = json.load(open("check.json"))["needed_bytes"]
assert needed >= 2 * max(sum(r["counted_bytes"].values()) for r in ranks), needed
END
}

@test "a run that trains nothing says so" {
  sed 's|"optimizer": .*|"optimizer": {"type": "AdamW", "param_groups": [{"params": "*", "frozen": true}]},|' cfg.json >o.json
  run -0 --separate-stderr ds-train o.json --out run --steps 1 --quiet
  run -0 --separate-stderr ds-train o.json --out other --steps 1
  assert_regex "$stderr" "every parameter is frozen: the run trains nothing"
}

@test "a run with a frozen group, and what is resolved of it, can be read again" {
  groups='{"type":"AdamW","params":{"lr":1e-3},"param_groups":[{"params":"*ln_*","frozen":true},{"params":"*mlp*","type":"Lion"}]}'
  ds-train cfg.json --set "optimizer=$groups" --out run --steps 1 --quiet
  ds-memreport run
  ds-train cfg.json --set "optimizer=$groups" --check --json | python3 -c 'import json, sys; json.dump(json.load(sys.stdin)["config"], open("again.json", "w"))'
  ds-train again.json --check
  # A group of another type has that type's defaults, except for settings that the optimizer is given.
  python3 -c 'import json; g = json.load(open("again.json"))["optimizer"]["param_groups"]; assert "type" not in g[0] and g[1]["lr"] == 1e-3 and g[1]["weight_decay"] == 0, g'
  # Frozen parameters have no state.
  run -3 ds-train cfg.json --set 'optimizer={"type":"AdamW","params":{"lr":1e-3}}' --out run --resume latest --steps 2
  assert_output --partial "has no state there (it was frozen"
}

@test "a step holds the weights alone of what is frozen, and resumes, merges and is cut like others" {
  train() { # ranks out steps ...
    ds-launch -n "$1" ds-train cfg.json --out "$2" --quiet --steps "$3" --set bf16.enabled=true \
      --set 'optimizer.param_groups=[{"params": ["*h.1.*", "*ln_f*"]}, {"params": "*", "frozen": true}]' "${@:4}"
  }
  train 2 whole 4
  train 2 half 2
  python3 - <<'END'
import json
m = json.load(open("half/step-00000002/manifest.json"))
assert m["version"] == 4
frozen = {i for i, p in enumerate(m["parameters"]) if p.get("frozen")}
assert {m["parameters"][i]["name"] for i in frozen} == {
    p["name"] for p in m["parameters"] if ".h.1." not in p["name"] and "ln_f" not in p["name"] and "tied_to" not in p}
for piece in m["pieces"]:
    trained = piece["parameter"] not in frozen
    assert ("master" in piece) == ("exp_avg" in piece) == trained, piece
END
  ds-shard half --out cut --dp 3 --stage 3 >/dev/null
  ds-ckpt-merge cut -o cut.safetensors --optimizer --verify >/dev/null
  ds-ckpt-merge half -o half.safetensors --optimizer --verify >/dev/null
  cmp cut.safetensors half.safetensors
  train 4 half 4 --resume latest --set zero_optimization.stage=3 --set pipeline.stages=2
  ds-ckpt-merge half -o half.safetensors --optimizer >/dev/null
  ds-ckpt-merge whole -o whole.safetensors --optimizer >/dev/null
  cmp half.safetensors whole.safetensors
  # A frozen parameter that becomes trained needs --weights.
  run -3 ds-train cfg.json --set bf16.enabled=true --out half --resume latest --steps 5
  assert_output --partial "has no state there (it was frozen"
  ds-train cfg.json --set bf16.enabled=true --weights half --out other --steps 1 --quiet
}
