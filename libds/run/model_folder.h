// SPDX-License-Identifier: Apache-2.0
#pragma once
// The directory of a run's published model, for the files beside its weights.

#include <filesystem>
#include <string>
#include <system_error>

#include "base/gguf.h"
#include "ds/config.h"

namespace ds::run {

// Empty: none. A GGUF file has its end tokens inside.
inline std::string model_folder(const Config& config) {
  const std::string& path = config.published.path;
  if (path.empty() || is_gguf(path)) return "";
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return path;
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace ds::run
