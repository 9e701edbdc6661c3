// SPDX-License-Identifier: Apache-2.0
#pragma once
// The contents of a DeepSpeed tag as a table: for each state of each parameter, the files and offsets of its elements.
// Built from the headers of all files, which must agree with one another.

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/deepspeed_files.h"
#include "checkpoint/manifest.h"
#include "formats/torch_file.h"

namespace ds {

// Elements [begin, begin + count) of a flattened parameter are those of a tensor in a file from `offset` on.
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
  std::vector<std::string> unread;  // files of the universal format without any of these states
};

DeepspeedTable read_deepspeed_table(const DeepspeedFiles& files);

}  // namespace ds
