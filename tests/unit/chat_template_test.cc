// SPDX-License-Identifier: Apache-2.0
// Chat templates of tokenizers: the text of transformers' apply_chat_template, byte for byte, for every construct
// (tests/golden/make_chat_templates.py) and, from a file that DS_CHAT_TEMPLATES names, for published templates
// (compare_chat_templates.py); refusals of hostile templates; the files of a tokenizer's directory.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/file.h"
#include "base/json.h"
#include "data/jinja/template.h"
#include "data/tokenizer.h"
#include "data/tokenizer_template.h"
#include "expect_error.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace chat_template_test {

using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

void refuses(const std::function<void()>& action, Errc code, const std::string& part) {
  testing::expect_error(code, ::testing::HasSubstr(part), action);
}

// Compares all cases of a file; returns how many there are, texts and errors.
std::pair<int, int> compare(const std::string& path) {
  setenv("TZ", "UTC", 1);
  const Json file = Json::parse(read_text_file(path, i64{1} << 30));
  std::map<std::string, std::optional<TokenizerTemplate>> templates;
  std::map<std::string, std::string> mistakes;
  for (const auto& [name, source] : file["templates"].items()) try {
      templates[name].emplace(std::map<std::string, std::string>{{"default", source.get<std::string>()}},
                              file["special_tokens"], name);
    } catch (const Error& e) {
      mistakes[name] = e.what();
      EXPECT_NE(e.code(), Errc::Internal) << e.what();
    }
  std::pair<int, int> counts{0, 0};
  for (const Json& given : file["cases"]) {
    const std::string name = given["template"];
    const bool raises = given.contains("error");
    SCOPED_TRACE(fmt::format("{} of {}: {}", given.value("name", ""), name,
                             file["templates"][name].get<std::string>().substr(0, 500)));
    if (const auto mistake = mistakes.find(name); mistake != mistakes.end()) {
      EXPECT_TRUE(raises) << mistake->second;
    } else {
      ChatOptions options{.tools = given.contains("tools") ? &given["tools"] : nullptr,
                          .documents = given.contains("documents") ? &given["documents"] : nullptr,
                          .add_generation_prompt = given.value("add_generation_prompt", false),
                          .continue_final_message = given.value("continue_final_message", false),
                          .variables = file.value("variables", Json::object()),
                          .now = file["now"].get<std::time_t>()};
      if (given.contains("variables")) options.variables.update(given["variables"]);
      try {
        const std::string text = templates.at(name)->render(given["messages"], options).text;
        EXPECT_FALSE(raises) << "must be an error: " << given["error"] << ", but is\n" << text;
        EXPECT_EQ(text, given.value("text", text));
      } catch (const Error& e) {
        EXPECT_TRUE(raises) << e.what();
        EXPECT_NE(e.code(), Errc::Internal) << e.what();
      }
    }
    ++(raises ? counts.second : counts.first);
    if (::testing::Test::HasFailure()) break;  // one is enough to read
  }
  return counts;
}

TEST(ChatTemplate, EveryConstructGivesTheTextOfTransformers) {
  const auto [texts, errors] = compare(test_data("chat_templates.json"));
  EXPECT_GT(texts, 180);
  EXPECT_GT(errors, 190);
}

TEST(ChatTemplate, PublishedTemplatesGiveTheTextOfTransformers) {
  const char* const path = std::getenv("DS_CHAT_TEMPLATES");
  if (path == nullptr) GTEST_SKIP() << "no DS_CHAT_TEMPLATES: see tests/golden/compare_chat_templates.py";
  const auto [texts, errors] = compare(path);
  fmt::print("{} texts and {} errors are those of transformers\n", texts, errors);
}

std::string render(const std::string& source, const Json& variables = Json::object(),
                   const jinja::Limits& limits = {}) {
  return jinja::Template(source, "t").render(variables, 0, limits);
}

