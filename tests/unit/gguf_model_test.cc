// SPDX-License-Identifier: Apache-2.0
// Models and tokenizers in GGUF files that PyPI's gguf has written (golden/make_gguf.py): elements of every type, names
// and order of tensors, the configuration, ids of texts; and values that are missing or not known.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "base/json.h"
#include "config/gguf_model.h"
#include "config/model_config.h"
#include "data/tokenizer.h"
#include "data/tokenizer/files.h"
#include "expect_error.h"
#include "formats/gguf_source.h"
#include "gguf_file.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace gguf_model_test {

using ::testing::AllOf;
using testing::expect_error;
using testing::GgufFile;
using ::testing::HasSubstr;
using testing::read_file;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

std::vector<char> all_of(const TensorSource& source, const TensorInfo& t) {
  std::vector<char> out(static_cast<size_t>(t.bytes()));
  source.read(t.name, 0, t.numel(), out.data());
  return out;
}

// Every type, whole and in ranges that begin and end within blocks.
TEST(GgufTypes, DecodeAsTheReferenceDoes) {
  const auto source = open_source(test_data("gguf/types.gguf"));
  const auto expected = open_source(test_data("gguf/types.safetensors"));
  EXPECT_EQ(source->list().size(), 11u);
  EXPECT_EQ(expected->list().size(), 11u);
  std::mt19937 rng(3);
  for (const TensorInfo& want : expected->list()) {
    const TensorInfo& t = source->at(want.name);
    ASSERT_EQ(t.shape, want.shape) << t.name;
    const std::vector<char> reference = all_of(*expected, want), raw = all_of(*source, t);
    std::vector<char> values(reference.size());
    convert_elements(DType::F32, values.data(), t.dtype, raw.data(), t.numel());
    EXPECT_EQ(values, reference) << t.name;
    for (int round = 0; round < 60; ++round) {
      const auto first = static_cast<i64>(rng() % static_cast<u64>(t.numel()));
      const i64 count = 1 + static_cast<i64>(rng() % static_cast<u64>(t.numel() - first)), size = dtype_bytes(t.dtype);
      std::vector<char> part(static_cast<size_t>(count * size));
      source->read(t.name, first, count, part.data());
      ASSERT_EQ(std::memcmp(part.data(), raw.data() + first * size, part.size()), 0) << t.name << " " << first;
    }
  }
}

// Codes of a matrix, read row by row, stand for the bits of its elements.
void expect_codes(const TensorSource& source, const std::string& name, CodedForm form) {
  const TensorInfo& t = source.at(name);
  ASSERT_EQ(source.codes_of(name), form) << name;
  if (!form) return;
  const i64 cols = t.shape.back(), rows = t.numel() / cols, row_bytes = form.row_bytes(cols);
  std::vector<u8> whole(static_cast<size_t>(rows * row_bytes)), by_row(whole.size() + 1, 0xAA);
  source.read_codes(name, 0, rows, whole.data());
  for (i64 row = 0; row < rows; ++row) source.read_codes(name, row, 1, by_row.data() + row * row_bytes);
  EXPECT_EQ(by_row.back(), 0xAA) << name;
  by_row.pop_back();
  ASSERT_EQ(whole, by_row) << name;
  const std::vector<char> values = all_of(source, t);
  for (i64 i = 0; i < t.numel(); ++i) {
    const float x = form.element(whole.data(), {}, rows, cols, i / cols, i % cols);
    ASSERT_EQ(std::memcmp(&x, values.data() + i * 4, sizeof x), 0) << name << " " << i;
  }
}

constexpr CodedForm gguf_form(CodeKind kind, DType scales, bool offsets = false, i32 group = 32) {
  return {.kind = kind, .scales = scales, .offsets = offsets, .group = group};
}

