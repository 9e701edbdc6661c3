// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text generation: the options, and the result for people and programs.

#include <optional>
#include <string>
#include <vector>

#include "common/tool.h"
#include "ds/train.h"

namespace ds::tools {

struct Writing {
  std::optional<std::string> prompt;
  std::string file;  // of prompts
  SamplingOptions sampling;

  explicit operator bool() const noexcept { return prompt.has_value() || !file.empty(); }
  const char* option() const noexcept { return prompt ? "--generate" : "--prompts"; }
  void add_options(CLI::App& app, std::initializer_list<CLI::Option*> excluded);
  // The prompts, read from the file where there is one.
  std::vector<Prompt> read(const RankInfo& ranks) const;
};

// Prints the output: for --generate the text token by token, or one document; for --prompts a line of JSON for each
// prompt, in order.
void write_text(TrainingRun& run, const Writing& writing, std::span<const Prompt> prompts,
                const EncodedPrompts& encoded, Output& out);

}  // namespace ds::tools
