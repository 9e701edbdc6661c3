#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# device "cuda" as its user meets it: without a GPU a reason and exit status 4; on the simulator, runs.

bats_require_minimum_version 1.5.0
load tiny

setup() {
  tiny_setup
  sim=$DS_BIN/../lib/libds_cuda_sim.so
}

on_sim() { DS_CUDA_PLUGIN=$sim "$@"; }
need_sim() { [[ -e $sim ]] || skip "this build has no CUDA"; }
losses() { grep '"type":"step"' "$1/metrics.jsonl" | grep -o '"loss":[^,]*'; }

@test "without a GPU every way to ask for one is exit status 4, with the reason, and writes nothing" {
  for key in device=cuda communication.backend=nccl cuda.graphs=true cuda.autotune=true cuda.autotune_file=cfg.json \
    'cuda={"attention": "cudnn"}'; do
    run -4 --separate-stderr ds-train cfg.json --out run --set "$key" --set bf16.enabled=true
    [[ $stderr == *"no NVIDIA driver"* || $stderr == *"driver finds no GPU"* || $stderr == *"built without CUDA"* ]]
    run -4 --separate-stderr ds-train cfg.json --check --set "$key" --set bf16.enabled=true
  done
  run -4 --separate-stderr ds-launch -n 2 ds-train cfg.json --out run --set device=cuda
  [[ ! -e run ]]
}

@test "a plug-in that is not there, or no plug-in" {
  DS_CUDA_PLUGIN=$PWD/absent.so run -4 --separate-stderr ds-train cfg.json --check --set device=cuda
  [[ $stderr == *"absent.so"* ]]
  echo text >broken.so
  DS_CUDA_PLUGIN=$PWD/broken.so run -4 --separate-stderr ds-train cfg.json --check --set device=cuda
  [[ $stderr == *"does not load"* ]]
  DS_CUDA_PLUGIN=$(ls "$DS_BIN"/../lib/libds.so.*.*.*) run -4 --separate-stderr ds-train cfg.json --check --set device=cuda
  [[ $stderr == *"is not a CUDA plug-in"* ]]
  # "auto" continues without the plug-in.
  DS_CUDA_PLUGIN=$PWD/broken.so run -0 --separate-stderr ds-train cfg.json --check
  [[ $output == *"1 rank on cpu"* && $stderr == *'device "auto" takes the CPU'*"does not load"* ]]
}

@test "no libds and no tool is linked to a CUDA library" {
  for file in "$DS_BIN"/ds-* "$DS_BIN"/../lib/libds.so; do
    run -0 ldd "$file"
    refute_output --regexp 'cuda|cublas|cudnn|nccl'
  done
}

@test "an NCCL that is too old is passed over, and one alone is refused with its version" {
  need_sim
  mkdir -p old toolkit/lib
  {
    echo 'int ncclGetVersion(int* version) { return *version = 21000, 0; }'
    grep -o 'nccl[A-Z][A-Za-z]*"' "$DS_SOURCE/libds/comm/nccl_api.cc" | tr -d '"' | grep -v ncclGetVersion | sort -u |
      sed 's/.*/int &(void) { return 1; }/'
  } >old.c
  gcc -shared -fPIC -Wl,-soname,libnccl.so.2 -o old/libnccl.so.2 old.c
  unset DS_NCCL_LIBRARY
  local -a asked=(env DS_CUDA_PLUGIN="$sim" LD_LIBRARY_PATH="$PWD/old" CUDA_HOME="$PWD/toolkit" ds-train cfg.json -v --out run
    --set communication.backend=nccl --set device=cuda)
  if ! ldconfig -p | grep -q libnccl.so.2; then
    run -4 "${asked[@]}"
    assert_output --partial "$PWD/old/libnccl.so.2 is NCCL version 21000; libds needs 2.14 or later"
  fi
  cp "$DS_BIN/../lib/libds_test_nccl.so" toolkit/lib/libnccl.so.2
  run -0 "${asked[@]}"
  assert_output --regexp "NCCL [0-9]+ from $PWD/toolkit/lib/libnccl.so.2"
}

