// SPDX-License-Identifier: Apache-2.0
// The configuration reader: the result of resolving a ds_config.json, and every way in which one is refused.
#include "ds/config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "config/keys.h"
#include "config/model_config.h"
#include "config/reader.h"
#include "cpu_time.h"
#include "temp_directory.h"
#include "unit/config_reading.h"

namespace ds {
namespace config_test {

using ::testing::HasSubstr;
using namespace ds::testing;

// ---- wrong configurations: text, code, and the words of the message
// --------------------------------------------------

struct Wrong {
  std::string_view text;  // of the members, beside "train_batch_size": 8 unless it sets batch keys itself
  Errc code;
  std::string_view message;
  int world = 1;
};

constexpr Errc kBad = Errc::Config;
constexpr Errc kLater = Errc::Unavailable;
const Wrong kWrong[] = {
    // Names.
    {R"("optimzer": {})", kBad, "cfg:1:25: optimzer: unknown key; did you mean optimizer?"},
    {R"("zero_optimization": {"satge": 2})", kBad,
     "zero_optimization.satge: unknown key; did you mean zero_optimization.stage?"},
    {R"("reduce_bucket_size": 5e8)", kBad, "did you mean zero_optimization.reduce_bucket_size?"},
    {R"("stage": 2)", kBad, "did you mean zero_optimization.stage?"},
    {R"("lr": 1e-4)", kBad, "did you mean optimizer.params.lr?"},
    {R"("optimizer": {"type": "AdamW", "lr": 1e-4})", kBad,
     "optimizer.lr: unknown key; did you mean optimizer.params.lr?"},
    {R"("fp16": {"enable": true})", kBad, "did you mean fp16.enabled?"},
    {R"("batch_size": 4)", kBad, "did you mean train_batch_size?"},
    {R"("qqqqqq": 1)", kBad, "qqqqqq: unknown key; ds-config-keys(5) lists all"},
    {R"("zero_optimization.stage": 2)", kBad, "sections are nested objects: no key has a dot or a bracket"},
    {R"("zero_optimization": {"offload_optimizer": {"device": "none", "pin_memry": true}})", kBad,
     "did you mean zero_optimization.offload_optimizer.pin_memory?"},
    {R"("bf16": {"enabled": true}, "bfloat16": {"enabled": false})", kBad,
     "bfloat16: contradicts bf16, which is the same key"},
    {R"("bfloat16": {"enabled": true}, "bf16": {"enabled": false})", kBad,
     "bf16: contradicts bfloat16, which is the same key"},
    {R"("a\u0000b": 1, "stepz": 2)", kBad, "\"a\\u0000b\": unknown key; ds-config-keys(5) lists all\n  cfg"},
    {R"("zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2})", kBad, "contradicts"},
    // Types and ranges.
    {R"("steps": "100")", kBad, "steps: must be an integer, 1 to 1000000000000, not \"100\"; write 100 without quotes"},
    {R"("optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}})", kBad, "write 1e-4 without quotes"},
    {R"("optimizer": {"type": "AdamW", "params": {"lr": -1}})", kBad, "must be a number, 0 to 3e+38, not -1"},
    {R"("optimizer": {"type": "AdamW", "params": {"betas": [0.9]}})", kBad, "an array of two numbers"},
    {R"("optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}})", kBad, "at least 0 and less than 1"},
    {R"("optimizer": {"type": "AdamW", "params": {"eps": 0}})", kBad, "must be a number, greater than 0, not 0"},
    {R"("optimizer": {"type": "AdamW", "params": {"eps": -1e-8}})", kBad, "greater than 0, not -1e-08"},
    {R"("optimizer": {"type": "AdamW", "params": {"eps": 1e-50}})", kBad, "must be a number that fits fp32, not 1e-50"},
    {R"("optimizer": {"type": "AdamW", "params": {"eps": 1e50}})", kBad, "must be a number that fits fp32, not 1e+50"},
    {R"("optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}})", kBad, "write gradient_clipping"},
    {R"("optimizer": "AdamW")", kBad, "optimizer: must be an object, not \"AdamW\""},
    {R"("optimizer": {"type": "Adamm"})", kBad, "did you mean \"AdamW\"?"},
    {R"("optimizer": {"type": "FusedAdam"})", kBad, "not \"FusedAdam\"; did you mean \"Adam\"?"},
    {R"("optimizer": {"type": 3})", kBad, "must be one of \"AdamW\", \"Adam\", \"SGD\", \"Lion\", \"Lamb\", "},
    {R"("optimizer": {"type": 3})", kBad, "\"OneBitLamb\", not 3"},
    {R"("optimizer": {"type": "AdamW8bit", "params": {"state_dtype": "bf16"}})", kBad,
     "optimizer.params.state_dtype: belongs to AdamW, Adam, SGD, Lion, Adagrad; the optimizer is AdamW8bit"},
    {R"("optimizer": {"params": {"state_dtype": "fp16"}})", kBad, "must be one of \"fp32\", \"bf16\", not \"fp16\""},
    {R"("zero_optimization": {"stage": 4})", kBad, "must be an integer, 0 to 3, not 4"},
    {R"("zero_optimization": {"stage": 1.5})", kBad, "not 1.5"},
    {R"("zero_optimization": {"stage": true})", kBad, "not true"},
    {R"("scheduler": {"type": "WSD", "params": {"decay_num_steps": "auto"}})", kBad, "\"auto\" has no meaning here"},
    {R"("zero_optimization": "on")", kBad, "zero_optimization: must be an object, not \"on\""},
    {R"("fp16": {"enabled": 2})", kBad, "fp16.enabled: must be true or false, not 2"},
    {R"("fp16": {"hysteresis": "two"})", kBad, "fp16.hysteresis: must be an integer, 1 to"},
    {R"("train_micro_batch_size_per_gpu": "2")", kBad, "write 2 without quotes"},
    {R"("bf16": {"enabled": true, "loss_scale": 0, "hysteresis": 2})", kBad, "bf16.loss_scale: bf16 has no loss scale"},
    {R"("gradient_allreduce_op": "sum", "loss_norm": "token")", kBad, "gradient_allreduce_op: \"sum\" adds"},
    {R"("data": {"_comment": "x"})", kBad, "data._comment: unknown key"},
    {R"("zero_optimization": {"stage3_prefetch_bucket_size": -1})", kBad, "0 to 9223372036854775807, not -1"},
    {R"("zero_optimization": {"reduce_bucket_size": 1e19})", kBad, "not 1e+19"},
    {R"("zero_optimization": {"reduce_bucket_size": 99999999999999999999})", kBad, "must be an integer"},
    {R"("zero_optimization": 3)", kBad, "zero_optimization: must be an object, not 3"},
    {R"("zero_optimization": {"overlap_comm": 2})", kBad, "must be true or false, not 2"},
    {R"("deterministic": "true")", kBad, "write true without quotes"},
    {R"("fp16": {"loss_scale": -1})", kBad, "fp16.loss_scale"},
    {R"("fp16": {"loss_scale": 1e308})", kBad, "0 to 1e+38, not 1e+308"},
    {R"("fp16": {"min_loss_scale": 1e39})", kBad, "fp16.min_loss_scale"},
    {R"("fp16": {"loss_scale_window": 0})", kBad, "1 to 1000000000000"},
    {R"("fp16": {"min_loss_scale": -1})", kBad, "min_loss_scale: must be a number, 0 to 1e+38"},
    {R"("fp16": {"hysteresis": 0})", kBad, "fp16.hysteresis"},
    {R"("gradient_clipping": -0.5)", kBad, "gradient_clipping"},
    {R"("gradient_clipping": null, "steps": null)", kBad, "steps: must be an integer, 1 to 1000000000000, not null"},
    {R"("seed": 4294967296)", kBad, "0 to 4294967295"},
    {R"("data": {"split": 1})", kBad, "data.split"},
    {R"("data": {"train": ["a", "b"], "split": 0, "weights": [1, 0]})", kBad, "data.weights"},
    {R"("data": {"train": ["a", "b"], "split": 0, "weights": [1]})", kBad, "has 1 numbers, and data.train 2 files"},
    {R"("data": {"train": ["a", "b"], "weights": [1, 2]})", kBad, "give data.validation, or set data.split to 0"},
    {R"("data": {"train": []})", kBad, "names no file"},
    {R"("data": {"train": ["a", 3]})", kBad, "a string or an array of strings"},
    {R"("data": {"train": ""})", kBad, "a string or an array of strings"},
    {R"("data": {"format": "csv"})", kBad, "one of \"auto\", \"text\", \"bin\""},
    {R"("communication": {"timeout_s": 0})", kBad, "greater than 0"},
    {R"("communication": {"backend": "gloo"})", kBad,
     "one of \"auto\", \"self\", \"shm\", \"mpi\", \"shm+mpi\", \"nccl\""},
    {R"("communication_data_type": "fp8")", kBad, "one of \"fp32\", \"bf16\", \"fp16\", \"int8\", \"int4\""},
    {R"("communication_data_type": "none")", kBad, "one of \"fp32\", \"bf16\", \"fp16\", \"int8\", \"int4\""},
    {R"("communication_data_type": 16)", kBad, "one of \"fp32\", \"bf16\", \"fp16\", \"int8\", \"int4\""},
    // Keys that contradict each other.
    {R"("fp16": {"enabled": true}, "bf16": {"enabled": true})", kBad, "exclude each other"},
    {R"("fp8": {"enabled": true})", kBad, "fp8.enabled: codes are made of numbers in bf16: set bf16.enabled to true"},
    {R"("fp16": {"enabled": true}, "fp8": {"enabled": true})", kBad, "set bf16.enabled to true"},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true, "gradients": "fp8"})", kBad,
     "fp8.gradients: must be one of \"e4m3\", \"e5m2\", not \"fp8\""},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true},
        "zero_optimization": {"stage": 3, "stage3_tile_size": 1000})",
     kLater, "fp8.enabled: matrices in tiles"},
    {R"("bf16": {"enabled": true}, "fp8": {"gathers": true}, "zero_optimization": {"stage": 3})", kBad,
     "fp8.gathers: sends the codes of products in FP8: set fp8.enabled to true"},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true, "gathers": true}, "zero_optimization": {"stage": 2})", kBad,
     "fp8.gathers: ZeRO stage 2 keeps whole parameters, and gathers none; stage 3 does"},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true, "gathers": true},
        "zero_optimization": {"stage": 3, "zero_quantized_weights": true})",
     kBad, "fp8.gathers: a matrix travels in one code, and zero_optimization.zero_quantized_weights has another"},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true, "gathers": true},
        "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true})",
     kBad, "and zero_optimization.zero_quantized_nontrainable_weights has another: set one of them to false"},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true},
        "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 96, "n_layer": 2, "n_head": 2})",
     kBad,
     "fp8.enabled: scales are for 128 x 128 elements of a matrix, so inputs and outputs of linear maps must be "
     "multiples of 128; these are not: the hidden size 96 (128 would do), 2 heads of 48, together 96 (128 would do)"},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true}, "tensor_parallel": {"tp_size": 2},
        "model": {"type": "llama", "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512})",
     kBad,
     "multiples of 128 on each of the 2 ranks of tensor_parallel; these are not: 1 key/value heads of 64, together 64",
     2},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true}, "optimizer": {"params": {"betas": [0.9]}},
        "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 96, "n_layer": 2, "n_head": 2})",
     kBad, "fp8.enabled: scales are for 128 x 128"},
    {R"("reduce_order": "boundary", "zero_optimization": {"stage": 2})", kBad, "ZeRO stage 2"},
    {R"("reduce_order": "boundary", "deterministic": true)", kBad, "sums in the order \"micro\""},
    {R"("scheduler": {"params": {"warmup_num_steps": 3}})", kBad, "scheduler.type: is missing"},
    {R"("scheduler": {"params": {"cos_min_ratio": 0.5}})", kBad, "scheduler.type: is missing"},
    {R"("scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}})", kBad,
     "belongs to WarmupDecayLR, WarmupCosineLR, Linear, Cosine, CosineRestarts and WSD; the scheduler is WarmupLR"},
    {R"("scheduler": {"type": "WarmupDecayLR", "params": {"cos_min_ratio": 0.5}})", kBad,
     "belongs to WarmupCosineLR; the scheduler is WarmupDecayLR"},
    {R"("scheduler": {"type": "WarmupCosineLR", "params": {"warmup_max_lr": 3}})", kBad,
     "belongs to WarmupLR and WarmupDecayLR"},
    {R"("scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 0.5}})", kBad,
     "scheduler.params.cycle_min_lr: is missing"},
    {R"("scheduler": {"type": "WSD", "params": {"num_cycles": 2}})", kBad,
     "belongs to CosineRestarts; the scheduler is WSD"},
    {R"("scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 1,
        "decay_step_size": 1, "decay_mom_rate": 0.5}}, "steps": 100)",
     kBad, "decay_mom_rate: lets the momentum grow to"},
    {R"("scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1}})", kBad,
     "cycle_max_mom"},
    {R"("device": "cpu", "cuda": {"graphs": true})", kBad, "cuda.graphs: there are no CUDA graphs on device \"cpu\""},
    {R"("zero_optimization": {"stage": 2, "stage3_tile_size": 1000})", kBad,
     "zero_optimization.stage3_tile_size: ZeRO stage 2 keeps whole parameters"},
    {R"("zero_optimization": {"stage": 3, "stage3_tile_size": 1000}, "cuda": {"graphs": true})", kLater,
     "cuda.graphs: with zero_optimization.stage3_tile_size"},
    {R"("device": "cpu", "cuda": {"autotune": true})", kBad, "cuda.autotune: there is nothing to tune"},
    {R"("deterministic": true, "cuda": {"autotune": true})", kBad, "\"deterministic\" forbids"},
    {R"("device": "cpu", "cuda": {"autotune_file": "choices"})", kBad, "cuda.autotune_file: holds choices for GPUs"},
    {R"("device": "cpu", "bf16": {"enabled": true}, "cuda": {"attention": "cudnn"})", kBad,
     "cuda.attention: there is no cuDNN on device \"cpu\""},
    {R"("cuda": {"attention": "cudnn"})", kBad, "cuda.attention: cuDNN computes attention in 16 bits alone"},
    {R"("device": "cpu", "cuda": {"invariant_forward": true})", kBad, "passes on device \"cpu\" are always so"},
    {R"("bf16": {"enabled": true}, "cuda": {"invariant_forward": true, "attention": "cudnn"})", kBad,
     "cuda.invariant_forward: takes the attention of libds"},
    {R"("bf16": {"enabled": true}, "fp8": {"enabled": true}, "cuda": {"invariant_forward": true})", kBad,
     "cuda.invariant_forward: products of FP8"},
    {R"("cuda": {"attention": "flash"})", kBad, "one of \"auto\", \"cudnn\", \"own\""},
    {R"("device": "cuda", "cuda": {"graphs": true}, "model": {"type": "gpt2", "resid_pdrop": 0.1})", kBad,
     "cuda.graphs: dropout"},
    {R"("device": "cpu", "communication": {"backend": "nccl"})", kBad, "talks between GPUs"},
    {R"("cuda": {"graph": true})", kBad, "did you mean cuda.graphs?"},
    {R"("communication": {"backend": "self"})", kBad, "\"self\" is for 1 rank; there are 2", 2},
    {R"("eval": {"every": 10}, "data": {"split": 0})", kBad, "nothing to evaluate on"},
    // Batch arithmetic.
    {R"("train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3)", kBad,
     "train_batch_size: 32 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 x 2 ranks = 24", 2},
    {R"("train_batch_size": 30, "train_micro_batch_size_per_gpu": 4)", kBad,
     "4 x 2 ranks = 8 does not divide it; 24 or 32 would do", 2},
    {R"("train_batch_size": 30, "gradient_accumulation_steps": 4)", kBad, "gradient_accumulation_steps 4 x 2 ranks = 8",
     2},
    {R"("train_batch_size": 5)", kBad, "gradient_accumulation_steps 1 x 2 ranks = 2 does not divide it; 4 or 6", 2},
    {R"("train_batch_size": 1)", kBad, "x 3 ranks = 3 does not divide it; 3 would do", 3},
    {R"("gradient_accumulation_steps": 4)", kBad, "(not gradient_accumulation_steps alone)"},
    {R"("train_batch_size": null)", kBad, "train_batch_size: is missing: give train_batch_size or"},
    {R"("train_batch_size": 0)", kBad, "1 to 2147483648, not 0"},
    {R"("train_micro_batch_size_per_gpu": 1e12, "gradient_accumulation_steps": 1e12)", kBad,
     "train_micro_batch_size_per_gpu: must be an integer, 1 to 2147483648, not 1000000000000.0"},
    {R"("eval": {"batches": 9223372036854775807})", kBad,
     "eval.batches: must be an integer, 0 to 1000000000000, not 9223372036854775807"},
    {R"("eval": {"batches": 768614336404564651})", kBad, "eval.batches: must be an integer, 0 to 1000000000000"},
    {R"("optimizer": {"type": "AdamW", "params": {"lr": 1e-320}})", kBad,
     "must be a number that fits fp32, not 1e-320"},
    {R"("communication": {"timeout_s": 1e308})", kBad, "greater than 0 and at most 1000000000"},
    {R"("train_batch_size": 1e9, "train_micro_batch_size_per_gpu": 1)", kBad,
     "gradient_accumulation_steps: 1000000000 is beyond 100000; a larger train_micro_batch_size_per_gpu needs fewer"},
    {R"("train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 100001)", kBad, "1 to 100000, not 100001"},
    {R"("train_batch_size": 2147483647, "model": {"type": "gpt2", "vocab_size": 16777216, "n_embd": 16777216,
        "n_layer": 100000, "n_head": 65536, "n_positions": 16777216}, "data": {"seq_length": 16777216})",
     kBad, "TiB, beyond the 1024 that are computed with"},
    {R"("train_micro_batch_size_per_gpu": 65537, "model": {"type": "mixtral", "vocab_size": 256, "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 128}, "data": {"seq_length": 128})",
     kBad,
     "train_micro_batch_size_per_gpu: a micro-batch of 8388736 tokens, of which each chooses 2 experts, has 16777472 "
     "choices, and routers count up to 16777216 exactly; 65536 sequences would do"},
    // Models.
    {R"("model": {"type": "gpt2", "vocab_size": 256, "n_embd": 2147483648, "n_layer": 2, "n_head": 2})", kBad,
     "model.n_embd: must be an integer, 1 to 16777216, not 2147483648"},
    {R"("model": {"type": "gpt2", "vocab_size": 256, "n_embd": 1e12, "n_layer": 2, "n_head": 1e10})", kBad,
     "model.n_head: must be an integer, 1 to 16777216"},
    {R"("model": "gpt2")", kBad, "model: must be an object"},
    {R"("model": {})", kBad, "model.type: is missing"},
    {R"("model": {"type": "gpt2", "path": "x"})", kBad, "model.type: stands beside model.path"},
    {R"("model": {"path": "x", "new_head": 1})", kBad, "model.new_head: must be true or false"},
    {R"("model": {"path": "/nonexistent/dir"})", kBad,
     "cfg:1:35: model.path: /nonexistent/dir: cannot be opened: No such file or directory"},
    {R"("model": {"type": "gpt2", "n_layers": 3})", kBad, "model.n_layers: unknown key; did you mean model.n_layer?"},
    {R"("model": {"type": "gpt2", "vocab_size": 9, "n_embd": 30, "n_layer": 1, "n_head": 4})", kBad,
     "4 heads do not divide n_embd 30"},
    {R"("model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}, "data": {"seq_length": 65})",
     kBad, "data.seq_length: 65 is beyond the model's 64 positions"},
    {R"("model": {"type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 64}, "data": {"seq_length": 65})",
     kBad, "data.seq_length: 65 is beyond the model's 64 positions"},
    {R"("model": {"type": "gpt2", "vocab_size": 200, "n_embd": 32, "n_layer": 2, "n_head": 2}, "data": {"train": "a.txt"})",
     kBad, "the vocabulary of 200 does not cover the 256 bytes"},
    // Known, but not there yet.
    {R"("zero_optimization": {"offload_optimizer": {"super_offload": true}})", kLater, "super_offload"},
    {R"("zero_optimization": {"stage": 1, "cpu_offload": true, "offload_optimizer": {"device": "none"}})", Errc::Config,
     "contradicts zero_optimization.offload_optimizer.device"},
    {R"("zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}})", Errc::Config,
     "offload_optimizer.nvme_path: is missing"},
    {R"("zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a"}})", Errc::Config,
     "needs ZeRO stage 1, 2 or 3"},
    {R"("zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "a"}})", Errc::Config,
     "ZeRO stage 2 keeps whole parameters"},
    {R"("zero_optimization": {"stage": 1, "offload_optimizer": {"device": "server"}})", Errc::Config,
     "offload_optimizer.name: is missing"},
    {R"("zero_optimization": {"offload_optimizer": {"device": "server", "name": "a"}})", Errc::Config,
     "needs ZeRO stage 1, 2 or 3"},
    {R"("zero_optimization": {"stage": 1, "offload_optimizer": {"device": "server", "name": "a", "ratio": 0.5}})",
     Errc::Config, "a server has all states"},
    {R"("tensor_parallel": {"tp_size": 2}, "activation_checkpointing": {"granularity": "layer", "partition_activations": true},
         "pipeline": {"schedule": "breadth-first", "virtual_stages": 2})",
     kLater, "is not supported with", 2},
    {R"("pipeline": {"schedule": "breadth-first"})", Errc::Config, "pipeline.virtual_stages is 1, it takes 2 or more"},
    {R"("zero_optimization": {"offload_optimizer": {"delayed_update": true}})", Errc::Config,
     "needs zero_optimization.offload_optimizer.device"},
    {R"("zero_optimization": {"stage": 1, "offload_optimizer": {"device": "server", "name": "a", "delayed_update": true}})",
     Errc::Unavailable, "is not supported with"},
    {R"("optimizer": {"type": "Lamb"}, "zero_optimization": {"offload_optimizer": {"device": "cpu", "delayed_update": true}})",
     Errc::Unavailable, "LAMB and Muon"},
    {R"("zero_optimization": {"offload_optimizer": {"device": "cpu", "delayed_update": true, "delayed_update_start": 0}})",
     kBad, "delayed_update_start"},
    {R"("zero_optimization": {"stage": 3, "offload_param": {"device": "server"}})", Errc::Config,
     "\"server\" is for states of optimizers"},
    {R"("save": {"async": true}, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "a"}})",
     Errc::Config, "save.async: copies the state"},
    {R"("aio": {"block_size": 5000})", Errc::Config, "no multiple of 4096"},
    {R"("train_micro_batch_size": 4)", Errc::Config, "did you mean train_micro_batch_size_per_gpu?"},
    {R"("zero_optimization": {"offload_optimizer": 3})", kBad, "must be an object, not 3"},
    {R"("offload_optimizer": "auto")", kBad, "offload_optimizer"},
    {R"("zero_optimization": {"legacy_stage1": true})", kLater,
     "true is not supported yet (libds 0.1.0); false is accepted"},
    {R"("zero_optimization": {"stage": 3, "zeropp_loco_param": {}})", kBad,
     "zero_optimization.zeropp_loco_param: compensates for quantisation errors, so it needs "
     "zero_optimization.zero_quantized_gradients true"},
    {R"("zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 1.5, "reset_T": 0}})", kBad,
     "err_beta: must be"},
    {R"("zero_optimization": {"stage": 3, "zero_quantized_gradients": true, "zeropp_loco_param": {"reset_t": 5}})",
     kBad, "did you mean"},
    {R"("zero_optimization": {"load_from_fp32_weights": false})", kLater, "true is accepted"},
    {R"("optimizer": {"type": "MuAdam", "params": {"lr": 1e-3}})", kLater, "\"MuAdam\" is not supported yet"},
    {R"("optimizer": {"type": "MuAdam", "params": {"lr": 1e-3, "coeff_beta": 0.9}})", kLater,
     "\"MuAdam\" is not supported yet"},
    {R"("optimizer": {"type": "muadam"})", kLater, "\"muadam\" is not supported yet"},
    {R"("optimizer": {"type": "OneBitLamb", "params": {"factor_min": 2, "factor_max": 1, "min_coeff": 3,
        "max_coeff": 2}})",
     kBad, "optimizer.params.factor_min: is above factor_max, 1"},
    {R"("optimizer": {"type": "OneBitLamb", "params": {"factor_threshold": 1}})", kBad, "less than 1"},
    {R"("optimizer": {"type": "Lamb", "params": {"factor_min": 2}})", kBad,
     "optimizer.params.factor_min: belongs to OneBitLamb; the optimizer is Lamb"},
    {R"("optimizer": {"type": "OneBitLamb", "params": {"eps_inside_sqrt": true}})", kLater, "false is accepted"},
    {R"("data_types": {"grad_accum_dtype": "bf16"})", kBad,
     "data_types.grad_accum_dtype: \"bf16\": sums are in fp32, or in the type of the parameters, fp32"},
    {R"("fp16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"})", kBad, "of the parameters, fp16"},
    {R"("data_types": {"logits_dtype": "bf16"})", kBad,
     "data_types.logits_dtype: \"bf16\": logits are in fp32, like the parameters"},
    {R"("bf16": {"enabled": true}, "data_types": {"logits_dtype": "fp16"})", kBad, "of the parameters, bf16"},
    {R"("data_types": {"logit_dtype": "fp32"})", kBad, "data_types.logits_dtype"},
    {R"("bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32")",
     kBad, "communication_data_type: sums that are kept in bf16 travel in bf16, too"},
    {R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true}, "data_types": {"grad_accum_dtype": "fp32"})",
     kBad, "\"fp32\" contradicts bf16.bf16_master_weights_and_grads, which keeps sums in bf16"},
    {R"("bf16": {"enabled": true, "stochastic_rounding": true})", kBad,
     "bf16.stochastic_rounding: is of parameters that have no master in fp32, which "
     "bf16.bf16_master_weights_and_grads"},
    {R"("bf16": {"enabled": true, "bf16_optimizer_states": true}, "optimizer": {"params": {"state_dtype": "fp32"}})",
     kBad, "bf16.bf16_optimizer_states: contradicts optimizer.params.state_dtype"},
    {R"("bf16": {"enabled": true, "bf16_optimizer_states": true}, "optimizer": {"type": "Lamb"})", kLater,
     "the states of Lamb are not kept in bf16"},
    {R"("bf16": {"enabled": true, "bf16_optimizer_states": true}, "optimizer": {"params": {"lr": 0.1},
        "param_groups": [{"params": ["*"], "type": "AdamW8bit"}]})",
     kLater, "the states of AdamW8bit are not kept in bf16"},
    {R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true}, "optimizer": {"type": "Muon"})", kLater,
     "bf16.bf16_master_weights_and_grads: Muon makes whole matrices"},
    {R"("fp16": {"enabled": true, "fp16_master_weights_and_grads": true}, "zero_optimization": {"stage": 2,
        "offload_optimizer": {"device": "server", "name": "a"}})",
     kLater, "fp16.fp16_master_weights_and_grads: a server of states has fp32 masters"},
    {R"("data": {"add_document_token": true})", kBad, "data.add_document_token: needs data.document_token"},
    {R"("data": {"add_document_token": true, "document_token": 3, "separate_documents": false})", kBad,
     "data.add_document_token: is of documents that are separated or packed"},
    {R"("data": {"document_token_at": "begin"})", kBad, "data.document_token_at: needs data.document_token"},
    {R"("data": {"document_token_at": "front", "document_token": 3})", kBad, "data.document_token_at"},
    {R"("data": {"document_positions": "anew", "document_token": 3})", kBad, "data.document_positions"},
    {R"("data": {"packing": "greedy"})", kBad, "data.packing"},
    {R"("data": {"packing": "best_fit", "document_token": 3}, "curriculum_learning": {"enabled": true,
        "max_difficulty": 9, "schedule_config": {"total_curriculum_step": 9}})",
     kLater, "curriculum_learning.enabled: cuts off the end of samples"},
    {R"("data": {"chat_template": {"user": "{content}"}})", kBad, "data.chat_template.assistant: is missing"},
    {R"("data": {"chat_template": {"assistant": "a"}})", kBad, "assistant: must contain {content} exactly once"},
    {R"("data": {"chat_template": {"assistant": "{content}{content}"}})", kBad, "must contain {content} exactly once"},
    {R"("data": {"chat_template": {"assistant": "{content}", "begin": "{content}"}})", kBad,
     "precedes the first message"},
    {R"("data": {"chat_template": {"assistant": "{content}", "asistant": "a"}})", kBad,
     "data.chat_template.assistant?"},
    {R"("data": {"chat_template": "llama"})", kBad, "data.chat_template"},
    {R"("flops_profiler": {"enabled": true, "profile_steps": 3})", kBad, "did you mean flops_profiler.profile_step?"},
    {R"("offload_optimizer": {"device": "cpu"})", kBad, "write zero_optimization.offload_optimizer"},
    {R"("zero_optimization": {"aio": {"block_size": 4096}})", kBad, "write aio beside zero_optimization"},
    {R"("tensor_parallel": {"autotp_size": 4})", kBad,
     "tensor_parallel.tp_size: 4 does not divide the 1 rank that there"},
    {R"("tensor_parallel": {"tp": {"tp_size": 2}})", kBad, "2 does not divide the 3 ranks that there are; with 2 or 4",
     3},
    {R"("tensor_parallel": {"tp_overlap_comm": true})", kLater, "tp_overlap_comm"},
    {R"("comms_logger": {"prof_all": false})", kBad, "comms_logger.prof_ops: names no operation"},
    {R"("tensorboard": {"enabled": true, "output": "x"})", kBad, "did you mean tensorboard.output_path?"},
    {R"("csv_monitor": {"job_name": ""})", kBad, "csv_monitor.job_name: must be a string"},
    {R"("nebula": {"enabled": true})", kLater, "nebula"},
    {R"("flops_profiler": {"profile_step": 0})", kBad, "flops_profiler.profile_step: must be an integer"},
    {R"("pipeline": {"stages": 2}, "tensor_parallel": {"tp_size": 3}, "sequence_parallel_size": 2)", kBad,
     "pipeline.stages 2 x tensor_parallel.tp_size 3 x sequence_parallel_size 2 = 12 does not divide the 8 ranks that",
     8},
    {R"("pipeline": {"stagess": 2})", kBad, "pipeline.stages"},
    {R"("pipeline": {"schedule": "1F1b2"})", kBad, "1f1b"},
    {R"("pipeline": {"partition": "type:(Block"})", kBad, "\"(Block\" is no regular expression"},
    {R"("pipeline": {"partition": "type:\\C"})", kBad, "is no regular expression"},
    {R"("pipeline": {"stages": 2, "partition": "type:((.*)*)*$x"}, "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})",
     kBad, "pipeline.partition: \"((.*)*)*$x\" matches no layer; their types are Embedding, Gpt2Block, Head", 2},
    {R"("pipeline": {"partition": "even"})", kBad,
     "must be \"parameters\", \"uniform\", \"memory\", \"compute\" or \"type:REGEX\""},
    {R"("pipeline": {"virtual_stages": 2})", kBad, "pipeline.virtual_stages: 2: pipeline.schedule 1f1b takes 1"},
    {R"("pipeline": {"stages": 2, "schedule": "interleaved", "virtual_stages": 2}, "gradient_accumulation_steps": 3,
        "train_micro_batch_size_per_gpu": 1)",
     kBad, "gradient_accumulation_steps 3 is no multiple of the 2 pipeline.stages; 2 or 4 would do", 2},
    {R"("pipeline": {"schedule": "zb-v"})", kBad, "pipeline.schedule: zb-v: pipeline.stages is 1, it takes 2 or more"},
    {R"("pipeline": {"schedule": "zbv"})", kBad, "zb-v"},
    {R"("pipeline": {"stages": 2, "schedule": "zb-v", "virtual_stages": 3})", kBad,
     "pipeline.virtual_stages: 3: pipeline.schedule zb-v takes 2, one on the way down the stages and one on the way up",
     2},
    {R"("pipeline": {"stages": 3, "schedule": "zb-v", "memory_limit": 0.6})", kBad,
     "pipeline.memory_limit: 0.6: pipeline.schedule zb-v of 3 stages takes 0.6667 or more", 3},
    {R"("pipeline": {"stages": 2, "schedule": "zb-v", "memory_limit": 0})", kBad, "pipeline.memory_limit", 2},
    {R"("pipeline": {"stages": 3, "schedule": "zb-v"}, "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})",
     kBad, "2 on each of 3 stages are more than the 4 layers", 3},
    {R"("pipeline": {"stages": 5}, "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})",
     kBad, "5 parts are more than the 4 layers (embedding and head among them); at most 4", 5},
    {R"("tensor_parallel": {"tp_size": 4}, "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})",
     kBad, "the model's 2 heads cannot be shared by 4 ranks; 1 or 2 would do", 4},
    {R"("sequence_parallel_size": 4, "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})",
     kBad, "2 heads (2 of keys and values) cannot be shared by 4 ranks; 1 or 2", 4},
    {R"("sequence_parallel_size": 3, "sequence_parallel_mode": "ring", "data": {"train": "x", "seq_length": 32}, "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})",
     kBad, "32 tokens cannot be cut in 6 parts (sequence_parallel_size 3, two chunks on each rank); 30 or 36 would do",
     3},
    {R"("activation_checkpointing": {"granularity": "layer", "interval": 0})", kBad, "0 keeps everything"},
    {R"("activation_checkpointing": {"granularity": "selective", "cpu_checkpointing": true})", kBad,
     "is about inputs of layers"},
    {R"("activation_checkpointing": {"granularity": "selective", "nvme_path": "disk"})", kBad,
     "activation_checkpointing.nvme_path: is about inputs of layers"},
    {R"("activation_checkpointing": {"cpu_checkpointing": true, "nvme_path": "disk"})", kBad,
     "activation_checkpointing.nvme_path: excludes activation_checkpointing.cpu_checkpointing"},
    {R"("activation_checkpointing": {"nvme_path": "disk", "buffer_count": 0})", kBad,
     "activation_checkpointing.buffer_count: must be an integer"},
    {R"("activation_checkpointing": {"granularity": "layers"})", kBad, "\"layer\""},
    {R"("cuda": {"graphs": true}, "device": "cuda", "tensor_parallel": {"tp_size": 2})", kLater, "exclude graphs", 2},
    {R"("cuda": {"graphs": true}, "device": "cuda", "model": {"type": "mixtral", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 8192, "intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.01, "moe": {"loss_over": "global_batch"}})",
     kLater, "cuda.graphs: model.moe.loss_over \"global_batch\" adds up counts", 2},
    {R"("train_batch_size": 4098, "train_micro_batch_size_per_gpu": 1, "data": {"train": "x", "seq_length": 4096}, "model": {"type": "mixtral", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 8192, "intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.01, "moe": {"loss_over": "global_batch"}})",
     kLater,
     "model.moe.loss_over: \"global_batch\" counts the tokens of an expert exactly up to 16777216, and a step has 4098",
     2},
    {R"("save": {"on_error": "retry"})", kBad, "save.on_error"},
    {R"("model": {"type": "gpt_oss"})", kLater, "\"gpt_oss\""},
    // Both: the mistake decides.
    {R"("torch_autocast": {"enabled": true}, "stepz": 3)", kBad, "torch_autocast"},
};

