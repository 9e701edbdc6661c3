// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention patterns of a run, as text and as a picture.

#include <string>

#include "chart/chart.h"
#include "ds/config.h"
#include "model/attention_pattern.h"

namespace ds::chart {

struct PatternPanel {
  std::string title;  // the layers and heads that have it
  model::AttentionPattern pattern;
  i64 head = 0;
};

// The different patterns of a model's layers and heads, for sequences of data.seq_length tokens. Without
// sparse_attention what hides keys is the model's own: a causal mask, sliding windows.
std::vector<PatternPanel> pattern_panels(const Config&);

// The first panel, rows of queries and columns of keys: a cell is a block, or several where there are more than fit.
//   ##  all of it is seen   ++  most   --  some   ..  a little; nothing is left blank
std::string pattern_text(const Config&, const TextStyle& = {});

// All panels (of many heads the first 32), as an SVG that needs nothing else.
std::string pattern_svg(const Config&);

}  // namespace ds::chart
