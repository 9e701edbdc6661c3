#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Layers that see some tokens of each sample, from the shell: with the section as in DeepSpeed's examples, in every
# arrangement, resumed.

bats_require_minimum_version 1.5.0

load tiny

drops=(--set model.n_layer=3 --set 'data_efficiency={"enabled": true, "data_routing": {"enabled": true, "random_ltd":
  {"enabled": true, "total_layer_num": 3, "random_ltd_layer_num": 2, "random_ltd_layer_id": [0, 2],
  "model_mask_name": "attention_mask", "model_type": "decoder", "hidden_state_order": "batch_seq_dim",
  "random_ltd_schedule": {"min_value": 8, "max_value": 32, "schedule_type": "fixed_linear",
  "schedule_config": {"require_steps": 6, "seq_per_step": 8}}}}}')

kept() { grep '"type":"step"' "$1/metrics.jsonl" | sed 's/.*"layer_tokens":\([0-9]*\).*/\1/' | tr '\n' ' '; }

@test "layers see as many tokens as the schedule says, in every arrangement, and a resumed run goes on" {
  ds-train cfg.json --out whole --quiet --steps 9 "${drops[@]}"
  assert_equal "$(kept whole)" "8 8 16 16 24 24 32 32 32 "
  merged whole whole.safetensors
  for more in '-n 2 zero_optimization.stage=3' '-n 4 zero_optimization.stage=1' '-n 2 pipeline.stages=3' '-n 1 eval.every=2' \
    '-n 1 activation_checkpointing.cpu_checkpointing=true' '-n 2 activation_checkpointing.granularity="selective"' \
    '-n 1 zero_optimization={"stage":3,"stage3_tile_size":512}' '-n 1 pipeline={"virtual_stages":3,"schedule":"breadth-first"}'; do
    read -r n ranks set <<<"$more"
    [[ $set == pipeline.* ]] && ranks=3
    rm -rf half
    ds-train cfg.json --out half --quiet --steps 4 "${drops[@]}" --set eval.every=3
    ds-launch "$n" "$ranks" ds-train cfg.json --out half --quiet --steps 9 --resume latest "${drops[@]}" \
      --set train_micro_batch_size_per_gpu=2 --set "$set"
    assert_equal "$(losses half)" "$(losses whole)"
    assert_equal "$(kept half)" "$(kept whole)"
    merged half half.safetensors
    cmp whole.safetensors half.safetensors
  done
}

@test "documents stay apart, and what is predicted is what is used" {
  python3 -c 'print("one. two. three and four. " * 400)' >text.txt
  for more in '-n 1 zero_optimization.stage=0' '-n 2 zero_optimization.stage=3'; do
    read -r n ranks set <<<"$more"
    ds-launch "$n" "$ranks" ds-train cfg.json --out "with$ranks" --steps 5 "${drops[@]}" --set data.document_token=46 \
      --set "$set" >out
    awk '/predicted/ {table = 1; next} table && $3 ~ /[KM]iB/ && $2 $3 != $4 $5 {print; bad = 1} END {exit bad}' out
  done
  assert_equal "$(losses with1)" "$(losses with2)"
}

@test "what does not fit is refused before anything is written" {
  refused 2 'random_ltd_layer_num: is 3, and there are 2' "${drops[@]}" \
    --set data_efficiency.data_routing.random_ltd.random_ltd_layer_num=3
  refused 2 'total_layer_num: is 3, and the model has 2 layers' "${drops[@]}" --set model.n_layer=2
  refused 4 'a layout of sparse attention' "${drops[@]}" --set sparse_attention.mode=local
  refused 4 'data_efficiency.data_sampling' "${drops[@]}" --set data_efficiency.data_sampling.enabled=true
}