TEST(Config, EveryMistakeIsRefusedWithItsCodeAndWords) {
  ASSERT_GE(std::size(kWrong), 60u);
  for (const Wrong& w : kWrong) {
    const bool own_batch = w.text.find("train_") != w.text.npos || w.text.find("accumulation_steps") != w.text.npos;
    const std::string text =
        own_batch ? "{" + std::string(w.text) + "}" : "{\"train_batch_size\": 6, " + std::string(w.text) + "}";
    const ConfigResult r = parse(text, w.world);
    ASSERT_FALSE(r.ok()) << text;
    EXPECT_EQ(static_cast<int>(r.code()), static_cast<int>(w.code)) << text << "\n" << r.message();
    EXPECT_THAT(r.message(), HasSubstr(std::string(w.message))) << text;
  }
}

TEST(Config, NotJsonIsOneMistakeWithItsPlace) {
  for (auto [text, message] : {std::pair{"{\"a\": 1,,}", "cfg:1:9: "},
                               {"{\"steps\": 1, \"steps\": 2}", "cfg:1:14: duplicate key \"steps\""},
                               {"{\"seed\": NaN}", "cfg:1:10: 'NaN' is not JSON"},
                               {"", "cfg:1:1: no JSON: the text is empty"},
                               {"[]", "cfg: must be a JSON object"}}) {
    const ConfigResult r = parse(text);
    ASSERT_EQ(r.diagnostics.size(), 1u) << text;
    EXPECT_THAT(r.message(), HasSubstr(message));
    EXPECT_EQ(exit_code(r.code()), 2);
  }
}

