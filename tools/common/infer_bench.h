// SPDX-License-Identifier: Apache-2.0
#pragma once
// ds-infer bench: the rates of prompts and of new tokens, in the terms of llama-bench.

#include <set>
#include <string>
#include <vector>

#include "common/inference.h"

namespace ds::tools {

struct InferBench {
  Inference inference;
  std::vector<i64> prompts = {512}, generated = {128}, parallel = {1};
  std::set<const std::vector<i64>*> named = {};  // those of the lists above that options give
  i64 repetitions = 5;

  void add_options(CLI::App& app);
  int run(Output& out);
};

}  // namespace ds::tools
