// SPDX-License-Identifier: Apache-2.0
#pragma once
// Records of text from files of any format: which of their parts are trained on, and how they become the ids of a file.

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/token_file.h"

namespace ds {

// A piece of a record, which is encoded separately.
struct Segment {
  std::string text;
  bool is_target;  // its tokens are predicted
};

// Which members make up a record. All records of a file have the same form.
enum class RecordForm : u8 { Text, Prompt, Messages };
std::string_view form_name(RecordForm form);  // "a prompt and its completion"

struct Record {
  RecordForm form = RecordForm::Text;
  std::vector<Segment> segments;
  i64 num_left_out = 0;  // messages, or completions, with weight 0

  static Record of_text(std::string text) { return {.segments = {{std::move(text), true}}}; }
  static Record of_prompt(std::string prompt, std::string completion) {
    return {.form = RecordForm::Prompt, .segments = {{std::move(prompt), false}, {std::move(completion), true}}};
  }
  // Excludes all of it from training.
  void leave_out() {
    const auto is_target = [](const Segment& segment) { return segment.is_target; };
    num_left_out += std::ranges::count_if(segments, is_target);
    for (Segment& segment : segments) segment.is_target = false;
  }
  void append(std::string_view text, bool is_target) {
    if (segments.empty() || segments.back().is_target != is_target) segments.push_back({"", is_target});
    segments.back().text += text;
  }
};

// Other members of a record or of one of its messages.
enum class MemberMeaning : u8 {
  Other,        // does not change the text: an identifier, a source, a date
  Weight,       // 0 or false: not trained on; 1 or true: trained on
  Mask,         // true: not trained on
  Unsupported,  // changes the text of a template or the loss in a way that libds does not support
};
MemberMeaning meaning_in_record(std::string_view name);
MemberMeaning meaning_in_message(std::string_view name);

inline constexpr std::string_view kTextIsTrainedOnWhole =
    "its weight is 0, and a text is trained on whole: leave the record out";

// Whether a message with a member of meaning Weight or Mask and this value is trained on. Nothing: the value is neither
// 0 nor 1.
std::optional<bool> is_trained_on(MemberMeaning meaning, double value);

// Makes a record of messages. Those of the assistant are predicted, including their end.
class Conversation {
 public:
  explicit Conversation(const ChatTemplate& chat) : chat_(chat) {}
  // Adds a message. `is_trained`: whether it is trained on; nothing: its role decides. Returns why it cannot be added;
  // empty: it was.
  std::string add(std::string_view role, std::string_view content, std::optional<bool> is_trained = {});
  Record take() { return std::move(record_); }

 private:
  const ChatTemplate& chat_;
  Record record_{.form = RecordForm::Messages, .segments = {}};
};

// Collects records and encodes them as the ids of a file, with several threads. Each gets the token of its border,
// unless it has it there already; a note then says how many do.
class RecordIds {
 public:
  // `kind`: of the file, for its fingerprint ("JSONL, %s in a line", where %s is the form). `place`: what messages say
  // of a record by its number: "a.jsonl:7". `parse`: makes a record of a line, in one of the threads.
  RecordIds(TokenFile& file, const TextEncoding& encoding, RecordForm form, std::string_view kind,
            std::function<std::string(i64)> place, std::function<Record(std::string_view, i64)> parse = {});
  // All have the form of the file. A line must stay valid until finish().
  void add(Record record, i64 number);
  void add_line(std::string_view line, i64 number);
  // Encodes the collected records. Throws what `parse` or the tokenizer throws for the first record that they refuse.
  void encode();
  // Ends the file. Throws likewise, and Errc::Config if nothing in the file is trained on.
  void finish();

 private:
  struct Waiting {
    std::string_view line;
    std::vector<Segment> segments;  // where there is no line
    i64 number;
    i64 num_left_out = 0;
    size_t bytes() const noexcept {
      size_t sum = sizeof *this + line.size();  // many texts may be empty
      for (const Segment& s : segments) sum += sizeof s + s.text.size();
      return sum;
    }
  };
  void wait(Waiting record);
  // Counts of records: messages or completions that are left out, and records that have the token of a border.
  struct Counts {
    i64 left_out = 0, with_border = 0;
  };
  // Appends its ids, and returns whether anything in it is trained on.
  bool encode(const Waiting& record, std::vector<i32>& ids, Counts& counts) const;
  static void mark(i32& id) { id |= TokenIds::kNoTarget; }

  TokenFile& file_;
  std::unique_ptr<Tokenizer> bytes_;  // where no other is given
  const Tokenizer& tokenizer_;
  RecordForm form_;
  std::function<std::string(i64)> place_;
  std::function<Record(std::string_view, i64)> parse_;
  std::optional<i32> begin_, end_;  // the tokens before and after a record
  bool is_token_given_, is_learnt_, finds_borders_;
  i64 num_records_ = 0;
  Counts counts_;
  std::vector<Waiting> waiting_;
  size_t waiting_bytes_ = 0;
};

}  // namespace ds
