// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ids of texts, encoded once and mapped, in a temporary file without a name in TMPDIR (or /tmp): they cost disk, 2
// or 4 bytes a token, and address space, but no memory, and are gone when the process is.

#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/temporary_file.h"
#include "data/tokenizer.h"

struct XXH3_state_s;

namespace ds {

// Whether ids carry the mark kNoTarget; if so, all have 4 bytes.
enum class TokenMarks : u8 { None, Some };

class TokenIds {
 public:
  static constexpr i32 kNoTarget = std::numeric_limits<i32>::min();  // the highest bit of an id
  static constexpr size_t kStretchBytes = size_t{4} << 20;           // of text that a thread encodes at a time

  // `name` names the texts in messages; ids are those of the tokenizer, and at most `largest_id` besides. Throws
  // Errc::Io, as all that writes does when TMPDIR is full.
  TokenIds(const Tokenizer& tokenizer, int num_threads, std::string name, i64 largest_id = 0,
           TokenMarks marks = TokenMarks::None);
  ~TokenIds();
  TokenIds(const TokenIds&) = delete;
  TokenIds& operator=(const TokenIds&) = delete;

  // Appends the ids of a text, encoded in stretches by several threads where the tokenizer knows places to cut, else in
  // one. intact() is asked before each stretch is read and may throw. Throws as Tokenizer::encode.
  template <class Intact>
  void add_text(std::string_view text, Intact&& intact) {
    for (size_t at = 0; at < text.size();) {
      intact();
      at = add_stretches(text, at);
    }
  }
  // Appends what encode(part, ids) gives for part 0, 1, .., num_parts - 1, each in a thread of its own.
  void add_parts(size_t num_parts, const std::function<void(size_t part, std::vector<i32>& ids)>& encode);
  // Ends the ids, which can then be read.
  void map();

  int num_threads() const noexcept { return num_threads_; }
  bool has_marks() const noexcept { return marks_ == TokenMarks::Some; }
  i64 num_tokens() const noexcept { return num_tokens_; }
  i64 token_bytes() const noexcept { return token_bytes_; }  // 2 or 4, unsigned
  const u8* data() const noexcept { return data_; }
  u64 hash() const noexcept;  // XXH3 of all ids

 private:
  // One round from text[at]: a stretch per thread. Returns where the next one starts.
  size_t add_stretches(std::string_view text, size_t at);
  void write(std::span<const i32> ids);

  const Tokenizer& tokenizer_;
  int num_threads_;
  std::string name_;
  TokenMarks marks_;
  TemporaryFile file_;
  i64 token_bytes_, num_tokens_ = 0;
  const u8* data_ = nullptr;
  struct FreeHash {
    void operator()(XXH3_state_s* state) const noexcept;
  };
  std::unique_ptr<XXH3_state_s, FreeHash> hash_;
};

}  // namespace ds
