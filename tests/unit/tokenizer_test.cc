// SPDX-License-Identifier: Apache-2.0
// Tokenizers by themselves: their refusals, bytes that are no UTF-8, very long words, the places where texts may be
// cut, and the choice of a file in a folder. Equality with the reference is in tokenizer_reference_test.cc.
#include "data/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "data/tokenizer/unicode.h"
#include "ds/error.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace tokenizer_test {

using testing::read_file;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;
using Json = nlohmann::json;

std::vector<i32> encode(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<i32> ids;
  tokenizer.encode(text, ids);
  return ids;
}

Json golden(const std::string& name) {
  return Json::parse(read_file(test_data("tokenizers/" + name + "/tokenizer.json")));
}

std::unique_ptr<Tokenizer> open(const Json& file) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.json", file.dump());
  return open_tokenizer(dir.path());
}

TEST(Tokenizer, BytesAreTheirOwnIds) {
  const auto bytes = open_tokenizer("bytes");
  EXPECT_EQ(encode(*bytes, std::string("A\0\xFF", 3)), (std::vector<i32>{65, 0, 255}));
  EXPECT_EQ(bytes->decode(std::vector<i32>{65, 0, 255, 256, -1}), std::string("A\0\xFF", 3));
  EXPECT_EQ(bytes->vocab_size(), 256);
  EXPECT_EQ(bytes->identity(), "bytes");
}

TEST(Tokenizer, SpecialTokensAreFoundByTheirNames) {
  const auto bert = open_tokenizer(test_data("tokenizers/bert-cased"));
  EXPECT_EQ(bert->special(SpecialToken::Cls), 2);
  EXPECT_EQ(bert->special(SpecialToken::Sep), 3);
  EXPECT_EQ(bert->special(SpecialToken::Mask), 4);
  EXPECT_EQ(bert->special(SpecialToken::Pad), 0);
  EXPECT_EQ(bert->special(SpecialToken::Unk), 1);
  EXPECT_FALSE(bert->special(SpecialToken::Eos));
  EXPECT_FALSE(bert->adds_bos());
  const auto gpt2 = open_tokenizer(test_data("tokenizers/gpt2-files"));
  EXPECT_EQ(gpt2->special(SpecialToken::Eos), gpt2->vocab_size() - 1);
  EXPECT_FALSE(gpt2->adds_bos());
  const auto llama = open_tokenizer(test_data("tokenizers/llama2-sp"));
  EXPECT_EQ(llama->special(SpecialToken::Bos), 1);
  EXPECT_EQ(llama->special(SpecialToken::Eos), 2);
  EXPECT_TRUE(llama->adds_bos());
}

TEST(Tokenizer, TheConfigurationBesideItNamesSpecialTokens) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.json", golden("llama3").dump());
  EXPECT_FALSE(open_tokenizer(dir.path())->adds_bos());  // no file states that the first token of the template is Bos
  write_file(dir / "tokenizer_config.json",
             R"({"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "lstrip": false}, "x": 1})");
  const auto llama = open_tokenizer(dir.path());
  EXPECT_TRUE(llama->adds_bos());
  EXPECT_EQ(llama->decode(std::vector<i32>{llama->special(SpecialToken::Bos).value()}), "<|begin_of_text|>");
  EXPECT_EQ(llama->decode(std::vector<i32>{llama->special(SpecialToken::Eos).value()}), "<|eot_id|>");
}

TEST(Tokenizer, AFolderIsSearchedInTheDocumentedOrder) {
  const TempDirectory dir;
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Config, "has no tokenizer.json, vocab.json + merges.txt");
  EXPECT_ERROR(open_tokenizer(dir / "none"), Errc::Config, "no such file");
  write_file(dir / "tokenizer.model", read_file(test_data("tokenizers/llama2-sp/tokenizer.model")));
  EXPECT_EQ(open_tokenizer(dir.path())->identity().substr(0, 13), "SentencePiece");
  write_file(dir / "vocab.txt", read_file(test_data("tokenizers/bert-files/vocab.txt")));
  EXPECT_EQ(open_tokenizer(dir.path())->identity().substr(0, 9), "WordPiece");
  write_file(dir / "vocab.json", read_file(test_data("tokenizers/gpt2-files/vocab.json")));
  EXPECT_ERROR(open_tokenizer(dir / "vocab.json"), Errc::Config, "merges.txt");
  EXPECT_EQ(open_tokenizer(dir.path())->identity().substr(0, 9), "WordPiece");
  write_file(dir / "merges.txt", read_file(test_data("tokenizers/gpt2-files/merges.txt")));
  EXPECT_NE(open_tokenizer(dir.path())->identity().find("vocab.json + merges.txt"), std::string::npos);
  EXPECT_EQ(open_tokenizer(dir / "merges.txt")->identity(), open_tokenizer(dir.path())->identity());
  write_file(dir / "tokenizer.json", golden("qwen2").dump());
  EXPECT_NE(open_tokenizer(dir.path())->identity().find("tokenizer.json"), std::string::npos);
  write_file(dir / "tokens.spm3", "x");
  EXPECT_ERROR(open_tokenizer(dir / "tokens.spm3"), Errc::Unavailable, "kind of file");
}

TEST(Tokenizer, IdentityFollowsTheContent) {
  const auto a = open(golden("gpt2")), b = open(golden("gpt2")), c = open(golden("llama3"));
  EXPECT_EQ(a->identity(), b->identity());
  EXPECT_NE(a->identity(), c->identity());
}

