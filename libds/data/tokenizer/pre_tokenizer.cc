// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/pattern.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

constexpr int kDepth = 8;  // of sequences in sequences

// GPT-2's words.
constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

using Lines = PreTokenizer::Lines;

// Expressions of published models, matches isolated, of which we know what they do to lines (PreTokenizer::Lines). All
// of them look at nothing before the place where they go on.
constexpr std::pair<std::string_view, Lines> kKnown[] = {
    {kGpt2, Lines::Split},
    // Llama 3; OpenAI's cl100k
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     Lines::Split},
    // Qwen 2, 2.5, 3
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     Lines::Split},
    // OpenAI's o200k
    {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
     R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
     R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     Lines::Split},
    // DeepSeek LLM and 2, the first step
    {"[\r\n]", Lines::Split},
    // DeepSeek 3, in three steps
    {R"(\p{N}{1,3})", Lines::Carried},
    {"[一-龥\u3040-ゟ゠-ヿ]+", Lines::Carried},
    {"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
     "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
     Lines::Split},
};

enum class Behavior : u8 { Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous };

Behavior read_behavior(const std::string& name, const Place& place) {
  if (name == "Removed") return Behavior::Removed;
  if (name == "Isolated") return Behavior::Isolated;
  if (name == "MergedWithPrevious") return Behavior::MergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::MergedWithNext;
  if (name == "Contiguous") return Behavior::Contiguous;
  place.unsupported(fmt::format("behavior '{}' is not supported", name));
}

// Joins the parts that a search gives, in order, to words.
class Joiner {
 public:
  Joiner(std::string_view text, Behavior behavior, bool at_start, const PreTokenizer::Sink& sink)
      : text_(text), behavior_(behavior), at_start_(at_start), sink_(sink) {}
  ~Joiner() = default;

  void add(size_t begin, size_t end, bool match) {
    switch (behavior_) {
      case Behavior::Isolated: word(begin, end); break;
      case Behavior::Removed:
        if (!match) word(begin, end);
        break;
      // A match is joined to what is before it, but not to another match.
      case Behavior::MergedWithPrevious: hold(begin, end, match && !previous_match_); break;
      // The held part is a match, and the next part is not.
      case Behavior::MergedWithNext: hold(begin, end, previous_match_ && !match); break;
      case Behavior::Contiguous: hold(begin, end, match == previous_match_); break;
    }
    previous_match_ = match;
  }
  void finish() {
    if (holds_) word(begin_, end_);
  }

 private:
  void hold(size_t begin, size_t end, bool join) {
    if (holds_ && !join) word(begin_, end_);
    if (!holds_ || !join) begin_ = begin;
    end_ = end;
    holds_ = true;
  }
  void word(size_t begin, size_t end) const {
    if (begin < end) sink_(text_.substr(begin, end - begin), at_start_ && begin == 0);
  }

  std::string_view text_;
  Behavior behavior_;
  bool at_start_;
  const PreTokenizer::Sink& sink_;
  bool holds_ = false, previous_match_ = false;
  size_t begin_ = 0, end_ = 0;
};

class Split : public PreTokenizer {
 public:
  Split(Pattern pattern, Behavior behavior, bool invert, Lines lines)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert), lines_(lines) {}
  void split(std::string_view text, bool at_start, const Sink& sink) const override {
    Joiner joiner(text, behavior_, at_start, sink);
    pattern_.each(text, [&](size_t begin, size_t end, bool match) { joiner.add(begin, end, match != invert_); });
    joiner.finish();
  }
  Lines lines() const noexcept override { return lines_; }

 private:
  Pattern pattern_;
  Behavior behavior_;
  bool invert_;
  Lines lines_;
};

// Splits at the characters of a class.
class SplitAt : public PreTokenizer {
 public:
  SplitAt(bool (*matches)(CodePoint), Behavior behavior) : matches_(matches), behavior_(behavior) {}
  void split(std::string_view text, bool at_start, const Sink& sink) const override {
    Joiner joiner(text, behavior_, at_start, sink);
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      if (!matches_(next_char(text, at))) continue;
      if (begin > done) joiner.add(done, begin, false);
      joiner.add(begin, at, true);
      done = at;
    }
    if (done < text.size()) joiner.add(done, text.size(), false);
    joiner.finish();
  }
  Lines lines() const noexcept override {
    if (behavior_ == Behavior::MergedWithPrevious || behavior_ == Behavior::MergedWithNext) return Lines::Unknown;
    if (!matches_(U'\n')) return Lines::Carried;
    return behavior_ == Behavior::Removed ? Lines::Split : Lines::Unknown;
  }
  bool takes_any_blank() const noexcept override {
    return behavior_ == Behavior::Removed && matches_(U'\n') && matches_(U' ');
  }

 private:
  bool (*matches_)(CodePoint);
  Behavior behavior_;
};