TEST(ChatTemplate, ErrorsNameTheLineAndTheReason) {
  refuses([] { render("a\n\n{{ nope.x }}"); }, Errc::Config, "t:3: 'nope' is undefined");
  refuses([] { render("{% if true %}\n{{ raise_exception('Roles must alternate') }}{% endif %}"); }, Errc::Config,
          "t:2: Roles must alternate");
  refuses([] { render("{% macro m() %}\n{{ 1 / 0 }}\n{% endmacro %}\n\n{{ m() }}"); }, Errc::Config,
          "t:2: division by zero");
  refuses([] { render("\n{% if true %}\n"); }, Errc::Corrupt, "t:2: the template ends before {% endif %}");
  refuses([] { render("\n\n{{ 1 + }}"); }, Errc::Corrupt, "t:3: unexpected '}}'");
  refuses([] { render("{% include 'x' %}"); }, Errc::Unavailable, "t:1: the tag 'include' is not supported");
  refuses([] { render("{{ [] | groupby('x') }}"); }, Errc::Unavailable, "t:1: the filter 'groupby' is not supported");
  refuses([] { render("{{ 'x'.encode() }}"); }, Errc::Unavailable, "t:1: 'encode' of a str is not supported");
  refuses([] { render("{{ 9223372036854775807 + 1 }}"); }, Errc::Unavailable, "t:1: an integer of more than 64 bits");
}

// Each takes its time, memory or stack, and ends.
TEST(ChatTemplate, HostileTemplatesAreRefused) {
  const std::string many = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}";
  const std::string ends = "{% endfor %}{% endfor %}{% endfor %}";
  const std::string loop = "{% for i in range(100000) %}";
  for (const std::string& source : {
           many + ends,
           many + "x" + ends,
           "{% for i in [[range(100000)] * 100000] * 1000 %}{% for j in i %}{% for k in j %}" + ends,
           std::string("{{ 'a' * 10**9 }}"),
           std::string("{{ 'a' * 10**18 }}"),
           std::string("{{ [0] * 10**10 }}"),
           "{% set ns = namespace(s='ab') %}" + loop + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
           "{% set ns = namespace(s='ab') %}" + loop + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
           "{% set ns = namespace(s='ab') %}" + loop + "{% set ns.s = ns.s | replace('', ns.s) %}{% endfor %}",
           "{% set ns = namespace(s='ab') %}" + loop + "{% set ns.s = ns.s | list | join(ns.s) %}{% endfor %}",
           "{% set ns = namespace(s='&') %}" + loop + "{% set ns.s = (ns.s | escape) ~ '' %}{% endfor %}",
           "{% set ns = namespace(l=[1]) %}" + loop + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
           "{% set ns = namespace(l=[1]) %}" + loop + "{% set ns.l = [ns.l] %}{% endfor %}",
           "{% set ns = namespace(l={}) %}" + loop + "{% set ns.l = {'a': ns.l} %}{% endfor %}",
           "{% set ns = namespace(l=1) %}" + loop + "{% set ns.l = (ns.l, 2) %}{% endfor %}",
           "{% set ns = namespace(f=none) %}" + loop +
               "{% set ns.f = [loop] %}{% for a in [ns.f] %}{% set ns.f = [loop] %}{% endfor %}{% endfor %}" + many +
               ends,
           std::string("{% set ns = namespace(l=[1]) %}{% for i in range(150) %}{% set ns.l = [ns.l, ns.l] %}{% endfor "
                       "%}{{ ns.l | tojson }}"),
           std::string("{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(150) %}{% set ns.l = [ns.l, ns.l] %}{% "
                       "set ns.m = [ns.m, ns.m] %}"
                       "{% endfor %}{{ ns.l == ns.m }}"),
           std::string("{% set ns = namespace(l=(1,)) %}{% for i in range(150) %}{% set ns.l = (ns.l, ns.l) %}{% "
                       "endfor %}{{ {ns.l: 1} }}"),
           std::string("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
           std::string(
               "{% macro m(x) %}{% call m(x) %}{% endcall %}{{ caller() }}{% endmacro %}{% call m(1) %}{% endcall %}"),
           "{% set ns = namespace(f=1) %}{% macro m(n) %}{% macro inner(x) %}{% macro more(y) %}{% endmacro %}{% set "
           "ns.f = more %}{% endmacro %}"
           "{% set ns.f = inner %}{% endmacro %}{{ m(1) }}" +
               loop + "{{ ns.f(1) }}{{ m(1) }}{% endfor %}" + many + ends,
           std::string("{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}"),
           std::string("{{ '%1000000000d' % 1 }}"),
           std::string("{{ '{:1000000000}'.format(1) }}"),
           std::string("{{ 'x'.center(10**12) }}"),
           std::string("{{ 'x' | indent(10**12) }}{{ 'a\nb' | indent(10**12) }}"),
           std::string("{{ 'x'.zfill(10**12) }}"),
           std::string("{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}"),
           std::string("{% set a = 'a' * 3000000 %}{{ (a ~ 'b') in (a ~ a) }}{{ a.find(a ~ 'b') }}{{ a.strip(a) }}{{ "
                       "a.split(a ~ 'c') }}"),
       }) {
    SCOPED_TRACE(source);
    refuses([&] { render(source, Json::object(), {.steps = 3'000'000, .bytes = i64{16} << 20}); }, Errc::Unavailable,
            "t:");
  }
}