TEST(Config, AllMistakesAreReportedAtOnce) {
  const ConfigResult r = parse(
      "{\n  \"stepz\": 1,\n  \"seed\": -1,\n  \"zero_optimization\": {\"stage\": 9},\n"
      "  \"wall_clock_breakdown\": 1\n}",
      1, {"threads=x"}, ConfigUse::Train);
  std::set<std::string> keys;
  for (const Diagnostic& d : r.diagnostics) keys.insert(d.key);
  EXPECT_THAT(keys, ::testing::ElementsAre("data.train", "model", "seed", "steps", "stepz", "threads",
                                           "train_batch_size", "wall_clock_breakdown", "zero_optimization.stage"));
  EXPECT_EQ(exit_code(r.code()), 2);
  EXPECT_THAT(r.message(), HasSubstr("cfg:4:25: zero_optimization.stage: "));
  EXPECT_THAT(r.message(), HasSubstr("--set threads=x: threads: "));
}

TEST(Config, TrainingDemandsModelDataAndSteps) {
  EXPECT_TRUE(parse(R"({"train_batch_size": 1})").ok());
  const ConfigResult r = parse(R"({"train_batch_size": 1})", 1, {}, ConfigUse::Train);
  EXPECT_EQ(r.diagnostics.size(), 3u) << r.message();
}

