// SPDX-License-Identifier: Apache-2.0
// Damaged tokenizer files and arbitrary bytes as text: a refusal has a reason, an accepted file encodes and decodes
// without a fault, and byte-level tokenizers give every text back.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "data/tokenizer.h"
#include "data/tokenizer/unicode.h"
#include "ds/error.h"
#include "fuzz/rounds.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace tokenizer_fuzz_test {

using Json = nlohmann::json;
using testing::test_data;
using Random = std::minstd_rand;
size_t below(Random& random, size_t n) { return static_cast<size_t>(random()) % std::max<size_t>(n, 1); }

const char* const kNames[] = {"gpt2",  "llama3",     "qwen2",       "deepseek3", "llama2",       "bert-uncased",
                              "mixed", "whitespace", "xlm-roberta", "albert",    "unigram-bytes"};

std::string golden(const std::string& name) {
  static const Json unigrams = [] {
    const std::string file = testing::read_file(test_data("tokenizer-directories/unigram.jsonl"));
    return Json::parse(file.substr(0, file.find('\n'))).at("content");
  }();
  if (unigrams.contains(name)) return unigrams[name].get<std::string>();
  return testing::read_file(test_data("tokenizers/" + name + "/tokenizer.json"));
}

// Bytes as in texts: letters, blanks, broken and whole characters, pieces of special tokens.
std::string any_text(Random& random) {
  static const std::string kPieces[] = {"a",
                                        "The ",
                                        " ",
                                        "\n",
                                        "\t",
                                        "1",
                                        "'s",
                                        "\u0301",
                                        "\u00e9",
                                        "\u4e2d",
                                        "\U0001F600",
                                        "\xFF",
                                        "\xE2\x82",
                                        "\xF0\x9F",
                                        "\x80",
                                        std::string(1, '\0'),
                                        "<|endoftext|>",
                                        "<|",
                                        "[MASK]",
                                        "\u2581",
                                        "\u200d",
                                        "\u3000",
                                        "<0x41>",
                                        "newword",
                                        "<mask>"};
  std::string text;
  for (size_t n = below(random, 40); n > 0; --n) {
    if (below(random, 6) == 0) {
      text += static_cast<char>(random());
    } else {
      text += kPieces[below(random, std::size(kPieces))];
    }
  }
  return text;
}

void use(const Tokenizer& tokenizer, Random& random) {
  for (int i = 0; i < 4; ++i) {
    std::vector<i32> ids;
    const std::string text = any_text(random);
    tokenizer.encode(text, ids);
    for (const i32 id : ids) ASSERT_TRUE(id >= 0 && id < tokenizer.vocab_size()) << text;
    tokenizer.decode(ids);
    ids.clear();
    for (int k = 0; k < 8; ++k) ids.push_back(static_cast<i32>(below(random, 3000)) - 10);
    tokenizer.decode(ids);
  }
}

// Returns whether the file was accepted.
bool check(const std::string& path, const std::string& content, Random& random) {
  testing::write_file(path, content);
  try {
    use(*open_tokenizer(path), random);
    return true;
  } catch (const Error& e) {
    EXPECT_TRUE(e.code() == Errc::Corrupt || e.code() == Errc::Unavailable) << e.what();
    EXPECT_GT(std::string(e.what()).size(), 20u);
    return false;
  }
}

TEST(TokenizerFuzz, ByteLevelTokenizersGiveEveryTextBack) {
  Random random(1);
  for (const char* name : {"gpt2", "llama3", "o200k", "deepseek3"}) {
    const auto tokenizer = open_tokenizer(test_data(std::string("tokenizers/") + name));
    for (int i = 0; i < testing::rounds(2000) && !HasFailure(); ++i) {
      const std::string text = any_text(random);
      std::vector<i32> ids;
      tokenizer->encode(text, ids);
      EXPECT_EQ(tokenizer->decode(ids), tokenizer::replace_invalid_utf8(text));
    }
  }
}

TEST(TokenizerFuzz, ATextIsDecodedFromTheFrontOn) {
  Random random(2);
  for (const char* name : {"gpt2", "llama2", "llama2-sp", "bert-uncased", "mixed"}) {
    const auto tokenizer = open_tokenizer(test_data(std::string("tokenizers/") + name));
    for (int i = 0; i < testing::rounds(200) && !HasFailure(); ++i) {
      std::vector<i32> ids;
      tokenizer->encode(any_text(random), ids);
      const std::string all = tokenizer->decode(ids);
      for (size_t n = 0; n < ids.size(); ++n) {
        const std::string part = tokenizer->decode(std::span(ids).first(n));
        const std::string_view shown = tokenizer::whole_characters(part);
        // SentencePiece writes U+FFFD for bytes that are not a character yet.
        if (shown.find("\uFFFD") == shown.npos) {
          EXPECT_EQ(all.substr(0, shown.size()), shown) << name;
        }
      }
    }
  }
}

