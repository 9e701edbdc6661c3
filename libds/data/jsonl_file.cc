// SPDX-License-Identifier: Apache-2.0
// Lines of JSON, each an object with a text, a prompt and its completion, or messages. A line is read by events, so
// that what is not asked for costs no memory, and no line is longer than kMostLineBytes; lines wait until there are
// enough for all threads, which parse and encode them.

#include <fmt/ranges.h>
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/content_kind.h"
#include "base/json.h"
#include "data/foreign_members.h"
#include "data/records.h"
#include "formats/compressed.h"

namespace ds {
namespace {

constexpr i64 kMostLineBytes = i64{64} << 20;
constexpr int kMaxDepth = 100;

// "FILE:7", in messages.
struct LinePlace {
  const std::string& path;
  i64 line;
  Compression compression = Compression::None;

  [[noreturn]] void refuse(const std::string& why, Errc code = Errc::Corrupt) const {
    throw Error(code, fmt::format("{}:{}: {}", path, line, why));
  }
};

// A word for a shell.
std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./+,@%";
  if (word.find_first_not_of(kPlain) == word.npos) return word.starts_with('-') ? "./" + word : word;
  std::string result = word.starts_with('-') ? "'./" : "'";
  for (const char c : word) result += c == '\'' ? "'\\''" : std::string(1, c);
  return result + "'";
}

// The end of a message: how a file becomes one that is read, under a name of its own.
std::string mended_by(std::string_view filter, const LinePlace& place) {
  const std::string name = place.path.substr(place.path.find_last_of('/') + 1);
  const std::string converted = quoted(name.substr(0, std::max<size_t>(name.find('.'), 1)) + "-new.jsonl");
  const std::string from = quoted(place.path);
  return place.compression == Compression::None
             ? fmt::format("; this converts the file: jq -c '{}' {} > {}", filter, from, converted)
             : fmt::format("; this converts the file: {} -dc {} | jq -c '{}' > {}", compression_name(place.compression),
                           from, filter, converted);
}

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

// A line with 2, which is the weight of no message, for what JSON has no number for and many writers put down
// nevertheless: NaN, Infinity, and what is beyond a double. Blanks fill up, so that all stands where it did.
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
        plain[i] = '2';
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
    if (!of_record_.wrong_weight.empty()) place_.refuse(of_record_.wrong_weight, Errc::Unavailable);
    if (members_[kText].is_given) {
      if (!of_record_.is_trained.value_or(true)) place_.refuse(std::string(kTextIsTrainedOnWhole), Errc::Unavailable);
      return Record::of_text(take_string(members_[kText]));
    }
    const Member &prompt = members_[kPrompt], &completion = members_[kCompletion];
    if (!has_messages_ && !(prompt.is_given && completion.is_given)) {
      const std::string_view why = prompt.is_given       ? "the object has no member \"completion\""
                                   : completion.is_given ? "the object has no member \"prompt\""
                                                         : "the object has no member \"text\", nor \"prompt\" and "
                                                           "\"completion\", nor \"messages\"";
      place_.refuse(fmt::format("{}{}", why, how_to_mend()));
    }
    if (!of_record_.unsupported.empty()) place_.refuse(of_record_.unsupported, Errc::Unavailable);
    Record record;
    if (has_messages_) {
      if (!wrong_message_.empty()) place_.refuse(wrong_message_ + how_to_mend(), wrong_code_);
      if (num_messages_ == 0) place_.refuse("its member \"messages\" is empty");
      record = messages_.take();
    } else {
      std::string text = take_string(members_[kPrompt]);
      record = Record::of_prompt(std::move(text), take_string(members_[kCompletion]));
    }
    if (!of_record_.is_trained.value_or(true)) record.leave_out();
    return record;
  }

  bool null() override {
    watched_ = MemberMeaning::Other;
    return other("null");
  }
  bool boolean(bool value) override {
    watch_number(value ? 1 : 0, value);
    return other("a boolean");
  }
  bool number_integer(i64 value) override { return number(static_cast<double>(value)); }
  bool number_unsigned(u64 value) override { return number(static_cast<double>(value)); }
  bool number_float(double value, const std::string&) override { return number(value); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // not in text
  bool string(std::string& value) override {
    watch(!value.empty(), "a string");
    if (target_ == nullptr) return other("a string");
    target_->text = std::move(value);
    target_ = nullptr;
    return true;
  }
  bool key(std::string& name) override {
    target_ = nullptr;
    see_content();
    if (depth_ == 1 && name == "messages") {
      if (has_messages_) refuse_twice(name);
      has_messages_ = is_messages_next_ = true;
    } else if (depth_ == 1) {
      if (!expect(name, kText, kCompletion)) look_at(name, meaning_in_record(name));
    } else if (depth_ == 3 && is_in_messages_ && !expect(name, kRole, kContent)) {
      look_at(name, meaning_in_message(name));
    }
    return true;
  }
  bool start_object(size_t) override {
    watch_container();
    if (depth_ == 2 && is_in_messages_) {
      members_[kRole] = members_[kContent] = {};
      of_message_ = {};
    } else if (depth_ > 0) {
      other("an object");
    }
    return open();
  }
  bool start_array(size_t) override {
    watch_container();
    if (is_messages_next_) {
      is_in_messages_ = true;
      is_messages_next_ = false;
    } else {
      other("an array");
    }
    return open();
  }
  bool end_object() override {
    end_container();
    if (--depth_ == 2 && is_in_messages_) add_message();
    return true;
  }
  bool end_array() override {
    end_container();
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
      case element_type::BOOL: boolean(e.get_bool().value_unsafe()); break;
      case element_type::INT64:
      case element_type::UINT64:
      case element_type::DOUBLE: number(e.get_double().value_unsafe()); break;
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
  bool expect(std::string_view name, Name first, Name last) {
    for (size_t i = first; i <= last; ++i) {
      if (kNames[i] != name) continue;
      target_ = &members_[i];
      if (std::exchange(target_->is_given, true)) refuse_twice(name);
      return true;
    }
    return false;
  }

  // The value that comes belongs to a member that may change what is trained on.
  void look_at(std::string_view name, MemberMeaning meaning) {
    watched_ = meaning;
    if (meaning == MemberMeaning::Other) return;
    watched_name_ = name;
    watched_place_ = depth_ == 1 ? &of_record_ : &of_message_;
  }
  bool number(double value) {
    watch_number(value, true);
    return other("a number");
  }
  void watch_number(double value, bool is_content) {
    see_content();
    if (watched_ != MemberMeaning::Weight && watched_ != MemberMeaning::Mask) return watch(is_content, "a number");
    const std::optional<bool> is_trained = is_trained_on(watched_, value);
    watched_ = MemberMeaning::Other;
    if (is_trained && watched_place_->is_trained.value_or(*is_trained) != *is_trained)
      watched_place_->wrong_weight =
          fmt::format("its member \"{}\" contradicts another one of its weights", watched_name_);
    else if (is_trained)
      watched_place_->is_trained = is_trained;
    else
      watched_place_->wrong_weight =
          fmt::format("its member \"{}\" is {}; the weights 0 and 1 are supported", watched_name_, value);
  }
  // A value of another type, with something in it or not.
  void watch(bool is_content, std::string_view what) {
    see_content();
    const MemberMeaning meaning = std::exchange(watched_, MemberMeaning::Other);
    if (meaning == MemberMeaning::Other || !is_content) return;
    if (meaning != MemberMeaning::Unsupported) {
      watched_place_->wrong_weight =
          fmt::format("its member \"{}\" is {}, where a number belongs", watched_name_, what);
      return;
    }
    watched_place_->unsupported = fmt::format(
        "its member \"{}\" is not supported, and no part of the text: write it into the text, or leave it out (jq -c "
        "'del({}.{})')",
        watched_name_, watched_place_ == &of_record_ ? "" : ".messages[]", watched_name_);
  }
  void watch_container() {
    see_content();
    is_container_watched_ = watched_ != MemberMeaning::Other;
  }
  // An empty one asks for nothing, and is no weight.
  void end_container() {
    if (std::exchange(is_container_watched_, false))
      watch(watched_ != MemberMeaning::Unsupported, "an array or object");
  }
  // Something stands in the array or object that is the value of a watched member.
  void see_content() {
    if (std::exchange(is_container_watched_, false)) watch(true, "an array or object");
  }

  // "; jq .. converts it", where the record has the members of another program's.
  std::string how_to_mend() const {
    const std::string filter = jq_filter_for(nlohmann::json::parse(text_, nullptr, false));
    return filter.empty() ? "" : mended_by(filter, place_);
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
    for (const std::string* why : {&of_message_.wrong_weight, &of_message_.unsupported})
      if (!why->empty()) return refuse_message(*why, Errc::Unavailable);
    for (const Name name : {kRole, kContent}) {
      const std::string why = wrong(name);
      if (!why.empty()) return refuse_message(why);
    }
    const std::string why = messages_.add(members_[kRole].text, members_[kContent].text, of_message_.is_trained);
    if (!why.empty()) refuse_message(why);
  }
  void refuse_message(const std::string& why, Errc code = Errc::Corrupt) {
    wrong_message_ = fmt::format("message {}: {}", num_messages_, why);
    wrong_code_ = code;
  }

  bool other(std::string_view what) {
    if (depth_ == 0)
      place_.refuse(
          fmt::format("is {}, where each line is an object{}", what, what == "an array" ? how_to_mend() : ""));
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
  Errc wrong_code_ = Errc::Corrupt;

  // The effect of members beside those that make a record or a message.
  struct Beside {
    std::optional<bool> is_trained{};
    std::string wrong_weight{}, unsupported{};
  };
  Beside of_record_, of_message_;
  MemberMeaning watched_ = MemberMeaning::Other;  // of the value that comes
  std::string watched_name_;
  Beside* watched_place_ = nullptr;
  bool is_container_watched_ = false;  // the value is an array or object that has just begun
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

// Members of messages that change nothing that is known, and are not read.
std::set<std::string> ignored_members(std::string_view record) {
  std::set<std::string> names;
  const auto json = nlohmann::json::parse(record, nullptr, false);
  if (!json.is_object() || !json.contains("messages")) return names;
  for (const auto& message : json["messages"])
    for (const auto& [name, value] : message.items())
      if (name != "role" && name != "content" && meaning_in_message(name) == MemberMeaning::Other) names.insert(name);
  return names;
}

// A document of JSON over several lines, of which the first holds a bracket alone.
void refuse_document(std::string_view line, const LinePlace& place) {
  const size_t first = line.find_first_not_of(" \t\r"), last = line.find_last_not_of(" \t\r");
  if (first != last || (line[first] != '[' && line[first] != '{')) return;
  place.refuse("this is a document of JSON over several lines, where each line is an object" +
               mended_by(line[first] == '[' ? ".[]" : ".", place));
}

// The form of the first line that is not blank.
RecordForm form_of(const MappedFile& file, const ChatTemplate& chat, TokenFile& of) {
  if (const std::string_view kind = kind_of_content(file.text()); !kind.empty()) {
    const std::string_view advice = how_to_get_text(kind);
    LinePlace{file.path(), 1}.refuse(
        fmt::format("this is {}, not a line of JSON{}{}", kind, advice.empty() ? "" : ": ", advice));
  }
  RecordForm form = RecordForm::Text;
  for_each_line(file, [&](std::string_view text, i64 line) {
    const LinePlace place{file.path(), line, of.compression()};
    refuse_document(text, place);
    form = LineHandler(text, place, chat).take().form;
    if (form != RecordForm::Messages) return false;
    if (const std::set<std::string> ignored = ignored_members(text); !ignored.empty())
      of.warn(fmt::format("{}:{}: members of messages are not read: \"{}\"", file.path(), line,
                          fmt::join(ignored, "\", \"")));
    return false;
  });
  return form;
}

}  // namespace

std::unique_ptr<TokenFile> open_jsonl_file(const std::string& path, const TextEncoding& encoding) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  const MappedFile& mapped = file->map_text(path);
  mapped.check_size();
  const ChatTemplate chat(encoding.chat_template);
  const RecordForm form = form_of(mapped, chat, *file);
  const auto parse = [&](std::string_view text, i64 line) {
    mapped.check_size();
    Record read = LineHandler(text, {path, line, file->compression()}, chat).take();
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
