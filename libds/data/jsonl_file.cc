// SPDX-License-Identifier: Apache-2.0
// Lines of JSON, each an object with a text, a prompt and its completion, or messages. A line is read by events, so
// that what is not asked for costs no memory, and no line is longer than kMostLineBytes; lines wait until there are
// enough for all threads, which parse and encode them.

#include <simdjson.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/content_kind.h"
#include "base/json.h"
#include "data/records.h"

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

// Whether it is a number as JSON writes them, and no double holds it.
bool is_beyond_double(std::string_view word) {
  size_t at = word.starts_with('-') ? 1 : 0;
  const auto digits = [&] {
    const size_t begin = at;
    while (at < word.size() && word[at] >= '0' && word[at] <= '9') ++at;
    return at - begin;
  };
  const bool zero = at < word.size() && word[at] == '0';
  if (const size_t n = digits(); n == 0 || (zero && n > 1)) return false;
  if (at < word.size() && word[at] == '.' && (++at, digits() == 0)) return false;
  if (at < word.size() && (word[at] == 'e' || word[at] == 'E')) {
    ++at;
    if (at < word.size() && (word[at] == '+' || word[at] == '-')) ++at;
    if (digits() == 0) return false;
  }
  double value = 0;
  return at == word.size() &&
         std::from_chars(word.data(), word.data() + at, value).ec == std::errc::result_out_of_range;
}

// A line with 0 for what JSON has no number for and many writers put down nevertheless: NaN, Infinity, and what is
// beyond a double. Blanks fill up, so that all stands where it did.
std::string with_plain_numbers(std::string_view text) {
  std::string plain(text);
  bool in_string = false;
  for (size_t i = 0; i < plain.size(); ++i) {
    const char c = plain[i];
    if (in_string && c == '\\') {
      ++i;
    } else if (c == '"') {
      in_string = !in_string;
    } else if (!in_string && (c == '-' || c == 'N' || c == 'I' || (c >= '0' && c <= '9'))) {
      const size_t end = std::min(plain.find_first_of(",]} \t\r\n", i), plain.size());
      const std::string_view word = std::string_view(plain).substr(i, end - i);
      const bool is_name = word == "NaN" || word == "Infinity" || word == "-Infinity";
      if (is_name || is_beyond_double(word)) {
        std::fill(plain.begin() + static_cast<i64>(i), plain.begin() + static_cast<i64>(end), ' ');
        plain[i] = '0';
      }
      i = end - 1;
    }
  }
  return plain;
}

