// SPDX-License-Identifier: Apache-2.0
#pragma once
// Configurations of tests, read.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "ds/config.h"

namespace ds::testing {

inline ConfigResult parse(std::string_view text, int world = 1, const std::vector<std::string>& overrides = {},
                          ConfigUse use = ConfigUse::Inspect) {
  return parse_config(text, "cfg", overrides, world, use);
}

inline Config good(std::string_view text, int world = 1, const std::vector<std::string>& overrides = {}) {
  const ConfigResult r = parse(text, world, overrides);
  EXPECT_TRUE(r.ok()) << text << "\n" << r.message();
  return r.config;
}

inline constexpr std::string_view kModel =
    R"("model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})";
inline constexpr std::string_view kBert =
    R"("model": {"type": "bert", "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 64}, "train_batch_size": 8)";

}  // namespace ds::testing