TEST(GgufTypes, HaveCodes) {
  const auto source = open_source(test_data("gguf/types.gguf"));
  for (const auto& [name, form] :
       std::vector<std::pair<std::string, CodedForm>>{{"f32", {}},
                                                      {"f16", {}},
                                                      {"bf16", {}},
                                                      {"q8_0", gguf_form(CodeKind::Int8, DType::F16)},
                                                      {"q4_0", gguf_form(CodeKind::Int4, DType::F16)},
                                                      {"q4_1", gguf_form(CodeKind::Int4, DType::F16, true)},
                                                      {"q5_0", gguf_form(CodeKind::Int8, DType::F16)},
                                                      {"q5_1", gguf_form(CodeKind::Int8, DType::F16, true)},
                                                      {"q4_k", gguf_form(CodeKind::Int4, DType::F32, true)},
                                                      {"q5_k", gguf_form(CodeKind::Int8, DType::F32, true)},
                                                      {"q6_k", gguf_form(CodeKind::Int8, DType::F32, false, 16)}})
    expect_codes(*source, name, form);
}

// A minimum and a scale that are far apart have no offset for codes of 4 bits; permuted rows and experts have codes.
TEST(GgufTypes, HaveCodesInTheOrderOfTheModel) {
  const TempDirectory dir;
  std::mt19937 rng(8);
  const auto half = [](float x) { return GgufFile::number(from_float<f16>(x)); };
  const auto bytes = [&](size_t n) {
    std::string s(n, '\0');
    for (char& c : s) c = static_cast<char>(rng());
    return s;
  };
  for (const float minimum : {0.5f, 0.0f, 5.4e-7f, -0.0f}) {
    for (const float scale : {0.25f, -0.25f}) {
      GgufFile file;
      file.text("general.architecture", "llama").u("general.alignment", 32);
      for (const auto& [key, value] : {std::pair{"context_length", 64u},
                                       {"embedding_length", 256u},
                                       {"block_count", 1u},
                                       {"feed_forward_length", 32u},
                                       {"attention.head_count", 4u},
                                       {"attention.head_count_kv", 2u},
                                       {"expert_count", 2u},
                                       {"expert_used_count", 1u}})
        file.u(std::string("llama.").append(key), value);
      std::string q4_k, q4_1, q4_0, q5_1;
      for (int b = 0; b < 6; ++b) q4_k += half(scale) + half(minimum) + std::string(12, '\x41') + bytes(128);
      for (int b = 0; b < 32; ++b) q4_1 += half(scale) + half(minimum) + bytes(16);
      for (int b = 0; b < 64; ++b) q4_0 += half(0.01f * static_cast<float>(b - 20)) + bytes(16);
      for (int b = 0; b < 128; ++b) q5_1 += half(0.01f * static_cast<float>(b)) + half(-0.3f) + bytes(20);
      file.tensor("token_embd.weight", {256, 6}, 12, q4_k);
      file.tensor("blk.0.attn_k.weight", {64, 16}, 3, q4_1);
      file.tensor("blk.0.attn_q.weight", {64, 32}, 2, q4_0);
      file.tensor("blk.0.ffn_down_exps.weight", {32, 64, 2}, 7, q5_1);
      write_file(dir / "m.gguf", file.bytes());
      const auto source = open_gguf(dir / "m.gguf");
      // Codes of Int4 make no -0, which a negative scale without a minimum makes.
      const bool four_bits = minimum != 5.4e-7f && !(minimum == 0 && scale < 0);
      const CodeKind kind = four_bits ? CodeKind::Int4 : CodeKind::Int8;
      expect_codes(*source, "model.embed_tokens.weight", gguf_form(kind, DType::F32, true));
      expect_codes(*source, "model.layers.0.self_attn.k_proj.weight", gguf_form(kind, DType::F16, true));
      expect_codes(*source, "model.layers.0.self_attn.q_proj.weight", gguf_form(CodeKind::Int4, DType::F16));
      for (const char* expert : {"0", "1"})
        expect_codes(*source, fmt::format("model.layers.0.block_sparse_moe.experts.{}.w2.weight", expert),
                     gguf_form(CodeKind::Int8, DType::F16, true));
    }
  }
}

