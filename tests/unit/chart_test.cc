// SPDX-License-Identifier: Apache-2.0
#include "chart/chart.h"

#include <gtest/gtest.h>

#include "well_formed.h"

namespace ds::chart {
namespace chart_test {

TEST(Chart, ColumnsAreThoseOfATerminal) {
  EXPECT_EQ(num_columns(""), 0u);
  EXPECT_EQ(num_columns("abc"), 3u);
  EXPECT_EQ(num_columns("\u00e4\u00f6"), 2u);
  EXPECT_EQ(num_columns("\u65e5\u672c"), 4u);
  EXPECT_EQ(num_columns("\U0001f600"), 2u);
}

TEST(Chart, WhatIsTooWideLosesItsMiddle) {
  EXPECT_EQ(clip("abcdefghij", 10), "abcdefghij");
  EXPECT_EQ(clip("abcdefghij", 9), "abc~~ghij");
  EXPECT_EQ(clip("abcdefghij", 5), "a~~ij");
  EXPECT_EQ(clip("abcdefghij", 4), "abcd");
  EXPECT_EQ(clip("abcdefghij", 0), "");
  EXPECT_EQ(clip("\u65e5\u672c\u8a9e\u6587\u5b57", 9), "\u65e5~~\u6587\u5b57") << "half a character is none";
  EXPECT_EQ(clip("\u00e4\u00e4\u00e4\u00e4\u00e4\u00e4", 5), "\u00e4~~\u00e4\u00e4");
  for (size_t width = 0; width < 24; ++width)
    EXPECT_LE(num_columns(clip("a\u65e5b\u672cc\U0001f600d\xff\u00e4\u8a9e\u6587", width)), width);
}

TEST(Chart, XmlIsEscaped) {
  EXPECT_EQ(xml("<a & \"b\">\x01"), "&lt;a &amp; &quot;b&quot;&gt;\\x01");
  EXPECT_EQ(xml("\u00e4 'c'"), "\u00e4 'c'");
}

TEST(Chart, TheTestsOfXmlFindWhatIsMalformed) {
  using ds::testing::malformed;
  EXPECT_EQ(malformed("<!DOCTYPE html>\n<a x=\"1\">&lt;<b/></a>\n"), std::nullopt);
  for (const char* text : {"<a><b></a>", "<a x=1></a>", "<a>", "<a/><b/>", "<a>&</a>", "<a>\x01</a>", "<a>\xff</a>",
                           "<a><0.1 %</a>", "x<a/>"}) {
    EXPECT_NE(malformed(text), std::nullopt) << text;
  }
}

}  // namespace chart_test
}  // namespace ds::chart
