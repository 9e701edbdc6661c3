// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/pipeline.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/decoder.h"
#include "data/tokenizer/model.h"
#include "data/tokenizer/normalizer.h"
#include "data/tokenizer/pre_tokenizer.h"
#include "data/tokenizer/unicode.h"
#include "data/tokenizer/word_cache.h"

namespace ds::tokenizer {
namespace {

using Lines = PreTokenizer::Lines;

class Pipeline : public Tokenizer {
 public:
  Pipeline(Fields& f, Definition& d)
      : normalizer_(make_normalizer(or_null(f.find("normalizer")), f.place() / "normalizer")),
        pre_tokenizer_(make_pre_tokenizer(or_null(f.find("pre_tokenizer")), f.place() / "pre_tokenizer", byte_level_)),
        model_(d.model ? std::move(d.model) : make_model(f.at("model"), f.place() / "model", byte_level_)),
        added_(or_null(f.find("added_tokens")), f.place() / "added_tokens", model_->vocabulary(), normalizer_.get(),
               d.splits_special, d.matches),
        decoder_(make_decoder(or_null(f.find("decoder")), f.place() / "decoder")) {
    static std::atomic<u64> tokenizers{0};
    serial_ = ++tokenizers;
    if (f.text("version", "1.0") != "1.0") (f.place() / "version").unsupported("only 1.0 is supported");
    // They shorten or fill what a model is given at once, which is not for a tokenizer to do here.
    f.ignore("truncation");
    f.ignore("padding");
    if (pre_tokenizer_ && pre_tokenizer_->knows_start() && normalizer_ && !normalizer_->keeps_start())
      (f.place() / "pre_tokenizer").unsupported("prepend_scheme 'first' behind a normalizer that removes characters");
    facts_.ends = std::move(d.ends);
    facts_.warnings = std::move(d.warnings);
    facts_.when_writing = std::move(d.when_writing);
    find_special(d, or_null(f.find("post_processor")));
    f.done();
    vocab_size_ = model_->vocabulary().num_ids();
    if (!added_.tokens().empty()) vocab_size_ = std::max<i64>(vocab_size_, added_.tokens().rbegin()->first + 1);
    splits_lines_ = pre_tokenizer_ && pre_tokenizer_->lines() == Lines::Split && added_.keep_lines() &&
                    (!normalizer_ || (normalizer_->keeps_lines() &&
                                      (normalizer_->keeps_newlines() || pre_tokenizer_->takes_any_blank())));
    Digest model, added;
    model_->digest(model);
    added_.digest(added);
    const std::string parts =
        parts_identity(model, or_null(f.find("normalizer")), or_null(f.find("pre_tokenizer")), added);
    const size_t library = std::min(d.own_content.find(kByLibrary), d.own_content.size());
    identity_ = fmt::format("{} of {} ids, {}{}{}{}", model_->kind(), d.own_ids > 0 ? d.own_ids : vocab_size_,
                            d.own_content.substr(0, library), d.others, parts, d.own_content.substr(library));
  }

  void encode(std::string_view text, std::vector<i32>& ids) const override {
    std::string mended;
    if (!is_utf8(text)) text = mended = replace_invalid_utf8(text);
    if (added_.before_normalizing().empty()) return encode_part(text, true, ids);
    added_.before_normalizing().each(text, [&](size_t begin, size_t end, const AddedToken* token) {
      if (token != nullptr) {
        ids.push_back(token->id);
      } else {
        encode_part(text.substr(begin, end - begin), begin == 0, ids);
      }
    });
  }

  std::string decode(std::span<const i32> ids) const override {
    std::vector<std::string> tokens;
    for (const i32 id : ids) {
      if (const auto it = added_.tokens().find(id); it != added_.tokens().end()) {
        tokens.push_back(it->second.in_text);
      } else if (const std::string* token = model_->vocabulary().token(id)) {
        tokens.push_back(*token);
      }
    }
    decoder_->apply(tokens);
    std::string text;
    for (const std::string& token : tokens) text += token;
    return text;
  }

  std::string piece(i32 id) const override {
    if (const auto it = added_.tokens().find(id); it != added_.tokens().end()) return it->second.content;
    const std::string* const token = model_->vocabulary().token(id);
    return token == nullptr ? "" : *token;
  }
  i64 vocab_size() const noexcept override { return vocab_size_; }
  std::optional<i32> special(SpecialToken kind) const noexcept override {
    const auto it = special_.find(kind);
    if (it == special_.end()) return std::nullopt;
    return it->second;
  }
  bool adds_bos() const noexcept override { return adds_bos_; }
  std::string identity() const override { return identity_; }

  size_t cut_after(std::string_view text, size_t from) const noexcept override {
    if (!splits_lines_) return text.size();
    for (size_t at = from; (at = text.find('\n', at)) != text.npos; ++at) {
      if (at == 0 || at + 1 == text.size()) continue;
      // ASCII, so that bytes that are not UTF-8 cannot deceive us; characters above it serve as letters if they are.
      const auto before = static_cast<u8>(text[at - 1]), after = static_cast<u8>(text[at + 1]);
      const bool visible = before > ' ' && before < 127;
      const bool letter = (after >= 'A' && after <= 'Z') || (after >= 'a' && after <= 'z');
      if ((visible || starts_letter_back(text, at)) && (letter || starts_letter(text, at + 1))) return at + 1;
    }
    return text.size();
  }

