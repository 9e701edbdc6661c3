#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# GLM-4.5 with real processes: biases of routers over ranks, in steps and in published files; published files in FP8 and with
# layers that predict further ahead; refusals.

bats_require_minimum_version 1.5.0
load tiny

setup() {
  tiny_setup
  cat >cfg.json <<'JSON'
{
  "model": {"type": "glm4_moe", "vocab_size": 256, "hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 40, "max_position_embeddings": 64, "intermediate_size": 200,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
            "routed_scaling_factor": 1.5, "attention_bias": true, "use_qk_norm": true},
  "data": {"train": "text.txt", "seq_length": 32},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}, "router_bias_update_rate": 0.01},
  "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
  "reduce_order": "micro", "bf16": {"enabled": true}, "device": "cpu", "threads": 1,
  "save": {"every": 4}, "steps": 8
}
JSON
  # Reads and writes safetensors: {name: (type, shape, bytes)}.
  cat >tensors.py <<'PY'
import json
import struct


def read(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    header.pop("__metadata__", None)
    return {n: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for n, t in header.items()}


def write(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def floats(tensor):
    return list(struct.unpack(f"<{len(tensor[2]) // 4}f", tensor[2]))


def pack(values):
    return struct.pack(f"<{len(values)}f", *values)
PY
}

over() { echo --set expert_parallel.enabled=true --set "expert_parallel.autoep_size=$1" --set expert_parallel.room=8; }

@test "biases of routers move alike over ranks, are fp32 in every file, and resume at any number of ranks" {
  ds-train cfg.json --out one
  # shellcheck disable=SC2046
  ds-launch -n 2 ds-train cfg.json --out two $(over 2)
  # shellcheck disable=SC2046
  ds-launch -n 4 ds-train cfg.json --out four --resume two/step-00000004 --set zero_optimization.stage=3 $(over 4)
  ds-launch -n 2 ds-train cfg.json --out stages --resume two/step-00000004 --set pipeline.stages=2
  merged one one.safetensors
  for run in two four stages; do
    merged $run $run.safetensors
    cmp one.safetensors $run.safetensors
  done
  assert_equal "$(losses two)" "$(losses one)"
  ds-ckpt-merge one -o hf --format hf --dtype bf16 --quiet
  run python3 - <<'PY'
import tensors
t = tensors.read("hf/model.safetensors")
for layer in (1, 2):
    bias = t[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
    assert bias[:2] == ("F32", [8]), bias
    steps = [round(x / 0.01) for x in tensors.floats(bias)]
    assert all(abs(x - 0.01 * n) < 1e-6 and abs(n) <= 8 for x, n in zip(tensors.floats(bias), steps)), steps
    assert len(set(steps)) > 2, steps
    assert f"model.layers.{layer}.mlp.shared_experts.up_proj.weight" in t
    assert t[f"model.layers.{layer}.mlp.experts.7.up_proj.weight"][0] == "BF16"
assert not any("layers.0.mlp.gate." in name for name in t)
PY
  assert_success
  # A published directory, a step of it over a mesh, and text.
  text=$(ds-train cfg.json --resume one --generate "The " --max-tokens 8)
  ds-ckpt-merge one -o full --format hf --quiet
  ds-shard full -o sharded --dp 2 --tp 2 --pp 3 --quiet
  ds-ckpt-merge sharded -o back --format hf --quiet
  cmp full/model.safetensors back/model.safetensors
  assert_equal "$(ds-train cfg.json --weights sharded --generate "The " --max-tokens 8)" "$text"
}

@test "weights in FP8 train like the numbers that they stand for" {
  ds-train cfg.json --out run --steps 2 --set bf16.enabled=false
  ds-ckpt-merge run -o plain --format hf --quiet
  cp -r plain fp8
  run python3 - <<'PY'
import json, tensors


def value(code):
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


numbers = sorted((value(c), c) for c in range(127))
fp8, plain = {}, {}
for name, t in tensors.read("plain/model.safetensors").items():
    fp8[name] = plain[name] = t
    if len(t[1]) != 2 or "proj" not in name:
        continue
    (rows, cols), x = t[1], tensors.floats(t)
    scales, codes, decoded = [], bytearray(rows * cols), [0.0] * len(x)
    for r0 in range(0, rows, 128):
        for c0 in range(0, cols, 128):
            block = [r * cols + c for r in range(r0, min(r0 + 128, rows)) for c in range(c0, min(c0 + 128, cols))]
            scale = tensors.struct.unpack("<f", tensors.pack([max(abs(x[i]) for i in block) / 448]))[0]
            scales.append(scale)
            for i in block:
                magnitude = min(abs(x[i]) / scale, 448.0)
                lo, hi = 0, 126
                while lo < hi:
                    middle = (lo + hi) // 2
                    lo, hi = (middle + 1, hi) if numbers[middle][0] < magnitude else (lo, middle)
                codes[i] = numbers[lo][1] | (128 if x[i] < 0 else 0)
                decoded[i] = value(codes[i]) * scale
    fp8[name] = ("F8_E4M3", t[1], bytes(codes))
    fp8[name + "_scale_inv"] = ("F32", [-(-rows // 128), -(-cols // 128)], tensors.pack(scales))
    plain[name] = ("F32", t[1], tensors.pack(decoded))
assert len(fp8) > len(plain)
tensors.write("fp8/model.safetensors", fp8)
tensors.write("plain/model.safetensors", plain)
config = json.load(open("fp8/config.json"))
config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                                 "activation_scheme": "dynamic"}
json.dump(config, open("fp8/config.json", "w"))
PY
  assert_success
  sed 's/"model": {.*/"model": {"path": "PATH"},/; /"num_key_value_heads"/d; /"n_routed_experts"/d; /"routed_scaling/d' cfg.json >from.json
  for form in plain fp8; do
    sed "s/PATH/$form/" from.json >$form.json
    ds-train $form.json --out run-$form --steps 3
    ds-shard $form -o step-$form --dp 2 --tp 2 --quiet
    ds-ckpt-merge step-$form -o back-$form --format hf --quiet
    ds-ckpt-merge $form -o one-$form.safetensors --quiet
  done
  assert_equal "$(losses run-fp8)" "$(losses run-plain)"
  cmp back-fp8/model.safetensors back-plain/model.safetensors
  run grep quantization_config back-fp8/config.json
  assert_failure
  cmp one-fp8.safetensors one-plain.safetensors
  for change in 's/\[128, 128\]/[64, 128]/' 's/e4m3/e5m2/' 's/"fp8"/"gptq"/'; do
    rm -rf other
    cp -r fp8 other
    sed -i "$change" other/config.json
    sed "s/PATH/other/" from.json >other.json
    run -4 --separate-stderr ds-train other.json --out refused --steps 1
    [[ $stderr == *quantization_config* ]] || fail "$stderr"
    assert [ ! -e refused ]
  done
}

@test "layers that predict further ahead are left out of published files" {
  ds-train cfg.json --out run --steps 2
  ds-ckpt-merge run -o plain --format hf --quiet
  cp -r plain mtp
  run python3 - <<'PY'
import json, tensors
t = tensors.read("plain/model.safetensors")
for name, tensor in list(t.items()):
    if name.startswith("model.layers.2."):
        t[name.replace("layers.2", "layers.3")] = tensor
t["model.layers.3.eh_proj.weight"] = t["model.layers.3.self_attn.o_proj.weight"]
t["model.layers.3.shared_head.head.weight"] = t["lm_head.weight"]
tensors.write("mtp/model.safetensors", t)
config = json.load(open("mtp/config.json"))
assert config["num_nextn_predict_layers"] == 0
config["num_nextn_predict_layers"] = 1
json.dump(config, open("mtp/config.json", "w"))
PY
  assert_success
  sed 's/"model": {.*/"model": {"path": "PATH"},/; /"num_key_value_heads"/d; /"n_routed_experts"/d; /"routed_scaling/d' cfg.json >from.json
  for form in plain mtp; do
    sed "s/PATH/$form/" from.json >$form.json
    run --separate-stderr ds-train $form.json --out run-$form --steps 2
    assert_success
    warned[0]=$stderr
    ds-shard $form -o step-$form --dp 2 --tp 2 2>shard-$form.txt
    ds-ckpt-merge step-$form -o back-$form --format hf --quiet
  done
  [[ ${warned[0]} == *"left out, for they predict tokens further ahead (num_nextn_predict_layers): "*"model.layers.3."* ]] ||
    fail "${warned[0]}"
  grep -q 'left out, for they predict tokens' shard-mtp.txt
  assert_equal "$(losses run-mtp)" "$(losses run-plain)"
  cmp back-mtp/model.safetensors back-plain/model.safetensors
  grep -q '"num_nextn_predict_layers": 0' back-mtp/config.json
  # Without the key they are tensors that do not belong to the model.
  sed -i 's/"num_nextn_predict_layers": 1/"num_nextn_predict_layers": 0/' mtp/config.json
  run -3 --separate-stderr ds-train mtp.json --out refused --steps 1
  [[ $stderr == *"model.layers.3."*"is not a parameter of the model"* ]] || fail "$stderr"
}

@test "what cannot move biases of routers is refused by its key" {
  refused 4 "optimizer.router_bias_update_rate: a server of states does not keep the biases of routers" --set zero_optimization.offload_optimizer.device=server \
    --set zero_optimization.offload_optimizer.name=x
  run -4 --separate-stderr ds-launch -n 2 ds-train cfg.json --out refused --set diloco.enabled=true --set diloco.workers=2
  [[ $stderr == *"optimizer.router_bias_update_rate"*"diloco.workers"* ]] || fail "$stderr"
  refused 2 "optimizer.router_bias_update_rate: must be" --set optimizer.router_bias_update_rate=-1
  sed -i 's/"glm4_moe"/"llama"/; s/"head_dim": 40, //; /"n_routed_experts"/d; /"routed_scaling/d; s/"intermediate_size": 200,/"intermediate_size": 200},/' cfg.json
  refused 2 "optimizer.router_bias_update_rate: the model has no router with a balancing bias"
}
