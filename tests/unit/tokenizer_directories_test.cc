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

#include "data/tokenizer.h"
#include "ds/error.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace tokenizer_directories_test {

using Json = nlohmann::json;
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

void check(const Json& content, const Json& test, std::map<std::string, Counts>& counts) {
  SCOPED_TRACE(shown(test));
  Counts& count = counts[test["kind"].get<std::string>()];
  const bool has4 = test.contains("fast4") && test["fast4"].is_array();
  const bool has5 = test.contains("auto5") && test["auto5"].is_array();
  const TempDirectory dir;
  write_case(dir, content, test);
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = open_tokenizer(dir.path());
  } catch (const Error& e) {
    EXPECT_TRUE(e.code() == Errc::Corrupt || e.code() == Errc::Unavailable) << e.what();
    const auto names_it = [&](const auto& file) { return std::string(e.what()).find(file.key()) != std::string::npos; };
    bool named = false;
    for (auto it = test["files"].begin(); it != test["files"].end(); ++it) named |= names_it(it);
    EXPECT_TRUE(named) << e.what();
    ++(has4 || has5 ? count.refused : count.no_reference);
    if (std::getenv("DS_SHOW") != nullptr && has4 && has5) std::printf("%s\n", e.what());
    return;
  }
  if (!has4 && !has5) {
    ++count.no_reference;
    return;
  }
  const bool agree = has4 && has5 && test["fast4"] == test["auto5"];
  ++(agree ? count.equal : count.differ);
  const std::string warnings = Json(tokenizer->facts().warnings).dump();
  if (has4 && has5 && !agree) {
    EXPECT_FALSE(tokenizer->facts().warnings.empty()) << "versions differ";
  }
  for (size_t i = 0; i < test["texts"].size(); ++i) {
    const auto text = test["texts"][i].get<std::string>();
    const Ids ids = encode(*tokenizer, text);
    const bool is4 = has4 && ids == test["fast4"][i].get<Ids>(), is5 = has5 && ids == test["auto5"][i].get<Ids>();
    EXPECT_TRUE(agree ? is4 && is5 : is4 || is5)
        << test["texts"][i] << "\n  ours " << Json(ids) << "\n  4    " << (has4 ? test["fast4"][i] : Json()) << "\n  5    "
        << (has5 ? test["auto5"][i] : Json()) << "\n  " << warnings;
    for (const i32 id : ids) {
      EXPECT_LT(id, tokenizer->vocab_size());
      EXPECT_FALSE(tokenizer->piece(id).empty());
    }
  }
  if (!agree || !test.contains("special fast4") || !test.contains("special auto5")) return;
  for (const auto& [kind, name] : {std::pair{SpecialToken::Bos, "bos"}, {SpecialToken::Eos, "eos"}}) {
    const Json &four = test["special fast4"][name], &five = test["special auto5"][name];
    if (four != five) continue;
    const std::optional<i32> id = tokenizer->special(kind);
    // A token that only the class names, and no file has, is none.
    EXPECT_TRUE(id ? four == *id : four.is_null() || four >= tokenizer->vocab_size() - 1)
        << name << " " << four << " " << id.value_or(-1);
  }
}

void check_file(const std::string& name, std::map<std::string, Counts>& counts) {
  std::ifstream file(test_data("tokenizer-directories/" + name));
  std::string line;
  ASSERT_TRUE(std::getline(file, line));
  const Json content = Json::parse(line)["content"];
  while (std::getline(file, line)) check(content, Json::parse(line), counts);
}

TEST(TokenizerDirectories, AreReadAsAutoTokenizerReadsThem) {
  std::map<std::string, Counts> counts;
  check_file(std::getenv("DS_SLOW") != nullptr ? "many.jsonl" : "few.jsonl", counts);
  int equal = 0, refused = 0;
  for (const auto& [kind, n] : counts) {
    std::printf("%-24s equal %3d, versions differ %3d, refused %3d, no reference %3d\n", kind.c_str(), n.equal, n.differ,
                n.refused, n.no_reference);
    if (kind.find("unigram") == kind.npos || kind.starts_with("spm")) {
      equal += n.equal + n.differ;
      refused += n.refused;
      EXPECT_GT(n.equal + n.differ, 0) << kind;
    }
  }
  EXPECT_LT(refused, equal / 5);
}

}  // namespace tokenizer_directories_test
}  // namespace ds