// Takes the members that are known out of the events of one line.
class LineHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  LineHandler(std::string_view text, LinePlace place, const ChatTemplate& chat)
      : text_(text), place_(place), chat_(chat), messages_(chat) {}

  Record take() {
    if (!read_plain() && !nlohmann::json::sax_parse(text_.data(), text_.data() + text_.size(), this)) {
      // Whoever wrote the line may not have kept to JSON's numbers.
      const std::string plain = with_plain_numbers(text_);
      if (plain != text_) return LineHandler(plain, place_, chat_).take();
      refuse_error();
    }
    if (members_[kText].is_given) return Record::of_text(take_string(members_[kText]));
    if (has_messages_) {
      if (!wrong_message_.empty()) place_.refuse(wrong_message_);
      if (num_messages_ == 0) place_.refuse("its member \"messages\" is empty");
      return messages_.take();
    }
    if (members_[kPrompt].is_given || members_[kCompletion].is_given) {
      std::string prompt = take_string(members_[kPrompt]);
      return Record::of_prompt(std::move(prompt), take_string(members_[kCompletion]));
    }
    place_.refuse("the object has no member \"text\", nor \"prompt\" and \"completion\", nor \"messages\"");
  }

  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool number_integer(i64) override { return other("a number"); }
  bool number_unsigned(u64) override { return other("a number"); }
  bool number_float(double, const std::string&) override { return other("a number"); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // not in text
  bool string(std::string& value) override {
    if (target_ == nullptr) return other("a string");
    target_->text = std::move(value);
    target_ = nullptr;
    return true;
  }
  bool key(std::string& name) override {
    target_ = nullptr;
    if (depth_ == 1 && name == "messages") {
      if (has_messages_) refuse_twice(name);
      has_messages_ = is_messages_next_ = true;
    } else if (depth_ == 1) {
      expect(name, kText, kCompletion);
    } else if (depth_ == 3 && is_in_messages_) {
      expect(name, kRole, kContent);
    }
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ == 2 && is_in_messages_)
      members_[kRole] = members_[kContent] = {};
    else if (depth_ > 0)
      other("an object");
    return open();
  }
  bool start_array(size_t) override {
    if (is_messages_next_) {
      is_in_messages_ = true;
      is_messages_next_ = false;
    } else {
      other("an array");
    }
    return open();
  }
  bool end_object() override {
    if (--depth_ == 2 && is_in_messages_) add_message();
    return true;
  }
  bool end_array() override {
    if (--depth_ == 1) is_in_messages_ = false;
    return true;
  }
  bool parse_error(size_t at, const std::string& token, const nlohmann::detail::exception& e) override {
    try {
      refuse_json(text_, place_.path, Errc::Corrupt, at, token, e);
    } catch (const JsonError& error) {
      error_ = fmt::format("{}:{}:{}: {}", place_.path, place_.line, error.place().column, error.message());
    }
    return false;
  }

 private:
  // simdjson reads a line ten times as fast, but needs some 14 bytes for each of its own, and of a line with a mistake,
  // or with numbers that other writers have, it says little: then it gives no events, and returns false.
  bool read_plain() {
    constexpr size_t kMostPlainBytes = size_t{1} << 20;
    if (text_.size() > kMostPlainBytes) return false;
    thread_local simdjson::dom::parser parser;
    simdjson::dom::element line;
    if (parser.parse(text_.data(), text_.size()).get(line) != simdjson::SUCCESS) return false;
    give_events(line);
    return true;
  }
  void give_events(simdjson::dom::element e) {
    using simdjson::dom::element_type;
    std::string text;
    switch (e.type()) {
      case element_type::NULL_VALUE: null(); break;
      case element_type::BOOL: boolean(true); break;
      case element_type::INT64:
      case element_type::UINT64:
      case element_type::DOUBLE: number_unsigned(0); break;
      case element_type::STRING:
        text = e.get_string().value_unsafe();
        string(text);
        break;
      case element_type::ARRAY:
        start_array(0);
        for (const simdjson::dom::element item : simdjson::dom::array(e.get_array())) give_events(item);
        end_array();
        break;
      case element_type::OBJECT:
        start_object(0);
        for (const simdjson::dom::key_value_pair member : simdjson::dom::object(e.get_object())) {
          text = member.key;
          key(text);
          give_events(member.value);
        }
        end_object();
        break;
    }
  }

  [[noreturn]] void refuse_error() const { throw Error(Errc::Corrupt, error_); }

  // A string, or what stands where one belongs: told when it turns out to be needed.
  struct Member {
    bool is_given = false;
    std::string text{};
    std::string_view instead{};
  };
  enum Name : u8 { kText, kPrompt, kCompletion, kRole, kContent };
  static constexpr std::array<std::string_view, 5> kNames = {"text", "prompt", "completion", "role", "content"};

  [[noreturn]] void refuse_twice(std::string_view name) const {
    place_.refuse(fmt::format("the key \"{}\" is there twice", name));
  }

  // The value that comes belongs to a member that is known, if its name is one of these.
  void expect(std::string_view name, Name first, Name last) {
    for (size_t i = first; i <= last; ++i) {
      if (kNames[i] != name) continue;
      target_ = &members_[i];
      if (std::exchange(target_->is_given, true)) refuse_twice(name);
    }
  }

  // Why a member cannot be taken; empty: it can.
  std::string wrong(Name name) const {
    const Member& member = members_[name];
    if (!member.is_given) return fmt::format("the object has no member \"{}\"", kNames[name]);
    if (member.instead.empty()) return "";
    return fmt::format("its member \"{}\" is {}, where a string belongs", kNames[name], member.instead);
  }
  std::string take_string(Member& member) {
    const std::string why = wrong(static_cast<Name>(&member - members_.data()));
    if (!why.empty()) place_.refuse(why);
    return std::move(member.text);
  }

  void add_message() {
    ++num_messages_;
    if (!wrong_message_.empty()) return;
    for (const Name name : {kRole, kContent}) {
      const std::string why = wrong(name);
      if (!why.empty()) return refuse_message(why);
    }
    const std::string why = messages_.add(members_[kRole].text, members_[kContent].text);
    if (!why.empty()) refuse_message(why);
  }
  void refuse_message(const std::string& why) { wrong_message_ = fmt::format("message {}: {}", num_messages_, why); }

  bool other(std::string_view what) {
    if (depth_ == 0) place_.refuse(fmt::format("is {}, where each line is an object", what));
    if (is_messages_next_ && wrong_message_.empty())
      wrong_message_ = fmt::format("its member \"messages\" is {}, where an array belongs", what);
    if (depth_ == 2 && is_in_messages_) {
      ++num_messages_;
      if (wrong_message_.empty()) refuse_message(fmt::format("is {}, where an object belongs", what));
    }
    if (target_ != nullptr) target_->instead = what;
    target_ = nullptr;
    is_messages_next_ = false;
    return true;
  }
  bool open() {
    if (++depth_ > kMaxDepth) place_.refuse(fmt::format("nested deeper than {} levels", kMaxDepth));
    return true;
  }

  std::string_view text_;
  LinePlace place_;
  const ChatTemplate& chat_;
  std::string error_;
  std::array<Member, 5> members_;
  Member* target_ = nullptr;  // what the value that comes belongs to
  int depth_ = 0;
  bool has_messages_ = false, is_messages_next_ = false, is_in_messages_ = false;
  i64 num_messages_ = 0;
  Conversation messages_;
  std::string wrong_message_;
};

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == line.npos; }