TEST(Config, GenerationAndEvaluationDemandLess) {
  const std::string model = "{" + std::string(kModel);
  EXPECT_TRUE(parse(model + "}", 3, {}, ConfigUse::Generate).ok());
  EXPECT_EQ(parse("{}", 1, {}, ConfigUse::Generate).diagnostics.size(), 1u);
  // Batch sizes that do not fit these ranks: generation has none.
  const ConfigResult r = parse(model + R"(, "train_batch_size": 8})", 3, {}, ConfigUse::Generate);
  EXPECT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r.config.batch.micro, 1);
  EXPECT_EQ(r.config.batch.train, 3);
  EXPECT_TRUE(parse(model + R"(, "train_batch_size": 6, "data": {"train": "a"}})", 3, {}, ConfigUse::Evaluate).ok());
  EXPECT_THAT(parse(model + R"(, "train_batch_size": 6})", 3, {}, ConfigUse::Evaluate).message(),
              HasSubstr("data.train: is missing"));
}

TEST(Config, OneRankAloneReadsStandardInput) {
  const ConfigResult r = load_config("-", {}, 2);
  EXPECT_EQ(r.message(), "standard input: only one of 2 ranks can read it; name a file");
  EXPECT_EQ(exit_code(r.code()), 2);
}

TEST(Config, MissingFileIsAMistakeOfTheCommandLine) {
  const ConfigResult r = load_config("/nonexistent.json", {}, 1);
  EXPECT_EQ(exit_code(r.code()), 2);
  EXPECT_EQ(r.message(), "/nonexistent.json: cannot be opened: No such file or directory");
  EXPECT_THAT(load_config("/", {}, 1).message(), HasSubstr("cannot be read: Is a directory"));
}

