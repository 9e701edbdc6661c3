// SPDX-License-Identifier: Apache-2.0
#pragma once
// The "pre_tokenizer" of a tokenizer.json: cuts a normalized text into words, which the model sees one by one.

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

class PreTokenizer {
 public:
  // A word, never empty; it is valid during the call. at_start: it begins where the text does.
  using Sink = std::function<void(std::string_view word, bool at_start)>;

  virtual ~PreTokenizer() = default;
  // Reentrant.
  virtual void split(std::string_view text, bool at_start, const Sink& sink) const = 0;
  // The effect on words of cutting the text after a newline between a visible character and a letter.
  enum class Lines : u8 {
    Unknown,  // it might change them
    Carried,  // a word that spans the cut is cut there; nothing else changes
    Split,    // nothing: there is no such word
  };
  virtual Lines lines() const noexcept { return Lines::Unknown; }
  // Whether that also holds where another blank stands for the newline.
  virtual bool takes_any_blank() const noexcept { return false; }
  // Whether words depend on at_start.
  virtual bool knows_start() const noexcept { return false; }
};

// ByteLevel Split Whitespace WhitespaceSplit Digits Punctuation BertPreTokenizer Metaspace Sequence; null is null.
// ByteLevel sets `byte_level`: words stay bytes, and the model's vocabulary is read as bytes instead (see
// byte_level.h); parts behind it only cut. Throws Errc::Unavailable, naming any other, and Errc::Corrupt.
std::unique_ptr<PreTokenizer> make_pre_tokenizer(const Json& part, const Place& place, bool& byte_level);

}  // namespace ds::tokenizer