TEST(Tokenizer, FilesWithoutTokenizerJsonFollowTheirClass) {
  const TempDirectory dir;
  for (const char* file : {"vocab.json", "merges.txt"})
    write_file(dir / file, read_file(test_data(std::string("tokenizers/gpt2-files/") + file)));
  const auto class_is = [&](const char* name) {
    write_file(dir / "tokenizer_config.json", Json{{"tokenizer_class", name}}.dump());
  };
  class_is("Qwen2TokenizerFast");
  EXPECT_EQ(encode(*open_tokenizer(dir.path()), "12 345").size(), 6u);  // digits one by one
  class_is("CLIPTokenizer");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Unavailable, "'CLIPTokenizer'");
  write_file(dir / "tokenizer_config.json", R"({"added_tokens_decoder": {"9x": {"content": "a"}}})");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "added_tokens_decoder.9x");
  write_file(dir / "tokenizer_config.json", "{}");
  write_file(dir / "added_tokens.json", R"({"<new>": 900})");
  const auto with_added = open_tokenizer(dir.path());
  EXPECT_EQ(encode(*with_added, "a<new>b")[1], 900);
  EXPECT_EQ(with_added->vocab_size(), 901);
  write_file(dir / "added_tokens.json", R"({"<new>": 5000})");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Unavailable, "added_tokens.json: <new>: '<new>' has the id 5000");
  write_file(dir / "merges.txt", "#version: 0.2\na b c\n");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "merges.txt:2");
}

TEST(Tokenizer, NullTakesARoleAndNoToken) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.json", golden("qwen2").dump());
  const auto opened = [&](const char* config) {
    write_file(dir / "tokenizer_config.json", config);
    return open_tokenizer(dir.path());
  };
  const auto by_class = opened(R"({"tokenizer_class": "Qwen2Tokenizer"})");
  const auto no_unk = opened(R"({"tokenizer_class": "Qwen2Tokenizer", "unk_token": null})");
  const auto no_eos = opened(R"({"tokenizer_class": "Qwen2Tokenizer", "eos_token": null})");
  EXPECT_TRUE(by_class->special(SpecialToken::Unk));
  EXPECT_FALSE(no_unk->special(SpecialToken::Unk));
  EXPECT_TRUE(no_unk->special(SpecialToken::Eos));
  EXPECT_FALSE(no_eos->special(SpecialToken::Eos));
  EXPECT_TRUE(no_eos->facts().ends.empty());
  // The ids of texts depend on their end alone.
  EXPECT_EQ(no_unk->identity(), by_class->identity());
  EXPECT_NE(no_eos->identity(), by_class->identity());
}

// A model_type alone names the class of Llama, and its own name the class that adds tokens for infilling.
TEST(Tokenizer, CodeLlamaByItsModelTypeIsLlama) {
  const auto ids = [](const Json& config) {
    const TempDirectory dir;
    write_file(dir / "tokenizer.json", golden("llama2").dump());
    write_file(dir / "tokenizer_config.json", config.dump());
    write_file(dir / "config.json", R"({"model_type": "code_llama"})");
    return encode(*open_tokenizer(dir.path()), "a \u2581<PRE> b");
  };
  const auto llama = ids({{"tokenizer_class", "LlamaTokenizer"}});
  EXPECT_EQ(llama, encode(*open(golden("llama2")), "a \u2581<PRE> b"));
  EXPECT_EQ(ids(Json::object()), llama);
  EXPECT_LT(ids({{"tokenizer_class", "CodeLlamaTokenizer"}}).size(), llama.size());
}

// transformers 5 takes its class by the model_type too.
TEST(Tokenizer, VersionsAreComparedByTheClassThatEachTakes) {
  const auto warnings = [](const char* name, const char* type, const Json& config) {
    const TempDirectory dir;
    write_file(dir / "tokenizer.json", golden(name).dump());
    write_file(dir / "tokenizer_config.json", config.dump());
    write_file(dir / "config.json", Json{{"model_type", type}}.dump());
    const auto tokenizer = open_tokenizer(dir.path());
    std::string all;
    for (const std::string& warning : tokenizer->facts().warnings) all += warning + "\n";
    return all;
  };
  const auto has = [](const std::string& all, const char* part) { return all.find(part) != all.npos; };
  const Json llama = {{"tokenizer_class", "LlamaTokenizerFast"}}, gpt2 = {{"tokenizer_class", "GPT2Tokenizer"}};
  EXPECT_TRUE(has(warnings("llama2", "llama", llama), "as the class LlamaTokenizer does"));
  for (const char* type : {"mistral", "phi3", "llava"}) EXPECT_EQ(warnings("llama2", type, llama), "") << type;
  EXPECT_EQ(warnings("qwen2", "qwen2", gpt2), "");
  EXPECT_TRUE(has(warnings("qwen2", "gpt2", gpt2), "as the class GPT2Tokenizer does"));
  EXPECT_TRUE(has(warnings("gpt2", "qwen2", gpt2), "as the class Qwen2Tokenizer does"));
  EXPECT_EQ(warnings("gpt2", "mistral", gpt2), "");
  EXPECT_TRUE(
      has(warnings("bert-cased", "modernbert", {{"tokenizer_class", "BertTokenizer"}}), "tokenizer.json alone"));

  const std::string file = warnings("llama3", "qwen2", {{"tokenizer_class", "PreTrainedTokenizerFast"}});
  EXPECT_TRUE(has(file, "as the class Qwen2Tokenizer does"));
  EXPECT_TRUE(has(file, "'<|endoftext|>' is no token"));
  Json named = {{"tokenizer_class", "LlamaTokenizer"}, {"bos_token", "<|begin_of_text|>"}, {"eos_token", "<|eot_id|>"}};
  EXPECT_TRUE(has(warnings("llama3", "llama", named), "'<unk>' is a token by the class LlamaTokenizer"));
  named["unk_token"] = nullptr;
  EXPECT_EQ(warnings("llama3", "llama", named), "");

  for (const Json& config : {Json::object(), Json{{"tokenizer_class", "BloomTokenizerFast"}}})
    EXPECT_TRUE(has(warnings("gpt2", "bloom", config), "'<s>' is a token by the class BloomTokenizer"));
  for (const char* type : {"llama", "code_llama"})
    EXPECT_TRUE(has(warnings("llama2", type, Json::object()), "as the class LlamaTokenizer does")) << type;
  Json t5 = {{"tokenizer_class", "T5Tokenizer"}, {"additional_special_tokens", {"<x>"}}};
  EXPECT_TRUE(has(warnings("gpt2", "t5", t5), "adds <extra_id_0> and those after it"));
  t5["extra_ids"] = 0;
  EXPECT_FALSE(has(warnings("gpt2", "t5", t5), "adds <extra_id_0>"));
  EXPECT_FALSE(has(warnings("gpt2", "t5", {{"tokenizer_class", "T5Tokenizer"}}), "adds <extra_id_0>"));

  Json flagged = {{"tokenizer_class", "Qwen2Tokenizer"}, {"additional_special_tokens", {"<|im_start|>"}}};
  EXPECT_EQ(warnings("qwen2", "qwen2", flagged), "");
  flagged["additional_special_tokens"][0] = {{"content", "<|im_start|>"}, {"rstrip", true}, {"normalized", false}};
  EXPECT_TRUE(has(warnings("qwen2", "qwen2", flagged), "'<|im_start|>' has flags"));
  const Json image = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"image_token", {{"content", "<image>"}}}};
  EXPECT_ERROR(warnings("gpt2", "", image), Errc::Unavailable, "tokenizer_config.json: image_token: '<image>'");

  Json twice = gpt2;
  twice["bos_token"] = twice["eos_token"] = {{"content", "</s>"}, {"normalized", true}};
  EXPECT_EQ(warnings("gpt2", "gpt2", twice), "");
  twice["eos_token"]["normalized"] = false;
  EXPECT_TRUE(has(warnings("gpt2", "gpt2", twice), "'</s>' is named twice"));
}