// ---- good configurations
// ----------------------------------------------------------------------------------------------

TEST(Config, BatchSizesFollowTheTable) {
  struct Case {
    std::string_view given;
    i64 train, micro, accumulation;
  };
  for (
      const Case& c : {
          Case{R"("train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2)", 24,
               4, 2},
          Case{R"("train_batch_size": 24, "train_micro_batch_size_per_gpu": 2)", 24, 2, 4},
          Case{R"("train_batch_size": 24, "gradient_accumulation_steps": 2)", 24, 4, 2},
          Case{R"("train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5)", 30, 2, 5},
          Case{R"("train_batch_size": 24)", 24, 8, 1},
          Case{R"("train_micro_batch_size_per_gpu": 7)", 21, 7, 1},
          Case{
              R"("train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto")",
              3, 1, 1},
          Case{
              R"("train_batch_size": 12, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto")",
              12, 4, 1},
          Case{R"("train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4)", 12, 1, 4},
          Case{R"("train_batch_size": null, "train_micro_batch_size_per_gpu": 2e0)", 6, 2, 1},
      }) {
    const BatchConfig b = good("{" + std::string(c.given) + "}", 3).batch;
    EXPECT_EQ(b.train, c.train) << c.given;
    EXPECT_EQ(b.micro, c.micro) << c.given;
    EXPECT_EQ(b.accumulation, c.accumulation) << c.given;
  }
}

TEST(Config, DefaultsAreDeepSpeeds) {
  const Config c = good(R"({"train_batch_size": 1})");
  EXPECT_EQ(c.optimizer.lr, 1e-3);
  EXPECT_TRUE(c.optimizer.adam_w_mode);
  EXPECT_EQ(c.scheduler.type, SchedulerType::Constant);
  EXPECT_EQ(c.gradient_clipping, 1.0);
  EXPECT_EQ(c.zero.stage, 0);
  EXPECT_FALSE(c.zero.overlap_comm);
  EXPECT_EQ(c.zero.reduce_bucket_size, 500000000);
  EXPECT_EQ(c.zero.prefetch_bucket_size, 50000000);
  EXPECT_EQ(c.zero.model_persistence_threshold, std::numeric_limits<i64>::max());
  EXPECT_EQ(c.work_dtype(), DType::F32);
  EXPECT_EQ(c.communication_data_type, WireType::F32);
  EXPECT_EQ(c.reduce_order, ReduceOrder::Boundary);
  EXPECT_EQ(c.communication.timeout_s, 300);
}

// All spellings of DeepSpeed's, old and new.
TEST(Config, CommunicationDataTypeIsWhatDeepSpeedTakes) {
  const auto resolved = [](const std::string& value, const std::string& more = "") {
    const Config c = good(R"({"train_batch_size": 1, "communication_data_type": )" + value + more + "}");
    return std::pair(c.communication_data_type,
                     Json::parse(resolved_json(c))["communication_data_type"].get<std::string>());
  };
  EXPECT_EQ(resolved(R"("fp32")", R"(, "bf16": {"enabled": true})"), std::pair(WireType::F32, std::string("fp32")));
  for (const char* bf16 : {R"("bf16")", R"("bfp16")", R"("BFP16")"})
    EXPECT_EQ(resolved(bf16), std::pair(WireType::BF16, std::string("bf16")));
  EXPECT_EQ(resolved(R"("FP16")"), std::pair(WireType::F16, std::string("fp16")));
  EXPECT_EQ(resolved(R"("INT8")", R"(, "bf16": {"enabled": true})"), std::pair(WireType::Int8, std::string("int8")));
  EXPECT_EQ(resolved(R"("int4")"), std::pair(WireType::Int4, std::string("int4")));
  for (const char* none : {"null", R"("auto")"}) {
    EXPECT_EQ(resolved(none).first, WireType::F32);
    EXPECT_EQ(resolved(none, R"(, "fp16": {"enabled": true})").first, WireType::F16);
  }
}

TEST(Config, DefaultsFollowOtherKeys) {
  const Config c =
      good(R"({"train_batch_size": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "seed": 7,
      "steps": 50, "optimizer": {"type": "adam", "params": {"lr": 0.25}}, "scheduler": {"type": "WarmupLR"}})");
  EXPECT_EQ(c.work_dtype(), DType::BF16);
  EXPECT_EQ(c.communication_data_type, WireType::BF16);
  EXPECT_TRUE(c.zero.overlap_comm);
  EXPECT_EQ(c.reduce_order, ReduceOrder::Micro);
  EXPECT_EQ(c.data.seed, 7);
  EXPECT_EQ(c.optimizer.type, OptimizerType::Adam);
  EXPECT_EQ(c.scheduler.warmup_max_lr, 0.25);
  const Config d = good(R"({"train_batch_size": 1, "deterministic": true, "steps": 50,
      "fp16": {"enabled": true}, "communication_data_type": "FP32", "zero_optimization": {"stage": 3, "overlap_comm": false},
      "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}})");
  EXPECT_EQ(d.work_dtype(), DType::F16);
  EXPECT_EQ(d.communication_data_type, WireType::F32);
  EXPECT_FALSE(d.zero.overlap_comm);
  EXPECT_EQ(d.reduce_order, ReduceOrder::Micro);
  EXPECT_EQ(d.scheduler.total_num_steps, 50);
}

// The ZeRO-3 example of Hugging Face's documentation, offload turned off: full of "auto".
TEST(Config, TakesADeepSpeedConfigurationAsItIs) {
  const ConfigResult r = parse(R"({
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR",
                  "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
      "stage": 3,
      "offload_optimizer": {"device": "none", "pin_memory": true},
      "offload_param": {"device": "none", "pin_memory": true},
      "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
      "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
      "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
      "stage3_gather_16bit_weights_on_model_save": true},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false})",
                               2);
  EXPECT_TRUE(r.ok()) << r.message();
  ASSERT_EQ(r.diagnostics.size(), 1u);
  EXPECT_EQ(to_string(r.diagnostics[0]),
            "cfg:4:14: bf16.enabled: results depend on what \"auto\" leaves open; the run takes: "
            "bf16.enabled true; give the values that you want");
  EXPECT_TRUE(r.config.bf16.enabled);
}

