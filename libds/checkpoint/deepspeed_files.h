// SPDX-License-Identifier: Apache-2.0
#pragma once
// The directory of one tag of a DeepSpeed checkpoint: its files, and whether they are complete.

#include <string>
#include <vector>

#include "ds/integers.h"

namespace ds {

// The weights of one expert, in a file of its own.
struct DeepspeedExpert {
  i64 layer = 0, expert = 0;  // of the layers with experts; of all ranks
  std::string path;
};

struct DeepspeedFiles {
  std::string dir;
  std::vector<std::string> model;         // paths by rank; one file up to stage 2
  std::vector<std::string> optim;         // paths by rank; none at stage 0 and in the universal format
  std::vector<DeepspeedExpert> experts;   // in order of layers, then of experts; each layer has all from 0 on
  std::vector<std::string> expert_optim;  // paths by rank of ep; stage 0
  bool universal = false;                 // zero/<parameter>/ contains the optimizer state
};

// Whether `dir` contains files named like those of a tag.
bool is_deepspeed_tag(const std::string& dir) noexcept;
// The subdirectories of `dir` with such files, sorted.
std::vector<std::string> list_deepspeed_tags(const std::string& dir);
// The tag directory that open_deepspeed(dir, tag) means.
std::string find_deepspeed_tag(const std::string& dir, const std::string& tag);
// Throws like open_deepspeed for problems that file names show.
DeepspeedFiles list_deepspeed_files(const std::string& tag_dir);

}  // namespace ds
