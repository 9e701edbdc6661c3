#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Masked language modelling from the shell: training, resuming, evaluation, and the features that a BERT lacks.

bats_require_minimum_version 1.5.0

load tiny

setup() {
  tiny_setup
  cat >bert.json <<'JSON'
{
  "model": {"type": "bert", "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 64, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1},
  "data": {"train": "text.txt", "seq_length": 32,
           "mlm": {"mask_token": 256, "cls_token": 257, "sep_token": 258}},
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
  "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
  "reduce_order": "micro",
  "steps": 12
}
JSON
}

@test "a bert learns, and ranks, stages and a resume in between leave no trace" {
  ds-launch -n 2 ds-train bert.json --out whole --quiet
  losses whole | awk 'NR == 1 { first = $2 } END { exit !(NR == 12 && $2 < first - 0.5) }'
  ds-train bert.json --out parts --quiet --steps 5
  ds-launch -n 4 ds-train bert.json --out parts --quiet --resume latest --set zero_optimization.stage=3
  diff <(losses whole) <(losses parts)
}

@test "what is merged starts another run, and evaluates alike" {
  ds-train bert.json --out run --quiet
  run -0 ds-train bert.json --resume run --eval
  want=${output#*val_loss }
  ds-ckpt-merge run -o merged.safetensors --quiet
  run -0 ds-train bert.json --weights merged.safetensors --eval
  assert_equal "${output#*val_loss }" "$want"
}

@test "a run goes on with the masks that it began with" {
  ds-train bert.json --out run --quiet --steps 2
  run -3 ds-train bert.json --out run --resume latest --set data.mlm.probability=0.2
  assert_output --partial "objective 'masked tokens, probability 0.15"
  run -3 ds-train bert.json --out run --resume latest --set data.mlm.mask_token=10
  assert_output --partial "mask 256"
}

@test "a bert writes no text, and a gpt masks none" {
  run -4 ds-train bert.json --generate 'In the beginning'
  assert_output --partial 'cannot continue a prompt'
  run -2 ds-train cfg.json --set data.mlm.probability=0.2
  assert_output --partial 'data.mlm: masks tokens, and a model of type "gpt2" predicts the next one'
  run -2 ds-train bert.json --set data.mlm.sep_token=256
  assert_output --partial 'begins or ends a sample'
}

@test "an encoder gets a new head when it is asked for" {
  ds-train bert.json --out run --quiet
  ds-ckpt-merge run -o encoder --format hf --quiet
  ds-ckpt-merge run -o encoder/model.safetensors --only 'bert.*' --quiet
  sed 's/"model": {.*/"model": {"path": "encoder"},/; /intermediate_size/d' bert.json >tune.json
  run -3 ds-train tune.json
  assert_output --partial 'cls.predictions.transform.dense.weight is missing'
  run -0 ds-train tune.json --set model.new_head=true --out tuned
  assert_output --partial 'random values for cls.predictions.bias, cls.predictions.transform'
  run -2 ds-train tune.json --set model.new_head=true --eval
  assert_output --partial 'nothing to evaluate'
}