// DeepSpeed drops whatever is "auto" in the sections that pydantic reads, also whole sections and keys of no use.
TEST(Config, WhatIsAutoInLaxSectionsIsLeftOut) {
  for (const char* text : {R"("zero_optimization": {"offload_optimizer": "auto", "offload_param": "auto"})",
                           R"("zero_optimization": {"stage": 3, "zeropp_loco_param": "auto", "leaf_module": "auto"})",
                           R"("bf16": {"loss_scale": "auto", "hysteresis": "auto", "min_loss_scale": "auto"})"}) {
    const ConfigResult r = parse(fmt::format("{{\"train_batch_size\": 1, {}}}", text));
    EXPECT_TRUE(r.ok()) << text << "\n" << r.message();
    EXPECT_TRUE(r.diagnostics.empty()) << text;
    EXPECT_FALSE(r.config.zero.loco.enabled);
  }
}

TEST(Config, WarmUpThatDoesNotFitIsSaid) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 3}}})");
  ASSERT_EQ(r.diagnostics.size(), 1u);
  EXPECT_THAT(to_string(r.diagnostics[0]), HasSubstr("5 warm-up steps do not fit into 3 steps"));
}

// The same on every machine, and never without a word.
TEST(Config, AutoPrecisionIsSaid) {
  const struct {
    const char* text;
    DType work;
    size_t words;
  } cases[] = {{R"("fp16": {"enabled": "auto"})", DType::BF16, 1},
               {R"("bf16": {"enabled": "auto"})", DType::BF16, 1},
               {R"("bf16": {"enabled": false}, "fp16": {"enabled": "auto"})", DType::F16, 1},
               {R"("fp16": {"enabled": false}, "bf16": {"enabled": "auto"})", DType::BF16, 1},
               {R"("fp16": {"enabled": true}, "bf16": {"enabled": "auto"})", DType::F16, 0},
               {R"("fp16": {"enabled": "auto"}, "bf16": {"enabled": true})", DType::BF16, 0},
               {R"("fp16": {"loss_scale": "auto"})", DType::F32, 0},
               {R"("bf16": {})", DType::F32, 0}};
  for (const auto& c : cases) {
    const ConfigResult r = parse(fmt::format("{{\"train_batch_size\": 1, {}}}", c.text));
    EXPECT_EQ(r.config.work_dtype(), c.work) << c.text;
    EXPECT_EQ(r.diagnostics.size(), c.words) << c.text;
    EXPECT_EQ(parse(resolved_json(r.config)).config.work_dtype(), c.work) << c.text;
  }
}

// The values that a run takes where nobody has chosen them; nothing where somebody has.
TEST(Config, OneWarningStatesWhatNobodyHasChosen) {
  const std::string rest = R"("steps": 20, "data": {"train": "x", "tokenizer": "bytes"},
    "model": {"type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2})";
  const std::string params = R"("betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1)";
  const struct {
    std::string text, warning;  // empty: none
  } cases[] = {
      {R"("train_batch_size": 1)",
       "optimizer.params.lr: no learning rate is given, and the run takes 0.001 in every step, with neither warm-up "
       "nor "
       "decay; optimizer.params.weight_decay 0.0; give the values that you want"},
      {R"("train_batch_size": 1, "optimizer": {"type": "Lion", "params": {"lr": "auto", "weight_decay": 0.1}},
          "scheduler": {"type": "Cosine", "params": {"warmup_num_steps": "auto"}})",
       "optimizer.params.lr: no learning rate is given, and the run takes 0.0001 with the schedule Cosine "
       "(warmup_num_steps 1000, total_num_steps 20, min_lr_ratio 0.0); give"},
      {R"("train_batch_size": 1, "optimizer": {"params": {"lr": 1e-4}}, "gradient_clipping": "auto",
          "communication_data_type": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"})",
       "gradient_clipping: results depend on what \"auto\" leaves open; the run takes: "
       "gradient_clipping "
       "1.0, bf16.enabled true, communication_data_type \"bf16\"; give"},
      {R"("train_batch_size": 1, "optimizer": {"params": {"lr": 1e-4, "betas": "auto", "eps": "auto",
          "weight_decay": "auto"}})",
       "optimizer.params.betas [0.9,0.999], optimizer.params.eps 1e-08, optimizer.params.weight_decay 0.0; give"},
      {R"("train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
          "optimizer": {"params": {"lr": 1e-4}})",
       "train_batch_size 1, train_micro_batch_size_per_gpu 1, gradient_accumulation_steps 1; give"},
      {R"("train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto",
          "optimizer": {"params": {"lr": 1e-4}})",
       "train_batch_size 3, gradient_accumulation_steps 1; give"},
      {R"("train_batch_size": 1, "optimizer": {"params": {"lr": 1e-4}}, "scheduler": {"type": "WarmupDecayLR", "params":
          {"warmup_max_lr": "auto", "warmup_num_steps": 2, "total_num_steps": "auto"}})",
       "the run takes: scheduler.params.warmup_max_lr 0.0001, scheduler.params.total_num_steps 20; give"},
      {R"("train_batch_size": 1, "scheduler": {"type": "LRRangeTest"})",
       "scheduler.params.lr_range_test_min_lr: no learning rate is given, and the run takes 0.001 with the schedule "
       "LRRangeTest (lr_range_test_step_size 2000"},
      {R"("train_batch_size": 1, "optimizer": {"params": {"lr": 1e-4}}, "fp16": {"enabled": true, "loss_scale": "auto"})",
       "the run takes: fp16.loss_scale 0.0; give"},
      // Chosen, or without an effect on results.
      {R"("train_batch_size": 2, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
          "optimizer": {"params": {"lr": 1e-4, )" +
           params + R"(}}, "fp16": {"enabled": "auto", "loss_scale": "auto"}, "bf16": {"enabled": true},
          "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "overlap_comm": "auto", "stage3_param_persistence_threshold": "auto"}, "steps_per_print": "auto")",
       ""},
      {R"("train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": "auto",
          "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3}})",
       ""},
      {R"("train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}})", ""},
      {R"("train_batch_size": 1, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4,
          "cycle_max_lr": 1e-3, "cycle_momentum": false}})",
       ""},
      // A rate that the run never takes.
      {R"("train_batch_size": 1, "optimizer": {"params": {"lr": "auto"}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}})",
       ""},
      {R"("train_batch_size": 1, "optimizer": {"params": {"lr": "auto"}},
          "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4}})",
       ""},
      {R"("train_batch_size": 1, "optimizer": {"params": {"lr": "auto"}, "param_groups": [
          {"params": ["*.bias"], "frozen": true}, {"params": ["ln_f.*", "*"], "lr": 1e-4}]})",
       ""},
      {R"("train_batch_size": 1, "optimizer": {"param_groups": [{"params": ["*.bias"], "lr": 1e-4}]})",
       "optimizer.params.lr: no learning rate is given beside those of optimizer.param_groups, and the run takes "
       "0.001"},
      {R"("train_batch_size": 1, "optimizer": {"param_groups": [{"params": ["*.bias"], "weight_decay": 0},
          {"params": ["*"], "lr": 1e-4}]})",
       "no learning rate is given beside those of optimizer.param_groups"},
      {R"("train_batch_size": 1, "optimizer": {"param_groups": [{"params": ["*"], "weight_decay": 0.1},
          {"params": ["*.bias"], "lr": 1e-4}]})",
       "optimizer.params.lr: no learning rate is given, and the run takes 0.001"}};
  for (const auto& c : cases) {
    const std::string text = fmt::format("{{{}, {}}}", c.text, rest);
    const ConfigResult r = parse_config(text, "cfg", {}, 1, ConfigUse::Train);
    ASSERT_TRUE(r.ok()) << text << "\n" << r.message();
    const auto is_said = [](const Diagnostic& d) { return to_string(d).find("the run takes") != std::string::npos; };
    ASSERT_EQ(std::ranges::count_if(r.diagnostics, is_said), c.warning.empty() ? 0 : 1) << text;
    if (c.warning.empty()) continue;
    EXPECT_THAT(to_string(*std::ranges::find_if(r.diagnostics, is_said)), HasSubstr(c.warning));
    EXPECT_TRUE(std::ranges::none_of(parse_config(text, "cfg", {}, 1, ConfigUse::Evaluate).diagnostics,
                                     [](const Diagnostic& d) { return d.key == "optimizer.params.lr"; }));
  }
}

