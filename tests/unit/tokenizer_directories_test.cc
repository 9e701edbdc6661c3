// SPDX-License-Identifier: Apache-2.0
// Random directories of tokenizers, in which files agree or not: the ids are those of AutoTokenizer of transformers, or
// the directory is refused by name. Where versions 4 and 5 differ, one of them is followed, with a warning. The
// directories and the reference's ids are in tests/golden/tokenizer-directories, made by make_directories.py; the
// default tests read a part of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/tokenizer.h"
#include "ds/error.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace tokenizer_directories_test {

using Json = nlohmann::ordered_json;  // the order of members counts
using Ids = std::vector<i32>;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

std::string base64(std::string_view text) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  u32 bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == kDigits.npos) break;
    bits = bits << 6 | static_cast<u32>(digit);
    if ((count += 6) < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 0xFF);
  }
  return bytes;
}

void write_case(const TempDirectory& dir, const Json& content, const Json& test) {
  for (const auto& [name, value] : test["files"].items()) {
    if (value.is_string()) {
      const Json& large = content.at(value.get<std::string>());
      write_file(dir / name, large.is_string() ? large.get<std::string>() : base64(large["base64"].get<std::string>()));
    } else if (name == "tokenizer.json") {
      Json whole = Json::parse(content.at(test["base"].get<std::string>()).get<std::string>());
      whole.update(value);
      write_file(dir / name, whole.dump());
    } else {
      write_file(dir / name, value.dump());
    }
  }
}

Ids encode(const Tokenizer& tokenizer, const std::string& text) {
  Ids ids;
  tokenizer.encode(text, ids);
  return ids;
}

std::string shown(const Json& test) {
  std::string text = test["kind"].get<std::string>();
  for (const auto& [name, value] : test["files"].items()) {
    Json small = value;
    if (small.is_object())
      for (const char* key : {"model", "decoder"}) small.erase(key);
    text += "\n  " + name + " " + small.dump();
  }
  return text;
}

struct Counts {
  int equal = 0, differ = 0, refused = 0, no_reference = 0;
};

// The ids that a version of transformers gives for each text; none: it refuses the directory.
std::optional<std::vector<Ids>> reference(const Json& test, const char* version) {
  const auto it = test.find(version);
  if (it == test.end() || !it->is_array()) return std::nullopt;
  return it->get<std::vector<Ids>>();
}

// strict: what one version alone can read is read as that one does.
void check(const Json& content, const Json& test, Counts& count, bool strict = false) {
  SCOPED_TRACE(shown(test));
  const auto four = reference(test, "fast4"), five = reference(test, "auto5");
  const TempDirectory dir;
  write_case(dir, content, test);
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = open_tokenizer(dir.path());
  } catch (const Error& e) {
    EXPECT_TRUE(e.code() == Errc::Corrupt || e.code() == Errc::Unavailable) << e.what();
    bool named = false;
    for (const auto& file : test["files"].items()) named |= std::string(e.what()).find(file.key()) != std::string::npos;
    EXPECT_TRUE(named) << e.what();
    ++(four || five ? count.refused : count.no_reference);
    return;
  }
  if (!four && !five) {
    ++count.no_reference;
    return;
  }
  const bool agree = four && five && *four == *five;
  ++(agree ? count.equal : count.differ);
  if (four && five && !agree) {
    EXPECT_FALSE(tokenizer->facts().warnings.empty()) << "versions differ";
  }
  for (size_t i = 0; i < test["texts"].size(); ++i) {
    const auto text = test["texts"][i].get<std::string>();
    const Ids ids = encode(*tokenizer, text);
    const bool is_four = four && ids == (*four)[i], is_five = five && ids == (*five)[i];
    // A random one that a version alone can read need not be read as that one does.
    const bool right = agree ? is_four : four && five ? is_four || is_five : !strict || is_four || is_five;
    EXPECT_TRUE(right) << test["texts"][i] << "\n  ours " << Json(ids) << "\n  4    " << test.value("fast4", Json())[i]
                       << "\n  5    " << test.value("auto5", Json())[i];
    for (const i32 id : ids) {
      EXPECT_LT(id, tokenizer->vocab_size());
      EXPECT_FALSE(tokenizer->piece(id).empty());
    }
  }
  if (!agree) return;
  for (const auto& [kind, name] : {std::pair{SpecialToken::Bos, "bos"}, {SpecialToken::Eos, "eos"}}) {
    const Json &of_four = test["special fast4"][name], &of_five = test["special auto5"][name];
    if (of_four != of_five) continue;
    if (const std::optional<i32> id = tokenizer->special(kind)) {
      EXPECT_EQ(of_four, Json(*id)) << name;
    } else if (!of_four.is_null()) {
      // A token that only the class names, and no file has, is none.
      const auto& named = tokenizer->facts().named;
      const auto it = std::ranges::find(named, of_four.get<i32>(), &NamedToken::id);
      EXPECT_TRUE(it != named.end() && it->source.starts_with("class ")) << name << " " << of_four;
    }
  }
}

// Calls test(content, case) for the first ones.
template <class Test>
void for_each_case(const std::string& name, int most, Test&& test) {
  std::ifstream file(test_data("tokenizer-directories/" + name));
  std::string line;
  ASSERT_TRUE(std::getline(file, line));
  const Json content = Json::parse(line)["content"];
  int n = 0;
  for (; n < most && std::getline(file, line); ++n) test(content, Json::parse(line));
  EXPECT_GT(n, 40);
}

TEST(TokenizerDirectories, EachRuleIsThatOfAutoTokenizer) {
  for_each_case("named.jsonl", 1000, [](const Json& content, const Json& test) {
    Counts count;
    check(content, test, count, true);
    EXPECT_EQ(count.equal + count.differ, 1) << shown(test);
    const bool differ = test["kind"].get<std::string>().find("versions differ") != std::string::npos;
    EXPECT_EQ(count.differ, differ) << shown(test);
  });
}

TEST(TokenizerDirectories, AreReadAsAutoTokenizerReadsThem) {
  std::map<std::string, Counts> counts;
  const bool is_slow = std::getenv("DS_SLOW") != nullptr;
  for (const auto& [name, most] : {std::pair{"random.jsonl", 85}, {"unigram.jsonl", 60}})
    for_each_case(name, is_slow ? 1000 : most,
                  [&](const Json& content, const Json& test) { check(content, test, counts[test["kind"]]); });
  int equal = 0, refused = 0;
  for (const auto& [kind, n] : counts) {
    std::printf("%-24s equal %3d, versions differ %3d, refused %3d, no reference %3d\n", kind.c_str(), n.equal,
                n.differ, n.refused, n.no_reference);
    if (kind == "spm unigram") continue;  // always refused
    equal += n.equal + n.differ;
    refused += n.refused;
    EXPECT_GT(n.equal + n.differ, 0) << kind;
  }
  EXPECT_LT(refused, equal / 5);
}

}  // namespace tokenizer_directories_test
}  // namespace ds