// \w+|[^\w\s]+
class Whitespace : public PreTokenizer {
 public:
  void split(std::string_view text, bool at_start, const Sink& sink) const override {
    const auto kind = [](CodePoint c) { return is_word(c) ? 1 : is_white_space(c) ? 0 : 2; };
    size_t begin = 0;
    int running = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t before = at;
      const int k = kind(next_char(text, at));
      if (k == running) continue;
      if (running != 0) sink(text.substr(begin, before - begin), at_start && begin == 0);
      begin = before;
      running = k;
    }
    if (running != 0) sink(text.substr(begin), at_start && begin == 0);
  }
  Lines lines() const noexcept override { return Lines::Split; }
  bool takes_any_blank() const noexcept override { return true; }
};

class ByteLevel : public PreTokenizer {
 public:
  ByteLevel(bool add_prefix_space, bool use_regex, const Place& place) : add_prefix_space_(add_prefix_space) {
    if (use_regex) regex_.emplace(Pattern(Regex(kGpt2, place)), Behavior::Isolated, false, Lines::Split);
  }
  void split(std::string_view text, bool at_start, const Sink& sink) const override {
    std::string with_space;
    if (add_prefix_space_ && !text.starts_with(' ')) text = with_space = fmt::format(" {}", text);
    if (regex_) return regex_->split(text, at_start, sink);
    sink(text, at_start);
  }
  Lines lines() const noexcept override {
    return add_prefix_space_ ? Lines::Unknown : regex_ ? Lines::Split : Lines::Carried;
  }

 private:
  bool add_prefix_space_;
  std::optional<Split> regex_;
};

class Metaspace : public PreTokenizer {
 public:
  enum class Scheme : u8 { Always, First, Never };
  Metaspace(std::string replacement, Scheme scheme, bool split)
      : replacement_(std::move(replacement)), scheme_(scheme), split_(split), pattern_(replacement_) {}
  bool knows_start() const noexcept override { return scheme_ == Scheme::First; }
  void split(std::string_view text, bool at_start, const Sink& sink) const override {
    std::string marked;
    marked.reserve(text.size() + text.size() / 4);
    for (const char c : text) {
      if (c == ' ') {
        marked += replacement_;
      } else {
        marked += c;
      }
    }
    if ((scheme_ == Scheme::Always || (scheme_ == Scheme::First && at_start)) && !marked.starts_with(replacement_))
      marked.insert(0, replacement_);
    if (!split_) return sink(marked, at_start);
    Joiner joiner(marked, Behavior::MergedWithNext, at_start, sink);
    pattern_.each(marked, [&](size_t begin, size_t end, bool match) { joiner.add(begin, end, match); });
    joiner.finish();
  }

 private:
  std::string replacement_;
  Scheme scheme_;
  bool split_;
  Pattern pattern_;
};

class Sequence : public PreTokenizer {
 public:
  explicit Sequence(std::vector<std::unique_ptr<PreTokenizer>> parts) : parts_(std::move(parts)) {}
  void split(std::string_view text, bool at_start, const Sink& sink) const override { from(0, text, at_start, sink); }
  bool knows_start() const noexcept override {
    return std::any_of(parts_.begin(), parts_.end(), [](const auto& p) { return p->knows_start(); });
  }
  // Behind the first one that splits lines, words are the same with and without the cut.
  Lines lines() const noexcept override {
    Lines all = knows_start() ? Lines::Unknown : Lines::Carried;
    for (const auto& part : parts_)
      if (all == Lines::Carried) all = part->lines();
    return all;
  }
  bool takes_any_blank() const noexcept override { return !parts_.empty() && parts_[0]->takes_any_blank(); }

 private:
  void from(size_t part, std::string_view text, bool at_start, const Sink& sink) const {
    if (part == parts_.size()) return sink(text, at_start);
    parts_[part]->split(text, at_start, [&](std::string_view word, bool start) { from(part + 1, word, start, sink); });
  }

  std::vector<std::unique_ptr<PreTokenizer>> parts_;
};

// A part behind ByteLevel, which cuts words where it would cut their spelling in GPT-2's alphabet.
class OfSpelling : public PreTokenizer {
 public:
  explicit OfSpelling(std::unique_ptr<PreTokenizer> part) : part_(std::move(part)) {}
  void split(std::string_view text, bool at_start, const Sink& sink) const override {
    part_->split(spelling_of(text), at_start,
                 [&](std::string_view word, bool start) { sink(bytes_of(word).value(), start); });
  }

