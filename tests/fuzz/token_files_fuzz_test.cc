// SPDX-License-Identifier: Apache-2.0
// Deterministic mutations of data files in the formats of others: whatever the bytes, the file is refused, or every
// token of its view lies inside the file and can be read; and JSONL gives what a parser of whole documents gives.

#include "data/token_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "fuzz/rounds.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace token_files_fuzz_test {

using testing::read_file;
using testing::test_data;
using testing::write_file;

constexpr i64 kAnyId = (i64{1} << 31) - 1;

size_t below(std::mt19937& rng, size_t n) { return static_cast<size_t>(rng()) % std::max<size_t>(n, 1); }

// Changes bits, bytes and whole fields of the first `head` bytes, and now and then the size.
std::string mutate(std::string s, std::mt19937& rng, size_t head) {
  constexpr u64 kValues[] = {0,
                             1,
                             2,
                             4,
                             5,
                             6,
                             0x7f,
                             0x80,
                             0xff,
                             0xffff,
                             0x7fffffff,
                             1u << 31,
                             ~0u,
                             u64{1} << 32,
                             ~u64{0} >> 1,
                             u64{1} << 63,
                             ~u64{0},
                             ~u64{0} / 12,
                             ~u64{0} / 8};
  for (size_t edits = 1 + below(rng, 3); edits > 0 && !s.empty(); --edits) {
    const size_t at = below(rng, std::min(head, s.size()));
    switch (below(rng, 6)) {
      case 0: s[at] = static_cast<char>(s[at] ^ (1 << below(rng, 8))); break;
      case 1: s[at] = static_cast<char>(rng()); break;
      case 2:
      case 3: {
        const u64 value = kValues[below(rng, std::size(kValues))];
        std::memcpy(s.data() + at, &value, std::min<size_t>(size_t{1} << below(rng, 4), s.size() - at));
        break;
      }
      case 4: s.insert(below(rng, s.size()), std::string(1 + below(rng, 16), static_cast<char>(rng()))); break;
      case 5: s.erase(below(rng, s.size()), 1 + below(rng, 16)); break;
    }
  }
  return s;
}

struct Counts {
  int accepted = 0, refused = 0;
};

// Opens the file, and reads everything that it claims to contain.
template <class Open>
void attempt(Open&& open, Counts& counts) {
  try {
    const std::unique_ptr<TokenFile> file = open();
    ++counts.accepted;
    const TokenView& view = file->view;
    const std::string_view all = file->copied.empty() ? file->mapped.front()->text() : std::string_view(file->copied);
    const auto* begin = reinterpret_cast<const u8*>(all.data());
    ASSERT_GT(view.count, 0);
    ASSERT_TRUE(view.data >= begin && view.data <= begin + all.size());
    ASSERT_LE(view.count, (begin + std::ssize(all) - view.data) / dtype_bytes(view.type));
    // Borders of documents ascend inside the file.
    i64 borders = 0;
    for (i64 at = 0, next; (next = file->borders.after(at)) != Borders::kNone; at = next) {
      ASSERT_TRUE(next > at && next < view.count);
      ASSERT_EQ(file->find_border(at, view.count, {}), next);
      ++borders;
    }
    ASSERT_EQ(borders, file->borders.count());
    std::vector<i32> ids(static_cast<size_t>(view.count));
    for (const i64 vocab_size : {i64{50}, i64{50257}, kAnyId}) {
      bool is_good = true;
      try {
        file->read(0, ids, vocab_size);
      } catch (const Error& e) {
        is_good = false;
        ASSERT_EQ(e.code(), Errc::Mismatch) << e.what();
      }
      ASSERT_TRUE(!is_good || std::ranges::all_of(ids, [&](i32 id) { return id >= 0 && id < vocab_size; }));
      try {
        file->check(0, view.count, vocab_size);
        ASSERT_TRUE(is_good);
      } catch (const Error& e) {
        ASSERT_FALSE(is_good) << e.what();
      }
    }
  } catch (const Error& e) {
    ++counts.refused;
    ASSERT_TRUE(e.code() == Errc::Corrupt || e.code() == Errc::Unavailable || e.code() == Errc::Config) << e.what();
    ASSERT_GT(std::string(e.what()).size(), 20u);
  }
}