@test "a run on the simulator: stages and ranks give the same losses, a CPU run goes on from its checkpoint" {
  need_sim
  sed -i 's/"steps": 12/"steps": 5/' cfg.json
  on_sim ds-train cfg.json --out a --quiet --set device=cuda
  on_sim ds-train cfg.json --out b --quiet --set device=cuda --set zero_optimization.stage=3 --set cuda.graphs=true \
    --set wall_clock_breakdown=true
  diff <(losses a) <(losses b)
  grep -q '"phase_ms":{"forward":[1-9]' b/metrics.jsonl
  on_sim ds-launch -n 2 ds-train cfg.json --out c --set device=cuda 2>err
  grep 'share 1 GPU' err
  diff <(losses a) <(losses c)
  on_sim ds-train cfg.json --check --set device=cuda | grep '1 rank on cuda'
  run -0 --separate-stderr ds-train cfg.json --resume a --out d --set steps=7 --set device=cpu
  [[ $stderr == *"results agree, bits may not"* ]]
  run -0 on_sim ds-train cfg.json --resume a --generate The --max-tokens 5 --set device=cuda
  run -0 on_sim ds-train cfg.json --resume a --eval --set device=cuda
}

@test "texts on the simulator: tokens are drawn there, those of the CPU, with the same scores" {
  need_sim
  ds-train cfg.json --out run --quiet --steps 5 --set device=cpu
  cat >in.jsonl <<'EOF'
{"prompt": "The words", "max_tokens": 6, "temperature": 0, "logprobs": 2}
{"prompt": "The words", "max_tokens": 6, "seed": 3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5}
{"prompt": "The licence", "max_tokens": 6, "seed": 4, "temperature": 2, "min_p": 0.01, "logprobs": 1, "prompt_logprobs": true}
{"prompt": "a", "max_tokens": 5, "n": 2, "min_tokens": 5, "stop_token_ids": [97, 101, 32, 116], "frequency_penalty": 1}
EOF
  on_sim ds-infer run in.jsonl --set device=cuda >cuda.jsonl
  ds-infer run in.jsonl --set device=cpu >cpu.jsonl
  python3 - <<'EOF'
import json
def lines(name): return [json.loads(line) for line in open(name)]
def tokens(d): return [c["tokens"] for c in d["choices"]] if "choices" in d else d["tokens"]
def scores(d): return [t for name in ("logprobs", "prompt_logprobs") for t in d.get(name, []) if t]
for ours, theirs in zip(lines("cuda.jsonl"), lines("cpu.jsonl"), strict=True):
    assert tokens(ours) == tokens(theirs), (ours, theirs)
    for a, b in zip(scores(ours), scores(theirs), strict=True):
        assert abs(a["logprob"] - b["logprob"]) < 1e-3, (a, b)
        assert [t["id"] for t in a.get("top_logprobs", [])] == [t["id"] for t in b.get("top_logprobs", [])], (a, b)
EOF
}

@test "texts on the simulator are the same bytes in any batch, with a draft, and with codes in any batch" {
  need_sim
  ds-train cfg.json --out run --quiet --steps 2 --set device=cpu
  for i in {1..5}; do
    printf '{"prompt": "%s", "max_tokens": 6, "seed": %d, "logprobs": 1}\n' "$(head -c $((11 * i)) <<<'The words of a licence, which everybody may copy, word by word')" "$i"
  done >in.jsonl
  on_sim ds-infer run in.jsonl --set device=cuda --batch 1 >alone.jsonl
  on_sim ds-infer run in.jsonl --set device=cuda --batch 5 --chunk 7 >together.jsonl
  cmp alone.jsonl together.jsonl
  on_sim ds-infer run in.jsonl --set device=cuda --draft run --draft-tokens 2 --verbose >drafted.jsonl 2>notes
  cmp alone.jsonl drafted.jsonl
  grep -q ' proposed tokens accepted' notes
  for options in '--weights int8' '--weights int4 --activations int8' '--cache-dtype int8'; do
    # shellcheck disable=SC2086
    on_sim ds-infer run in.jsonl --set device=cuda --batch 1 $options >alone.jsonl
    # shellcheck disable=SC2086
    on_sim ds-infer run in.jsonl --set device=cuda --batch 5 --chunk 7 $options >together.jsonl
    cmp alone.jsonl together.jsonl
  done
}

@test "choices of autotuning are kept in a file, and taken from it without timing" {
  slow_only
  need_sim
  tuned() { on_sim ds-train cfg.json --quiet --set device=cuda --set cuda.autotune=true --set cuda.autotune_file="$PWD/tuned" "$@"; }
  run -0 tuned --out strict --set deterministic=true --set reduce_order=micro
  [[ ! -e tuned ]]
  tuned --out a
  (($(grep -c $'^simulator\t0\t[0-9,]*\tin order$' tuned) > 5))
  cp tuned before
  tuned --out b
  cmp tuned before
  diff <(losses a) <(losses b)
  on_sim ds-launch -n 2 ds-train cfg.json --quiet --out c --set device=cuda --set cuda.autotune=true --set cuda.autotune_file=tuned
  echo 'half a line' >>tuned
  run -2 --separate-stderr tuned --out d
  [[ $stderr == *"tuned:"*"expected GPU, library, product and algorithm"* && ! -e d ]]
}

