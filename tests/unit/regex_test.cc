// SPDX-License-Identifier: Apache-2.0
// Regular expressions of tokenizers mean what they mean in the reference's library, Oniguruma.
#include "data/tokenizer/regex.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "data/tokenizer/pattern.h"
#include "temp_directory.h"

namespace ds {
namespace regex_test {

tokenizer::Regex compile(const char* pattern) { return tokenizer::Regex(pattern, {"f", "p"}); }

TEST(Regex, RunawayExpressionsEndWithAnError) {
  const tokenizer::Regex regex = compile("(a|aa)+[bc]");
  EXPECT_ERROR(regex.find(std::string(100, 'a'), 0), Errc::Unavailable, "(a|aa)+[bc]");
}

TEST(Regex, ClassesAreTheReferences) {
  const auto matches = [](const char* pattern, std::string_view text) {
    const auto found = compile(pattern).find(text, 0);
    return found && *found == std::pair{size_t{0}, text.size()};
  };
  EXPECT_TRUE(matches(R"(\s)", "\u0085"));
  EXPECT_TRUE(matches(R"([\s])", "\u3000"));
  EXPECT_FALSE(matches(R"(\s)", "\u180E"));  // was a blank until Unicode 6.3
  EXPECT_TRUE(matches(R"(\S)", "\u180E"));
  EXPECT_TRUE(matches(R"(\w+)", "e\u0301"));
  EXPECT_TRUE(matches(R"(\d)", "\u0663"));
  EXPECT_FALSE(matches(R"(\p{Han})", "\u3001"));  // by its extensions it would be
  EXPECT_TRUE(matches(R"(\u0041\x{42}\x43)", "ABC"));
  EXPECT_TRUE(matches(R"((?i:'s))", "'\u017F"));
  EXPECT_TRUE(matches(R"(\w)", "\u00B2"));  // of Latin-1's, and no others
  EXPECT_FALSE(matches(R"(\w)", "\u2074"));
  EXPECT_FALSE(matches(R"([\w])", "\u00B2"));
  EXPECT_TRUE(matches(R"([^\w])", "\u00B2"));
  EXPECT_FALSE(matches(R"(\W)", "\u00BE"));
  for (const char* folded : {"(?i:ss)", "(?i:oFf)", "(?i:x|(fi))", "(?i:\u00DF)", R"((?i:\u0053))"})
    EXPECT_ERROR(compile(folded), Errc::Unavailable, "in '(?i:'");
}

// As Oniguruma reads them; PCRE2 takes the first as lazy.
TEST(Regex, RepetitionsAreTheReferences) {
  const auto first = [](const char* pattern, std::string_view text) {
    const auto found = compile(pattern).find(text, 0);
    return found ? std::string(text.substr(found->first, found->second - found->first)) : "none";
  };
  EXPECT_EQ(first("a{2}?", "aaa"), "aa");
  EXPECT_EQ(first("a{2}?", "ab"), "");
  EXPECT_EQ(first("xa{2}?", "xab"), "x");
  EXPECT_EQ(first("x[ab]{2}?", "xabx"), "xab");
  EXPECT_EQ(first("x(?:a(b)){2}?c", "xababc"), "xababc");
  EXPECT_EQ(first("x(?:a(b)){2}?c", "xabc"), "none");
  EXPECT_EQ(first(R"(x\s{1}?)", "x b"), "x ");
  EXPECT_EQ(first("xé{2}?", "xéé"), "xéé");
  EXPECT_EQ(first("(x{2}?a){2}?", "xxaa"), "xxaa");
  EXPECT_EQ(first("a{2,3}?", "aaa"), "aa");
  EXPECT_EQ(first("a{1,}?", "aaa"), "a");
  EXPECT_EQ(first("a{2}", "aaa"), "aa");
  EXPECT_EQ(first("a+?", "aaa"), "a");
  EXPECT_EQ(first("a++a", "aaa"), "none");
}

// As Oniguruma's iterator finds them: an empty one that begins where the last match ends is none.
TEST(Regex, EmptyMatchesAreTheReferences) {
  const auto parts = [](const char* pattern, std::string_view text) {
    std::string all;
    const tokenizer::Pattern matcher(compile(pattern));
    matcher.each(text, [&](size_t begin, size_t end, bool is_match) {
      all += fmt::format("{}{}-{}", is_match ? " =" : " ", begin, end);
    });
    return all;
  };
  EXPECT_EQ(parts("b?", "ab b"), " =0-0 0-1 =1-2 2-3 =3-4");
  EXPECT_EQ(parts("b?", "bac"), " =0-1 1-2 =2-2 2-3 =3-3");
  EXPECT_EQ(parts("b*", "\u00e9bb"), " =0-0 0-2 =2-4");
  EXPECT_EQ(parts("(?=b)", "abb"), " 0-1 =1-1 1-2 =2-2 2-3");
  EXPECT_EQ(parts("b|", "bb"), " =0-1 =1-2");
}

}  // namespace regex_test
}  // namespace ds
