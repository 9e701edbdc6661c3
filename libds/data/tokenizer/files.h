// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files that tokenizers are published as, each read into the form of a tokenizer.json.

#include <memory>
#include <optional>
#include <string>

#include "data/tokenizer.h"

namespace ds::tokenizer {

constexpr i64 kMostFileBytes = i64{256} << 20;

// `path` is a tokenizer.json; tokenizer_config.json and special_tokens_map.json beside it name the special tokens.
std::unique_ptr<Tokenizer> open_tokenizer_json(const std::string& path);
// vocab.json and merges.txt: byte-level BPE of GPT-2, RoBERTa or Qwen2, as tokenizer_config.json says (GPT-2's without
// it), with the added tokens of that file, added_tokens.json and special_tokens_map.json.
std::unique_ptr<Tokenizer> open_bpe_files(const std::string& vocab, const std::string& merges);
// vocab.txt: BERT's WordPiece; do_lower_case, strip_accents and tokenize_chinese_chars of tokenizer_config.json.
std::unique_ptr<Tokenizer> open_vocab_txt(const std::string& path);
// A SentencePiece model (unigram, BPE, word, char), by its library.
std::unique_ptr<Tokenizer> open_sentence_piece(const std::string& path);

// The chat template (Jinja) that a tokenizer's files have: chat_template.jinja, else the member "chat_template" of
// chat_template.json or tokenizer_config.json, of several the one named "default". `path` as of open_tokenizer. Throws
// as it does.
std::optional<std::string> read_chat_template(const std::string& path);

// "tokenizer.json xxh3 0123456789abcdef": the names and the content of what was read.
std::string content_identity(const std::string& name, std::string_view content);

}  // namespace ds::tokenizer