std::string repeat(std::string_view text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(ChatTemplate, DeepSourcesAreRefused) {
  for (const auto& [begin, middle, end] : std::initializer_list<std::array<std::string, 3>>{
           {"(", "1", ")"},
           {"[", "", "]"},
           {"{1: ", "1", "}"},
           {"not ", "1", ""},
           {"- ", "1", ""},
           {"1 if ", "1", " else 2"},
           {"1 if 1 else ", "1", ""},
           {"x[", "1", "]"},
           {"f(", "1", ")"},
           {"x | default(", "1", ")"},
           {"", "1", " + 1"},
           {"", "1", " and 1"},
           {"", "x", ".y"},
           {"", "x", "()"},
           {"", "x", " | string"},
           {"1 ** ", "1", ""},
       }) {
    const std::string source = "{{ " + repeat(begin, 5000) + middle + repeat(end, 5000) + " }}";
    SCOPED_TRACE(source.substr(0, 40));
    refuses([&] { render(source); }, Errc::Unavailable, "nested more than 200 deep");
  }
  for (const auto& [begin, end] :
       {std::pair("{% if 1 %}", "{% endif %}"), std::pair("{% for i in [1] %}", "{% endfor %}"),
        std::pair("{% macro m() %}", "{% endmacro %}"), std::pair("{% set x %}", "{% endset %}"),
        std::pair("{% generation %}", "{% endgeneration %}")})
    refuses([&] { render(repeat(begin, 5000) + repeat(end, 5000)); }, Errc::Unavailable, "nested more than 200 deep");
  EXPECT_EQ(render("{% if 0 %}" + repeat("{% elif 0 %}", 5000) + "{% else %}x{% endif %}"), "x");
  EXPECT_EQ(render("{{ 'a' " + repeat("~ 'a'", 5000) + " }}").size(), 5001u);
}

TEST(ChatTemplate, BytesThatAreNotTextAreRefused) {
  refuses([] { render("a\xff"); }, Errc::Corrupt, "t: the template is not UTF-8");
  refuses([] { render("{{ '\xc3' }}"); }, Errc::Corrupt, "t: the template is not UTF-8");
  refuses([] { render("{{ x }}", {{"x", "a\xff"}}); }, Errc::Config, "not UTF-8");
  refuses([] { render(std::string(static_cast<size_t>(jinja::kMostSourceBytes) + 1, 'a')); }, Errc::Unavailable,
          "t: a template of more");
  const std::string zero("a\0b{{ '\0' }}", 12);
  EXPECT_EQ(render(zero), std::string("a\0b\0", 4));
}

TEST(ChatTemplate, NothingCostsNothing) {
  EXPECT_EQ(render("{{ '' * 10**18 }}{{ [] * 10**18 }}{{ 'a' * -5 }}", Json::object(), {.steps = 100}), "[]");
}

TEST(ChatTemplate, LongConversationsAreRendered) {
  Json messages = Json::array();
  for (int i = 0; i < 2000; ++i)
    messages.push_back({{"role", i % 2 == 0 ? "user" : "assistant"}, {"content", std::string(1000, 'x')}});
  const std::string text = render(
      "{% set ns = namespace(text='') %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + "
      "'<|im_end|>\n' }}"
      "{% endfor %}",
      {{"messages", messages}});
  EXPECT_GT(text.size(), 2000u * 1000);
}

TEST(ChatTemplate, MessagesAreChecked) {
  const TokenizerTemplate made({{"default", "{{ messages | length }}"}}, Json::object(), "t");
  refuses([&] { made.render(Json::array()); }, Errc::Config, "a conversation needs a message");
  refuses([&] { made.render(Json("x")); }, Errc::Config, "\"messages\" must be an array");
  refuses([&] { made.render(Json::array({1})); }, Errc::Config, "each of \"messages\" must be an object");
  const Json messages = Json::array({{{"role", "user"}}}), tools = Json::array({"x"});
  refuses([&] { made.render(messages, {.tools = &tools}); }, Errc::Config, "each of \"tools\" must be an object");
  refuses([&] { made.render(messages, {.add_generation_prompt = true, .continue_final_message = true}); }, Errc::Config,
          "not both");
  refuses([&] { made.render(messages, {.continue_final_message = true}); }, Errc::Config, "no \"content\"");
  const Json answered = Json::array({{{"role", "assistant"}, {"content", "x"}}});
  refuses([&] { made.render(answered, {.continue_final_message = true}); }, Errc::Config, "cannot be continued");
}

// A tokenizer's directory: one of "bytes" would have no files, so a small tokenizer.json.
class Folder {
 public:
  Folder() {
    write("tokenizer.json", R"({"version": "1.0", "added_tokens": [{"id": 1, "content": "<s>", "special": true}],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})");
  }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    write_file(path(name), text);
  }
  std::optional<TokenizerTemplate> open() const {
    return TokenizerTemplate::open(*open_tokenizer(path("tokenizer.json")), path("tokenizer.json"));
  }
  ChatText render(const ChatOptions& options = {}) const {
    return open()->render(Json::array({{{"role", "user"}, {"content", "Hi"}}}), options);
  }
  std::string path(const std::string& name) const { return directory_ / name; }

 private:
  TempDirectory directory_;
};