// Without separate masters, sums and states take the type of the parameters. The keys have no effect with bf16 off,
// which is a warning.
TEST(Config, WithoutMastersSumsAreInTheTypeOfTheParameters) {
  Config c = good(R"({"train_batch_size": 6, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
    "bf16_optimizer_states": true, "stochastic_rounding": true}})");
  EXPECT_TRUE(c.own_masters());
  EXPECT_EQ(c.grad_accum_dtype, DType::BF16);
  EXPECT_EQ(c.optimizer.state_dtype, StateDtype::BF16);
  EXPECT_TRUE(c.bf16.stochastic_rounding);
  c = good(R"({"train_batch_size": 6, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}})");
  EXPECT_TRUE(c.own_masters());
  EXPECT_EQ(c.grad_accum_dtype, DType::F16);
  c = good(R"({"train_batch_size": 6, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}})");
  EXPECT_FALSE(c.own_masters());
  EXPECT_EQ(c.grad_accum_dtype, DType::BF16);
  EXPECT_TRUE(good(R"({"train_batch_size": 6})").own_masters());  // fp32
  for (const char* const key : {"bf16_master_weights_and_grads", "bf16_optimizer_states", "stochastic_rounding"}) {
    const ConfigResult r =
        parse(fmt::format(R"({{"train_batch_size": 6, "bf16": {{"enabled": false, "{}": true}}}})", key), 1);
    ASSERT_TRUE(r.ok()) << r.message();
    ASSERT_EQ(r.diagnostics.size(), 1u) << key;
    EXPECT_EQ(r.diagnostics[0].key, fmt::format("bf16.{}", key));
    EXPECT_THAT(r.diagnostics[0].message, HasSubstr("has no effect: bf16.enabled is not true"));
    EXPECT_EQ(r.config.grad_accum_dtype, DType::F32);
  }
}

// Settings that the schedule replaces are not written again, so the resolved configuration is read back without a
// diagnostic.
TEST(Config, AResolvedOneCycleIsReadBack) {
  for (const char* type : {"AdamW", "Lion", "Lamb"}) {
    const ConfigResult r = parse(fmt::format(R"({{"train_batch_size": 1, "optimizer": {{"type": "{}"}}, "scheduler":
        {{"type": "OneCycle", "params": {{"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_second_step_size": 0}}}}}})",
                                             type));
    EXPECT_TRUE(r.diagnostics.empty()) << r.message();
    const ConfigResult again = parse(resolved_json(r.config));
    EXPECT_TRUE(again.diagnostics.empty()) << to_string(again.diagnostics[0]);
  }
  const ConfigResult group = parse(R"({"train_batch_size": 1, "scheduler": {"type": "OneCycle", "params":
      {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}, "optimizer": {"type": "AdamW", "param_groups":
      [{"params": "*", "betas": [0.5, 0.6]}]}})");
  ASSERT_EQ(group.diagnostics.size(), 1u);
  EXPECT_THAT(to_string(group.diagnostics[0]), HasSubstr("optimizer.param_groups[0].betas: has no effect"));
}

// Values that pydantic accepts for DeepSpeed, and older forms of sections.
TEST(Config, SectionsOfPydanticAreReadAsTheyReadThem) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "_comment": {"of": ["mine"]}, "zero_optimization": {
      "stage": "2", "overlap_comm": 1, "load_from_fp32_weights": "true", "zero_hpz_partition_size": "1",
      "zero_quantized_weights": 0, "legacy_stage1": "no", "contiguous_gradients": 1, "reduce_bucket_size": "5e8", "sub_group_size": "auto", "cpu_offload": "auto"},
      "fp16": {"enabled": "True", "loss_scale": "0"}, "scheduler": {"type": null}, "optimizer": {"type": null}})");
  EXPECT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r.config.zero.stage, 2);
  EXPECT_TRUE(r.config.zero.overlap_comm);
  EXPECT_EQ(r.config.zero.reduce_bucket_size, 500'000'000);
  EXPECT_TRUE(r.config.fp16.enabled);
  ASSERT_EQ(r.diagnostics.size(), 8u);
  EXPECT_EQ(to_string(r.diagnostics[0]), "cfg:1:25: _comment: a remark, passed over: its name begins with '_'");
  EXPECT_EQ(to_string(r.diagnostics[1]), "cfg:2:7: zero_optimization.stage: \"2\" is read as 2");
  for (const auto& [text, stage] : {std::pair{"true", 1}, {"false", 0}}) {
    const ConfigResult old = parse(fmt::format(R"({{"train_batch_size": 1, "zero_optimization": {}}})", text));
    EXPECT_TRUE(old.ok()) << old.message();
    EXPECT_EQ(old.config.zero.stage, stage);
    ASSERT_EQ(old.diagnostics.size(), 1u);
    EXPECT_EQ(to_string(old.diagnostics[0]),
              fmt::format("cfg:1:25: zero_optimization: deprecated; write {{\"stage\": {}}}", stage));
  }
}

TEST(Config, OneLineSaysThatBf16HasNoLossScale) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "bf16": {"enabled": true, "loss_scale": 0,
      "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}})");
  EXPECT_FALSE(r.ok());
  EXPECT_EQ(r.diagnostics.size(), 1u) << r.message();
}

TEST(Config, IntegersMayBeWrittenAsDeepSpeedsDocumentsDo) {
  const Config c =
      good(R"({"train_batch_size": 1, "zero_optimization": {"reduce_bucket_size": 2e8, "prefetch_bucket_size": 5.0}})");
  EXPECT_EQ(c.zero.reduce_bucket_size, 200000000);
  EXPECT_EQ(c.zero.prefetch_bucket_size, 5);
}

// As in DeepSpeed's documents, and with its own defaults.
TEST(Config, MonitorsOfDeepSpeedPass) {
  const ConfigResult r = parse(R"({"train_batch_size": 1,
    "tensorboard": {"enabled": true, "output_path": "output/ds_logs/", "job_name": "train_bert"},
    "csv_monitor": {"enabled": false, "output_path": "", "job_name": "DeepSpeedJobName"}, "wandb": {"enabled": false},
    "comms_logger": {"enabled": true, "verbose": false, "prof_all": true, "debug": false, "prof_ops": []},
    "flops_profiler": {"enabled": true, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": true,
      "output_file": null, "recompute_fwd_factor": 0.0}, "wall_clock_breakdown": true})");
  EXPECT_TRUE(r.diagnostics.empty()) << to_string(r.diagnostics.at(0));
  EXPECT_EQ(r.config.monitors.tensorboard.output_path, "output/ds_logs/");
  EXPECT_TRUE(parse(R"({"train_batch_size": 1, "tensorboard": null, "csv_monitor": {}, "comms_logger": null})").ok());
}

TEST(Config, WhatAsksForNothingPasses) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "prescale_gradients": false, "gradient_predivide_factor": 1.0,
      "amp": {"enabled": false, "opt_level": "O1"}, "flops_profiler": {"enabled": false, "profile_step": 1}, "compile": null,
      "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}, "comms_logger": {"enabled": false, "verbose": true},
      "pipeline": {"stages": "auto", "activation_checkpoint_interval": 0}, "data_types": {"grad_accum_dtype": null}, "qqq": null})");
  EXPECT_EQ(r.message(), "cfg:4:118: qqq: unknown key; ds-config-keys(5) lists all");
}

// A file of another kind: the first keys are listed, the others counted, and no similar key is searched for any of
// them.
TEST(Config, OfVeryManyUnknownKeysTheFirstAreTold) {
  std::string text = R"({"train_batch_size": 1, "amp": {"enabled": false)";
  for (int i = 0; i < 50'000; ++i) text += fmt::format(R"(, "stage{}": 1)", i);
  text += "}";
  for (int i = 0; i < 50'000; ++i) text += fmt::format(R"(, "step{}": 1)", i);
  ConfigResult r;
  const double seconds = testing::cpu_seconds_of([&] { r = parse(text + "}"); });
  EXPECT_EQ(r.diagnostics.size(), 31u);
  EXPECT_EQ(r.diagnostics.back().key, "amp.stage30");
  EXPECT_EQ(r.diagnostics.back().message, "unknown key, and so are 99969 more");
  EXPECT_LT(seconds, 20);
}

TEST(Config, OfAModelWithVeryManyUnknownKeysToo) {
  const testing::TempDirectory dir;
  std::string model = R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2)";
  for (int i = 0; i < 500; ++i) model += fmt::format(R"(, "zzz{}": 1)", i);
  testing::write_file(dir / "config.json", model + "}");
  const std::string text = fmt::format(R"({{"train_batch_size": 1, "model": {{"path": "{}"}}}})", dir.path());
  const ConfigResult some = parse(text);
  EXPECT_TRUE(some.ok()) << some.message();
  EXPECT_EQ(some.diagnostics.size(), 31u);
  EXPECT_EQ(some.diagnostics.back().message, "unknown key, and so are 469 more");
  for (int i = 500; i < 20'000; ++i) model += fmt::format(R"(, "zzz{}": 1)", i);
  testing::write_file(dir / "config.json", model + "}");
  EXPECT_FALSE(parse(text).ok());  // no model's
}

TEST(Config, WhatDoesNotTrainDoesWithoutAnArrangementThatDoesNotFit) {
  const std::string text = R"({"train_batch_size": 6, "pipeline": {"stages": 2, "schedule": "zb-h1"}, "data":
      {"train": "a"}, "model": {"type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2,
      "n_positions": 64}, "tensor_parallel": {"tp_size": 2}})";
  for (const ConfigUse use : {ConfigUse::Evaluate, ConfigUse::Generate}) {
    const ConfigResult r = parse(text, 3, {}, use);
    EXPECT_TRUE(r.ok()) << r.message();
    ASSERT_EQ(r.diagnostics.size(), 1u);
    EXPECT_THAT(
        to_string(r.diagnostics[0]),
        HasSubstr("pipeline.stages 2 x tensor_parallel.tp_size 2 has no effect: it does not divide the 3 ranks"));
    EXPECT_EQ(r.config.ranks_per_replica(), 1);
    EXPECT_EQ(parse(text, 4, {}, use).config.ranks_per_replica(), 4);
  }
  EXPECT_FALSE(parse(text, 3).ok());
}

