#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ds-infer: weights that are streamed from a disk.

bats_require_minimum_version 1.5.0

load infer

@test "streamed weights: the bytes of weights in memory" {
  trained
  lines >in.jsonl
  infer in.jsonl >all.jsonl
  mkdir disk
  # Small rows stay in memory, here all.
  local stream="--stream disk --set zero_optimization.stage3_param_persistence_threshold=0"
  # shellcheck disable=SC2086
  {
    infer in.jsonl $stream | cmp - all.jsonl
    infer in.jsonl $stream --chunk 3 --batch 2 | cmp - all.jsonl
    ds-launch -n 2 ds-infer run in.jsonl $stream | cmp - all.jsonl
    ds-launch -n 2 ds-infer run in.jsonl $stream --set pipeline.stages=2 | cmp - all.jsonl
    echo '{"context": "The sky", "continuations": [" is", " was"]}' >score.jsonl
    ds-infer score run score.jsonl $stream | cmp - <(ds-infer score run score.jsonl)
    ds-infer bench run -p 8 -n 4 -r 1 $stream
    ds-infer run $stream --check --json | whole 'd["streamed_bytes_per_pass"] > 0 and d["file_bytes"] >= d["streamed_bytes_per_pass"]' | grep -qx true
  }
  assert [ -z "$(ls -A disk)" ]
  run -2 infer in.jsonl --stream disk
  assert_output --partial "nothing is streamed, since no matrix has more elements"
  run -2 infer in.jsonl --stream cpu --set device=cpu
  assert_output --partial "has its weights in host memory anyway"
  run -2 infer in.jsonl --stream disk --set zero_optimization.stage=1
  assert_output --partial "--stream sets the keys of ZeRO"
  run -2 ds-launch -n 2 ds-infer run in.jsonl --stream disk --weights int8
  assert_output --partial "--stream has codes on one data-parallel rank alone"
  run -4 infer in.jsonl --stream nowhere --set zero_optimization.stage3_param_persistence_threshold=0
  assert_output --partial "nowhere: cannot offload to this directory"
}

@test "streamed codes: the bytes of codes in memory" {
  of_llama
  trained
  lines >in.jsonl
  mkdir disk
  local form stream="--stream disk --set zero_optimization.stage3_param_persistence_threshold=0"
  for form in "--weights int8" "--weights int4" "--weights w8a8" "--weights int4 --activations int8"; do
    # shellcheck disable=SC2086
    {
      infer in.jsonl $form >all.jsonl
      infer in.jsonl $form $stream | cmp - all.jsonl
      infer in.jsonl $form $stream --chunk 3 --batch 2 | cmp - all.jsonl
      ds-launch -n 2 ds-infer run in.jsonl $form $stream --set pipeline.stages=2 | cmp - all.jsonl
    }
  done
  # shellcheck disable=SC2086
  bytes() { infer --check --json $stream "$@" | whole 'd["file_bytes"]'; }
  assert [ "$(bytes --weights int8)" -lt "$(bytes)" ]
  assert [ "$(bytes --weights int4)" -lt "$(bytes --weights int8)" ]
}

# A model of random numbers whose 100 blocks have 3 MB each in bf16.
large_model() {
  mkdir large
  python3 - <<'PY'
import json, random, struct
C, I, L, V, H, D = 512, 704, 100, 256, 8, 64
json.dump({"model_type": "llama", "hidden_size": C, "intermediate_size": I, "num_hidden_layers": L, "vocab_size": V,
           "num_attention_heads": H, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
           "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"},
          open("large/config.json", "w"))
names = [("model.embed_tokens.weight", [V, C])]
for l in range(L):
    p = f"model.layers.{l}."
    names += [(p + "input_layernorm.weight", [C]), (p + "post_attention_layernorm.weight", [C])]
    names += [(p + f"self_attn.{n}_proj.weight", [D if n in "kv" else C, C]) for n in "qkvo"]
    names += [(p + f"mlp.{n}_proj.weight", [I, C]) for n in ("gate", "up")] + [(p + "mlp.down_proj.weight", [C, I])]
names += [("model.norm.weight", [C]), ("lm_head.weight", [V, C])]
header, at = {}, 0
for name, shape in names:
    n = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
    at += n
text = json.dumps(header).encode()
random.seed(1)
numbers = b"".join(struct.pack("<f", random.gauss(0, 0.03))[2:] for _ in range(100003))  # bf16
with open("large/model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for name, shape in names:
        n = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        f.write(b"\x80\x3f" * (n // 2) if len(shape) == 1 else (numbers * (n // len(numbers) + 1))[:n])
PY
}

@test "streamed weights need the memory of a few layers" {
  large_model
  mkdir disk
  lines | head -2 >in.jsonl
  local small="--tokenizer bytes --batch 2 --chunk 32 --context 64 --set threads=1"
  # shellcheck disable=SC2086
  ds-infer large in.jsonl $small >all.jsonl
  # In a quarter of the model's size, with the program itself. Glibc reserves addresses for each thread.
  local limit=$(($(stat -c %s large/model.safetensors) / 4 / 1024))
  # shellcheck disable=SC2086
  run -4 bash -c "ulimit -d $limit; ds-infer large in.jsonl $small"
  # shellcheck disable=SC2086
  (ulimit -d "$limit"; ds-infer large in.jsonl $small --stream disk) | cmp - all.jsonl
}

@test "streamed weights beside a GPU: from its host's memory and from a disk, on the simulator" {
  local sim=$DS_BIN/../lib/libds_cuda_sim.so
  [[ -e $sim ]] || skip "this build has no CUDA"
  export DS_CUDA_PLUGIN=$sim
  trained
  lines | head -4 >in.jsonl
  infer in.jsonl --set device=cuda >all.jsonl
  mkdir disk
  local key="--set device=cuda --set zero_optimization.stage3_param_persistence_threshold=0"
  # shellcheck disable=SC2086
  {
    infer in.jsonl $key --stream cpu | cmp - all.jsonl
    infer in.jsonl $key --stream disk | cmp - all.jsonl
    ds-launch -n 2 ds-infer run in.jsonl $key --stream cpu | cmp - all.jsonl
  }
}