TEST(ChatTemplate, ATokenizersFilesNameItsTemplates) {
  const Folder folder;
  EXPECT_FALSE(folder.open());
  folder.write("tokenizer_config.json",
               R"({"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"})");
  EXPECT_EQ(folder.render().text, "<s>Hi");
  EXPECT_TRUE(folder.render().begins_with_bos);
  const Json tools = Json::array({Json::object()});
  folder.write("tokenizer_config.json",
               R"({"bos_token": "<s>", "chat_template": [{"name": "default", "template": "plain"},
      {"name": "tool_use", "template": "with {{ tools | length }}"}, {"name": "rag", "template": "{% broken"}]})");
  EXPECT_EQ(folder.render().text, "plain");
  EXPECT_FALSE(folder.render().begins_with_bos);
  EXPECT_EQ(folder.render({.tools = &tools}).text, "with 1");
  folder.write("chat_template.jinja", "file\n");
  EXPECT_EQ(folder.render({.tools = &tools}).text, "file");
  folder.write("additional_chat_templates/tool_use.jinja", "more");
  EXPECT_EQ(folder.render().text, "file");
  EXPECT_EQ(folder.render({.tools = &tools}).text, "more");
}

TEST(ChatTemplate, MistakesNameTheFile) {
  const Folder folder;
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "x"}]})");
  refuses([&] { folder.open(); }, Errc::Unavailable,
          "tokenizer_config.json: chat_template: none of several templates is named \"default\"");
  folder.write("tokenizer_config.json", R"({"chat_template": [{"template": "x"}]})");
  refuses([&] { folder.open(); }, Errc::Corrupt, "each of several templates must have a name");
  folder.write("tokenizer_config.json", R"({"chat_template": 5})");
  refuses([&] { folder.open(); }, Errc::Corrupt, "chat_template");
  folder.write("chat_template.jinja", "{% if x %}");
  refuses([&] { folder.open(); }, Errc::Corrupt, "chat_template.jinja:1: the template ends before");
}

}  // namespace chat_template_test
}  // namespace ds