TEST(Config, MistakesNameKeysAsTheyWereWritten) {
  const ConfigResult r = parse(
      R"({"train_batch_size": 1, "pipeline": {"activation_checkpoint_interval": 2}, "activation_checkpointing":
      {"granularity": "selective"}})");
  EXPECT_EQ(r.message(),
            "cfg:1:38: pipeline.activation_checkpoint_interval: is about inputs of layers, which "
            "activation_checkpointing.granularity \"layer\" keeps");
}

TEST(Config, AGroupOfMoreLayersThanThereAreIsAWarning) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "activation_checkpointing": {"interval": 7},
      "model": {"type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}})");
  EXPECT_TRUE(r.ok()) << r.message();
  ASSERT_EQ(r.diagnostics.size(), 1u);
  EXPECT_EQ(
      to_string(r.diagnostics[0]),
      "cfg:1:54: activation_checkpointing.interval: 7 is more than the model's 2 layers, which are one group then");
}

TEST(Config, DynamicRotaryScalingTakesAnyLength) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "data": {"seq_length": 65}, "model": {"type": "llama",
      "vocab_size": 256, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
      "max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2}}})");
  EXPECT_TRUE(r.ok()) << r.message();
  EXPECT_TRUE(r.diagnostics.empty());
}

TEST(Config, DeprecatedAndIgnoredKeysWarn) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "zero_optimization": {"allgather_partitions": true,
      "stage3_gather_fp16_weights_on_model_save": true}, "aio": {"block_size": 1048576}, "disable_allgather": false})");
  EXPECT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r.diagnostics.size(), 3u);  // one for both that have no effect
  for (const Diagnostic& d : r.diagnostics) EXPECT_EQ(d.severity, Severity::Warning);
}

// ---- --set
// --------------------------------------------------------------------------------------------------------------

TEST(ConfigSet, ParsesJsonElseAString) {
  const Config c =
      good(R"({"train_batch_size": 4, "data": {"train": ["a", "b"]}})", 1,
           {"data.train[1]=c", "data.train[2]=d e", "data.validation=e=f", "bf16.enabled=true", "steps=5e1",
            "optimizer={\"type\": \"Adam\", \"params\": {\"betas\": [0.5, 0.75]}}", "optimizer.params.betas[1]=0.875"});
  EXPECT_THAT(c.data.train, ::testing::ElementsAre("a", "c", "d e"));
  EXPECT_THAT(c.data.validation, ::testing::ElementsAre("e=f"));
  EXPECT_TRUE(c.bf16.enabled);
  EXPECT_EQ(c.steps, 50);
  EXPECT_EQ(c.optimizer.beta1, 0.5);
  EXPECT_EQ(c.optimizer.beta2, 0.875);
}

TEST(ConfigSet, MistakesNameTheArgument) {
  struct Case {
    std::string argument, message;
  };
  for (const Case& c : {
           Case{"zero_optimization.stage=7",
                "--set zero_optimization.stage=7: zero_optimization.stage: must be an integer"},
           Case{"data.chat_template.user=[INST] {content}", "a text that begins so stands in quotes: "},
           Case{"csv_monitor.job_name=", "must be a string that is not empty, not \"\""},
           Case{"zero_optimization={\"stage\": 7}",
                "--set zero_optimization={\"stage\": 7}: zero_optimization.stage: "},
           Case{"zero_optimisation.stage=1", "did you mean zero_optimization?"},
           Case{"steps", "--set steps: must look like key=value"},
           Case{"=3", "must look like"},
           Case{"a..b=3", "must look like"},
           Case{"a[x]=3", "must look like"},
           Case{"data.train=[a.txt]", "--set data.train=[a.txt]: data.train: the value is not JSON: column 2: "},
           Case{"data.train[2]=x", "data.train[2]: data.train has only 1 elements"},
           Case{"train_batch_size.x=1", "train_batch_size is 4, not an object"},
           Case{"data[0]=1", "data is an object, not an array"},
           Case{"data.train=\xff\xfe", "the value is not UTF-8"},
       }) {
    const ConfigResult r = parse(R"({"train_batch_size": 4, "data": {"train": ["a"]}})", 1, {c.argument});
    EXPECT_EQ(exit_code(r.code()), 2) << c.argument;
    EXPECT_THAT(r.message(), HasSubstr(c.message));
    EXPECT_THAT(r.message(), HasSubstr("--set "));
  }
}

TEST(ConfigSet, MendsWhatItReplaces) {
  EXPECT_TRUE(parse(R"({"train_batch_size": "x", "seed": -4})", 1, {"train_batch_size=4", "seed=4"}).ok());
}

// ---- resolved_json
// ------------------------------------------------------------------------------------------------------

TEST(ConfigResolved, RoundTripsEveryEffect) {
  const std::string texts[] = {
      R"({"train_batch_size": 12, "steps": 3})",
      R"({"train_batch_size": 12, "steps": 3, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
        "bf16_optimizer_states": true, "stochastic_rounding": true}})",
      R"({"train_batch_size": 12, "steps": 3, "fp16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}})",
      "{" + std::string(kModel) +
          R"(, "train_batch_size": 12, "fp16": {"enabled": true, "hysteresis": 3}, "reduce_order": "micro",
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.5, 0.25], "adam_w_mode": false}}, "steps": 9,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}, "data": {"train": ["a", "b"]}})",
      R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "steps": 10,
        "scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.3, "warmup_num_steps": 4}}, "loss_norm": "token", "threads": 3,
        "data": {"train": "a", "validation": "b", "seed": 5}, "save": {"every": 4, "keep": 2},
        "model": {"type": "qwen3", "vocab_size": 300, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e6,
          "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768},
          "use_sliding_window": true, "sliding_window": 7, "max_window_layers": 1}})",
  };
  for (const std::string& text : texts) {
    const std::string once = resolved_json(good(text, 2));
    const ConfigResult again = parse(once, 2);
    EXPECT_TRUE(again.diagnostics.empty()) << once << again.message();
    EXPECT_EQ(resolved_json(again.config), once);
  }
}

// ---- masked language modelling
// ----------------------------------------------------------------------------------------------

ConfigResult parse_bert(std::string_view data, ConfigUse use = ConfigUse::Inspect) {
  return parse(fmt::format(R"({{{}, "data": {{{}}}}})", kBert, data), 1, {}, use);
}

TEST(MaskedModels, ResolveTheirObjective) {
  const ConfigResult r = parse_bert(
      R"("train": "a.txt", "mlm": {"mask_token": 256, "cls_token": 0, "sep_token": 258, "probability": 0.2})");
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r.config.data.seq_length, 512);
  EXPECT_EQ(r.config.data.mlm.probability, 0.2);
  EXPECT_EQ(r.config.data.mlm.cls_token, 0);
  const std::string resolved = resolved_json(r.config);
  EXPECT_THAT(resolved, HasSubstr(R"("mask_token": 256)"));
  EXPECT_EQ(resolved_json(parse(resolved).config), resolved);
  // Without data there is nothing to mask, and an id that nobody gave is not written.
  const ConfigResult bare = parse_bert("");
  EXPECT_TRUE(bare.ok()) << bare.message();
  EXPECT_THAT(resolved_json(bare.config), ::testing::Not(HasSubstr("mask_token")));
  EXPECT_THAT(resolved_json(good(fmt::format(R"({{{}, "train_batch_size": 8}})", kModel))),
              ::testing::Not(HasSubstr("mlm")));
}

TEST(MaskedModels, SayWhatIsMissingOrHasNoMeaning) {
  const auto message = [](const ConfigResult& r) {
    EXPECT_FALSE(r.ok());
    EXPECT_EQ(r.code(), Errc::Config);
    return r.message();
  };
  const std::string three = message(parse_bert(R"("train": "a.txt")"));
  for (const char* key : {"mask_token", "cls_token", "sep_token"})
    EXPECT_THAT(three, HasSubstr(fmt::format("data.mlm.{}: is missing", key)));
  EXPECT_THAT(message(parse_bert(R"("mlm": {"mask_token": 259})")), HasSubstr("outside the model's vocabulary of 259"));
  EXPECT_THAT(message(parse_bert(R"("mlm": {"mask_token": 1, "sep_token": 1})")), HasSubstr("begins or ends a sample"));
  EXPECT_THAT(message(parse_bert(R"("mlm": {"probability": 0})")), HasSubstr("greater than 0"));
  EXPECT_THAT(message(parse_bert(R"("mlm": {"maks_token": 1})")), HasSubstr("did you mean data.mlm.mask_token?"));
  EXPECT_THAT(message(parse_bert(R"("seq_length": 2)")), HasSubstr("must be at least 3"));
  EXPECT_THAT(message(parse(
                  fmt::format(R"({{{}, "train_batch_size": 8, "data": {{"mlm": {{"probability": 0.3}}}}}})", kModel))),
              HasSubstr("a model of type \"gpt2\" predicts the next one"));
  const ConfigResult generate = parse_bert("", ConfigUse::Generate);
  EXPECT_EQ(generate.code(), Errc::Unavailable);
  EXPECT_THAT(generate.message(), HasSubstr("cannot continue a prompt"));
}

}  // namespace config_test
}  // namespace ds
