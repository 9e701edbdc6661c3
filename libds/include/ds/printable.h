// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text from elsewhere (names in files, paths, what other programs say) made fit to be shown to people. Messages of
// ds::Error and of the log carry it as it is: who shows them, escapes them.

#include <cstddef>
#include <string>
#include <string_view>

#include "ds/error.h"

namespace ds {

// Which line breaks and tabs stay.
enum class Breaks {
  None,      // of a name: none
  Indented,  // of a message: tabs, and breaks before two blanks, so that text from elsewhere cannot begin a line
  All,       // of a listing
};

// Valid UTF-8 in which nothing steers a terminal: control characters (C0, DEL, C1), marks that turn the direction of
// text, separators of lines, invisible tags and bytes that are not UTF-8 are written as \n, \x1b, \u202e. All else
// stays, the backslash too.
DS_API std::string printable(std::string_view text, Breaks breaks = Breaks::None);

// `text`, or if it has more than `most` bytes, its beginning and its end around " ... (1048576 bytes) ... ". Of UTF-8
// whole characters.
DS_API std::string shortened(std::string_view text, std::size_t most);

// What somebody else said, in lines of a message: "\n  | " before each.
DS_API std::string quoted_lines(std::string_view text);

// JSON that a terminal cannot take for commands: the same value, with the characters that printable() escapes and JSON
// need not (DEL, C1, marks of direction) as \u009b.
DS_API std::string printable_json(std::string_view json);

}  // namespace ds