TEST(TokenizerFuzz, DamagedBytesOfFilesAreRefusedWithReasons) {
  const testing::TempDirectory dir;
  Random random(3);
  size_t accepted = 0;
  for (int i = 0; i < testing::rounds(900) && !HasFailure(); ++i) {
    std::string text = golden(kNames[below(random, std::size(kNames))]);
    for (size_t edits = 1 + below(random, 3); edits > 0; --edits) {
      const size_t at = below(random, text.size()), n = 1 + below(random, 12);
      switch (below(random, 4)) {
        case 0: text[at] = static_cast<char>(random()); break;
        case 1: text.erase(at, n); break;
        case 2: text.insert(at, text.substr(at, n)); break;
        case 3: text.resize(at); break;
      }
      if (text.empty()) break;
    }
    accepted += check(dir / "tokenizer.json", text, random);
  }
  EXPECT_GT(accepted, 5u);
}

TEST(TokenizerFuzz, DisturbedPartsAreRefusedOrWork) {
  const Json values = Json::parse(
      R"([null, true, false, 0, 1, -1, 7, 2147483647, 1e300, "", "a", "Ġ", " ", "▁", "[UNK]", "\\s+", "(a|b)*", "[^\\s]+",
          [], ["a", "b"], {}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Whitespace"}, {"type": "Fuse"},
          {"type": "ByteLevel", "add_prefix_space": true}, {"Regex": "a*"}, {"Regex": "(?i:k)|\\p{L}+"}, {"String": ""},
          {"type": "Metaspace", "replacement": "▁"}, {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Removed",
          "invert": true}])");
  const testing::TempDirectory dir;
  Random random(4);
  size_t accepted = 0;
  for (int i = 0; i < testing::rounds(500) && !HasFailure(); ++i) {
    Json file = Json::parse(golden(kNames[below(random, std::size(kNames))]));
    for (size_t edits = 1 + below(random, 2); edits > 0; --edits) {
      Json* at = &file;
      while (at->is_structured() && !at->empty() && below(random, 6) != 0) {
        auto it = at->begin();
        std::advance(it, below(random, at->size()));
        at = &*it;
      }
      *at = values[below(random, values.size())];
    }
    accepted += check(dir / "tokenizer.json", file.dump(), random);
  }
  EXPECT_GT(accepted, 20u);
}

// The files beside the vocabulary: members that they have, with values that they do not.
TEST(TokenizerFuzz, DisturbedFilesBesideItAreRefusedOrWork) {
  const Json values = Json::parse(
      R"([null, true, false, 0, 1, -1, 900, 1e300, 99999999999999999999, "", "a", "</s>", "<new>", [], ["a", 3], {}, [[[]]],
          {"content": "<new>", "lstrip": true}, {"content": ""}, {"content": 3}, {"900": {"content": "x", "rstrip": true}},
          {"-1": {"content": "x"}}, {"00": {"content": "x"}}, {"3": {"content": "Q"}}, {"<x>": 900}, {"<x>": 901, "<y>": 900},
          {"<x>": "1"}, "LlamaTokenizer", "GPT2TokenizerFast", "BertTokenizer", "Qwen2Tokenizer", "RobertaTokenizer",
          "PreTrainedTokenizerFast", "NoSuchTokenizer"])");
  const char* const members[] = {"bos_token",
                                 "eos_token",
                                 "unk_token",
                                 "mask_token",
                                 "tokenizer_class",
                                 "added_tokens_decoder",
                                 "add_bos_token",
                                 "add_prefix_space",
                                 "additional_special_tokens",
                                 "do_lower_case",
                                 "strip_accents",
                                 "split_special_tokens",
                                 "legacy",
                                 "eos_token_id",
                                 "model_type",
                                 "sp_model_kwargs",
                                 "<x>",
                                 "clean_up_tokenization_spaces"};
  const char* const files[] = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
                               "generation_config.json"};
  Random random(6);
  size_t accepted = 0;
  for (int i = 0; i < testing::rounds(1500) && !HasFailure(); ++i) {
    const testing::TempDirectory dir;
    for (size_t n = 1 + below(random, 3); n > 0; --n) {
      Json file = Json::object();
      for (size_t m = below(random, 5); m > 0; --m)
        file[members[below(random, std::size(members))]] = values[below(random, values.size())];
      std::string text = below(random, 20) == 0 ? values[below(random, values.size())].dump() : file.dump();
      if (below(random, 20) == 0) text[below(random, text.size())] = static_cast<char>(random());
      testing::write_file(dir / files[below(random, std::size(files))], text);
    }
    const bool sentence_piece = below(random, 3) == 0;
    accepted += sentence_piece
                    ? check(dir / "tokenizer.model",
                            testing::read_file(test_data("tokenizers/llama2-sp/tokenizer.model")), random)
                    : check(dir / "tokenizer.json", golden(kNames[below(random, std::size(kNames))]), random);
  }
  EXPECT_GT(accepted, 100u);
}

TEST(TokenizerFuzz, DamagedSentencePieceModelsAreRefusedOrWork) {
  const testing::TempDirectory dir;
  Random random(5);
  const std::string good = testing::read_file(test_data("tokenizers/llama2-sp/tokenizer.model"));
  for (int i = 0; i < testing::rounds(200) && !HasFailure(); ++i) {
    std::string model = good;
    for (size_t edits = 1 + below(random, 4); edits > 0; --edits)
      model[below(random, model.size())] = static_cast<char>(random());
    if (below(random, 4) == 0) model.resize(below(random, model.size()));
    check(dir / "tokenizer.model", model, random);
  }
}

}  // namespace tokenizer_fuzz_test
}  // namespace ds
