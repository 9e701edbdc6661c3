// SPDX-License-Identifier: Apache-2.0
// Lines of JSON, each an object with a text. A line is read by events, so that what is not asked for costs no memory,
// and no line is longer than kMostLineBytes; texts wait until there is enough for all threads, no longer.

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/check.h"
#include "base/content_kind.h"
#include "base/json.h"
#include "data/token_file.h"

namespace ds {
namespace {

constexpr i64 kMostLineBytes = i64{64} << 20;
constexpr int kMaxDepth = 100;

// "FILE:7", in messages.
struct LinePlace {
  const std::string& path;
  i64 line;

  [[noreturn]] void refuse(const std::string& why, Errc code = Errc::Corrupt) const {
    throw Error(code, fmt::format("{}:{}: {}", path, line, why));
  }
};

// Takes the member "text" out of the events of one line.
class LineHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  LineHandler(std::string_view line, LinePlace place) : line_(line), place_(place) {}

  std::string take_text() {
    nlohmann::json::sax_parse(line_.data(), line_.data() + line_.size(), this);
    if (!text_) place_.refuse("the object has no member \"text\"");
    return std::move(*text_);
  }

  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool number_integer(i64) override { return other("a number"); }
  bool number_unsigned(u64) override { return other("a number"); }
  bool number_float(double, const std::string&) override { return other("a number"); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // not in text
  bool string(std::string& value) override {
    if (!is_text_) return other("a string");
    text_ = std::move(value);
    is_text_ = false;
    return true;
  }
  bool key(std::string& name) override {
    is_text_ = depth_ == 1 && name == "text";
    if (is_text_ && text_) place_.refuse("the key \"text\" is there twice");
    return true;
  }
  bool start_object(size_t) override { return open("an object"); }
  bool start_array(size_t) override { return open("an array"); }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool parse_error(size_t at, const std::string& token, const nlohmann::detail::exception& e) override {
    if (e.id == 406) place_.refuse("a number does not fit a double");  // and may be as long as the line
    try {
      refuse_json(line_, place_.path, Errc::Corrupt, at, token, e);
    } catch (const JsonError& error) {
      throw Error(Errc::Corrupt,
                  fmt::format("{}:{}:{}: {}", place_.path, place_.line, error.place().column, error.message()));
    }
  }

 private:
  bool other(std::string_view what) {
    if (depth_ == 0) place_.refuse(fmt::format("is {}, where each line is an object", what));
    if (is_text_) place_.refuse(fmt::format("its member \"text\" is {}, where a string belongs", what));
    return true;
  }
  bool open(std::string_view what) {
    if (depth_ > 0 || what != "an object") other(what);
    if (++depth_ > kMaxDepth) place_.refuse(fmt::format("nested deeper than {} levels", kMaxDepth));
    return true;
  }

  std::string_view line_;
  LinePlace place_;
  std::optional<std::string> text_;
  int depth_ = 0;
  bool is_text_ = false;  // the value that comes is that of "text"
};

struct Document {
  std::string text;
  i64 line;
};

// Documents that wait for each other, and become ids by several threads.
class Documents {
 public:
  Documents(TokenIds& ids, const Tokenizer& tokenizer, std::optional<i32> end, const std::string& path)
      : ids_(ids), tokenizer_(tokenizer), end_(end), path_(path) {}

  void add(Document document) {
    bytes_ += document.text.size();
    waiting_.push_back(std::move(document));
    if (bytes_ >= TokenIds::kStretchBytes * static_cast<size_t>(ids_.num_threads())) encode();
  }

  // All that wait, cut into parts of about equal size.
  void encode() {
    std::vector<size_t> begins;
    size_t part = 0, bytes = 0;
    for (size_t i = 0; i < waiting_.size(); ++i) {
      if (bytes >= part * (bytes_ / static_cast<size_t>(ids_.num_threads()) + 1)) {
        begins.push_back(i);
        ++part;
      }
      bytes += waiting_[i].text.size();
    }
    begins.push_back(waiting_.size());
    ids_.add_parts(part, [&](size_t i, std::vector<i32>& ids) {
      for (size_t d = begins[i]; d < begins[i + 1]; ++d) encode(waiting_[d], ids);
    });
    waiting_.clear();
    bytes_ = 0;
  }

 private:
  void encode(const Document& document, std::vector<i32>& ids) const {
    try {
      tokenizer_.encode(document.text, ids);
    } catch (const Error& e) {
      LinePlace{path_, document.line}.refuse(e.what(), e.code());
    }
    if (end_) ids.push_back(*end_);
  }

  TokenIds& ids_;
  const Tokenizer& tokenizer_;
  std::optional<i32> end_;
  const std::string& path_;
  std::vector<Document> waiting_;
  size_t bytes_ = 0;
};

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == line.npos; }

}  // namespace

std::unique_ptr<TokenFile> open_jsonl_file(const std::string& path, const TextEncoding& encoding) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  const MappedFile& mapped = file->map(path);
  const std::unique_ptr<Tokenizer> bytes = encoding.tokenizer == nullptr ? open_tokenizer("bytes") : nullptr;
  const Tokenizer& tokenizer = bytes ? *bytes : *encoding.tokenizer;
  std::optional<i32> end = tokenizer.special(SpecialToken::Eos);
  if (encoding.document_token >= 0) end = narrow<i32>(encoding.document_token);
  file->reading = end ? fmt::format("JSONL, {} behind each text", *end) : "JSONL";
  file->ids = std::make_unique<TokenIds>(tokenizer, encoding.num_threads, path, end.value_or(0));
  Documents documents(*file->ids, tokenizer, end, path);

  mapped.check_size();
  if (const std::string_view kind = kind_of_content(mapped.text()); !kind.empty())
    LinePlace{path, 1}.refuse(fmt::format("this is {}, not a line of JSON", kind));
  std::string_view left = mapped.text();
  for (i64 line = 1; !left.empty(); ++line) {
    mapped.check_size();
    const size_t size = std::min(left.substr(0, kMostLineBytes + 1).find('\n'), left.size());
    if (size > kMostLineBytes) LinePlace{path, line}.refuse(fmt::format("longer than {} MiB", kMostLineBytes >> 20));
    const std::string_view text = left.substr(0, size);
    if (!is_blank(text)) documents.add({LineHandler(text, {path, line}).take_text(), line});
    left.remove_prefix(std::min(size + 1, left.size()));
  }
  documents.encode();
  file->ids->map();
  file->view_ids();
  return file;
}

}  // namespace ds