std::string golden(const std::string& name) { return read_file(test_data("data/" + name)); }

TEST(TokenFilesFuzz, MutatedFilesOfLlmcAreRefusedOrSound) {
  const testing::TempDirectory dir;
  std::mt19937 rng(20240520);
  Counts counts;
  for (int i = 0; i < testing::rounds(1000) && !HasFatalFailure(); ++i) {
    write_file(dir / "x.bin", mutate(golden(i % 2 == 0 ? "gpt2.bin" : "llama3.bin"), rng, i % 3 == 0 ? 1024 : 16));
    attempt([&] { return open_llmc_file(dir / "x.bin"); }, counts);
  }
  EXPECT_GT(counts.accepted, 40);
  EXPECT_GT(counts.refused, 300);
}

TEST(TokenFilesFuzz, MutatedIndexesOfMegatronAreRefusedOrSound) {
  const testing::TempDirectory dir;
  std::mt19937 rng(20240521);
  Counts counts;
  constexpr const char* kTypes[] = {"uint8", "int8", "int16", "int32", "int64", "uint16"};
  for (int i = 0; i < testing::rounds(1500) && !HasFatalFailure(); ++i) {
    const std::string name = std::string("megatron-") + kTypes[below(rng, std::size(kTypes))];
    const std::string idx = golden(name + ".idx"), bin = golden(name + ".bin");
    const size_t kind = below(rng, 4);  // the tokens alone are damaged in one of four, the index in the others
    write_file(dir / "m.idx", kind == 0 ? idx : mutate(idx, rng, idx.size()));
    write_file(dir / "m.bin", kind <= 1 ? mutate(bin, rng, bin.size()) : bin);
    attempt([&] { return open_megatron_file(dir / "m"); }, counts);
  }
  EXPECT_GT(counts.accepted, 40);
  EXPECT_GT(counts.refused, 400);
}

TEST(TokenFilesFuzz, MutatedHdf5FilesAreRefusedOrSound) {
  const testing::TempDirectory dir;
  std::mt19937 rng(20240522);
  Counts counts;
  constexpr const char* kDatasets[] = {"", ":/u2", ":/i8", ":/group/rows", ":/compact", ":/floats"};
  for (int i = 0; i < testing::rounds(60) && !HasFatalFailure(); ++i) {
    const std::string good = golden(i % 3 == 0 ? "one.h5" : "several.h5");
    write_file(dir / "x.h5", mutate(good, rng, good.size()));
    const std::string name = i % 3 == 0 ? "x.h5" : std::string("x.h5") + kDatasets[below(rng, std::size(kDatasets))];
    attempt([&] { return open_hdf5_file(dir / name); }, counts);
  }
  EXPECT_GT(counts.accepted, 5);
  EXPECT_GT(counts.refused, 10);
}

struct Tokens {
  std::vector<i32> ids, targets;
  void append(const std::string& text, bool is_target) {
    for (const char c : text) {
      ids.push_back(static_cast<u8>(c));
      targets.push_back(is_target ? ids.back() : kIgnoredTarget);
    }
  }
};

// Whether it is a number by the grammar of JSON.
bool is_number(std::string_view s) {
  const auto digits = [&] {
    const size_t n = std::min(s.find_first_not_of("0123456789"), s.size());
    s.remove_prefix(n);
    return n;
  };
  const auto take = [&](std::string_view any_of) {
    if (s.empty() || any_of.find(s.front()) == any_of.npos) return false;
    s.remove_prefix(1);
    return true;
  };
  take("-");
  if (!take("0") && digits() == 0) return false;
  if (take(".") && digits() == 0) return false;
  if (take("eE")) {
    take("+-");
    if (digits() == 0) return false;
  }
  return s.empty();
}

