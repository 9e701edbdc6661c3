// SPDX-License-Identifier: Apache-2.0
#pragma once
// Records of text, whatever file they come from: what they are trained on, and how they become the ids of a file.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/token_file.h"

namespace ds {

// What a record is trained on, in pieces that are encoded each for itself.
struct Segment {
  std::string text;
  bool is_target;  // its tokens are to be predicted
};

// Which members make a record's segments. All records of a file are of one form.
enum class RecordForm : u8 { Text, Prompt, Messages };
std::string_view form_name(RecordForm form);  // "a prompt and its completion"

struct Record {
  RecordForm form = RecordForm::Text;
  std::vector<Segment> segments;

  static Record of_text(std::string text) { return {RecordForm::Text, {{std::move(text), true}}}; }
  static Record of_prompt(std::string prompt, std::string completion) {
    return {RecordForm::Prompt, {{std::move(prompt), false}, {std::move(completion), true}}};
  }
  void append(std::string_view text, bool is_target) {
    if (segments.empty() || segments.back().is_target != is_target) segments.push_back({"", is_target});
    segments.back().text += text;
  }
};

// Messages, one behind the other. What the assistant says is predicted, with what ends it.
class Conversation {
 public:
  explicit Conversation(const ChatTemplate& chat) : chat_(chat) {}
  // Why it cannot be; empty: it is added.
  std::string add(std::string_view role, std::string_view content);
  Record take() { return std::move(record_); }

 private:
  const ChatTemplate& chat_;
  Record record_{RecordForm::Messages, {}};
};

// Records that wait for each other, and become the ids of a file by several threads.
class RecordIds {
 public:
  // `kind`: of the file, for its fingerprint ("JSONL, %s in a line", where %s is the form). `place`: what messages say
  // of a record by its number: "a.jsonl:7". `parse`: makes a record of a line, in one of the threads.
  RecordIds(TokenFile& file, const TextEncoding& encoding, RecordForm form, std::string_view kind,
            std::function<std::string(i64)> place, std::function<Record(std::string_view, i64)> parse = {});
  // All are of the file's form. A line stays where it is until finish().
  void add(Record record, i64 number);
  void add_line(std::string_view line, i64 number);
  // Encodes all that wait. Throws what `parse` and the tokenizer do, of the first record that they refuse.
  void encode();
  // No more is to come: the file is to be read. Throws likewise, and Errc::Config where nothing of it is learnt.
  void finish();

 private:
  struct Waiting {
    std::string_view line;
    std::vector<Segment> segments;  // where there is no line
    i64 number;
    size_t bytes() const noexcept {
      size_t sum = sizeof *this + line.size();  // many texts may be empty
      for (const Segment& s : segments) sum += sizeof s + s.text.size();
      return sum;
    }
  };
  void wait(Waiting record);
  // Returns whether something of it is learnt.
  bool encode(const Waiting& record, std::vector<i32>& ids) const;
  static void mark(i32& id) { id |= TokenIds::kNoTarget; }

  TokenFile& file_;
  std::unique_ptr<Tokenizer> bytes_;  // where no other is given
  const Tokenizer& tokenizer_;
  RecordForm form_;
  std::function<std::string(i64)> place_;
  std::function<Record(std::string_view, i64)> parse_;
  std::optional<i32> end_;  // the token behind a record
  bool end_is_target_, is_learnt_;
  std::vector<Waiting> waiting_;
  size_t waiting_bytes_ = 0;
};

}  // namespace ds
