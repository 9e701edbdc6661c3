// SPDX-License-Identifier: Apache-2.0
#pragma once
// The options by which ds-infer and its subcommands open a model.

#include <string>
#include <vector>

#include "common/tool.h"
#include "ds/config.h"
#include "ds/infer.h"
#include "ds/train.h"

namespace ds::tools {

// A model ready to run: its configuration, and the request for its run.
struct OpenModel {
  Config config;
  RunOptions options;
  SessionSizes sizes{};
  std::string identity{};  // InferenceModel::identity, and the options that change what it computes
};

struct Inference {
  std::string model, tokenizer, dtype, weights = "stored", cache_dtype = "work", stream;
  std::string activations;  // "work", "int8"; empty: as the form of the weights has it
  std::vector<std::string> set;
  i64 group = 0, batch = 64, context = 0, chunk = 512, cached = 0;
  std::string draft;  // a model; empty: none
  std::string draft_weights;
  i64 draft_tokens = 0;  // 0: the default

  void add_options(CLI::App& app, bool with_sizes = true);
  void add_draft(CLI::App& app);
  // Reports mistakes of the configuration. Throws Errc::Config and the errors of find_model().
  OpenModel open(const RankInfo& ranks) const;

 private:
  void choose_products(WeightsConfig& weights) const;
};

}  // namespace ds::tools
