#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ZeRO++ from the shell: second shards move no bit, coded weights resume bit for bit, a checkpoint that does not fit is
# refused.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  sed -i 's/"stage": 2/"stage": 3/' cfg.json
}

near='zero_optimization.zero_hpz_partition_size' codes='zero_optimization.zero_quantized_weights'

@test "second shards move no bit, and checkpoints go from run to run" {
  ds-launch -n 4 ds-train cfg.json --out plain --quiet
  ds-launch -n 4 ds-train cfg.json --out near --quiet --set $near=2
  assert_equal "$(losses near)" "$(losses plain)"
  merged plain plain.safetensors
  merged near near.safetensors
  cmp plain.safetensors near.safetensors
  ds-launch -n 4 ds-train cfg.json --out half --quiet --steps 5 --set $near=4
  ds-launch -n 2 ds-train cfg.json --out half --quiet --resume latest --set $near=2
  assert_equal "$(losses half)" "$(losses plain)"
  run ds-launch -n 4 ds-train cfg.json --check --json --set $near=2
  assert_success
  local sent
  sent=$(grep -o '"hpz.all_gather":[0-9]*' near/metrics.jsonl | sort -u | cut -d: -f2)
  assert_output --partial "\"hpz.all_gather\": $sent"
}

@test "coded weights train, resume bit for bit, and are saved exactly" {
  for more in bf16.enabled=false bf16.enabled=true; do
    rm -rf whole half
    ds-launch -n 2 ds-train cfg.json --out whole --quiet --set $codes=true --set $more
    ds-launch -n 2 ds-train cfg.json --out half --quiet --set $codes=true --set $more --steps 5
    ds-launch -n 2 ds-train cfg.json --out half --quiet --set $codes=true --set $more --resume latest --set $near=2
    assert_equal "$(losses half)" "$(losses whole)"
    merged whole whole.safetensors
    merged half half.safetensors
    cmp whole.safetensors half.safetensors
  done
}

@test "what codes of gradients lost is resumed bit for bit, and other ranks begin without" {
  local loco="--set zero_optimization.zero_quantized_gradients=true --set zero_optimization.zeropp_loco_param={}"
  for more in ${DS_SLOW:+save.async=true fp16.enabled=true} "$near=2" "tensor_parallel.tp_size=2 --set $codes=true"; do
    # shellcheck disable=SC2086
    resumes_bit_for_bit 4 5 $loco --set $more
  done
  cp -r other alone
  run --separate-stderr ds-launch -n 2 ds-train cfg.json --out other $loco --resume latest
  assert_success
  [[ $stderr == *"other/step-00000005 was made by another layout of ranks"*"what compression had lost there is lost"* ]]
  # A single rank sends no codes, so the saved errors are lost.
  run --separate-stderr ds-train cfg.json --out alone --resume latest
  assert_success
  [[ $stderr == *"what compression had lost there is lost"* ]]
  run grep '"type":"step","step":3,' whole/metrics.jsonl
  assert_output --regexp '"compression":\{"gradient_error":[0-9.e-]+,"gradient_error_across":'
}

@test "gradients in 8 and 4 bits train at every stage, and resume bit for bit with what they lost" {
  local stage more
  for stage in ${DS_SLOW:+0 2} 1 3; do
    for more in communication_data_type=int8 "communication_data_type=int4 --set bf16.enabled=true"; do
      [[ -n ${DS_SLOW-} || $stage$more == @(1*int8|3*int4*) ]] || continue
      # shellcheck disable=SC2086
      resumes_bit_for_bit 4 5 --set zero_optimization.stage=$stage --set $more --set zero_optimization.zeropp_loco_param={}
    done
  done
  run ds-launch -n 4 ds-train cfg.json --check --json --set communication_data_type=int8
  assert_success
  assert_output --regexp '"dp.all_to_all": [0-9]{4}'
  # The choice of sequences that are cut over ranks changes nothing.
  ds-launch -n 2 ds-train cfg.json --out sp --quiet --set communication_data_type=int8 --set sequence_parallel_size=2
  assert_equal "$(losses sp | wc -l)" 12
}

