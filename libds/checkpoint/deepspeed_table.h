// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a tag of DeepSpeed holds, as a table: for each state of each parameter, which elements stand where in which
// file. Built from the headers of all files, which must agree with one another.

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/deepspeed_files.h"
#include "checkpoint/manifest.h"
#include "formats/torch_file.h"

namespace ds {

// Elements [begin, begin + count) of a flattened parameter are those from `offset` on of a tensor of a file.
struct DeepspeedSegment {
  i64 begin, count;
  size_t file;
  const PickleTensor* tensor;
  i64 offset;
};

struct DeepspeedTable {
  CheckpointMeta meta;
  std::vector<ParamEntry> params;
  StateSet has;
  PerState<std::vector<std::vector<DeepspeedSegment>>> segments;  // by parameter; none: zeros
  std::vector<std::unique_ptr<TorchFile>> files;                  // all of them closed
  std::vector<std::string> unread;  // files of the universal format that hold nothing of the above
};

DeepspeedTable read_deepspeed_table(const DeepspeedFiles& files);

}  // namespace ds