constexpr Errc kLater = Errc::Unavailable, kBad = Errc::Corrupt;

// The ids of whole directories are in tokenizer_directories_test.cc.
std::string llama(const TempDirectory& dir, const Json& config) {
  write_file(dir / "tokenizer.model", read_file(test_data("tokenizers/llama2-sp/tokenizer.model")));
  write_file(dir / "tokenizer_config.json", config.dump());
  return dir.path();
}

TEST(Tokenizer, EveryFileThatNamesAnEndCounts) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.json", golden("llama3").dump());
  EXPECT_TRUE(open_tokenizer(dir.path())->facts().ends.empty());
  write_file(dir / "config.json", R"({"eos_token_id": 7})");
  write_file(dir / "generation_config.json", R"({"eos_token_id": [5, 7, 9]})");
  write_file(dir / "tokenizer_config.json", R"({"eos_token": "<|eot_id|>"})");
  const auto tokenizer = open_tokenizer(dir.path());
  const i32 eos = tokenizer->special(SpecialToken::Eos).value();
  EXPECT_EQ(end_tokens(*tokenizer, "", 1000), (std::vector<i32>{5, 7, 9, eos}));
  EXPECT_ERROR(end_tokens(*tokenizer, "", eos), Errc::Unavailable,
               fmt::format("{}/tokenizer_config.json: eos_token: {} is no token of the model", dir.path(), eos));
  const TempDirectory model;
  write_file(model / "generation_config.json", R"({"eos_token_id": 11})");
  EXPECT_EQ(end_tokens(*tokenizer, model.path(), 1000), (std::vector<i32>{5, 7, 9, eos, 11}));
  EXPECT_EQ(end_tokens(*tokenizer, dir.path(), 1000), end_tokens(*tokenizer, "", 1000));
  write_file(model / "generation_config.json", R"({"eos_token_id": [11, 1000]})");
  EXPECT_ERROR(end_tokens(*tokenizer, model.path(), 1000), Errc::Unavailable,
               "generation_config.json: eos_token_id: 1000 is no token of the model, whose vocabulary has 1000");
  for (const char* bad : {R"({"eos_token_id": 1e300})", R"({"eos_token_id": [-1]})", R"({"eos_token_id": "</s>"})",
                          R"({"eos_token_id": 99999999999})", R"({"eos_token_id": [[1]]})"}) {
    write_file(dir / "generation_config.json", bad);
    EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "generation_config.json: eos_token_id: must be an id");
  }
}

TEST(Tokenizer, NamesTheFileOfEachSpecialToken) {
  const TempDirectory dir;
  const auto tokenizer = open_tokenizer(
      llama(dir, {{"tokenizer_class", "LlamaTokenizer"}, {"legacy", false}, {"eos_token", "<|im_end|>"}}));
  std::map<std::string, std::string> sources;
  for (const NamedToken& token : tokenizer->facts().named) sources[token.role + " " + token.content] = token.source;
  EXPECT_EQ(sources["eos_token <|im_end|>"], "tokenizer_config.json");
  EXPECT_EQ(sources[" <|im_end|>"], "tokenizer_config.json");
  EXPECT_EQ(sources["bos_token <s>"], "class LlamaTokenizer");
  EXPECT_EQ(sources[" </s>"], "tokenizer.model");
  EXPECT_EQ(tokenizer->piece(2), "</s>");
  EXPECT_EQ(tokenizer->piece(-1), "");
  EXPECT_EQ(tokenizer->decode(encode(*tokenizer, "a<|im_end|>b")), "a<|im_end|>b");
}

