// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ids of a text, encoded once and mapped, in a temporary file without a name in TMPDIR (or /tmp): they cost disk, 2
// or 4 bytes a token, and address space, but no memory, and are gone when the process is.

#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace ds {

class TokenIds {
 public:
  // Encodes in stretches of a few MiB with `num_threads` threads where the tokenizer knows places to cut, else in one.
  // `name` names the text in messages; intact() is asked before each stretch is read and may throw. Throws as
  // Tokenizer::encode, and Errc::Io when TMPDIR is full.
  template <class Intact>
  TokenIds(std::string_view text, const Tokenizer& tokenizer, int num_threads, const std::string& name, Intact&& intact)
      : TokenIds(tokenizer) {
    for (size_t at = 0; at < text.size();) {
      intact();
      at = append(text, at, tokenizer, num_threads, name);
    }
    map(name);
  }
  ~TokenIds();
  TokenIds(const TokenIds&) = delete;
  TokenIds& operator=(const TokenIds&) = delete;

  i64 num_tokens() const noexcept { return num_tokens_; }
  i64 token_bytes() const noexcept { return token_bytes_; }  // 2 or 4, unsigned
  const u8* data() const noexcept { return data_; }

 private:
  explicit TokenIds(const Tokenizer& tokenizer);
  // One round from text[at]: a stretch per thread. Returns where the next one starts.
  size_t append(std::string_view text, size_t at, const Tokenizer&, int num_threads, const std::string& name);
  void write(std::span<const i32> ids, const std::string& name);
  void map(const std::string& name);

  int fd_ = -1;
  std::string directory_;
  i64 token_bytes_, num_tokens_ = 0;
  const u8* data_ = nullptr;
};

}  // namespace ds