// With 0 for numbers that no double represents, and for those that JSON cannot write, outside of strings.
std::string with_doubles(const std::string& line) {
  constexpr std::string_view kOfNumbers = "-+.0123456789eE";
  std::string out;
  for (size_t at = 0; at < line.size();) {
    const std::string_view rest = std::string_view(line).substr(at);
    size_t length = 1;
    bool is_zero = false;
    if (rest.front() == '"') {
      while (length < rest.size() && rest[length] != '"') length += rest[length] == '\\' ? 2 : 1;
      length = std::min(length + 1, rest.size());
    } else {
      for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
        constexpr std::string_view kBehind = ",]} \t\r";
        if (rest.starts_with(word) && (rest.size() == word.size() || kBehind.find(rest[word.size()]) != kBehind.npos)) {
          length = word.size();
          is_zero = true;
          break;
        }
      }
      if (!is_zero && kOfNumbers.find(rest.front()) != kOfNumbers.npos) {
        length = std::min(rest.find_first_not_of(kOfNumbers), rest.size());
        const std::string part(rest.substr(0, length));
        is_zero = is_number(part) && std::isinf(std::strtod(part.c_str(), nullptr));
      }
    }
    out += is_zero ? std::string_view("0") : rest.substr(0, length);
    at += length;
  }
  return out;
}

// The result of parsing each line as a whole document; nothing if one of them is wrong.
std::optional<Tokens> tokens_of(const std::string& lines) {
  Tokens all;
  std::string form;
  for (size_t at = 0; at < lines.size();) {
    const size_t end = std::min(lines.find('\n', at), lines.size());
    const std::string line = lines.substr(at, end - at);
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    auto json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_discarded()) json = nlohmann::json::parse(with_doubles(line), nullptr, false);
    if (!json.is_object()) return std::nullopt;
    const auto is_string = [](const nlohmann::json& object, const char* key) {
      return object.is_object() && object.contains(key) && object.at(key).is_string();
    };
    const std::string own = json.contains("text") ? "text" : json.contains("messages") ? "messages" : "prompt";
    if (!form.empty() && form != own) return std::nullopt;
    form = own;
    if (form == "text") {
      if (!is_string(json, "text")) return std::nullopt;
      all.append(json.at("text"), true);
    } else if (form == "prompt") {
      if (!is_string(json, "prompt") || !is_string(json, "completion")) return std::nullopt;
      all.append(json.at("prompt"), false);
      all.append(json.at("completion"), true);
    } else {
      const nlohmann::json& messages = json.at("messages");
      if (!messages.is_array() || messages.empty()) return std::nullopt;
      for (const nlohmann::json& message : messages) {
        if (!is_string(message, "role") || !is_string(message, "content")) return std::nullopt;
        const std::string role = message.at("role");
        all.append("<|im_start|>" + role + "\n", false);
        all.append(message.at("content").get<std::string>() + "<|im_end|>", role == "assistant");
        all.append("\n", false);
      }
    }
  }
  return all;
}

