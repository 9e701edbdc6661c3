// SPDX-License-Identifier: Apache-2.0
#pragma once
// The regular expressions of tokenizer files. They are written for Oniguruma (Ruby's syntax, Unicode); those parts of
// it that PCRE2 reads otherwise are written anew or refused.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

class Regex {
 public:
  // Throws Errc::Corrupt (no regular expression), Errc::Unavailable (one that we cannot promise the same matches for).
  Regex(std::string_view pattern, const Place& place);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) = delete;

  // [begin, end) of the first match at or after `at`. Reentrant. Throws Errc::Unavailable when the expression needs
  // more steps or memory than a sane one.
  std::optional<std::pair<size_t, size_t>> find(std::string_view text, size_t at) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace ds::tokenizer
