// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/normalizer.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "data/tokenizer/pattern.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

constexpr int kDepth = 8;  // of sequences in sequences

template <class Keep>
std::string filtered(std::string_view text, Keep&& keep) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (keep(next_char(text, at))) out.append(text, begin, at - begin);
  }
  return out;
}

class UnicodeForm : public Normalizer {
 public:
  explicit UnicodeForm(Form form) : form_(form) {}
  void apply_within(std::string& text, const TextBound&) const override { text = normalize(text, form_); }
  // Some compatibility characters begin with a blank when they are taken apart.
  bool keeps_lines() const noexcept override { return form_ == Form::NFC || form_ == Form::NFD; }

 private:
  Form form_;
};

class Lowercase : public Normalizer {
 public:
  void apply_within(std::string& text, const TextBound&) const override { text = lower_case(text); }
};

class StripAccents : public Normalizer {
 public:
  void apply_within(std::string& text, const TextBound&) const override {
    text = filtered(text, [](CodePoint c) { return !is_mark(c); });
  }
  bool keeps_start() const noexcept override { return false; }
};

class Strip : public Normalizer {
 public:
  Strip(bool left, bool right) : left_(left), right_(right) {}
  void apply_within(std::string& text, const TextBound&) const override {
    size_t begin = 0, end = text.size();
    for (size_t at = 0; left_ && at < end && is_white_space(next_char(text, at));) begin = at;
    while (right_ && end > begin) {
      const size_t before = previous_char(text, end);
      size_t at = before;
      if (!is_white_space(next_char(text, at))) break;
      end = before;
    }
    text = text.substr(begin, end - begin);
  }
  bool keeps_lines() const noexcept override { return !left_ && !right_; }
  bool keeps_start() const noexcept override { return !left_; }

 private:
  bool left_, right_;
};

class Prepend : public Normalizer {
 public:
  explicit Prepend(std::string prefix) : prefix_(std::move(prefix)) {}
  void apply_within(std::string& text, const TextBound& bound) const override {
    bound.check(text.size() + prefix_.size());
    if (!text.empty()) text.insert(0, prefix_);
  }
  bool keeps_lines() const noexcept override { return prefix_.empty(); }

 private:
  std::string prefix_;
};

class Replace : public Normalizer {
 public:
  Replace(Pattern pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply_within(std::string& text, const TextBound& bound) const override {
    std::string out;
    out.reserve(text.size());
    pattern_.each(text, [&](size_t begin, size_t end, bool match) {
      if (match) {
        bound.check(out.size() + content_.size());
        out += content_;
      } else {
        out.append(text, begin, end - begin);
      }
    });
    text = std::move(out);
  }
  bool keeps_lines() const noexcept override { return false; }
  bool keeps_start() const noexcept override { return !content_.empty(); }

 private:
  Pattern pattern_;
  std::string content_;
};

// The text cleaning of BERT's BasicTokenizer.
class Bert : public Normalizer {
 public:
  explicit Bert(Fields& f)
      : clean_(f.flag("clean_text")),
        chinese_(f.flag("handle_chinese_chars")),
        lowercase_(f.flag("lowercase")),
        strip_accents_(f.flag("strip_accents", lowercase_)) {}

  void apply_within(std::string& text, const TextBound&) const override {
    if (clean_ || chinese_) {
      std::string out;
      out.reserve(text.size());
      for (size_t at = 0; at < text.size();) clean(out, next_char(text, at));
      text = std::move(out);
    }
    if (strip_accents_) text = filtered(normalize(text, Form::NFD), [](CodePoint c) { return !is_nonspacing_mark(c); });
    if (lowercase_) text = lower_case(text);
  }
  bool keeps_newlines() const noexcept override { return !clean_; }
  bool keeps_start() const noexcept override { return false; }

 private:
  static bool is_ideograph(CodePoint c) {
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0x20000 && c <= 0x2A6DF) ||
           (c >= 0x2A700 && c <= 0x2B73F) || (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
           (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
  }
  void clean(std::string& out, CodePoint c) const {
    if (clean_) {
      const bool blank = c == '\t' || c == '\n' || c == '\r';
      if (!blank && (c == 0 || c == 0xFFFD || is_other(c))) return;
      if (is_white_space(c)) c = ' ';
    }
    if (chinese_ && is_ideograph(c)) {
      out += ' ';
      append_char(out, c);
      out += ' ';
    } else {
      append_char(out, c);
    }
  }

  bool clean_, chinese_, lowercase_, strip_accents_;
};

class Sequence : public Normalizer {
 public:
  explicit Sequence(std::vector<std::unique_ptr<Normalizer>> parts) : parts_(std::move(parts)) {}
  void apply_within(std::string& text, const TextBound& bound) const override {
    for (const auto& part : parts_) {
      part->apply_within(text, bound);
      bound.check(text.size());
    }
  }
  bool keeps_lines() const noexcept override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& p) { return p->keeps_lines(); });
  }
  bool keeps_newlines() const noexcept override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& p) { return p->keeps_newlines(); });
  }
  bool keeps_start() const noexcept override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& p) { return p->keeps_start(); });
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> parts_;
};

std::unique_ptr<Normalizer> make(const Json& part, const Place& place, int depth) {
  if (part.is_null()) return nullptr;
  const std::string type = part_type(part, place);
  Fields f(part, place);
  f.ignore("type");
  std::unique_ptr<Normalizer> made;
  if (type == "NFC") made = std::make_unique<UnicodeForm>(Form::NFC);
  if (type == "NFD") made = std::make_unique<UnicodeForm>(Form::NFD);
  if (type == "NFKC") made = std::make_unique<UnicodeForm>(Form::NFKC);
  if (type == "NFKD") made = std::make_unique<UnicodeForm>(Form::NFKD);
  if (type == "Lowercase") made = std::make_unique<Lowercase>();
  if (type == "StripAccents") made = std::make_unique<StripAccents>();
  if (type == "Strip") {
    const bool left = f.flag("strip_left"), right = f.flag("strip_right");
    made = std::make_unique<Strip>(left, right);
  }
  if (type == "Prepend") made = std::make_unique<Prepend>(f.text("prepend"));
  if (type == "Replace")
    made = std::make_unique<Replace>(Pattern(f.at("pattern"), place / "pattern"), f.text("content"));
  if (type == "BertNormalizer") made = std::make_unique<Bert>(f);
  if (type == "Precompiled") made = make_precompiled(f);
  if (type == "Sequence") {
    if (depth >= kDepth) place.corrupt("sequences are nested too deeply");
    const Json& list = f.at("normalizers");
    if (!list.is_array()) place.corrupt("normalizers must be an array");
    std::vector<std::unique_ptr<Normalizer>> parts;
    for (size_t i = 0; i < list.size(); ++i) {
      auto inner = make(list[i], place / fmt::format("normalizers[{}]", i), depth + 1);
      if (inner) parts.push_back(std::move(inner));
    }
    made = std::make_unique<Sequence>(std::move(parts));
  }
  if (!made) place.unsupported(fmt::format("normalizer '{}' is not supported", type));
  f.done();
  return made;
}

}  // namespace

std::unique_ptr<Normalizer> make_normalizer(const Json& part, const Place& place) { return make(part, place, 0); }

}  // namespace ds::tokenizer
