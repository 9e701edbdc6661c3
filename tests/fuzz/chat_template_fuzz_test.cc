// SPDX-License-Identifier: Apache-2.0
// Chat templates on damaged sources and values: thousands of deterministic mutations of a corpus. Every one is
// rendered, twice with the same text, or refused with the name of the template; under small limits nothing takes long.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "data/jinja/template.h"
#include "ds/error.h"
#include "fuzz/rounds.h"
#include "test_data.h"

namespace ds {
namespace chat_template_fuzz_test {

std::vector<std::string> corpus() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(testing::test_data("../fuzz/corpus/chat_template")))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<std::string> texts;
  for (const auto& file : files) texts.push_back(read_text_file(file.string(), i64{1} << 20));
  const Json golden = Json::parse(read_text_file(testing::test_data("chat_templates.json"), i64{1} << 24));
  for (const auto& [name, source] : golden["templates"].items()) texts.push_back(source.get<std::string>());
  return texts;
}

Json conversation() {
  return Json::parse(R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 你"},
      {"role": "assistant", "content": "<think>a</think>Hello", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, null]}}}]},
      {"role": "user", "content": [{"type": "text", "text": "x"}]}], "tools": [{"name": "f", "parameters": {"a": {"b": [1, {"c": true}]}}}],
      "documents": null, "add_generation_prompt": true, "bos_token": "<s>", "eos_token": "</s>", "n": 7, "s": "Hello World", "e": "",
      "list": [3, 1, 2, 1], "words": ["b", "A"], "d": {"b": 1, "items": 5}, "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2}]})");
}

constexpr jinja::Limits kLimits{.steps = 100'000, .bytes = i64{1} << 20, .depth = 200};

// Whether the template was rendered.
bool check(const std::string& source, const Json& variables) {
  std::string texts[2];
  for (std::string& text : texts) try {
      text = jinja::Template(source, "t").render(variables, 0, kLimits);
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).substr(0, 2), "t:") << source;
      EXPECT_NE(e.code(), Errc::Internal) << e.what() << "\n" << source;
      EXPECT_NE(e.code(), Errc::OutOfMemory) << e.what() << "\n" << source;
      return false;
    }
  EXPECT_EQ(texts[0], texts[1]) << source;
  return true;
}

using Random = std::minstd_rand;
size_t below(Random& random, size_t n) { return static_cast<size_t>(random()) % std::max<size_t>(n, 1); }

std::string damage(std::string text, const std::vector<std::string>& texts, Random& random) {
  static const std::vector<std::string> kTokens = {"{{",
                                                   "}}",
                                                   "{%",
                                                   "%}",
                                                   "{#",
                                                   "#}",
                                                   "-",
                                                   "(",
                                                   ")",
                                                   "[",
                                                   "]",
                                                   "{",
                                                   "}",
                                                   "'",
                                                   "\"",
                                                   "\\",
                                                   "|",
                                                   ".",
                                                   ",",
                                                   ":",
                                                   "::",
                                                   "**",
                                                   "//",
                                                   "~",
                                                   " if ",
                                                   " else ",
                                                   " not ",
                                                   " in ",
                                                   " is ",
                                                   " and ",
                                                   " recursive ",
                                                   "{% endif %}",
                                                   "{% endfor %}",
                                                   "{% else %}",
                                                   "{% for i in list %}",
                                                   "{% if n %}",
                                                   "{% set x = ",
                                                   "{% macro m(a, b=1) %}",
                                                   "{% endmacro %}",
                                                   "{% call m() %}",
                                                   "{% endcall %}",
                                                   "{% raw %}",
                                                   "{% break %}",
                                                   "{% generation %}",
                                                   "| tojson",
                                                   "| list",
                                                   "| join",
                                                   "| map('upper')",
                                                   "| sort",
                                                   "| length",
                                                   "| default(1)",
                                                   "loop",
                                                   "loop.index",
                                                   "loop(list)",
                                                   "namespace(a=1)",
                                                   "range(1000)",
                                                   "m(1)",
                                                   "caller()",
                                                   "varargs",
                                                   "kwargs",
                                                   "self",
                                                   "messages",
                                                   "none",
                                                   "true",
                                                   "-1",
                                                   "99999999999999999999",
                                                   "1e400",
                                                   "0x",
                                                   "* 10**9",
                                                   "%s",
                                                   "{0.a[b]!r:>9}",
                                                   "\xff",
                                                   "\xe2\x82",
                                                   std::string(1, '\0'),
                                                   "\n",
                                                   "\r\n",
                                                   "\u2028",
                                                   std::string(300, '('),
                                                   std::string(300, '[')};
  for (size_t edits = 1 + below(random, 4); edits > 0; --edits) {
    const size_t at = below(random, text.size() + 1);
    const size_t n = std::min(1 + below(random, 12), text.size() - at);
    switch (below(random, 6)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(random());
        break;
      case 1: text.erase(at, n); break;
      case 2: text.insert(at, text.substr(at, n)); break;
      case 3: text.insert(at, kTokens[below(random, kTokens.size())]); break;
      case 4: text.replace(at, n, kTokens[below(random, kTokens.size())]); break;
      case 5: {
        const std::string& other = texts[below(random, texts.size())];
        text.insert(at, other.substr(below(random, other.size() + 1), 40));
      }
    }
  }
  return text;
}

// Replaces one value, so that templates meet types that they do not expect.
void disturb(Json& value, Random& random) {
  static const Json kValues = Json::parse(
      R"([null, true, false, 0, -1, 9223372036854775807, 1.5, 1e300, "", "x", "<think>", "user", [], [1], ["a", null], {}, {"role": "user"}, {"a": {"b": [{}]}}])");
  if (value.is_structured() && !value.empty() && below(random, 6) != 0) {
    auto it = value.begin();
    std::advance(it, below(random, value.size()));
    return disturb(*it, random);
  }
  value = kValues[below(random, kValues.size())];
}

TEST(ChatTemplateFuzz, DamagedSourcesAreRenderedOrRefused) {
  const std::vector<std::string> texts = corpus();
  ASSERT_GE(texts.size(), 100u);
  const Json variables = conversation();
  Random random(1);
  int rendered = 0;
  for (int i = 0; i < testing::rounds(4000) && !HasFailure(); ++i)
    rendered += check(damage(texts[below(random, texts.size())], texts, random), variables);
  EXPECT_GT(rendered, 200);
}

TEST(ChatTemplateFuzz, UnexpectedValuesAreRenderedOrRefused) {
  const std::vector<std::string> texts = corpus();
  Random random(2);
  int rendered = 0;
  for (int i = 0; i < testing::rounds(3000) && !HasFailure(); ++i) {
    Json variables = conversation();
    for (size_t edits = 1 + below(random, 3); edits > 0; --edits) disturb(variables, random);
    if (!variables.is_object()) continue;
    rendered += check(texts[below(random, texts.size())], variables);
  }
  EXPECT_GT(rendered, 500);
}

}  // namespace chat_template_fuzz_test
}  // namespace ds