@test "what codes lose in a step is measured without being fed back" {
  local type measured='zero_optimization.zeropp_loco_param={"err_beta":0,"reset_T":1}' error=()
  for type in int4 int8; do
    ds-launch -n 2 ds-train cfg.json --out plain --quiet --set communication_data_type=$type
    ds-launch -n 2 ds-train cfg.json --out $type --quiet --set communication_data_type=$type --set "$measured"
    assert_equal "$(losses $type)" "$(losses plain)"
    rm -rf plain
    error+=("$(sed -n 's/.*"step":3,.*"gradient_error_across":\([0-9.e-]*\).*/\1/p' $type/metrics.jsonl)")
  done
  # Steps of 4 bits are 127/7 as wide as those of 8.
  awk -v a="${error[0]}" -v b="${error[1]}" 'BEGIN { exit !(12 * b < a && a < 24 * b) }' || fail "${error[*]}"
}

@test "what codes lost is of the elements that a rank has, and follows the loss scale also in steps that send nothing" {
  local loco="--set communication_data_type=int4 --set zero_optimization.zeropp_loco_param={}"
  # shellcheck disable=SC2086
  set -- $loco --set model.n_layer=4 --set pipeline.stages=2 --set zero_optimization.stage=1
  ds-launch -n 4 ds-train cfg.json --out run --quiet --steps 4 "$@"
  # As many elements, of other layers.
  run --separate-stderr ds-launch -n 4 ds-train cfg.json --out run --steps 5 --resume latest "$@" \
    --set pipeline.schedule=interleaved --set pipeline.virtual_stages=2
  assert_success
  [[ $stderr == *"what compression had lost there is lost"* ]] || fail "$stderr"
  # shellcheck disable=SC2086
  resumes_bit_for_bit 2 3 $loco --set zero_optimization.stage=0 --set fp16.enabled=true --set fp16.initial_scale_power=6 \
    --set fp16.loss_scale_window=1 \
    --set 'optimizer={"type":"ZeroOneAdam","params":{"lr":1e-5,"var_freeze_step":100,"var_update_scaler":1}}'
  # Steps that average by signs have norms of those errors, and the others of codes: of two ranks there is one hop.
  run grep -o '"gradient_error":[0-9.e-]*' whole/metrics.jsonl
  assert_success
  refute_output --regexp '"gradient_error":0[.]0*[1-9]'
}

