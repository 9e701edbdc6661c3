// SPDX-License-Identifier: Apache-2.0
#pragma once
// Vocabularies that are no tokenizer.json, in its form; the chat template of a directory.

#include <map>
#include <optional>
#include <string>

#include "data/tokenizer/classes.h"
#include "data/tokenizer/directory.h"
#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

// The "model" of vocab.json and merges.txt, byte-level BPE. `identity` becomes the content's identity, here and below.
Json byte_level_model(const std::string& vocab_path, const std::string& merges_path, std::string& identity);
// The "model" of vocab.txt, WordPiece, without the unk_token.
Json word_piece_model(const std::string& path, std::string& identity);

// "from_slow" beside a tokenizer.json, whose content is `file`: transformers 4 reads vocab.json and merges.txt instead,
// and of tokenizer.json the added tokens. Throws Errc::Unavailable unless that is the same.
void check_from_slow(const Directory& directory, Shape shape, const Json& file);

// The chat templates (Jinja) that AutoTokenizer finds, by name: chat_template.jinja is "default", and each file of
// additional_chat_templates has its own name; if there are none, the member "chat_template" of tokenizer_config.json,
// one template ("default") or several with names; of a GGUF file, tokenizer.chat_template. (chat_template.json is
// another program's, of a processor.) `path` as of open_tokenizer. Throws as it does.
struct ChatTemplates {
  std::map<std::string, std::string> sources;  // empty: the tokenizer has none
  std::string place;                           // the file, and the member in it
};
ChatTemplates read_chat_templates(const std::string& path);
// The one named "default"; nothing if there are none. Throws Errc::Unavailable if none of several is the default.
std::optional<std::string> read_chat_template(const std::string& path);

}  // namespace ds::tokenizer
