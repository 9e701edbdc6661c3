// SPDX-License-Identifier: Apache-2.0
#pragma once
// The classes of tokenizers of transformers: the special tokens that a class has where no file names them, and the form
// that it gives to a vocabulary.

#include <array>
#include <string_view>

#include "data/tokenizer.h"
#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

enum class Shape : u8 {
  Unknown,  // no row
  File,     // the class takes a tokenizer.json as it is
  Gpt2,
  Roberta,
  Qwen2,
  Bert,
  Llama,
  CodeLlama,
  Gemma,
  // Classes for Unigram models, which take a tokenizer.json as it is, but for transformers 5.
  T5,
  XlmRoberta,
  Albert,
};
constexpr bool is_llama(Shape shape) { return shape == Shape::Llama || shape == Shape::CodeLlama; }
constexpr bool is_unigram(Shape shape) {
  return shape == Shape::T5 || shape == Shape::XlmRoberta || shape == Shape::Albert;
}

struct ClassRow {
  std::string_view name;  // without "Fast"
  Shape shape = Shape::Unknown;
  std::array<std::string_view, kNumSpecialTokens> special = {};  // by SpecialToken; empty: none
};

// The row of a class, "" included: Shape::Unknown if there is none.
const ClassRow& shape_of(std::string_view name);
// The unk_id that transformers 5 gives to a Unigram model of this shape.
i64 unk_id_of(Shape shape);
// The class that transformers takes for a model_type; empty: not known.
std::string_view class_of_model(std::string_view model_type);
// The class by which transformers 5 reads a tokenizer.json, which depends on config.json's model_type too. named: that
// of the files, or empty; is_byte_level: of the tokenizer.json.
std::string_view class_of_five(std::string_view named, std::string_view model_type, bool is_byte_level);

// How a class of this shape prepares a text, in the words of a tokenizer.json.
struct TextForm {
  Json normalizer, pre_tokenizer, decoder;
};
struct TextFormOptions {
  bool add_prefix_space = false;
  bool legacy = true;                                // Llama
  bool lowercase = true, chinese = true;             // Bert, and Albert's lowercase
  std::optional<bool> strip_accents = std::nullopt;  // Bert
  bool keep_accents = false;                         // Albert
  Json rules = nullptr;                              // the classes for Unigram models: a normalizer "Precompiled"
};
// Requires: a shape other than Unknown and File.
TextForm form_of(Shape shape, const TextFormOptions& options);

}  // namespace ds::tokenizer
