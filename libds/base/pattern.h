// SPDX-License-Identifier: Apache-2.0
#pragma once
// Regular expressions from elsewhere: of a configuration, a command line, a tokenizer's file. Neither compiling nor
// matching one takes unbounded time, stack or memory, whatever it is.

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "ds/kernels/dtype.h"

namespace ds {

class Pattern {
 public:
  // Where PCRE2's syntax leaves a choice.
  enum class Kind : u8 {
    Name,  // of a few short names, whatever their case, as Python's re.search(..., re.IGNORECASE)
    Text,  // of long UTF-8 texts: classes are Unicode's, \C is refused, lines end with \n; compiled to machine code
  };

  // Throws Errc::Config (no regular expression, or too large a one), Errc::Unavailable (a property of characters that
  // is unknown here). The message is the reason alone.
  Pattern(std::string_view text, Kind kind);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  // [begin, end) of the first match at or after `at` in valid UTF-8. Reentrant. Throws Errc::Unavailable where that
  // needs more steps or memory than a sane expression; the message is the reason alone.
  std::optional<std::pair<size_t, size_t>> find(std::string_view text, size_t at = 0) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace ds