 private:
  std::unique_ptr<PreTokenizer> part_;
};

std::unique_ptr<PreTokenizer> make_split(Fields& f) {
  const Json& pattern = f.at("pattern");
  const std::string behavior = f.text("behavior");
  const bool invert = f.flag("invert", false);
  const Behavior how = read_behavior(behavior, f.place());
  Lines lines = Lines::Unknown;
  for (const auto& [regex, known] : kKnown)
    if (pattern == Json{{"Regex", regex}} && how == Behavior::Isolated && !invert) lines = known;
  return std::make_unique<Split>(Pattern(pattern, f.place() / "pattern"), how, invert, lines);
}

std::unique_ptr<PreTokenizer> make_metaspace(Fields& f) {
  const std::string replacement = f.text("replacement");
  if (replacement.empty() || replacement.size() != char_bytes(replacement, 0))
    (f.place() / "replacement").corrupt("must be one character");
  const std::string scheme = f.text("prepend_scheme", "always");
  const bool prefix = f.flag("add_prefix_space", scheme != "never");
  if (!prefix && scheme != "never") f.place().corrupt("add_prefix_space contradicts prepend_scheme");
  f.ignore("str_rep");
  const bool split = f.flag("split", true);
  if (scheme != "always" && scheme != "first" && scheme != "never")
    f.place().unsupported(fmt::format("prepend_scheme '{}' is not supported", scheme));
  return std::make_unique<Metaspace>(replacement,
                                     scheme == "always"  ? Metaspace::Scheme::Always
                                     : scheme == "first" ? Metaspace::Scheme::First
                                                         : Metaspace::Scheme::Never,
                                     split);
}

std::unique_ptr<PreTokenizer> make(const Json& part, const Place& place, int depth, bool& byte_level) {
  if (part.is_null()) return nullptr;
  const std::string type = part_type(part, place);
  const bool is_spelt = byte_level;
  if (is_spelt && (type == "ByteLevel" || type == "Metaspace"))
    place.unsupported(fmt::format("pre-tokenizer '{}' after 'ByteLevel' is not supported", type));
  Fields f(part, place);
  f.ignore("type");
  std::unique_ptr<PreTokenizer> made;
  if (type == "ByteLevel") {
    f.ignore("trim_offsets");
    const bool prefix = f.flag("add_prefix_space"), regex = f.flag("use_regex", true);
    made = std::make_unique<ByteLevel>(prefix, regex, place);
    byte_level = true;
  }
  if (type == "Split") made = make_split(f);
  if (type == "Whitespace") made = std::make_unique<Whitespace>();
  if (type == "WhitespaceSplit") made = std::make_unique<SplitAt>(is_white_space, Behavior::Removed);
  if (type == "Digits")
    made =
        std::make_unique<SplitAt>(is_number, f.flag("individual_digits") ? Behavior::Isolated : Behavior::Contiguous);
  if (type == "Punctuation")
    made = std::make_unique<SplitAt>(is_punctuation, read_behavior(f.text("behavior", "Isolated"), place));
  if (type == "BertPreTokenizer") {
    std::vector<std::unique_ptr<PreTokenizer>> parts;
    parts.push_back(std::make_unique<SplitAt>(is_white_space, Behavior::Removed));
    parts.push_back(std::make_unique<SplitAt>(is_punctuation, Behavior::Isolated));
    made = std::make_unique<Sequence>(std::move(parts));
  }
  if (type == "Metaspace") made = make_metaspace(f);
  if (type == "Sequence") {
    if (depth >= kDepth) place.corrupt("sequences are nested too deeply");
    const Json& list = f.at("pretokenizers");
    if (!list.is_array()) place.corrupt("pretokenizers must be an array");
    std::vector<std::unique_ptr<PreTokenizer>> parts;
    for (size_t i = 0; i < list.size(); ++i) {
      auto inner = make(list[i], place / fmt::format("pretokenizers[{}]", i), depth + 1, byte_level);
      if (inner) parts.push_back(std::move(inner));
    }
    made = std::make_unique<Sequence>(std::move(parts));
  }
  if (!made) place.unsupported(fmt::format("pre-tokenizer '{}' is not supported", type));
  f.done();
  if (is_spelt && type != "Sequence") made = std::make_unique<OfSpelling>(std::move(made));
  return made;
}

}  // namespace

std::unique_ptr<PreTokenizer> make_pre_tokenizer(const Json& part, const Place& place, bool& byte_level) {
  return make(part, place, 0, byte_level);
}

}  // namespace ds::tokenizer
