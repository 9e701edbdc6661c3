// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/classes.h"

#include <algorithm>

namespace ds::tokenizer {
namespace {

constexpr std::string_view kEnd = "<|endoftext|>";
using Names = std::array<std::string_view, kNumSpecialTokens>;
//                          Bos    Eos     Unk      Pad      Cls      Sep     Mask
constexpr Names kNone = {};
constexpr Names kGpt2 = {kEnd, kEnd, kEnd, "", "", "", ""};
constexpr Names kQwen2 = {"", kEnd, kEnd, kEnd, "", "", ""};
constexpr Names kRoberta = {"<s>", "</s>", "<unk>", "<pad>", "<s>", "</s>", "<mask>"};
constexpr Names kBert = {"", "", "[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"};
constexpr Names kLlama = {"<s>", "</s>", "<unk>", "", "", "", ""};
constexpr Names kGemma = {"<bos>", "<eos>", "<unk>", "<pad>", "", "", ""};
constexpr Names kT5 = {"", "</s>", "<unk>", "<pad>", "", "", ""};
constexpr Names kAlbert = {"[CLS]", "[SEP]", "<unk>", "<pad>", "[CLS]", "[SEP]", "[MASK]"};
constexpr Names kBloom = {"<s>", "</s>", "<unk>", "<pad>", "", "", ""};

constexpr ClassRow kRows[] = {
    {"PreTrainedTokenizer", Shape::File, kNone},    {"TokenizersBackend", Shape::File, kNone},
    {"GPTNeoXTokenizer", Shape::File, kGpt2},       {"CodeGenTokenizer", Shape::File, kGpt2},
    {"BloomTokenizer", Shape::File, kBloom},        {"GPT2Tokenizer", Shape::Gpt2, kGpt2},
    {"RobertaTokenizer", Shape::Roberta, kRoberta}, {"LongformerTokenizer", Shape::Roberta, kRoberta},
    {"BartTokenizer", Shape::Roberta, kRoberta},    {"Qwen2Tokenizer", Shape::Qwen2, kQwen2},
    {"BertTokenizer", Shape::Bert, kBert},          {"DistilBertTokenizer", Shape::Bert, kBert},
    {"ElectraTokenizer", Shape::Bert, kBert},       {"MobileBertTokenizer", Shape::Bert, kBert},
    {"LlamaTokenizer", Shape::Llama, kLlama},       {"CodeLlamaTokenizer", Shape::CodeLlama, kLlama},
    {"GemmaTokenizer", Shape::Gemma, kGemma},       {"T5Tokenizer", Shape::T5, kT5},
    {"AlbertTokenizer", Shape::Albert, kAlbert},    {"XLMRobertaTokenizer", Shape::XlmRoberta, kRoberta},
};

constexpr std::pair<std::string_view, std::string_view> kModels[] = {
    {"bert", "BertTokenizer"},
    {"distilbert", "DistilBertTokenizer"},
    {"electra", "ElectraTokenizer"},
    {"mobilebert", "MobileBertTokenizer"},
    {"roberta", "RobertaTokenizer"},
    {"longformer", "LongformerTokenizer"},
    {"bart", "BartTokenizer"},
    {"gpt2", "GPT2Tokenizer"},
    {"gpt_neo", "GPT2Tokenizer"},
    {"gptj", "GPT2Tokenizer"},
    {"opt", "GPT2Tokenizer"},
    {"starcoder2", "GPT2Tokenizer"},
    {"gpt_neox", "GPTNeoXTokenizer"},
    {"olmo", "GPTNeoXTokenizer"},
    {"olmo2", "GPTNeoXTokenizer"},
    {"bloom", "BloomTokenizer"},
    {"phi", "CodeGenTokenizer"},
    {"qwen2", "Qwen2Tokenizer"},
    {"qwen2_moe", "Qwen2Tokenizer"},
    {"qwen3", "Qwen2Tokenizer"},
    {"qwen3_moe", "Qwen2Tokenizer"},
    {"llama", "LlamaTokenizer"},
    {"mistral", "LlamaTokenizer"},
    {"mixtral", "LlamaTokenizer"},
    {"phi3", "LlamaTokenizer"},
    {"gemma", "GemmaTokenizer"},
    {"gemma2", "GemmaTokenizer"},
    {"gemma3_text", "GemmaTokenizer"},
    {"t5", "T5Tokenizer"},
    {"mt5", "T5Tokenizer"},
    {"albert", "AlbertTokenizer"},
    {"xlm-roberta", "XLMRobertaTokenizer"},
    {"code_llama", "LlamaTokenizer"},
};

// Models whose tokenizer.json transformers 5 reads by itself, whatever class the files name.
constexpr std::string_view kByThemselves[] = {"arctic",
                                              "ernie4_5",
                                              "ernie4_5_moe",
                                              "flex_olmo",
                                              "fuyu",
                                              "glm",
                                              "glm4",
                                              "glm4_moe",
                                              "glm4_moe_lite",
                                              "glm4v",
                                              "glm4v_moe",
                                              "gpt_bigcode",
                                              "granite",
                                              "granitemoe",
                                              "granitemoehybrid",
                                              "internlm2",
                                              "internlm3",
                                              "granitemoeshared",
                                              "jamba",
                                              "kimi_linear",
                                              "llava",
                                              "llava_next",
                                              "mimo_v2_flash",
                                              "minicpm3",
                                              "minimax_m2",
                                              "ministral",
                                              "ministral3",
                                              "mistral",
                                              "mistral3",
                                              "mixtral",
                                              "modernbert",
                                              "modernbert-decoder",
                                              "molmo",
                                              "molmo2",
                                              "nemotron",
                                              "nystromformer",
                                              "olmo2",
                                              "olmo3",
                                              "olmo_hybrid",
                                              "persimmon",
                                              "phi3",
                                              "phi3_v",
                                              "phimoe",
                                              "pixtral",
                                              "smolvlm",
                                              "stablelm",
                                              "umt5",
                                              "vipllava",
                                              "voxtral",
                                              "xlm-roberta-xl"};
constexpr std::string_view kByItself = "TokenizersBackend";

constexpr std::string_view kMark = "\u2581";
constexpr std::string_view kQwen2Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Json replace(std::string_view from, std::string_view to) {
  return {{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
}

Json pieces_decoder(bool prefix) {
  Json steps = {replace(kMark, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}};
  if (prefix) steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  return {{"type", "Sequence"}, {"decoders", std::move(steps)}};
}

Json words_with_mark(bool prefix) {
  const Json words = {{"type", "WhitespaceSplit"}},
             mark = {{"type", "Metaspace"}, {"replacement", kMark}, {"prepend_scheme", prefix ? "always" : "never"}};
  return {{"type", "Sequence"}, {"pretokenizers", {words, mark}}};
}

}  // namespace

const ClassRow& shape_of(std::string_view name) {
  static constexpr ClassRow kUnknown;
  const auto* const row = std::ranges::find(kRows, name, &ClassRow::name);
  return row == std::end(kRows) ? kUnknown : *row;
}

i64 unk_id_of(Shape shape) { return shape == Shape::T5 ? 2 : shape == Shape::XlmRoberta ? 3 : 1; }

std::string_view class_of_model(std::string_view model_type) {
  const auto* const row = std::ranges::find(kModels, model_type, &std::pair<std::string_view, std::string_view>::first);
  return row == std::end(kModels) ? "" : row->second;
}

std::string_view class_of_five(std::string_view named, std::string_view model_type, bool is_byte_level) {
  const bool is_named = !named.empty();
  if (!is_named) named = class_of_model(model_type);
  if (is_named && std::ranges::find(kByThemselves, model_type) != std::end(kByThemselves)) return kByItself;
  if (is_named && model_type == "qwen2") return "Qwen2Tokenizer";
  if (named == "BloomTokenizer") return kByItself;
  return is_named && named == "LlamaTokenizer" && is_byte_level ? kByItself : named;
}

TextForm form_of(Shape shape, const TextFormOptions& o) {
  TextForm form;
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", o.add_prefix_space},
                           {"trim_offsets", true},
                           {"use_regex", shape != Shape::Qwen2}};
  switch (shape) {
    case Shape::Unknown:
    case Shape::File: break;
    case Shape::Gpt2:
    case Shape::Roberta:
      form.pre_tokenizer = byte_level;
      form.decoder = {{"type", "ByteLevel"}};
      break;
    case Shape::Qwen2: {
      const Json split = {
          {"type", "Split"}, {"pattern", {{"Regex", kQwen2Words}}}, {"behavior", "Isolated"}, {"invert", false}};
      form.normalizer = {{"type", "NFC"}};
      form.pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
      form.decoder = {{"type", "ByteLevel"}};
      break;
    }
    case Shape::Bert:
      form.normalizer = {{"type", "BertNormalizer"},
                         {"clean_text", true},
                         {"handle_chinese_chars", o.chinese},
                         {"strip_accents", o.strip_accents ? Json(*o.strip_accents) : Json()},
                         {"lowercase", o.lowercase}};
      form.pre_tokenizer = {{"type", "BertPreTokenizer"}};
      form.decoder = {{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}};
      break;
    case Shape::Llama:
    case Shape::CodeLlama:
      if (o.legacy) {
        Json steps = Json::array();
        if (o.add_prefix_space) steps.push_back({{"type", "Prepend"}, {"prepend", kMark}});
        steps.push_back(replace(" ", kMark));
        form.normalizer = {{"type", "Sequence"}, {"normalizers", std::move(steps)}};
      } else {
        form.pre_tokenizer = {{"type", "Metaspace"},
                              {"replacement", kMark},
                              {"prepend_scheme", o.add_prefix_space ? "first" : "never"},
                              {"split", false}};
      }
      form.decoder = pieces_decoder(o.add_prefix_space);
      break;
    case Shape::Gemma:
      form.normalizer = replace(" ", kMark);
      form.pre_tokenizer = {
          {"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "MergedWithPrevious"}, {"invert", false}};
      form.decoder = pieces_decoder(false);
      break;
    case Shape::Albert: {
      Json steps = {replace("``", "\""), replace("''", "\"")};
      if (!o.keep_accents) {
        steps.push_back({{"type", "NFKD"}});
        steps.push_back({{"type", "StripAccents"}});
      }
      if (o.lowercase) steps.push_back({{"type", "Lowercase"}});
      if (!o.rules.is_null()) steps.push_back(o.rules);
      form.normalizer = {{"type", "Sequence"}, {"normalizers", std::move(steps)}};
      form.pre_tokenizer = words_with_mark(o.add_prefix_space);
      break;
    }
    case Shape::T5:
    case Shape::XlmRoberta:
      form.normalizer = o.rules;
      form.pre_tokenizer = words_with_mark(o.add_prefix_space || shape == Shape::T5);
      break;
  }
  return form;
}

}  // namespace ds::tokenizer
