// SPDX-License-Identifier: Apache-2.0
// SentencePiece's compiled normalization rules, as Hugging Face's tokenizers apply them:
//
//     u32  bytes of the trie, little-endian
//     u32  units of the trie, a double array (Aoe, "An Efficient Digital Search Algorithm by Using a Double-Array
//          Structure", IEEE Transactions on Software Engineering, 1989) in the form of the library Darts-clone
//     ...  the replacements, UTF-8, each with a NUL behind it; the trie's values are where they begin
//
// A grapheme of up to five bytes is replaced as a whole, by the rule for the shortest of its prefixes that has one;
// otherwise its characters are replaced one by one. So a letter with a rule loses its accents.

#include <algorithm>
#include <cstring>

#include "data/tokenizer/normalizer.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

std::string from_base64(std::string_view text, const Place& place) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.size() % 4 != 0) place.corrupt("is not base64");
  for (int i = 0; i < 2 && text.ends_with('='); ++i) text.remove_suffix(1);
  std::string bytes;
  u32 bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == kDigits.npos) place.corrupt("is not base64");
    bits = bits << 6 | static_cast<u32>(digit);
    if ((count += 6) < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 0xFF);
  }
  return bytes;
}

class Precompiled : public Normalizer {
 public:
  Precompiled(std::string_view base64, const Place& place) : place_(place) {
    const std::string rules = from_base64(base64, place);
    u32 bytes = 0;
    if (rules.size() < sizeof bytes) place.corrupt("has no rules");
    std::memcpy(&bytes, rules.data(), sizeof bytes);
    if (bytes > rules.size() - sizeof bytes || bytes < sizeof(u32)) place.corrupt("has a trie that is not whole");
    units_.resize(bytes / sizeof(u32));
    std::memcpy(units_.data(), rules.data() + sizeof bytes, units_.size() * sizeof(u32));
    replacements_ = rules.substr(sizeof bytes + units_.size() * sizeof(u32));
    if (!is_utf8(replacements_)) place.corrupt("has replacements that are not UTF-8");
  }

  void apply_within(std::string& text, const TextBound& bound) const override {
    constexpr size_t kLongest = 5;  // bytes of a grapheme that may be replaced as a whole
    std::string out;
    out.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
      const size_t end = end_of_grapheme(text, at);
      if (end - at <= kLongest) {
        if (const auto to = replacement(std::string_view(text).substr(at, end - at))) {
          out += *to;
          at = end;
        }
      }
      while (at < end) {
        const std::string_view c = std::string_view(text).substr(at, char_bytes(text, at));
        out += replacement(c).value_or(c);
        at += c.size();
      }
      bound.check(out.size());
    }
    text = std::move(out);
  }
  bool keeps_lines() const noexcept override { return false; }
  // The reference counts a text whose first characters are removed as one that begins where it did.
  bool keeps_start() const noexcept override { return true; }

 private:
  u32 unit(size_t at) const {
    if (at >= units_.size()) place_.corrupt("has a trie that leads out of itself");
    return units_[at];
  }
  static size_t offset(u32 unit) noexcept { return static_cast<size_t>(unit >> 10) << ((unit & (1u << 9)) >> 6); }

  std::optional<std::string_view> replacement(std::string_view text) const {
    size_t at = offset(unit(0));
    for (const char c : text) {
      const auto byte = static_cast<u8>(c);
      if (byte == 0) return std::nullopt;
      at ^= byte;
      const u32 found = unit(at);
      if ((found & ((1u << 31) | 0xFF)) != byte) return std::nullopt;
      at ^= offset(found);
      if ((found >> 8 & 1) == 0) continue;
      const size_t begin = unit(at) & ~(1u << 31);
      if (begin >= replacements_.size()) place_.corrupt("has a replacement beyond its end");
      return std::string_view(replacements_).substr(begin, replacements_.find('\0', begin) - begin);
    }
    return std::nullopt;
  }

  Place place_;
  std::vector<u32> units_;
  std::string replacements_;
};

}  // namespace

std::unique_ptr<Normalizer> make_precompiled(Fields& fields) {
  const std::string rules = fields.text("precompiled_charsmap");
  return std::make_unique<Precompiled>(rules, fields.place() / "precompiled_charsmap");
}

}  // namespace ds::tokenizer
