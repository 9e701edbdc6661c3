// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared parts of charts in text and SVG: fitting text to a terminal, and escaping it for XML.

#include <string>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds::chart {

struct TextStyle {
  int width = 80;       // columns, from 40 on
  bool colour = false;  // ANSI escapes
};

// Columns that `text` takes in a terminal, as fmt pads it: two for a character of East Asia or an emoji, else one.
size_t num_columns(std::string_view text);

// At most `width` columns: the middle gives way to "~~"; below five columns, the end.
std::string clip(std::string_view text, size_t width);

// `text`, printable, with the characters escaped that mean something in XML.
std::string xml(std::string_view text);

// `x` with two decimals at most, for coordinates.
double hundredths(double x);

}  // namespace ds::chart