// Calls body(text, line) for each line that is not blank, until it gives false.
template <class Body>
void for_each_line(const MappedFile& file, Body&& body) {
  std::string_view left = file.text();
  for (i64 line = 1; !left.empty(); ++line) {
    file.check_size();
    const size_t size = std::min(left.substr(0, kMostLineBytes + 1).find('\n'), left.size());
    if (size > kMostLineBytes)
      LinePlace{file.path(), line}.refuse(fmt::format("longer than {} MiB", kMostLineBytes >> 20));
    const std::string_view text = left.substr(0, size);
    if (!is_blank(text) && !body(text, line)) return;
    left.remove_prefix(std::min(size + 1, left.size()));
  }
}

// That of the first line that has one.
RecordForm form_of(const MappedFile& file, const ChatTemplate& chat) {
  if (const std::string_view kind = kind_of_content(file.text()); !kind.empty())
    LinePlace{file.path(), 1}.refuse(fmt::format("this is {}, not a line of JSON", kind));
  RecordForm form = RecordForm::Text;
  for_each_line(file, [&](std::string_view text, i64 line) {
    form = LineHandler(text, {file.path(), line}, chat).take().form;
    return false;
  });
  return form;
}

}  // namespace

std::unique_ptr<TokenFile> open_jsonl_file(const std::string& path, const TextEncoding& encoding) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  const MappedFile& mapped = file->map(path);
  mapped.check_size();
  const ChatTemplate chat(encoding.chat_template);
  const RecordForm form = form_of(mapped, chat);
  const auto parse = [&](std::string_view text, i64 line) {
    mapped.check_size();
    Record read = LineHandler(text, {path, line}, chat).take();
    if (read.form != form)
      LinePlace{path, line}.refuse(
          fmt::format("has {}, and the first line {}: all of a file are alike", form_name(read.form), form_name(form)));
    return read;
  };
  RecordIds ids(
      *file, encoding, form, fmt::format("JSONL, {} in a line", form_name(form)),
      [&path](i64 line) { return fmt::format("{}:{}", path, line); }, parse);
  try {
    for_each_line(mapped, [&](std::string_view text, i64 line) {
      ids.add_line(text, line);
      return true;
    });
  } catch (const Error&) {
    ids.encode();  // what is wrong before it comes first
    throw;
  }
  ids.finish();
  return file;
}

}  // namespace ds
