// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads checkpoints of DeepSpeed's engine.save_checkpoint: ZeRO stages 0 to 3 of any data-parallel size,
// BF16_Optimizer, and the universal format of ds_to_universal.py. ds-checkpoint(5) lists the files; formats/pickle.h
// explains why reading them runs no code.
//
// The StateSource has:
//   params   trained ones in the order of param_shapes (stage 0: of the module), then frozen parameters and buffers
//            in the order of the module, in their stored dtype; then the names that share a parameter
//            with another one, tied to it. Experts have names over all ranks; those of models that AutoEP has
//            converted, their routers and shared experts, the names of the published model
//   Param    the module's weights if they are stored in 16 bits (stages 0 to 2), else the master, rounded
//   Master   the fp32 partitions. A frozen parameter and a buffer are their own master, and their moments are zero
//   ExpAvg, ExpAvgSq   Adam's, if the optimizer has them for every trained parameter. States of other
//            optimizers are not read. At stage 0 they have no names: they are assigned if exactly one assignment
//            keeps the order of the module and fits the shapes, and are missing otherwise
//   meta     step = global_steps, optimizer_step = Adam's own count, consumed_samples = global_samples, the loss
//   scaler;
//            config_json = ds_config, empty if it contains values that JSON cannot hold; world_size = data-parallel
//            ranks
// Weights read as fp32 are bit for bit those that zero_to_fp32.py merges.

#include "checkpoint/state_source.h"

namespace ds {

// Whether `dir` is a checkpoint directory of DeepSpeed, which contains tags, or one of its tags.
bool is_deepspeed(const std::string& dir);
// Whether a file of this name contains the part of one rank instead of whole tensors.
bool is_deepspeed_shard(const std::string& path) noexcept;

// `tag`: a subdirectory of `dir`; empty: `dir` itself if it contains the files, else the tag that `latest` or, without
// that, `latest_universal` names. Only headers are read; memory does not depend on the number of elements. Throws
// Errc::Unavailable (naming tensor or pipeline parallelism, experts, or offloaded tensors), Errc::Corrupt (a shard is
// missing or damaged, naming its rank; `latest` names no tag), Errc::Config (no `latest`, naming the tags),
// Errc::Mismatch (shards of different saves, naming the rank), Errc::Io.
std::unique_ptr<StateSource> open_deepspeed(const std::string& dir, const std::string& tag = {});

}  // namespace ds