# The choices of another GPU or version are no reason to stop.
@test "a file of choices alone is read, not timed or written; without choices for this GPU a warning" {
  need_sim
  sed -i 's/"steps": 12/"steps": 3/' cfg.json
  reads() { on_sim ds-train cfg.json --set device=cuda --set cuda.autotune_file="$PWD/tuned" "$@"; }
  run -2 --separate-stderr reads --out a
  [[ $stderr == *"cuda.autotune_file: there is no $PWD/tuned"* && ! -e a ]]
  on_sim ds-train cfg.json --quiet --out a --set device=cuda --set cuda.autotune=true --set cuda.autotune_file=tuned
  cp tuned before
  chmod a-w tuned
  run -0 --separate-stderr reads --out b
  [[ $stderr != *warning* ]] || fail "$stderr"
  cmp tuned before
  diff <(losses a) <(losses b)
  chmod u+w tuned
  sed -i 's/^simulator\t/NVIDIA H200\t/' tuned
  run -0 --separate-stderr reads --out c
  [[ $stderr == *"tuned has choices for NVIDIA H200 with cuBLASLt 0, and none for simulator with cuBLASLt 0"* ]]
}

# The simulator's stand-in for cuDNN has the version that DS_SIM_CUDNN states; our own kernels compute for it.
cudnn_run() { on_sim ds-train cfg.json --set device=cuda --set bf16.enabled=true --set steps=3 "$@"; }

@test "attention is cuDNN's where it can be used; record and checkpoint state that, and a resume without it warns" {
  need_sim
  DS_SIM_CUDNN=9.19.0 run -0 --separate-stderr cudnn_run --out a
  [[ $stderr != *warning* ]] || fail "$stderr"
  grep -q '"attention":"cuDNN 9.19.0"' a/metrics.jsonl
  grep -q 'attention by cuDNN 9.19.0' a/step-*3/manifest.json
  # The memory of its plans is counted before and after.
  scratch() { grep -o "\"$1\":{[^}]*\"scratch\":[0-9]*" a/metrics.jsonl | grep -o '[0-9]*$' | sort -u; }
  [[ -n $(scratch counted_bytes) ]]
  assert_equal "$(scratch counted_bytes)" "$(scratch predicted_bytes | tail -n 1)"
  # Without it.
  run -0 --separate-stderr cudnn_run --resume a --out b --set steps=4
  [[ $stderr == *'cuda.attention "auto" takes the kernels of libds, which are slower: rank 0: the simulator has no cuDNN'* ]]
  [[ $stderr == *"was made with simulated device, attention by cuDNN 9.19.0, this machine runs simulated device: results agree, bits may not"* ]]
  grep -q '"attention":"libds"' b/metrics.jsonl
  # Another version.
  DS_SIM_CUDNN=9.20.0 run -0 --separate-stderr cudnn_run --resume a --out c --set steps=4
  [[ $stderr == *"attention by cuDNN 9.19.0, this machine runs"*"attention by cuDNN 9.20.0"* ]]
  # As asked for: no message, and none in fp32 or for a model that cuDNN does not compute.
  run -0 --separate-stderr cudnn_run --out d --set cuda.attention=own
  [[ $stderr != *warning* ]] || fail "$stderr"
  run -0 --separate-stderr cudnn_run --out e --set bf16.enabled=false
  [[ $stderr != *warning* ]] || fail "$stderr"
  run -0 --separate-stderr cudnn_run --out f --set model.attn_pdrop=0.1 --set data.split=0
  [[ $stderr != *warning* ]] || fail "$stderr"
}

@test "cuDNN's attention that was asked for and cannot be had is exit status 4, with the reason" {
  need_sim
  run -4 --separate-stderr cudnn_run --out a --set cuda.attention=cudnn
  [[ $stderr == *'cuda.attention "cudnn": rank 0: the simulator has no cuDNN'* ]]
  export DS_SIM_CUDNN=9.19.0
  run -4 --separate-stderr cudnn_run --out a --set cuda.attention=cudnn --set model.attn_pdrop=0.1
  [[ $stderr == *'cuDNN does not compute all attention of this run: dropout'* ]]
  DS_SIM_CUDNN_PLANS=0 run -4 --separate-stderr cudnn_run --out a --set cuda.attention=cudnn
  [[ $stderr == *'rank 0: no deterministic plan'* ]]
  [[ ! -e a ]]
  DS_SIM_CUDNN_PLANS=0 run -0 --separate-stderr cudnn_run --out a
  [[ $stderr == *'takes the kernels of libds'*'no deterministic plan'* ]]
  cudnn_run --out b --set cuda.attention=cudnn
  diff <(losses a) <(losses b) # both are our kernels here
}