TEST(GgufTypes, RefuseOthersByName) {
  const auto source = open_source(test_data("gguf/types.gguf"));
  ASSERT_EQ(source->foreign().size(), 1u);
  float x = 0;
  expect_error(Errc::Unavailable, HasSubstr("'q2_k' has elements of type Q2_K"),
               [&] { source->read("q2_k", 0, 1, &x); });
}

struct Published : ::testing::TestWithParam<const char*> {
  const std::string name = GetParam();
  const std::string path = test_data("gguf/" + name + ".gguf");
  const bool is_text = name.starts_with("text-");
  const std::string original = test_data(is_text ? "gguf/" + name : name);
};

// Tensors of the original model, rounded to the types of the file. A published model's layer may be another one in the
// file, which has one layer: the first with experts.
TEST_P(Published, TensorsAreThoseOfTheModel) {
  const auto source = open_source(path), wanted = open_source(original);
  const std::string layer = name == "qwen2_moe" ? ".1." : ".0.";
  size_t compared = 0;
  for (const TensorInfo& t : source->list()) {
    std::string published = t.name;
    if (const size_t at = published.find(".0."); at != published.npos && !is_text) published.replace(at, 3, layer);
    const TensorInfo& w = wanted->at(published);
    ASSERT_EQ(t.shape, w.shape) << t.name;
    const std::vector<char> raw = all_of(*wanted, w), values = all_of(*source, t);
    std::vector<char> rounded(values.size());
    convert_elements(t.dtype, rounded.data(), w.dtype, raw.data(), w.numel());
    EXPECT_EQ(values, rounded) << t.name;
    // In pieces that are no rows.
    const i64 size = dtype_bytes(t.dtype);
    std::vector<char> pieces(values.size());
    for (i64 first = 0; first < t.numel(); first += 13)
      source->read(t.name, first, std::min<i64>(13, t.numel() - first), pieces.data() + first * size);
    EXPECT_EQ(pieces, values) << t.name;
    ++compared;
  }
  for (const TensorInfo& w : wanted->list()) {
    const bool is_here =
        is_text || w.name.find("layers.") == w.name.npos || w.name.find("layers" + layer) != w.name.npos;
    if (is_here && !w.name.starts_with("transformer.h.")) --compared;
  }
  EXPECT_EQ(compared, name == "gpt2" ? 12u : 0u);  // GPT-2's layer has 12 tensors
}

TEST_P(Published, ConfigurationIsThatOfTheModel) {
  const auto model_of = [](const std::string& file) {
    std::vector<Diagnostic> diagnostics;
    const ModelConfig model = read_model_file(file, diagnostics);
    for (const Diagnostic& d : diagnostics) EXPECT_EQ(d.severity, Severity::Warning) << to_string(d);
    return model;
  };
  Json stored = model_json(model_of(path)), wanted = model_json(model_of(original));
  for (Json* json : {&stored, &wanted}) {
    for (const char* key : {"num_hidden_layers", "n_layer"})  // the file has one
      if (json->contains(key) && !is_text) (*json)[key] = 1;
    // Not in the file, and of training alone; Qwen's are lists of layers.
    for (const char* key : {"embd_pdrop", "resid_pdrop", "attn_pdrop", "layer_types", "mlp_only_layers",
                            "output_router_logits", "router_aux_loss_coef", "initializer_range"})
      json->erase(key);
  }
  EXPECT_EQ(stored.dump(1), wanted.dump(1));
}

