// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes untrusted text (names in files, paths, output of other programs) safe to show. Messages of ds::Error and of the
// log contain such text unchanged; the code that shows them escapes it.

#include <cstddef>
#include <string>
#include <string_view>

#include "ds/error.h"

namespace ds {

// Which line breaks and tabs are kept.
enum class Breaks {
  None,      // for names: none
  Indented,  // for messages: tabs, and breaks followed by two blanks, so that untrusted text cannot start a line
  All,       // for listings: all
};

// Returns valid UTF-8 without anything that controls a terminal. Control characters (C0, DEL, C1), marks that change
// the direction of text, line separators, invisible tags and bytes that are not UTF-8 are written as \n, \x1b, \u202e.
// All else is kept, including the backslash.
DS_API std::string printable(std::string_view text, Breaks breaks = Breaks::None);

// Returns `text`, or if it is longer than `most` bytes, its beginning and end around " ... (1048576 bytes) ... ", cut
// between UTF-8 characters.
DS_API std::string shortened(std::string_view text, std::size_t most);

// Puts "\n  | " before each line, to quote another program's text in a message.
DS_API std::string quoted_lines(std::string_view text);

// Returns JSON with the same value in which the characters that printable() escapes and JSON allows unescaped (DEL, C1,
// marks of direction) are written as \u009b.
DS_API std::string printable_json(std::string_view json);

}  // namespace ds
