// SPDX-License-Identifier: Apache-2.0
#pragma once
// The "added_tokens" of a tokenizer.json: tokens that are found in a text before, or after, it is normalized, and taken
// out whole.

#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/identity.h"
#include "data/tokenizer/model.h"
#include "data/tokenizer/normalizer.h"

namespace ds::tokenizer {

struct AddedToken {
  std::string content;
  i32 id = 0;
  bool single_word = false;  // not inside a word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and behind it
  bool normalized = true;    // stands in the normalized text
  bool is_split = false;     // found in a text, it is cut into pieces like other text
  std::string in_text = {};  // content, normalized if it is
};

// Where a token is found that two files list with different flags; the last one's other flags count.
struct TokenMatch {
  bool raw = false, normalized = false;  // before, and after normalizing
  bool special = false;                  // in either file
};
using TokenMatches = std::map<std::string, TokenMatch>;  // by content

// Finds the leftmost longest of a set of strings.
class TokenSet {
 public:
  void add(const AddedToken* token);  // its in_text is not empty
  void finish();                      // after the last add
  bool empty() const noexcept { return tokens_.empty(); }
  // Calls part(begin, end, token) for the tokens found and, with null, the parts between them, in order. What strips
  // takes belongs to its token.
  void each(std::string_view text, const std::function<void(size_t begin, size_t end, const AddedToken*)>& part) const;

 private:
  const AddedToken* longest(std::string_view text, size_t at) const;
  std::vector<const AddedToken*> tokens_;  // by in_text
  bool starts_[256] = {};
};

class AddedTokens {
 public:
  // `list` is an array of {id, content, ...} or null. As the reference, a token that the vocabulary has keeps the
  // vocabulary's id, and others are numbered from its end in the order of the list; a file that says otherwise is
  // Errc::Corrupt or, where the reference gives other ids than it says, Errc::Unavailable. splits_special: those of
  // "special": true are cut into pieces. Tokens that are not in `matches` are found as their flags say.
  AddedTokens(const Json& list, const Place& place, const Vocabulary& vocabulary, const Normalizer* normalizer,
              bool splits_special, const TokenMatches& matches);
  AddedTokens(const AddedTokens&) = delete;
  AddedTokens& operator=(const AddedTokens&) = delete;

  const TokenSet& before_normalizing() const noexcept { return raw_; }
  const TokenSet& after_normalizing() const noexcept { return normalized_; }
  const std::map<i32, AddedToken>& tokens() const noexcept { return tokens_; }
  std::optional<i32> id(std::string_view content) const;
  // Whether a text can be cut before a letter behind a newline without changing which tokens are found.
  bool keep_lines() const noexcept { return keep_lines_; }
  // Adds all that ids depend on.
  void digest(Digest& digest) const;

 private:
  std::map<i32, AddedToken> tokens_;
  std::list<AddedToken> twice_;  // those that are found before and after normalizing, once more
  std::map<std::string, i32, std::less<>> ids_;
  TokenSet raw_, normalized_;
  bool keep_lines_ = true;
};

}  // namespace ds::tokenizer
