// SPDX-License-Identifier: Apache-2.0
#pragma once
// The directory of one tag of a DeepSpeed checkpoint: which files there are, and whether they are all.

#include <string>
#include <vector>

namespace ds {

struct DeepspeedFiles {
  std::string dir;
  std::vector<std::string> model;  // paths by rank; one file alone up to stage 2
  std::vector<std::string> optim;  // paths by rank; none at stage 0 and in the universal format
  bool universal = false;          // zero/<parameter>/ holds the optimizer's state
};

// Whether file names of a tag stand in `dir`.
bool is_deepspeed_tag(const std::string& dir) noexcept;
// The sub-directories of `dir` in which they stand, sorted.
std::vector<std::string> list_deepspeed_tags(const std::string& dir);
// The tag directory that open_deepspeed(dir, tag) means.
std::string find_deepspeed_tag(const std::string& dir, const std::string& tag);
// Throws as open_deepspeed does for what file names alone can tell.
DeepspeedFiles list_deepspeed_files(const std::string& tag_dir);

}  // namespace ds