// transformers 5 reads a tokenizer.model by itself for some model types, as version 4 does with "legacy".
TEST(Tokenizer, LegacyIsWarnedOfWhereVersionsDiffer) {
  const TempDirectory dir;
  llama(dir, {{"tokenizer_class", "LlamaTokenizer"}, {"legacy", true}});
  write_file(dir / "config.json", R"({"model_type": "mistral"})");
  EXPECT_TRUE(open_tokenizer(dir.path())->facts().warnings.empty());
  write_file(dir / "config.json", R"({"model_type": "llama"})");
  EXPECT_EQ(open_tokenizer(dir.path())->facts().warnings.size(), 1u);
}

// Members of tokenizer_config.json that would change ids in a way that is not followed.
TEST(Tokenizer, SettingsThatAreNotFollowedAreRefusedByName) {
  const std::tuple<const char*, const char*, Errc> cases[] = {
      {"gpt2", R"({"fix_mistral_regex": true})", kLater},
      {"gpt2", R"({"from_slow": true})", kLater},
      {"gpt2", R"({"tokenizer_class": "T5Tokenizer", "add_prefix_space": true})", kLater},
      {"gpt2", R"({"tokenizer_class": "T5Tokenizer", "extra_ids": 1000000})", kLater},
      {"gpt2", R"({"tokenizer_class": "T5Tokenizer", "extra_ids": 2, "additional_special_tokens": ["<extra_id_0>"]})",
       kLater},
      {"gpt2", R"({"image_token": "<image>"})", kLater},
      {"gpt2", R"({"split_special_tokens": "yes"})", kBad},
      {"gpt2", R"({"tokenizer_class": 3})", kBad},
      {"gpt2", R"({"eos_token": 3})", kBad},
      {"gpt2", R"({"eos_token": {"lstrip": true}})", kBad},
      {"gpt2", R"({"additional_special_tokens": "x"})", kBad},
      {"gpt2", R"({"added_tokens_decoder": {"7": {"content": "x", "lstrip": 1}}})", kBad},
      {"gpt2", R"({"added_tokens_decoder": {"77777": {"content": "x"}}})", kLater},
      {"gpt2", R"({"added_tokens_decoder": []})", kBad},
      {"llama2", R"({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": false})", kLater},
      {"bert-cased", R"({"do_basic_tokenize": false})", kLater},
      {"bert-cased", R"({"never_split": ["x"]})", kLater},
      {"bert-cased", R"({"wordpieces_prefix": "%%"})", kLater},
      {"bert-cased", R"({"do_lower_case": 0})", kBad},
  };
  for (const auto& [name, config, code] : cases) {
    SCOPED_TRACE(config);
    const TempDirectory dir;
    write_file(dir / "tokenizer.json", golden(name).dump());
    write_file(dir / "tokenizer_config.json", config);
    const Json parsed = Json::parse(config);
    const std::string key = parsed.size() == 1             ? parsed.begin().key()
                            : parsed.contains("extra_ids") ? "extra_ids"
                                                           : "add_prefix_space";
    EXPECT_ERROR(open_tokenizer(dir.path()), code, "tokenizer_config.json: " + key);
  }
  const TempDirectory dir;
  llama(dir, {{"tokenizer_class", "XLMRobertaTokenizer"}});
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Unavailable, "'XLMRobertaTokenizer' in tokenizer_config.json");
  llama(dir, {{"tokenizer_class", "LlamaTokenizer"}, {"sp_model_kwargs", {{"enable_sampling", true}}}});
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Unavailable, "tokenizer_config.json: sp_model_kwargs");
}

TEST(Tokenizer, AModelAloneIsReadBySentencePieceWhichIsSaid) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.model", read_file(test_data("tokenizers/llama2-sp/tokenizer.model")));
  const auto alone = open_tokenizer(dir.path());
  encode(*alone, "some words");
  EXPECT_TRUE(alone->warnings_of_texts().empty());
  encode(*alone, "some</s>words");
  ASSERT_EQ(alone->warnings_of_texts().size(), 1u);
  EXPECT_NE(alone->warnings_of_texts()[0].find("'</s>'"), std::string::npos);
  // Files without a class: its own rules, and the tokens that are added.
  write_file(dir / "added_tokens.json", R"({"<new>": 1000})");
  const auto added = open_tokenizer(dir.path());
  std::vector<i32> wanted = encode(*alone, "some ");
  wanted.push_back(1000);
  for (const i32 id : encode(*alone, "words")) wanted.push_back(id);
  EXPECT_EQ(encode(*added, "some <new>words"), wanted);
}