@test "of wide rows, which travel in several exchanges, no more is sent than predicted" {
  slow_only
  head -c 200000 /dev/urandom >rnd.txt
  cat >wide.json <<'JSON'
{"model": {"type": "qwen3", "vocab_size": 1024, "hidden_size": 16384, "num_hidden_layers": 1, "num_attention_heads": 1,
           "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8, "max_position_embeddings": 128, "tie_word_embeddings": false},
 "data": {"train": "rnd.txt", "seq_length": 64}, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1,
 "optimizer": {"type": "SGD", "params": {"lr": 3e-3}}, "zero_optimization": {"stage": 2},
 "reduce_order": "micro", "sparse_gradients": true, "steps": 2}
JSON
  local vocab most sent
  for vocab in 1024 4096; do # the most is dense, and is not
    most=$(ds-launch -n 4 ds-train wide.json --check --json --set model.vocab_size=$vocab | sed '/"most_comm/,$d' | grep -o '"dp.[a-z_]*": [0-9]*' | awk '{ sum += $2 } END { print sum }')
    ds-launch -n 4 ds-train wide.json --out run$vocab --quiet --set model.vocab_size=$vocab
    while read -r sent; do
      assert [ "$(grep -o '"dp.[a-rt-z][a-z_]*":[0-9]*\|"dp.sparse_gather":[0-9]*' <<<"$sent" | awk -F: '{ sum += $2 } END { print sum }')" -le "$most" ]
    done < <(grep '"type":"step"' run$vocab/metrics.jsonl)
  done
}

@test "sparse gradients of embeddings: the losses of dense ones, fewer bytes, and no more than predicted" {
  local stage sent dense most
  bytes_of() { grep -o '"dp.[a-z_]*":[0-9]*' "$1/metrics.jsonl" | awk -F: '{ sum += $2 } END { print sum }'; }
  for stage in ${DS_SLOW:+1} 0 3; do
    set -- --set model.vocab_size=8192 --set model.tie_word_embeddings=false --set zero_optimization.stage=$stage
    ds-launch -n 2 ds-train cfg.json --out dense --quiet "$@"
    ds-launch -n 2 ds-train cfg.json --out sparse --quiet "$@" --set sparse_gradients=true
    assert_equal "$(losses sparse)" "$(losses dense)"
    merged dense dense.safetensors
    merged sparse sparse.safetensors
    cmp dense.safetensors sparse.safetensors
    sent=$(bytes_of sparse) dense=$(bytes_of dense)
    assert [ $((sent * 5)) -lt $((dense * 4)) ]
    ds-launch -n 2 ds-train cfg.json --check --json "$@" --set sparse_gradients=true >check.json
    # No step sends more of any kind of message than predicted.
    local name
    for name in dp.sparse_gather dp.reduce_scatter dp.all_gather; do
      most=$(sed -n '/"most_comm/,/}/p' check.json | grep -o "\"$name\": [0-9]*" | cut -d' ' -f2)
      [[ -n $most ]] || most=$(sed -n '/"comm_bytes_per_step/,/}/p' check.json | grep -o "\"$name\": [0-9]*" | head -1 | cut -d' ' -f2)
      for sent in $(grep -o "\"$name\":[0-9]*" sparse/metrics.jsonl | cut -d: -f2); do assert [ "$sent" -le "$most" ]; done
    done
    run ds-memreport sparse/metrics.jsonl
    assert_line --regexp '^ *scratch .* (exact|at most)$'
    rm -rf dense sparse
  done
  run ds-launch -n 2 ds-train cfg.json --check "$@" --set sparse_gradients=true
  assert_line --regexp 'scratch +[0-9.]+ [KM]iB at most$'
  assert_line --regexp 'dp.sparse_gather +[0-9.]+ [KM]iB, at most [0-9.]+ [KM]iB in a step$'
  run ds-memreport cfg.json -n 2 --device cpu "$@" --set sparse_gradients=true
  assert_line --regexp 'scratch +[0-9.]+ [KM]iB at most$'
  assert_line --regexp 'dp.sparse_gather .*, at most [0-9.]+ [KM]iB in a step$'
}

@test "a rank that is killed while codes and blocks travel is named" {
  local transport
  sed -i 's/"steps": .*/"steps": 1000000/; s/3e-3/1e-6/' cfg.json
  for transport in shm ${DS_SLOW:+mpi}; do
    rm -rf run
    killed_rank_is_named '[0-2]' -n 3 ds-train cfg.json --out run --quiet --set communication.backend=$transport \
      --set model.vocab_size=4096 --set model.tie_word_embeddings=false --set sparse_gradients=true \
      --set communication_data_type=int8 --set train_batch_size=6 --set zero_optimization.stage=1
  done
}

@test "evaluation and generation take coded weights, and no second shards" {
  sed -i 's/"stage": 3/"stage": 3, "zero_quantized_weights": true, "zero_quantized_gradients": true, "zero_hpz_partition_size": 2/' cfg.json
  ds-launch -n 2 ds-train cfg.json --out run --quiet --set data.split=0.1
  for n in 1 2 4; do
    run ds-launch -n $n ds-train cfg.json --out run --resume latest --eval --set data.split=0.1
    assert_success
    assert_output --partial val_loss
  done
  run ds-launch -n 2 ds-train cfg.json --out run --resume latest --generate 'The ' --max-tokens 4
  assert_success
}

@test "what ZeRO++ cannot be with is refused" {
  refused 2 "does not divide the 1 data-parallel ranks" --set $near=2
  refused 2 "ZeRO stage 2 keeps whole parameters" --set zero_optimization.stage=2 --set $codes=true
  refused 2 "ZeRO stage 0 keeps whole parameters" --set zero_optimization.stage=0 --set $near=2
  refused 2 "must be an integer, 1 to" --set $near=0
  refused 2 "communication_data_type: \"int8\" contradicts zero_optimization.zero_quantized_gradients" \
    --set zero_optimization.zero_quantized_gradients=true --set communication_data_type=int8
  refused 2 "communication_data_type \"int4\" is of all" --set zero_optimization.zero_quantized_gradients=true \
    --set zero_optimization.stage=1
  refused 2 "so it needs zero_optimization.zero_quantized_gradients true, or communication_data_type" \
    --set zero_optimization.zeropp_loco_param={}
  refused 2 "communication_data_type: sums that are kept in bf16 travel in bf16, too" --set bf16.enabled=true --set data_types.grad_accum_dtype=bf16 \
    --set communication_data_type=int8
  local frozen=zero_optimization.zero_quantized_nontrainable_weights
  refused 2 "ZeRO stage 2 keeps whole parameters" --set zero_optimization.stage=2 --set $frozen=true
  refused 2 "of no layer all that is gathered is frozen" --set $frozen=true
  ds-launch -n 2 ds-train cfg.json --out frozen --quiet --set $frozen=true \
    --set zero_optimization.stage3_param_persistence_threshold=0 --set 'optimizer.param_groups=[{"params": "*h.0.*", "frozen": true}]'
}
