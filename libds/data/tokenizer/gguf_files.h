// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tokenizer in a GGUF file as the files of a tokenizer's directory.

#include <map>
#include <string>

namespace ds::tokenizer {

// The texts of tokenizer.json (byte-level BPE) or the bytes of tokenizer.model (SentencePiece), and of
// tokenizer_config.json with the chat template, and generation_config.json, by these names. Throws Errc::Unavailable,
// advising to name another tokenizer, if the file has none, one of another kind, or a pre-tokenizer whose expression is
// not known; Errc::Corrupt if its lists disagree.
std::map<std::string, std::string> gguf_tokenizer_files(const std::string& path);

}  // namespace ds::tokenizer