TEST(Tokenizer, IdentityIsOverThePartsThatIdsDependOn) {
  const TempDirectory dir;
  Json file = golden("gpt2");
  write_file(dir / "tokenizer.json", file.dump());
  const auto identity = [&] { return open_tokenizer(dir.path())->identity(); };
  const std::string alone = identity();
  std::vector<std::string> all = {alone};
  const auto differs = [&](const char* name, const std::string& text, const char* part) {
    write_file(dir / name, text);
    const std::string now = identity();
    for (const std::string& other : all) EXPECT_FALSE(is_same_tokenizer(other, now)) << name << " " << text;
    EXPECT_EQ(
        difference_of_tokenizers(now, all.back(), "the run was started with"),
        fmt::format("data.tokenizer is BPE of {0} ids, tokenizer.json, and the run was started with BPE of {0} ids, "
                    "tokenizer.json, of which {1} differs, by this file or those beside it",
                    file["model"]["vocab"].size() + file["added_tokens"].size(), part));
    all.push_back(now);
  };
  const auto same = [&](const char* name, const std::string& text) {
    write_file(dir / name, text);
    EXPECT_TRUE(is_same_tokenizer(identity(), all.back())) << name << " " << text;
    EXPECT_TRUE(is_same_tokenizer(all.back(), identity())) << name << " " << text;
  };
  same("tokenizer_config.json", R"({"model_max_length": 5, "padding_side": "left"})");
  same("tokenizer_config.json",
       R"({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "add_bos_token": true})");
  differs("tokenizer_config.json", R"({"eos_token": "<new>"})", "added_tokens");
  differs("tokenizer_config.json", R"({"eos_token": "<new>", "split_special_tokens": true})", "added_tokens");
  differs("special_tokens_map.json", R"({"eos_token": "<newer>"})", "added_tokens");
  same("special_tokens_map.json", R"({"eos_token": "<newer>", "pad_token": "<newer>"})");
  differs("added_tokens.json", R"({"<x>": 901})", "added_tokens");
  same("generation_config.json", R"({"eos_token_id": 3})");
  same("config.json", R"({"model_type": "gpt2"})");
  // The same content in another form.
  for (Json& merge : file["model"]["merges"])
    if (merge.is_string()) {
      const auto text = merge.get<std::string>();
      merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
    }
  file["pre_tokenizer"]["trim_offsets"] = !file["pre_tokenizer"].value("trim_offsets", false);
  file["pre_tokenizer"].erase("use_regex");
  file["model"]["byte_fallback"] = false;
  same("tokenizer.json", file.dump(2));
  file["model"]["merges"].erase(file["model"]["merges"].size() - 1);
  differs("tokenizer.json", file.dump(), "model");
  file["normalizer"] = {{"type", "NFC"}};
  differs("tokenizer.json", file.dump(), "normalizer");
  write_file(dir / "tokenizer_config.json", R"({"add_prefix_space": true})");
  differs("tokenizer_config.json", R"({"add_prefix_space": true, "split_special_tokens": true})", "pre_tokenizer");
}

TEST(Tokenizer, IdentitiesOfOlderVersionsAreCompared) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.json", golden("gpt2").dump());
  const std::string now = open_tokenizer(dir.path())->identity();
  const std::string without_parts = now.substr(0, now.find(kParts));
  ASSERT_NE(without_parts, now);
  EXPECT_TRUE(is_same_tokenizer(without_parts, now));
  EXPECT_TRUE(is_same_tokenizer(now.substr(0, now.find(kOtherFiles)), now));
  write_file(dir / "tokenizer_config.json", R"({"eos_token": "<new>"})");
  EXPECT_FALSE(is_same_tokenizer(without_parts, open_tokenizer(dir.path())->identity()));
  EXPECT_TRUE(is_same_tokenizer("BPE of 900 ids, vocab.json + merges.txt xxh3 1",
                                "BPE of 900 ids, vocab.json + merges.txt xxh3 2, other files xxh3 3"));
  EXPECT_FALSE(is_same_tokenizer("BPE of 900 ids, tokenizer.json xxh3 1",
                                 "BPE of 900 ids, tokenizer.json xxh3 2, other files xxh3 3"));
  EXPECT_TRUE(
      is_same_tokenizer("SentencePiece of 9 ids, tokenizer.model xxh3 1, by sentencepiece 0.1.97",
                        "SentencePiece of 9 ids, tokenizer.model xxh3 1, other files xxh3 3, by sentencepiece 2"));
}

TEST(Tokenizer, AFileBesideASentencePieceModelThatChangesNothingIsNoOther) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.model", read_file(test_data("tokenizers/llama2-sp/tokenizer.model")));
  const std::string alone = open_tokenizer(dir.path())->identity();
  write_file(dir / "tokenizer_config.json", R"({"model_max_length": 5})");
  EXPECT_TRUE(is_same_tokenizer(alone, open_tokenizer(dir.path())->identity()));
  write_file(dir / "tokenizer_config.json", R"({"tokenizer_class": "LlamaTokenizer", "legacy": false})");
  EXPECT_FALSE(is_same_tokenizer(alone, open_tokenizer(dir.path())->identity()));
}

