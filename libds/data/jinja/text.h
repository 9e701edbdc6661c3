// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text as Python's str treats it: characters are code points, and upper and
// lower case, white space and printable characters are Unicode's. All text is
// valid UTF-8.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/jinja/budget.h"
#include "ds/kernels/dtype.h"

namespace ds::jinja {

i64 count_chars(std::string_view text) noexcept;
// The byte at which character `index` begins; text.size() if there are fewer.
size_t byte_of_char(std::string_view text, i64 index) noexcept;

bool is_space(char32_t c) noexcept;
std::string_view strip_begin(std::string_view text) noexcept;
std::string_view strip_end(std::string_view text) noexcept;
// Without the characters that `chars` contains.
std::string_view strip_chars(std::string_view text, std::string_view chars, bool begin, bool end) noexcept;

std::string upper_case(std::string_view text);
std::string lower_case(std::string_view text);   // a sigma at the end of a word becomes a final one
std::string capitalized(std::string_view text);  // the first character in title case, the
                                                 // others in lower case
std::string title_case(std::string_view text);   // each word capitalized, as str.title() does
enum class CharClass : u8 { Alpha, Alnum, Digit, Space, Upper, Lower };
// str.isalpha() and its neighbours.
bool is_all(std::string_view text, CharClass wanted);

// Lines without their ends; `keep` leaves these in.
std::vector<std::string_view> split_lines(std::string_view text, bool keep);

// split() and, from the end, rsplit(); most < 0: no limit. Words are separated
// by white space.
std::vector<std::string_view> split_words(std::string_view text, i64 most, bool from_end);
std::vector<std::string_view> split_at(std::string_view text, std::string_view separator, i64 most, bool from_end);
// text.replace(from, to, most)
std::string replaced(Budget& budget, std::string_view text, std::string_view from, std::string_view to, i64 most);
// At least `width` characters; `side`: 'l', 'r' or 'c', where the text is.
std::string justified(Budget& budget, std::string_view text, i64 width, std::string_view fill, char side);

std::string repr_of_text(std::string_view text);  // repr(text)
std::string repr(double x);                       // the fewest digits that give this number

// float(text) and int(text, base); nothing where Python raises ValueError.
// int() throws Errc::Unavailable for more than 64 bits.
std::optional<double> parse_real(std::string_view text);
std::optional<i64> parse_integer(std::string_view text, i64 base);

}  // namespace ds::jinja
