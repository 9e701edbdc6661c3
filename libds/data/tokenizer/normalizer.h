// SPDX-License-Identifier: Apache-2.0
#pragma once
// The "normalizer" of a tokenizer.json: what happens to a text before it is cut into words.

#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer/fields.h"
#include "data/tokenizer/text_bound.h"

namespace ds::tokenizer {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // Valid UTF-8 stays so. Reentrant. Throws Errc::Unavailable where it would make more of a text than TextBound allows.
  void apply(std::string& text) const {
    const TextBound bound(text.size());
    apply_within(text, bound);
    bound.check(text.size());
  }
  // A normalizer whose output may become long checks the bound on the way.
  virtual void apply_within(std::string& text, const TextBound& bound) const = 0;
  // Whether a text can be cut after a newline that stands between a visible character and a letter: parts are
  // normalized as the whole is, and these three characters stay a visible one, a newline (or blank), a letter.
  virtual bool keeps_lines() const noexcept { return true; }
  // Whether that newline stays one.
  virtual bool keeps_newlines() const noexcept { return true; }
  // Whether a text's first character always leads to the first one of what becomes of it.
  virtual bool keeps_start() const noexcept { return true; }
};

// NFC NFD NFKC NFKD Lowercase Strip StripAccents Prepend Replace BertNormalizer Precompiled Sequence; null is null.
// Throws Errc::Unavailable, naming any other, and Errc::Corrupt.
std::unique_ptr<Normalizer> make_normalizer(const Json& part, const Place& place);
std::unique_ptr<Normalizer> make_precompiled(Fields& fields);

}  // namespace ds::tokenizer