// More pieces of a word than a tokenizer keeps memory for, none of them known.
TEST(Tokenizer, AUnigramModelTakesLongWords) {
  const Json model =
      Json::parse(R"({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0], ["a", -1], ["aa", -1.5]]})");
  const Json file = {{"version", "1.0"}, {"model", model}};
  const auto tokenizer = open(file);
  EXPECT_EQ(encode(*tokenizer, std::string(200'001, 'a')).size(), 100'001u);
  EXPECT_EQ(encode(*tokenizer, std::string(200'001, 'x')), (std::vector<i32>{0}));
  EXPECT_EQ(encode(*tokenizer, "xxaaxa"), (std::vector<i32>{0, 2, 0, 1}));
}

TEST(Tokenizer, AUnigramModelWithAPieceWithoutEndIsRefused) {
  Json file = {{"version", "1.0"}, {"model", {{"type", "Unigram"}, {"unk_id", 0}}}};
  file["model"]["vocab"] = Json::array({Json::array({std::string(5000, 'a'), -1.0})});
  EXPECT_ERROR(open(file), Errc::Unavailable, "model.vocab: a piece of 5000 bytes");
}

// A trie of one unit that leads out of itself, and a replacement that begins beyond all.
TEST(Tokenizer, RulesThatContradictThemselvesAreRefused) {
  for (const auto& [rules, words] :
       {std::pair{"BAAAAAD8/38=", "leads out of itself"}, {"BAAAAAAAAAA=", "leads out of itself"}}) {
    Json file = golden("gpt2");
    file["normalizer"] = {{"type", "Precompiled"}, {"precompiled_charsmap", rules}};
    const auto tokenizer = open(file);
    EXPECT_ERROR(encode(*tokenizer, "abc"), Errc::Corrupt, words);
  }
}

// The error after one value of a good file is changed: pointer, new value, code, words.
struct Refusal {
  const char *file, *pointer, *value;
  Errc code;
  const char* words;
};
const Refusal kRefusals[] = {
    {"gpt2", "/normalizer", R"({"type": "Precompiled", "precompiled_charsmap": ""})", kBad, "has no rules"},
    {"gpt2", "/normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "A"})", kBad,
     "normalizer.precompiled_charsmap: is not base64"},
    {"gpt2", "/normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "/////w=="})", kBad, "not whole"},
    {"gpt2", "/normalizer", R"({"type": "Precompiled", "precompiled_charsmap": null})", kBad, "is missing"},
    {"gpt2", "/normalizer", R"({"type": "NFC", "extra": 1})", kLater, "normalizer.extra: this field is not known"},
    {"gpt2", "/normalizer", R"({"type": "Sequence", "normalizers": [{"type": "Nmt"}]})", kLater, "normalizers[0]"},
    {"gpt2", "/normalizer", R"({"type": "Replace", "pattern": {"String": 3}, "content": ""})", kBad, "pattern.String"},
    {"gpt2", "/normalizer", R"("NFC")", kBad, "must be an object"},
    {"gpt2", "/pre_tokenizer", R"({"type": "UnicodeScripts"})", kLater, "'UnicodeScripts' is not supported"},
    {"gpt2", "/pre_tokenizer", R"({"type": "ByteLevel"})", kBad, "add_prefix_space: is missing"},
    {"gpt2", "/pre_tokenizer",
     R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false}, {"type": "Metaspace"}]})",
     kLater, "'Metaspace' after 'ByteLevel'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a("}, "behavior": "Isolated"})", kBad,
     "cannot be compiled"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "(?<=a)b"}, "behavior": "Isolated"})", kLater,
     "'(?<'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a**"}, "behavior": "Isolated"})", kLater,
     "'*' behind a repetition"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a+?+"}, "behavior": "Isolated"})", kLater,
     "'+' behind a repetition"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a{2}{2}"}, "behavior": "Isolated"})", kLater,
     "'{' behind a repetition"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a{2}?*"}, "behavior": "Isolated"})", kLater,
     "'*' behind a repetition"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a{2}+"}, "behavior": "Isolated"})", kLater,
     "'+' behind '}'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a{2,1}"}, "behavior": "Isolated"})", kLater,
     "'{2,1}'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a{65536}"}, "behavior": "Isolated"})", kLater,
     "'{65536}'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a{,2}"}, "behavior": "Isolated"})", kLater,
     "'{'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "(*UCP)a"}, "behavior": "Isolated"})", kLater,
     "'(*'"},
    {"gpt2", "/pre_tokenizer", R"x({"type": "Split", "pattern": {"Regex": "a(*FAIL)"}, "behavior": "Isolated"})x",
     kLater, "'(*'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "[a&&b]"}, "behavior": "Isolated"})", kLater,
     "'&&'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "\\h+"}, "behavior": "Isolated"})", kLater,
     "'\\h'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "^+a"}, "behavior": "Isolated"})", kLater,
     "'^+'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "[a[^b]]"}, "behavior": "Isolated"})", kLater,
     "'[^' inside a bracket"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "[[:alpha:]]"}, "behavior": "Isolated"})",
     kLater, "'[:'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "[\\s-a]"}, "behavior": "Isolated"})", kLater,
     "'-' after a set"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "[a-[b]]"}, "behavior": "Isolated"})", kLater,
     "'-' before a set"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "\\p{Elvish}"}, "behavior": "Isolated"})",
     kLater, "Elvish"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "[a"}, "behavior": "Isolated"})", kBad, "']'"},
    {"gpt2", "/pre_tokenizer", R"({"type": "Split", "pattern": {"String": "a"}, "behavior": "Apart"})", kLater,
     "'Apart'"},
    {"gpt2", "/decoder", R"({"type": "CTC"})", kLater, "decoder 'CTC' is not supported"},
    {"gpt2", "/decoder", R"({"type": "Strip", "content": "", "start": 1, "stop": 0})", kBad, "is empty"},
    {"gpt2", "/model/type", R"("Unigram")", kLater, "model: 'Unigram' behind 'ByteLevel' is not supported"},
    {"gpt2", "/model/type", R"("WordLevel")", kLater, "model: 'WordLevel' is not supported"},
    {"bert-cased", "/model", R"({"type": "Unigram", "unk_id": 0, "vocab": []})", kBad, "model.vocab: must be a list"},
    {"bert-cased", "/model", R"({"type": "Unigram", "unk_id": 0, "vocab": [["a"]]})", kBad, "entry 0 must be a piece"},
    {"bert-cased", "/model", R"({"type": "Unigram", "unk_id": 0, "vocab": [["a", 0], ["a", 1]]})", kBad,
     "'a' has the ids 0 and 1"},
    {"bert-cased", "/model", R"({"type": "Unigram", "unk_id": 1, "vocab": [["a", 0]]})", kBad, "unk_id: 1 is no piece"},
    {"bert-cased", "/model", R"({"type": "Unigram", "unk_id": null, "vocab": [["a", 0]]})", kLater, "unk_id: null"},
    {"bert-cased", "/model", R"({"type": "Unigram", "unk_id": 0, "vocab": [["a", 0]], "alpha": 1})", kLater, "alpha"},
    {"bert-cased", "/model", "null", kBad, "model: is missing"},
    {"gpt2", "/model/dropout", "0.1", kLater, "model.dropout: only null"},
    {"gpt2", "/model/vocab", "[]", kBad, "model.vocab"},
    {"gpt2", "/model/vocab/a", "-1", kBad, "model.vocab.a"},
    {"gpt2", "/model/vocab/a", "99999999999", kBad, "model.vocab.a"},
    {"gpt2", "/model/vocab/a", "0", kBad, "same id 0"},
    {"gpt2", "/model/merges", "{}", kBad, "model.merges: must be an array"},
    {"gpt2", "/model/merges/0", R"("a")", kBad, "merge 0: is not two tokens"},
    {"gpt2", "/model/merges/3", R"(["nowhere", "a"])", kBad, "merge 3: 'nowhere' is not in the vocabulary"},
    {"gpt2", "/model/unk_token", R"("none")", kBad, "model.unk_token"},
    {"gpt2", "/model/byte_fallback", "true", kLater, "byte_fallback"},
    {"gpt2", "/model/novelty", "true", kLater, "model.novelty: this field is not known"},
    {"gpt2", "/version", R"("2.0")", kLater, "version"},
    {"gpt2", "/special_of_vocabulary", R"({"eos_token": "a"})", kLater,
     "special_of_vocabulary: this field is not known"},
    {"gpt2", "/added_tokens/0/id", "3", kBad, "added_tokens[0]: '<|endoftext|>' has the id 3 of '$'"},
    {"gpt2", "/added_tokens/0/content", R"("a")", kBad, "added_tokens[0]"},
    {"gpt2", "/added_tokens/0/rstrip", "1", kBad, "added_tokens[0].rstrip"},
    {"bert-cased", "/model/unk_token", R"("none")", kBad, "'none' is not in the vocabulary"},
    {"bert-cased", "/model/max_input_chars_per_word", "1000000", kLater, "max_input_chars_per_word"},
    {"mixed", "/normalizer", R"({"type": "Strip", "strip_left": true, "strip_right": true})", kLater, "'first'"},
    {"mixed", "/pre_tokenizer/pretokenizers/0/replacement", R"("ab")", kBad, "one character"},
};