@test "ranks with other versions of cuDNN, or one without, use our kernels together" {
  need_sim
  sed -i 's/"steps": 12/"steps": 2/' cfg.json
  several() { # VERSION-OF-RANK-0 VERSION-OF-RANK-1 OPTION...
    local versions=("$1" "$2")
    shift 2
    printf '#!/bin/bash\nv=(%q %q)\nexport DS_SIM_CUDNN=${v[RANK]}\nexec ds-train "$@"\n' "${versions[@]}" >rank
    chmod +x rank
    on_sim ds-launch -n 2 ./rank cfg.json --set device=cuda --set bf16.enabled=true "$@"
  }
  run -0 --separate-stderr several 9.19.0 9.19.0 --out a
  [[ $stderr != *'takes the kernels'* ]] || fail "$stderr"
  grep -q '"attention":"cuDNN 9.19.0"' a/metrics.jsonl
  run -0 --separate-stderr several 9.19.0 9.20.0 --out b
  [[ $stderr == *'rank 1: cuDNN 9.20.0, and cuDNN 9.19.0 on rank 0'* ]]
  grep -q '"attention":"libds"' b/metrics.jsonl
  run -0 --separate-stderr several 9.19.0 '' --out c
  [[ $stderr == *'rank 1: the simulator has no cuDNN'* ]]
  run -4 --separate-stderr several 9.19.0 '' --out d --set cuda.attention=cudnn
  [[ ! -e d ]]
}

@test "memory of the host that the system does not lock is said, with the key; what it locks changes no loss" {
  need_sim
  sed -i 's/"steps": 12/"steps": 5/' cfg.json
  on_sim ds-train cfg.json --out plain --quiet --set device=cuda
  for section in offload_optimizer ${DS_SLOW:+offload_param}; do
    pinned=(--set device=cuda --set zero_optimization.stage=3
      --set "zero_optimization.$section={\"device\": \"cpu\", \"pin_memory\": true}")
    DS_SIM_LOCKED_BYTES=8192 run -4 --separate-stderr on_sim ds-train cfg.json --out run "${pinned[@]}"
    [[ $stderr == *"zero_optimization.$section.pin_memory: the system does not lock "*"set the key to false"* ]] || fail "$stderr"
    run -0 --separate-stderr on_sim ds-train cfg.json --out "$section" --quiet "${pinned[@]}"
    diff <(losses plain) <(losses "$section")
  done
}

@test "what is wrong with a device is said before anything is written" {
  need_sim
  DS_SIM_DEVICES=0 run -4 --separate-stderr on_sim ds-train cfg.json --out run --set device=cuda
  [[ $stderr == *"driver finds no GPU"* ]]
  run -4 --separate-stderr on_sim ds-train cfg.json --out run --set device=cuda --set model.n_embd=4096 \
    --set model.n_layer=12 --set model.n_head=32
  [[ $stderr == *"GiB"*"free on simulated device"*"optimizer"* ]]
  # Four ranks, so that some come to the verdict after others have gone with it: the same status on all.
  for _ in 1 2 3 4 5 6; do
    run -4 --separate-stderr on_sim ds-launch -n 4 ds-train cfg.json --out run --set communication.backend=nccl
    [[ $stderr == *"4 ranks share 1 GPU"* ]]
  done
  (
    unset CUDA_VISIBLE_DEVICES
    run -4 --separate-stderr on_sim ds-launch -n 2 ds-train cfg.json --check --set communication.backend=nccl
    [[ $stderr == *"2 ranks and 1 GPU"* ]]
  )
  [[ ! -e run ]]
}

@test "lines beside others have the bytes that they have alone, from caches of codes too" {
  need_sim
  ds-train cfg.json --out run --steps 1 --quiet
  for n in 3 20 7; do
    printf '{"prompt": "The words of a text", "max_tokens": %d, "seed": %d, "logprobs": 1}\n' "$n" "$n"
  done >in.jsonl
  for dtype in work int8; do
    on_sim ds-infer run in.jsonl --set device=cuda --cache-dtype "$dtype" >all.jsonl
    while IFS= read -r line; do on_sim ds-infer run --set device=cuda --cache-dtype "$dtype" <<<"$line"; done <in.jsonl >alone.jsonl
    cmp all.jsonl alone.jsonl
  done
}