INSTANTIATE_TEST_SUITE_P(Gguf, Published,
                         ::testing::Values("llama", "mixtral", "olmoe", "qwen2_moe", "qwen3", "qwen3_moe", "gpt2",
                                           "text-llama3", "text-qwen2"),
                         [](const auto& p) {
                           std::string name = p.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

// The least model, of which tests leave out or change values.
GgufFile small(const std::string& architecture = "llama") {
  GgufFile file;
  file.text("general.architecture", architecture);
  for (const auto& [key, value] : {std::pair{"context_length", 64u},
                                   {"embedding_length", 32u},
                                   {"block_count", 1u},
                                   {"feed_forward_length", 32u},
                                   {"attention.head_count", 4u}})
    file.u(fmt::format("{}.{}", architecture, key), value);
  file.floats("token_embd.weight", {32, 10}, std::vector<float>(320));
  return file;
}

struct GgufConfiguration : ::testing::Test {
  const TempDirectory dir;
  const std::string path = dir / "x.gguf";
  Json config(const GgufFile& file) const {
    write_file(path, file.bytes());
    return Json::parse(gguf_config(Gguf(path)));
  }
  void refused(const GgufFile& file, const std::string& text, Errc code) const {
    expect_error(code, AllOf(HasSubstr(path), HasSubstr(text)), [&] { config(file); });
  }
};

TEST_F(GgufConfiguration, TakesScalingAndBiases) {
  const Json plain = config(small());
  EXPECT_EQ(plain["tie_word_embeddings"], true);
  EXPECT_EQ(plain["attention_bias"], false);
  EXPECT_EQ(plain["num_key_value_heads"], 4);
  EXPECT_EQ(plain["rope_theta"], 10000);
  EXPECT_FALSE(plain.contains("rope_scaling"));
  EXPECT_EQ(config(small().floats("output.weight", {32, 10}, std::vector<float>(320)))["tie_word_embeddings"], false);
  EXPECT_EQ(config(small().floats("blk.0.attn_q.bias", {32}, std::vector<float>(32)))["attention_bias"], true);
  const Json linear = config(small().text("llama.rope.scaling.type", "linear").real("llama.rope.scaling.factor", 4));
  EXPECT_EQ(linear["rope_scaling"], Json({{"rope_type", "linear"}, {"factor", 4.0}}));
  const Json yarn = config(small()
                               .text("llama.rope.scaling.type", "yarn")
                               .real("llama.rope.scaling.factor", 2.5f)
                               .u("llama.rope.scaling.original_context_length", 32)
                               .real("llama.rope.scaling.yarn_beta_fast", 16));
  EXPECT_EQ(yarn["rope_scaling"]["original_max_position_embeddings"], 32);
  EXPECT_EQ(yarn["rope_scaling"]["beta_fast"], 16.0);
  EXPECT_EQ(config(small().real("llama.attention.layer_norm_rms_epsilon", 1e-5f))["rms_norm_eps"], 1e-5);
}

TEST_F(GgufConfiguration, RefusesWhatWouldChangeTheModel) {
  refused(GgufFile().u("x", 1), "'general.architecture' is missing", Errc::Corrupt);
  refused(small("mamba"), "the architecture 'mamba' is not supported (gpt2, llama, qwen2, qwen3, olmoe,",
          Errc::Unavailable);
  refused(small().real("llama.logit_scale", 2), "'llama.logit_scale' is not known", Errc::Unavailable);
  refused(small().u("llama.rope.dimension_count", 4), "'llama.rope.dimension_count' is 4; only 8", Errc::Unavailable);
  refused(small().u("llama.attention.value_length", 4), "'llama.attention.value_length' is 4", Errc::Unavailable);
  refused(small().u("llama.attention.sliding_window", 16), "'llama.attention.sliding_window' is 16", Errc::Unavailable);
  refused(small().text("llama.rope.scaling.type", "longrope"), "\"longrope\"", Errc::Unavailable);
  refused(small().flag("llama.attention.causal", false), "'llama.attention.causal' is false", Errc::Unavailable);
  refused(small().floats("rope_freqs.weight", {4}, {1, 3, 2, 8}), "do not follow Llama 3's rule", Errc::Unavailable);
  refused(small().floats("rope_freqs.weight", {3}, {1, 3, 8}), "is not 4 numbers of F32", Errc::Corrupt);
  refused(GgufFile().text("general.architecture", "llama"), "there is no tensor 'token_embd.weight'", Errc::Corrupt);
  refused(GgufFile().text("general.architecture", "llama").floats("token_embd.weight", {2, 2}, {1, 2, 3, 4}),
          "'llama.embedding_length' is missing", Errc::Corrupt);
  refused(small().u("llama.vocab_size", 11), "'llama.vocab_size' is 11; only 10", Errc::Unavailable);
  refused(small().u("llama.expert_count", 4).u("llama.expert_used_count", 2), "the experts are not joined",
          Errc::Unavailable);
}

TEST_F(GgufConfiguration, RefusesTensorsThatDoNotFitTheHeads) {
  const auto refused_tensors = [&](const GgufFile& file, const std::string& text) {
    write_file(path, file.bytes());
    expect_error(Errc::Corrupt, HasSubstr(text), [&] { open_gguf(path); });
  };
  refused_tensors(small().floats("blk.0.attn_q.weight", {2, 6}, std::vector<float>(12)),
                  "'blk.0.attn_q.weight' [6,2] has no even number of rows for each of 4 heads");
  refused_tensors(small().floats("model.norm.weight", {1}, {1}).floats("output_norm.weight", {1}, {1}),
                  "two tensors are 'model.norm.weight'");
  const GgufFile mixture = small().u("llama.expert_count", 4).u("llama.expert_used_count", 2);
  refused_tensors(GgufFile(mixture).floats("blk.0.ffn_up_exps.weight", {8, 8, 2}, std::vector<float>(128)),
                  "is not a matrix for each of 4 experts");
  refused_tensors(GgufFile(mixture).floats("blk.0.ffn_up_exps.weight", {2, 2, 4}, std::vector<float>(16)),
                  "has 4 elements for each expert");
}

struct StoredTokenizer : ::testing::TestWithParam<std::pair<const char*, const char*>> {};

// Ids and texts of the reference for the tokenizer of which the file was made.
TEST_P(StoredTokenizer, IdsAreThoseOfItsFiles) {
  const std::string path = test_data(fmt::format("gguf/{}.gguf", GetParam().first)),
                    folder = test_data(fmt::format("tokenizers/{}", GetParam().second));
  const auto stored = open_tokenizer(path), files = open_tokenizer(folder);
  const auto texts = nlohmann::json::parse(read_file(test_data("tokenizers/records.json")));
  ASSERT_GT(texts.size(), 70u);
  std::ifstream expected(folder + "/expected.txt");
  for (const auto& json : texts) {
    const auto text = json.get<std::string>();
    std::vector<i32> ids, wanted;
    stored->encode(text, ids);
    files->encode(text, wanted);
    EXPECT_EQ(ids, wanted) << text;
    EXPECT_EQ(stored->decode(ids), files->decode(ids)) << text;
    std::string line;
    ASSERT_TRUE(std::getline(expected, line));
    std::istringstream numbers(line);
    EXPECT_EQ(ids, std::vector<i32>(std::istream_iterator<i32>(numbers), {})) << text;
    ASSERT_TRUE(std::getline(expected, line));
  }
  EXPECT_EQ(stored->vocab_size(), files->vocab_size());
}
INSTANTIATE_TEST_SUITE_P(Gguf, StoredTokenizer,
                         ::testing::Values(std::pair{"text-llama3", "llama3"}, std::pair{"text-qwen2", "qwen2"},
                                           std::pair{"tokenizer-gpt2", "gpt2"},
                                           std::pair{"tokenizer-llama2", "llama2"}));

TEST(GgufTokenizers, AreThoseOfTheirFiles) {
  const auto llama3 = open_tokenizer(test_data("gguf/text-llama3.gguf"));
  EXPECT_TRUE(is_same_tokenizer(llama3->identity(), open_tokenizer(test_data("tokenizers/llama3"))->identity()));
  EXPECT_TRUE(llama3->adds_bos());
  EXPECT_EQ(llama3->special(SpecialToken::Bos), 900);
  EXPECT_EQ(llama3->special(SpecialToken::Eos), 901);
  ASSERT_EQ(llama3->facts().ends.size(), 2u);
  EXPECT_EQ(llama3->facts().ends[1].id, 902);
  const auto qwen2 = open_tokenizer(test_data("gguf/text-qwen2.gguf"));
  EXPECT_TRUE(is_same_tokenizer(qwen2->identity(), open_tokenizer(test_data("tokenizers/qwen2"))->identity()));
  EXPECT_FALSE(qwen2->adds_bos());
  EXPECT_EQ(tokenizer::read_chat_template(test_data("gguf/text-qwen2.gguf")), "{{ messages[0].content }}\n");
  const auto llama2 = open_tokenizer(test_data("gguf/tokenizer-llama2.gguf"));
  EXPECT_TRUE(llama2->adds_bos());
  EXPECT_EQ(llama2->special(SpecialToken::Eos), 2);
}

TEST(GgufTokenizers, RefuseWhatIsNotKnown) {
  const TempDirectory dir;
  const std::string path = dir / "x.gguf";
  const auto refused = [&](const GgufFile& file, Errc code, const std::string& text) {
    write_file(path, file.bytes());
    expect_error(code, AllOf(HasSubstr(path), HasSubstr(text)), [&] { open_tokenizer(path); });
  };
  const auto bpe = [](const char* pre) {
    GgufFile file;
    file.text("tokenizer.ggml.model", "gpt2").texts("tokenizer.ggml.tokens", {"a", "b", "ab"});
    file.texts("tokenizer.ggml.merges", {"a b"});
    return pre == nullptr ? file : file.text("tokenizer.ggml.pre", pre);
  };
  write_file(path, bpe("gpt-2").bytes());
  std::vector<i32> ids;
  open_tokenizer(path)->encode("abba", ids);
  EXPECT_THAT(ids, ::testing::ElementsAre(2, 1, 0));
  // Added tokens among the others, after them, and after a hole.
  write_file(path, GgufFile()
                       .text("tokenizer.ggml.model", "gpt2")
                       .text("tokenizer.ggml.pre", "gpt-2")
                       .texts("tokenizer.ggml.tokens", {"<s>", "a", "b", "ab", "<t>", "[PAD5]", "<u>"})
                       .integers("tokenizer.ggml.token_type", {3, 1, 1, 1, 4, 5, 3})
                       .texts("tokenizer.ggml.merges", {"a b"})
                       .bytes());
  ids.clear();
  open_tokenizer(path)->encode("<s>ab<t>b<u>a", ids);
  EXPECT_THAT(ids, ::testing::ElementsAre(0, 3, 4, 2, 6, 1));
  const std::string advice = "name another with data.tokenizer";
  refused(GgufFile(), Errc::Unavailable, "contains no tokenizer: " + advice);
  refused(GgufFile().text("tokenizer.ggml.model", "rwkv"), Errc::Unavailable, "\"rwkv\"; only \"gpt2\" and \"llama\"");
  refused(bpe("new-one"), Errc::Unavailable, "'tokenizer.ggml.pre' is \"new-one\"");
  refused(bpe(nullptr), Errc::Unavailable, "'tokenizer.ggml.pre' is missing");
  refused(bpe("gpt-2").u("tokenizer.ggml.bos_token_id", 3), Errc::Corrupt, "is 3, and there are 3 tokens");
  refused(bpe("gpt-2").integers("tokenizer.ggml.token_type", {1}), Errc::Corrupt, "has 1 entries for 3 tokens");
  refused(GgufFile().text("tokenizer.ggml.model", "llama").texts("tokenizer.ggml.tokens", {"a"}), Errc::Corrupt,
          "'tokenizer.ggml.scores' has 0 entries for 1 tokens");
  refused(GgufFile().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2"), Errc::Corrupt,
          "'tokenizer.ggml.tokens' is missing");
}

}  // namespace gguf_model_test
}  // namespace ds