TEST(Tokenizer, WhatItCannotPromiseIsRefusedByName) {
  for (const Refusal& r : kRefusals) {
    SCOPED_TRACE(std::string(r.file) + r.pointer + " " + r.value);
    Json file = golden(r.file);
    file[Json::json_pointer(r.pointer)] = Json::parse(r.value);
    EXPECT_ERROR(open(file), r.code, r.words);
  }
}

TEST(Tokenizer, DeepNestingIsRefused) {
  Json part = {{"type", "NFC"}};
  for (int i = 0; i < 20; ++i) part = {{"type", "Sequence"}, {"normalizers", {part}}};
  Json file = golden("gpt2");
  file["normalizer"] = part;
  EXPECT_ERROR(open(file), Errc::Corrupt, "nested too deeply");
  const TempDirectory dir;
  for (const char* name : {"special_tokens_map.json", "tokenizer_config.json", "added_tokens.json", "config.json",
                           "generation_config.json"}) {
    write_file(dir / "vocab.json", "{}");
    write_file(dir / "merges.txt", "");
    write_file(dir / name, fmt::format(R"({{"x": {}1{}}})", std::string(200000, '['), std::string(200000, ']')));
    EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "nested deeper than 100 levels");
    std::filesystem::remove(dir / name);
  }
  write_file(dir / "tokenizer.json", "{}");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "tokenizer.json: model: is missing");
  write_file(dir / "tokenizer.json", std::string(1 << 20, '['));
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "tokenizer.json");
}

// A file without end is refused before its content is kept.
TEST(Tokenizer, HugeFilesAreRefused) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.json", golden("gpt2").dump());
  for (const char* name : {"special_tokens_map.json", "tokenizer_config.json", "added_tokens.json", "config.json",
                           "generation_config.json"}) {
    write_file(dir / name, "{}");
    std::filesystem::resize_file(dir / name, uintmax_t{1} << 30);  // a hole
    EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, name);
    std::filesystem::remove(dir / name);
  }
}

// The reference numbers them itself, whatever ids the file gives.
TEST(Tokenizer, AddedTokensFollowTheVocabularyInTheOrderOfTheList) {
  const Json file = golden("gpt2");
  const i64 end = static_cast<i64>(file["model"]["vocab"].size());
  const auto with = [&](std::vector<std::pair<std::string, i64>> tokens) {
    Json changed = file;
    changed["added_tokens"] = Json::array();
    for (const auto& [content, id] : tokens)
      changed["added_tokens"].push_back({{"id", id}, {"content", content}, {"special", true}});
    return changed;
  };
  EXPECT_EQ(open(with({{"<a>", end}, {"<b>", end + 1}}))->vocab_size(), end + 2);
  EXPECT_ERROR(open(with({{"<a>", end + 9}})), Errc::Unavailable, fmt::format("gives it {}", end));
  EXPECT_ERROR(open(with({{"<b>", end + 1}, {"<a>", end}})), Errc::Unavailable, "'<b>' has the id");
  EXPECT_ERROR(open(with({{"<a>", i64{1} << 31}})), Errc::Corrupt, "32 bits");
}

// A line of a hundred thousand marks takes no longer than others.
TEST(Tokenizer, ManyMarksOnOneCharacter) {
  std::string text = "a", in_order = "a";
  for (int i = 0; i < 100000; ++i) text += "\u0301";
  for (int i = 0; i < 100000; ++i) text += "\u0316", in_order += "\u0316";
  for (int i = 0; i < 100000; ++i) in_order += "\u0301";
  EXPECT_EQ(tokenizer::normalize(text, tokenizer::Form::NFD), in_order);
}

