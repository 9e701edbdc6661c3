// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints of DeepSpeed's engine.save_checkpoint, read as they are: ZeRO stages 0 to 3 of any data-parallel size,
// BF16_Optimizer, and what ds_to_universal.py makes of them. ds-checkpoint(5) lists the files; formats/pickle.h says
// why reading them runs no code.
//
// What the StateSource shows:
//   params   the trained ones in the order of param_shapes (stage 0: of the module), then frozen parameters and buffers
//            in the order of the module, in the dtype that they are stored in; then the names that share a parameter
//            with another one, tied to it
//   Param    the module's weights where they are stored in 16 bits (stages 0 to 2), else the master, rounded
//   Master   the fp32 partitions. A frozen parameter and a buffer are their own master, and their moments are zero
//   ExpAvg, ExpAvgSq   Adam's; there only if the optimizer has them for every trained parameter. Other optimizers'
//            states are not shown. At stage 0 they carry no names: they are attributed where exactly one assignment
//            keeps the order of the module and fits the shapes, and else are not there
//   meta     step = global_steps, optimizer_step = Adam's own count, consumed_samples = global_samples, the loss
//   scaler;
//            config_json = ds_config, empty where it holds what JSON does not; world_size = data-parallel ranks
// Weights read as fp32 are bit for bit what zero_to_fp32.py merges.

#include "checkpoint/state_source.h"

namespace ds {

// Whether `dir` is DeepSpeed's: a checkpoint directory, which holds tags, or one tag of it.
bool is_deepspeed(const std::string& dir);
// Whether the name is that of a file that holds one rank's part and no whole tensors.
bool is_deepspeed_shard(const std::string& path) noexcept;

// `tag`: a sub-directory of `dir`; empty: `dir` itself where it holds the files, else the tag that `latest`, or where
// there is none `latest_universal`, names. Only headers are read; memory does not depend on the number of elements.
// Throws Errc::Unavailable (by name: tensor or pipeline parallelism, experts, offloaded tensors), Errc::Corrupt (a
// shard is missing or damaged; its rank is named; `latest` names no tag), Errc::Config (no `latest`: the tags are
// named), Errc::Mismatch (shards of different saves; the rank is named), Errc::Io.
std::unique_ptr<StateSource> open_deepspeed(const std::string& dir, const std::string& tag = {});

}  // namespace ds
