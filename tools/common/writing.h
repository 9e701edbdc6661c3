// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text generation: the options, and the result for people and programs.

#include <optional>
#include <string>

#include "common/tool.h"
#include "ds/train.h"

namespace ds::tools {

struct Writing {
  std::optional<std::string> prompt;
  SamplingOptions sampling;

  explicit operator bool() const noexcept { return prompt.has_value(); }
  void add_options(CLI::App& app, std::initializer_list<CLI::Option*> excluded);
};

// Prints the completion, token by token or as one document.
void write_text(TrainingRun& run, const Writing& writing, const EncodedPrompt& encoded, Output& out);

}  // namespace ds::tools