TEST(Tokenizer, OtherModelFilesAreNotSentencePiece) {
  const TempDirectory dir;
  write_file(dir / "tokenizer.model", "IQ== 0\nIg== 1\n");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Unavailable, "tiktoken");
  write_file(dir / "tokenizer.model", "garbage");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "not a SentencePiece model");
  write_file(dir / "tokenizer.model", "");
  EXPECT_ERROR(open_tokenizer(dir.path()), Errc::Corrupt, "not a SentencePiece model");
}

TEST(Tokenizer, WhatIsNotUtf8IsReplacedByMaximalParts) {
  const auto gpt2 = open_tokenizer(test_data("tokenizers/gpt2"));
  const std::pair<std::string, std::string> cases[] = {
      {"a\xFF"
       "b",
       "a\uFFFDb"},
      {"\xE2\x82", "\uFFFD"},                    // one unfinished character
      {"\xE2\x82\xE2\x82\xAC", "\uFFFD\u20AC"},  // then a whole one
      {"\xF0\x9F\x98", "\uFFFD"},                //
      {"\xC0\x80", "\uFFFD\uFFFD"},              // overlong
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},    // a surrogate
      {"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"\x80\xBF", "\uFFFD\uFFFD"},
  };
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(tokenizer::replace_invalid_utf8(bytes), text);
    EXPECT_EQ(encode(*gpt2, bytes), encode(*gpt2, text)) << text;
  }
}

TEST(Tokenizer, OnlyWholeCharactersAreShown) {
  const auto whole = [](std::string_view text) { return tokenizer::whole_characters(text).size(); };
  EXPECT_EQ(whole("abc"), 3u);
  EXPECT_EQ(whole("a\xE2\x82"), 1u);
  EXPECT_EQ(whole("a\xF0\x9F\x98"), 1u);
  EXPECT_EQ(whole("a\xF0\x9F\x98\x80"), 5u);
  EXPECT_EQ(whole("a\xFF"), 2u);  // never becomes a character
  EXPECT_EQ(whole("\x80\x80\x80\x80"), 4u);
  EXPECT_EQ(whole(""), 0u);
}

// A word of 2 MB in one piece: n log n, not n * n, which would take hours.
TEST(Tokenizer, VeryLongWordsAreRead) {
  const std::string word(2'000'000, 'a');
  for (const char* name : {"gpt2", "qwen2", "llama2", "bert-uncased", "whitespace"}) {
    const auto tokenizer = open_tokenizer(test_data(std::string("tokenizers/") + name));
    const auto start = std::chrono::steady_clock::now();
    EXPECT_GT(encode(*tokenizer, word).size(), 0u) << name;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << name;
  }
}

TEST(Tokenizer, CutsChangeNoIds) {
  std::string text;
  for (const auto& record : Json::parse(read_file(test_data("tokenizers/records.json"))))
    text += record.get<std::string>() + "\n";
  text += "broken \xE2\x82\nNext\xFF\nline\n\n\nThree\n4\n \xE4\xB8\xAD\n\xE4\xB8\xAD\xE6\x96\x87";
  for (const char* name : {"gpt2", "llama3", "qwen2", "o200k", "deepseek3", "bert-cased", "bert-uncased", "bytes"}) {
    const auto tokenizer =
        open_tokenizer(std::string(name) == "bytes" ? name : test_data(std::string("tokenizers/") + name));
    std::vector<i32> parts;
    size_t num_cuts = 0;
    for (size_t at = 0; at < text.size(); ++num_cuts) {
      const size_t end = tokenizer->cut_after(text, at);
      ASSERT_GT(end, at);
      tokenizer->encode(std::string_view(text).substr(at, end - at), parts);
      at = end;
    }
    EXPECT_GT(num_cuts, 30u) << name;
    EXPECT_EQ(parts, encode(*tokenizer, text)) << name;
  }
  // Tokenizers about which nothing is known have no cuts.
  for (const char* name : {"llama2", "llama2-sp", "mixed"})
    EXPECT_EQ(open_tokenizer(test_data(std::string("tokenizers/") + name))->cut_after(text, 0), text.size()) << name;
}

// Each of them doubles the text: twenty would make a million of each character.
TEST(Tokenizer, ReplacementsThatFeedEachOtherEndWithAnError) {
  Json file = golden("gpt2");
  const Json twice = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  for (int i = 0; i < 4; ++i) file["normalizer"]["normalizers"].push_back(twice);
  const std::string text(100'000, 'a');
  EXPECT_EQ(open(file)->decode(encode(*open(file), text)).size(), 16 * text.size());
  for (int i = 4; i < 40; ++i) file["normalizer"]["normalizers"].push_back(twice);
  EXPECT_ERROR(encode(*open(file), text), Errc::Unavailable,
               "the tokenizer makes more than 1665536 bytes of a text of 100000");

  // One alone with a long content, and the same on the way back.
  const Json once = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(1 << 20, 'b')}};
  file["normalizer"] = once;
  EXPECT_ERROR(encode(*open(file), text), Errc::Unavailable, "the tokenizer makes more than");
  file["normalizer"] = nullptr;
  file["decoder"] = {{"type", "Sequence"}, {"decoders", {file["decoder"], once}}};
  const auto tokenizer = open(file);
  EXPECT_ERROR(tokenizer->decode(encode(*tokenizer, text)), Errc::Unavailable, "the tokenizer makes more than");
}

}  // namespace tokenizer_test
}  // namespace ds
