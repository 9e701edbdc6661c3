// SPDX-License-Identifier: Apache-2.0
#include "ds/printable.h"

#include <gtest/gtest.h>

namespace ds {
namespace printable_test {

TEST(Printable, WhatATerminalOrXmlWouldObeyIsEscaped) {
  EXPECT_EQ(printable("a b\\"), "a b\\");
  EXPECT_EQ(printable("x\n\t\r\x01\x7f\x1b[31my"), "x\\n\\t\\r\\x01\\x7f\\x1b[31my");
  EXPECT_EQ(printable("Gr\u00f6\u00dfe \u65e5\u672c \U0001f600"), "Gr\u00f6\u00dfe \u65e5\u672c \U0001f600");
  EXPECT_EQ(printable("\u009b31m \ufffe \uffff"), "\\u009b31m \\ufffe \\uffff");
  EXPECT_EQ(printable("a\u202egnp.exe \u2066\u2028\ufeff \U000e0041"),
            "a\\u202egnp.exe \\u2066\\u2028\\ufeff \\U000e0041");
  EXPECT_EQ(printable("\xff\xc3 \xed\xa0\x80 \xc0\xaf"), "\\xff\\xc3 \\xed\\xa0\\x80 \\xc0\\xaf");
  EXPECT_EQ(printable(std::string_view("\0a", 2)), "\\x00a");
  EXPECT_EQ(printable(""), "");
}

TEST(Printable, BreaksAreThoseOfTheCaller) {
  constexpr std::string_view kText = "a\nforged\n  b\n\tc\td\r\n";
  EXPECT_EQ(printable(kText), "a\\nforged\\n  b\\n\\tc\\td\\r\\n");
  EXPECT_EQ(printable(kText, Breaks::Indented), "a\\nforged\n  b\\n\tc\td\\r\\n");
  EXPECT_EQ(printable(kText, Breaks::All), "a\nforged\n  b\n\tc\td\\r\n");
}

TEST(Printable, WhatIsTooLongLosesItsMiddle) {
  EXPECT_EQ(shortened("abcdef", 6), "abcdef");
  EXPECT_EQ(shortened("abcdefghi", 6), "abcd ... (9 bytes) ... hi");
  EXPECT_EQ(shortened("\u65e5\u672c\u65e5\u672c", 7), "\u65e5 ... (12 bytes) ... \u672c");  // whole characters
  EXPECT_EQ(shortened(std::string(100, '\x80'), 6).size(), std::string_view(" ... (100 bytes) ... ").size());
}

TEST(Printable, QuotedLinesAreIndented) {
  EXPECT_EQ(quoted_lines(""), "");
  EXPECT_EQ(quoted_lines("\n\r\n"), "");
  EXPECT_EQ(quoted_lines("a\r\n\nb\n"), "\n  | a\n  | \n  | b");
}

TEST(Printable, JsonKeepsItsValue) {
  EXPECT_EQ(printable_json("{\n \"a\": \"\u009b\x7f\u202e\u00e4\U000e0041\"\n}"),
            "{\n \"a\": \"\\u009b\\u007f\\u202e\u00e4\\udb40\\udc41\"\n}");
}

}  // namespace printable_test
}  // namespace ds
