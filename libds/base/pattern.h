// SPDX-License-Identifier: Apache-2.0
#pragma once
// Regular expressions from untrusted sources: a configuration, a command line, a tokenizer's file. Compiling and
// matching take bounded time, stack and memory for any expression.

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "ds/kernels/dtype.h"

namespace ds {

class Pattern {
 public:
  // Options where PCRE2's syntax leaves a choice.
  enum class Kind : u8 {
    Name,  // for a few short names, ignoring case, like Python's re.search(..., re.IGNORECASE)
    Text,  // for long UTF-8 texts: Unicode classes, \C refused, lines end with \n; compiled to machine code
  };

  // Throws Errc::Config (invalid or too large), Errc::Unavailable (unknown character property). The message is only the
  // reason.
  Pattern(std::string_view text, Kind kind);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  // [begin, end) of the first match at or after `at` in valid UTF-8. Reentrant. Throws Errc::Unavailable if matching
  // takes more steps or memory than sane expressions need; the message is only the reason.
  std::optional<std::pair<size_t, size_t>> find(std::string_view text, size_t at = 0) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace ds
