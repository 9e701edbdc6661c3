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
  for key in device=cuda communication.backend=nccl cuda.graphs=true cuda.autotune=true; do
    run -4 --separate-stderr ds-train cfg.json --out run --set "$key"
    [[ $stderr == *"no NVIDIA driver"* || $stderr == *"driver finds no GPU"* || $stderr == *"built without CUDA"* ]]
    run -4 --separate-stderr ds-train cfg.json --check --set "$key"
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
