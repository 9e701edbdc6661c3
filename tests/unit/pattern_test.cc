// SPDX-License-Identifier: Apache-2.0
// Regular expressions from elsewhere: their matches, and that none of them ends the process or runs for long.
#include "base/pattern.h"

#include <gtest/gtest.h>

#include <string>

#include "cpu_time.h"
#include "ds/error.h"
#include "temp_directory.h"

namespace ds {
namespace pattern_test {

std::string repeated(std::string_view text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

bool matches(std::string_view pattern, std::string_view text) {
  return Pattern(pattern, Pattern::Kind::Name).find(text).has_value();
}

// As in Python's re.search with IGNORECASE.
TEST(Pattern, IsSearchedForInNamesWhateverTheirCase) {
  for (const char* pattern : {"block", "^GPT2", "Block$", "gpt2block|head", "(gpt|llama)\\d?Block", "[a-z]+2",
                              "(?=G)gp", "^(?!Head).*$", "G.T", "\\bgpt2block\\b", "(?P<n>gpt)2", ""})
    EXPECT_TRUE(matches(pattern, "Gpt2Block")) << pattern;
  for (const char* pattern : {"head", "^block", "gpt2$", "llama", "Gpt2Block.", "\\d\\d"})
    EXPECT_FALSE(matches(pattern, "Gpt2Block")) << pattern;
  const auto found = Pattern("b.", Pattern::Kind::Name).find("Gpt2Block", 2);
  ASSERT_TRUE(found);
  EXPECT_EQ(*found, (std::pair<size_t, size_t>{4, 6}));
}

TEST(Pattern, WhatIsNoneIsRefusedWithItsReason) {
  for (const std::string& pattern :
       {std::string("("), std::string("a{2,1}"), std::string("[z-a]"), std::string("*"), std::string("a\\"),
        std::string("\\C"), std::string("\xff"), std::string("(?<=a*)b"),
        repeated("(", 100'000) + repeated(")", 100'000), repeated("a", 1'000'000), repeated("(a|", 50'000),
        std::string("((a{0,9999}){0,9999}){0,9999}")}) {
    const double seconds =
        testing::cpu_seconds_of([&] { EXPECT_ERROR(Pattern(pattern, Pattern::Kind::Name), Errc::Config, ""); });
    EXPECT_LT(seconds, 5) << pattern.substr(0, 40);
  }
}

TEST(Pattern, NoneRunsForLong) {
  for (const char* pattern : {"((.*)*)*$x", "(a*)*b", "(a|aa)+$", "(.+.+)+y", "(x+x+)+y", "(?:(?:a+)+)+!",
                              "(a?){60}a{60}", "^(([a-z])+.)+[A-Z]([a-z])+$", "(?R)?a", "((?1)?a)"}) {
    const double seconds = testing::cpu_seconds_of([&] {
      for (const std::string& text : {std::string("Gpt2Block"), repeated("a", 60), repeated("x", 5000)}) {
        try {
          matches(pattern, text);
        } catch (const Error& e) {
          EXPECT_TRUE(e.code() == Errc::Unavailable || e.code() == Errc::Config) << pattern << ": " << e.what();
        }
      }
    });
    EXPECT_LT(seconds, 10) << pattern;
  }
  EXPECT_ERROR(matches("(a|aa)+$", repeated("a", 60) + "b"), Errc::Unavailable, "match limit exceeded");
}

}  // namespace pattern_test
}  // namespace ds
