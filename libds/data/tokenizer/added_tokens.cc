// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/added_tokens.h"

#include <algorithm>

#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {

void TokenSet::add(const AddedToken* token) { tokens_.push_back(token); }

void TokenSet::finish() {
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const auto* a, const auto* b) { return a->in_text < b->in_text; });
  for (const AddedToken* t : tokens_) starts_[static_cast<u8>(t->in_text[0])] = true;
}

// Narrows the sorted tokens byte by byte to those that the text spells.
const AddedToken* TokenSet::longest(std::string_view text, size_t at) const {
  const AddedToken* found = nullptr;
  auto low = tokens_.begin(), high = tokens_.end();
  for (size_t depth = 0; low != high && at + depth < text.size(); ++depth) {
    const auto byte = [&](const AddedToken* t) {
      return depth < t->in_text.size() ? static_cast<int>(static_cast<u8>(t->in_text[depth])) : -1;
    };
    const int wanted = static_cast<u8>(text[at + depth]);
    low = std::partition_point(low, high, [&](const AddedToken* t) { return byte(t) < wanted; });
    high = std::partition_point(low, high, [&](const AddedToken* t) { return byte(t) == wanted; });
    if (low != high && (*low)->in_text.size() == depth + 1) found = *low;
  }
  return found;
}

void TokenSet::each(std::string_view text, const std::function<void(size_t, size_t, const AddedToken*)>& part) const {
  const auto is_word_at = [&](size_t at) { return is_word(next_char(text, at)); };
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const AddedToken* const token = starts_[static_cast<u8>(text[at])] ? longest(text, at) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + token->in_text.size();
    at = end;
    if (token->is_split) continue;
    if (token->single_word &&
        ((begin > 0 && is_word_at(previous_char(text, begin))) || (end < text.size() && is_word_at(end))))
      continue;
    while (token->lstrip && begin > done) {
      size_t before = previous_char(text, begin);
      const size_t start = before;
      if (!is_white_space(next_char(text, before))) break;
      begin = start;
    }
    while (token->rstrip && end < text.size()) {
      size_t next = end;
      if (!is_white_space(next_char(text, next))) break;
      end = next;
    }
    if (begin > done) part(done, begin, nullptr);
    part(begin, end, token);
    done = end;
  }
  if (done < text.size()) part(done, text.size(), nullptr);
}

AddedTokens::AddedTokens(const Json& list, const Place& place, const Vocabulary& vocabulary,
                         const Normalizer* normalizer, bool splits_special, const TokenMatches& matches) {
  if (list.is_null()) return;
  if (!list.is_array()) place.corrupt("must be an array");
  constexpr size_t kLongest = 4096;  // bytes; a search takes at most so many steps per byte of text
  for (size_t i = 0; i < list.size(); ++i) {
    const Place here{place.file, fmt::format("{}[{}]", place.path, i)};
    Fields f(list[i], here);
    AddedToken token;
    token.content = f.text("content");
    const i64 id = f.integer("id");
    if (id < 0) here.corrupt("the id is negative");
    token.id = static_cast<i32>(id);
    token.single_word = f.flag("single_word", false);
    token.lstrip = f.flag("lstrip", false);
    token.rstrip = f.flag("rstrip", false);
    const bool special = f.flag("special", false);
    token.normalized = f.flag("normalized", !special);
    const auto match = matches.find(token.content);
    const bool twice = match != matches.end() && match->second.raw && match->second.normalized;
    if (match != matches.end()) token.normalized = match->second.normalized;
    token.is_split = splits_special && (match == matches.end() ? special : match->second.special);
    f.done();
    if (token.content.empty()) continue;
    if (token.content.size() > kLongest) here.unsupported(fmt::format("a token of {} bytes", token.content.size()));
    if (const auto known = vocabulary.id(token.content); known && *known != token.id)
      here.corrupt(fmt::format("'{}' has id {} here and {} in the vocabulary", token.content, token.id, *known));
    if (const std::string* other = vocabulary.token(token.id); other != nullptr && *other != token.content)
      here.corrupt(fmt::format("'{}' has the id {} of '{}'", token.content, token.id, *other));
    if (!vocabulary.id(token.content) && !ids_.contains(token.content)) {
      const i64 end = vocabulary.num_tokens(), last = tokens_.empty() ? -1 : tokens_.rbegin()->first;
      if (const i64 next = last >= end ? last + 1 : end; token.id != next)
        here.unsupported(
            fmt::format("'{}' has the id {}, where the reference, which goes by the order of the list, "
                        "gives it {}",
                        token.content, token.id, next));
    }
    const auto [entry, inserted] = ids_.emplace(token.content, token.id);
    if (entry->second != token.id)
      here.corrupt(fmt::format("'{}' has the ids {} and {}", token.content, entry->second, token.id));
    token.in_text = token.content;
    if (twice) {
      twice_.push_back(token);
      twice_.back().normalized = false;
    }
    if (token.normalized && normalizer != nullptr) normalizer->apply(token.in_text);
    const auto it = tokens_.find(token.id);
    if (it != tokens_.end() && it->second.content != token.content)
      here.corrupt(fmt::format("'{}' has the id {} of '{}'", token.content, token.id, it->second.content));
    tokens_.insert_or_assign(token.id, std::move(token));
  }
  const auto sort = [&](const AddedToken& token) {
    if (token.in_text.find('\n') != std::string::npos || token.lstrip) keep_lines_ = false;
    const bool takes_blank = token.normalized && token.in_text.find(' ') != std::string::npos;
    if (takes_blank && normalizer != nullptr && !normalizer->keeps_newlines()) keep_lines_ = false;
    if (!token.in_text.empty()) (token.normalized ? normalized_ : raw_).add(&token);
  };
  for (const auto& [id, token] : tokens_) sort(token);
  for (const AddedToken& token : twice_) sort(token);
  raw_.finish();
  normalized_.finish();
}

std::optional<i32> AddedTokens::id(std::string_view content) const {
  const auto it = ids_.find(content);
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

void AddedTokens::digest(Digest& digest) const {
  const auto add = [&](const AddedToken& token) {
    digest.add(token.content);
    digest.add(token.id);
    for (const bool flag : {token.single_word, token.lstrip, token.rstrip, token.normalized, token.is_split})
      digest.add(flag);
  };
  for (const auto& [id, token] : tokens_) add(token);
  for (const AddedToken& token : twice_) add(token);
}

}  // namespace ds::tokenizer
