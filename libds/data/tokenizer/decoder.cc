// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/decoder.h"

#include <utility>

#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/pattern.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

constexpr int kDepth = 8;  // of sequences in sequences

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(from); at != text.npos; at = text.find(from, done)) {
    out.append(text, done, at - done).append(to);
    done = at + from.size();
  }
  if (done > 0) text = out.append(text, done);
}

size_t bytes_in(const std::vector<std::string>& tokens) {
  size_t bytes = 0;
  for (const std::string& token : tokens) bytes += token.size();
  return bytes;
}

class Blanks : public Decoder {
 public:
  void apply_within(std::vector<std::string>& tokens, const TextBound&) const override {
    for (size_t i = 1; i < tokens.size(); ++i) tokens[i].insert(0, 1, ' ');
  }
};

class ByteLevel : public Decoder {
 public:
  void apply_within(std::vector<std::string>& tokens, const TextBound&) const override {
    for (std::string& token : tokens)
      if (auto bytes = bytes_of(token)) token = *std::move(bytes);
  }
};

class WordPiece : public Decoder {
 public:
  WordPiece(std::string prefix, bool cleanup) : prefix_(std::move(prefix)), cleanup_(cleanup) {}
  void apply_within(std::vector<std::string>& tokens, const TextBound&) const override {
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::string& token = tokens[i];
      if (i > 0) {
        if (token.starts_with(prefix_)) {
          token.erase(0, prefix_.size());
        } else {
          token.insert(0, 1, ' ');
        }
      }
      if (cleanup_) clean(token);
    }
  }

 private:
  // Blanks that English does not have; the reference's list, in its order.
  static void clean(std::string& token) {
    static constexpr std::pair<std::string_view, std::string_view> kReplaced[] = {
        {" .", "."},   {" ?", "?"},           {" !", "!"},   {" ,", ","},     {" ' ", "'"},   {" n't", "n't"},
        {" 'm", "'m"}, {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
    for (const auto& [from, to] : kReplaced) replace_all(token, from, to);
  }
  std::string prefix_;
  bool cleanup_;
};

class Metaspace : public Decoder {
 public:
  Metaspace(std::string replacement, bool prepended) : replacement_(std::move(replacement)), prepended_(prepended) {}
  void apply_within(std::vector<std::string>& tokens, const TextBound&) const override {
    for (size_t i = 0; i < tokens.size(); ++i) replace_all(tokens[i], replacement_, i == 0 && prepended_ ? "" : " ");
  }

 private:
  std::string replacement_;
  bool prepended_;
};

class Replace : public Decoder {
 public:
  Replace(Pattern pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply_within(std::vector<std::string>& tokens, const TextBound& bound) const override {
    size_t before = 0;
    for (std::string& token : tokens) {
      if (!is_utf8(token)) continue;  // a byte, by a step before this one
      std::string out;
      pattern_.each(token, [&](size_t begin, size_t end, bool match) {
        if (match) bound.check(before + out.size() + content_.size());
        out += match ? std::string_view(content_) : std::string_view(token).substr(begin, end - begin);
      });
      token = std::move(out);
      before += token.size();
    }
  }

 private:
  Pattern pattern_;
  std::string content_;
};

// "<0x0A>" is a byte.
class ByteFallback : public Decoder {
 public:
  void apply_within(std::vector<std::string>& tokens, const TextBound&) const override {
    for (std::string& token : tokens) {
      const auto digit = [](char c) {
        return c >= '0' && c <= '9'   ? c - '0'
               : c >= 'A' && c <= 'F' ? c - 'A' + 10
               : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                      : -1;
      };
      if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') continue;
      const int high = digit(token[3]), low = digit(token[4]);
      if (high >= 0 && low >= 0) token = std::string(1, static_cast<char>(16 * high + low));
    }
  }
};

class Fuse : public Decoder {
 public:
  void apply_within(std::vector<std::string>& tokens, const TextBound&) const override {
    std::string all;
    for (const std::string& token : tokens) all += token;
    tokens.assign(1, std::move(all));
  }
};

class Strip : public Decoder {
 public:
  Strip(std::string content, i64 start, i64 stop) : content_(std::move(content)), start_(start), stop_(stop) {}
  void apply_within(std::vector<std::string>& tokens, const TextBound&) const override {
    for (std::string& token : tokens) {
      std::string_view rest = token;
      for (i64 i = 0; i < start_ && rest.starts_with(content_); ++i) rest.remove_prefix(content_.size());
      for (i64 i = 0; i < stop_ && rest.ends_with(content_); ++i) rest.remove_suffix(content_.size());
      token = std::string(rest);
    }
  }

 private:
  std::string content_;
  i64 start_, stop_;
};

class Sequence : public Decoder {
 public:
  explicit Sequence(std::vector<std::unique_ptr<Decoder>> parts) : parts_(std::move(parts)) {}
  void apply_within(std::vector<std::string>& tokens, const TextBound& bound) const override {
    for (const auto& part : parts_) {
      part->apply_within(tokens, bound);
      bound.check(bytes_in(tokens));
    }
  }

 private:
  std::vector<std::unique_ptr<Decoder>> parts_;
};

std::unique_ptr<Decoder> make(const Json& part, const Place& place, int depth) {
  const std::string type = part_type(part, place);
  Fields f(part, place);
  f.ignore("type");
  std::unique_ptr<Decoder> made;
  if (type == "ByteLevel") {
    for (const char* field : {"add_prefix_space", "trim_offsets", "use_regex"}) f.ignore(field);
    made = std::make_unique<ByteLevel>();
  }
  if (type == "WordPiece") {
    const bool cleanup = f.flag("cleanup", true);
    made = std::make_unique<WordPiece>(f.text("prefix", "##"), cleanup);
  }
  if (type == "Metaspace") {
    const bool prefix = f.flag("add_prefix_space", true);
    for (const char* field : {"split", "str_rep"}) f.ignore(field);
    const bool never = f.text("prepend_scheme", prefix ? "always" : "never") == "never";
    const std::string replacement = f.text("replacement");
    if (replacement.empty()) (place / "replacement").corrupt("is empty");
    made = std::make_unique<Metaspace>(replacement, !never);
  }
  if (type == "Replace")
    made = std::make_unique<Replace>(Pattern(f.at("pattern"), place / "pattern"), f.text("content"));
  if (type == "ByteFallback") made = std::make_unique<ByteFallback>();
  if (type == "Fuse") made = std::make_unique<Fuse>();
  if (type == "Strip") {
    const std::string content = f.text("content");
    if (content.empty()) (place / "content").corrupt("is empty");
    const i64 start = f.integer("start"), stop = f.integer("stop");
    made = std::make_unique<Strip>(content, start, stop);
  }
  if (type == "Sequence") {
    if (depth >= kDepth) place.corrupt("sequences are nested too deeply");
    const Json& list = f.at("decoders");
    if (!list.is_array()) place.corrupt("decoders must be an array");
    std::vector<std::unique_ptr<Decoder>> parts;
    for (size_t i = 0; i < list.size(); ++i)
      parts.push_back(make(list[i], place / fmt::format("decoders[{}]", i), depth + 1));
    made = std::make_unique<Sequence>(std::move(parts));
  }
  if (!made) place.unsupported(fmt::format("decoder '{}' is not supported", type));
  f.done();
  return made;
}

}  // namespace

void Decoder::apply(std::vector<std::string>& tokens) const {
  const TextBound bound(bytes_in(tokens));
  apply_within(tokens, bound);
  bound.check(bytes_in(tokens));
}

std::unique_ptr<Decoder> make_decoder(const Json& part, const Place& place) {
  if (part.is_null()) return std::make_unique<Blanks>();
  return make(part, place, 0);
}

}  // namespace ds::tokenizer