 private:
  static const Json& or_null(const Json* part) {
    static const Json kNull;
    return part == nullptr ? kNull : *part;
  }
  static bool starts_letter(std::string_view text, size_t at) noexcept {
    const std::string_view c = text.substr(at, std::min<size_t>(4, text.size() - at));
    if (static_cast<u8>(c[0]) < 0xC2 || c.size() < char_bytes(c, 0) || !is_utf8(c.substr(0, char_bytes(c, 0))))
      return false;
    size_t begin = 0;
    return is_letter(next_char(c, begin));
  }
  static bool starts_letter_back(std::string_view text, size_t end) noexcept {
    const size_t begin = previous_char(text, end);
    return static_cast<u8>(text[begin]) >= 0xC2 && starts_letter(text, begin) && begin + char_bytes(text, begin) == end;
  }

  void encode_part(std::string_view text, bool at_start, std::vector<i32>& ids) const {
    std::string normal;
    if (normalizer_) {
      normal = text;
      normalizer_->apply(normal);
      text = normal;
    }
    if (added_.after_normalizing().empty()) return encode_normal(text, at_start, ids);
    added_.after_normalizing().each(text, [&](size_t begin, size_t end, const AddedToken* token) {
      if (token != nullptr) {
        ids.push_back(token->id);
      } else {
        encode_normal(text.substr(begin, end - begin), at_start && begin == 0, ids);
      }
    });
  }

  void encode_normal(std::string_view text, bool at_start, std::vector<i32>& ids) const {
    if (text.empty()) return;
    thread_local WordCache cache;
    const std::string_view mark = model_->cuts_before();
    const auto word = [&](std::string_view w) {
      cache.append(serial_, w, ids, [&](std::string_view x, std::vector<i32>& out) { model_->encode(x, out); });
    };
    const auto words = [&](std::string_view w) {
      for (size_t begin = 0; begin < w.size();) {
        size_t end = begin;
        while (w.substr(end).starts_with(mark)) end += mark.size();  // one behind another is no place to cut
        end = std::min(w.find(mark, end), w.size());
        word(w.substr(begin, end - begin));
        begin = end;
      }
    };
    const auto sink = [&](std::string_view w, bool) { mark.empty() ? word(w) : words(w); };
    if (pre_tokenizer_) return pre_tokenizer_->split(text, at_start, sink);
    sink(text, at_start);
  }

  void find_special(const Definition& d, const Json& post_processor) {
    const auto name = [&](SpecialToken kind, const std::string& content, const std::string& source) {
      auto id = added_.id(content);
      if (!id) id = model_->vocabulary().id(content);
      if (!id || !special_.emplace(kind, *id).second) return;  // the first word counts
      facts_.named.push_back({std::string(special_name(kind)), content, *id, source});
    };
    const std::string file = d.name.substr(d.name.find_last_of('/') + 1);
    for (const auto& [kind, special] : d.special) name(kind, special.content, special.source);
    if (const auto unk = model_->unk_token()) name(SpecialToken::Unk, *unk, file);
    if (model_->kind() == "WordPiece") {
      for (const auto& [kind, content] : {std::pair{SpecialToken::Cls, "[CLS]"},
                                          {SpecialToken::Sep, "[SEP]"},
                                          {SpecialToken::Pad, "[PAD]"},
                                          {SpecialToken::Mask, "[MASK]"}})
        name(kind, content, file);
    }
    for (const auto& [id, token] : added_.tokens()) {
      const auto origin = d.origins.find(token.content);
      facts_.named.push_back({"", token.content, id, origin == d.origins.end() ? file : origin->second});
    }
    add_eos_to_ends(d.name);
    const std::optional<i32> first = end_of_template(post_processor, 0, true);
    const std::optional<i32> last = end_of_template(post_processor, 0, false);
    adds_bos_ = d.adds_bos.value_or(first.has_value() && first == special(SpecialToken::Bos));
    if (!special(SpecialToken::Bos)) adds_bos_ = false;
    facts_.adds_eos = special(SpecialToken::Eos) && (d.adds_eos || last == special(SpecialToken::Eos));
    if (facts_.adds_eos)
      facts_.when_writing.push_back(fmt::format(
          "tokenizer '{}': the reference puts '{}' after every text; prompts are left open, to be continued", d.name,
          piece(*special(SpecialToken::Eos))));
  }

  // The special token that the file puts before a text, or after it.
  std::optional<i32> end_of_template(const Json& part, int depth, bool front) const {
    if (!part.is_object() || depth > 8) return std::nullopt;
    const std::string type = part.value("type", Json()).is_string() ? part["type"].get<std::string>() : "";
    if (const auto list = part.find("processors"); type == "Sequence" && list != part.end() && list->is_array()) {
      for (const Json& inner : *list)
        if (const auto found = end_of_template(inner, depth + 1, front)) return found;
    }
    const auto single = part.find("single");
    if (type != "TemplateProcessing" || single == part.end() || !single->is_array() || single->empty())
      return std::nullopt;
    const Json& outer = front ? single->front() : single->back();
    if (!outer.is_object() || !outer.contains("SpecialToken")) return std::nullopt;
    const Json& token = outer["SpecialToken"];
    if (!token.is_object() || !token.contains("id") || !token["id"].is_string()) return std::nullopt;
    return added_.id(token["id"].get_ref<const std::string&>());
  }

  bool byte_level_ = false;
  std::unique_ptr<Normalizer> normalizer_;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  std::unique_ptr<Model> model_;
  AddedTokens added_;
  std::unique_ptr<Decoder> decoder_;
  std::string identity_;
  std::map<SpecialToken, i32> special_;
  bool adds_bos_ = false, splits_lines_ = false;
  i64 vocab_size_ = 0;
  u64 serial_ = 0;  // for the cache of words
};

}  // namespace

std::unique_ptr<Tokenizer> make_pipeline(Definition definition) {
  Fields f(definition.file, {definition.name, ""});
  return std::make_unique<Pipeline>(f, definition);
}

}  // namespace ds::tokenizer