TEST(TokenFilesFuzz, MutatedLinesAreRefusedOrReadAsByAParserOfDocuments) {
  const std::string kTokens[] = {"{",
                                 "}",
                                 "[",
                                 "]",
                                 ",",
                                 ":",
                                 "\"",
                                 "\\",
                                 "\n",
                                 "\r\n",
                                 "\"text\"",
                                 "null",
                                 "1e400",
                                 "-0.5",
                                 "\xff",
                                 "\xC3\xA9",
                                 "\\u0000",
                                 "\\ud83d\\ude42",
                                 "\\ud83d",
                                 "\xEF\xBB\xBF",
                                 "{\"text\":\"x\"}",
                                 "\"text\":\"y\","};
  const testing::TempDirectory dir;
  std::mt19937 rng(20240523);
  const std::string seeds[] = {
      golden("texts.jsonl"),
      R"({"prompt":"a","completion":"b"})"
      "\n"
      R"({"completion":"\u00e9","n":[1,{"prompt":2}],"prompt":""})"
      "\n",
      R"({"messages":[{"role":"user","content":"a"},{"content":"b","role":"assistant","n":[{}]}]})"
      "\n"
      R"({"n":{"messages":[]},"messages":[{"role":"assistant","content":"c"},{"role":"tool","content":""}]})"};
  Counts counts;
  for (int i = 0; i < testing::rounds(1500) && !HasFatalFailure(); ++i) {
    std::string lines = seeds[i % 3];
    for (size_t edits = 1 + below(rng, 3); edits > 0 && !lines.empty(); --edits) {
      const size_t at = below(rng, lines.size());
      switch (below(rng, 5)) {
        case 0: lines[at] = static_cast<char>(rng()); break;
        case 1: lines.erase(at, 1 + below(rng, 20)); break;
        case 2: lines.insert(at, kTokens[below(rng, std::size(kTokens))]); break;
        case 3: lines.insert(below(rng, lines.size()), lines.substr(at, 1 + below(rng, 40))); break;
        case 4: lines[at] = static_cast<char>('a' + below(rng, 26)); break;
      }
    }
    write_file(dir / "x.jsonl", lines);
    const std::optional<Tokens> want = tokens_of(lines);
    try {
      const auto file = open_jsonl_file(dir / "x.jsonl", {.tokenizer = nullptr, .num_threads = 1 + i % 2});
      std::vector<i32> ids(static_cast<size_t>(file->view.count));
      file->read(0, ids, 256);
      ASSERT_TRUE(want) << lines;
      ASSERT_EQ(ids, want->ids) << lines;
      file->read_targets(0, ids, 256);
      ASSERT_EQ(ids, want->targets) << lines;
      ++counts.accepted;
    } catch (const Error& e) {
      ASSERT_TRUE(e.code() == Errc::Corrupt || e.code() == Errc::Config) << e.what();
      const std::string why = e.what();
      const bool is_ours = why.find("twice") != why.npos || why.find("binary data") != why.npos ||
                           why.find("UTF-16") != why.npos || why.find("no tokens") != why.npos ||
                           why.find("name of a role") != why.npos || why.find("is empty") != why.npos ||
                           why.find("nothing in it is trained on") != why.npos;
      ASSERT_TRUE(!want || is_ours) << why << "\n" << lines;
      ++counts.refused;
    }
  }
  EXPECT_GT(counts.accepted, 50);
  EXPECT_GT(counts.refused, 400);
}

// Inputs that no mutation reaches, or that a careless reader would follow: only those called good-* are read.
TEST(TokenFilesFuzz, OfTheCorpusOnlyTheGoodFilesAreRead) {
  int good = 0, bad = 0;
  for (const auto& entry : std::filesystem::directory_iterator(DS_TEST_DATA "/../fuzz/corpus/data")) {
    const std::string path = entry.path(), name = entry.path().filename(), suffix = entry.path().extension();
    if (name == "make.py" || (suffix == ".bin" && std::filesystem::exists(path.substr(0, path.size() - 4) + ".idx")))
      continue;
    Counts counts;
    attempt(
        [&] {
          if (suffix == ".jsonl") {
            auto file = open_jsonl_file(path, {.tokenizer = nullptr});
            file->copied.assign(reinterpret_cast<const char*>(file->view.data),
                                static_cast<size_t>(file->view.count * dtype_bytes(file->view.type)));
            file->view.data = reinterpret_cast<const u8*>(file->copied.data());
            return file;
          }
          return suffix == ".idx" ? open_megatron_file(path) : open_llmc_file(path);
        },
        counts);
    EXPECT_EQ(counts.accepted, name.starts_with("good-") ? 1 : 0) << name;
    good += counts.accepted;
    bad += counts.refused;
  }
  EXPECT_GE(good, 3);
  EXPECT_GE(bad, 8);
}

}  // namespace token_files_fuzz_test
}  // namespace ds
