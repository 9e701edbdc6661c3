// SPDX-License-Identifier: Apache-2.0
#include "data/records.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"

namespace ds {

std::string_view form_name(RecordForm form) {
  switch (form) {
    case RecordForm::Text: return "a text";
    case RecordForm::Prompt: return "a prompt and its completion";
    case RecordForm::Messages: return "messages";
  }
  return "?";
}

std::string Conversation::add(std::string_view role, std::string_view content) {
  if (role.empty() || role.find_first_of("\n<>|") != role.npos) return "its member \"role\" is no name of a role";
  const std::optional<ChatTemplate::Form> form = chat_.form(role);
  if (!form) return fmt::format("data.chat_template has no form of the role \"{}\"", role);
  if (record_.segments.empty()) record_.append(chat_.begin(), false);
  record_.append(form->before, false);
  record_.append(content, form->is_learnt);
  record_.append(form->end, form->is_learnt);
  record_.append(form->after, false);
  return {};
}

RecordIds::RecordIds(TokenFile& file, const TextEncoding& encoding, RecordForm form, std::string_view kind,
                     std::function<std::string(i64)> place, std::function<Record(std::string_view, i64)> parse)
    : file_(file),
      bytes_(encoding.tokenizer == nullptr ? open_tokenizer("bytes") : nullptr),
      tokenizer_(bytes_ ? *bytes_ : *encoding.tokenizer),
      form_(form),
      place_(std::move(place)),
      parse_(std::move(parse)),
      end_is_target_(form != RecordForm::Messages) {
  // A conversation has an end of its own.
  if (form != RecordForm::Messages) end_ = tokenizer_.special(SpecialToken::Eos);
  if (encoding.document_token >= 0) end_ = narrow<i32>(encoding.document_token);
  file.has_messages = form == RecordForm::Messages;
  file.reading = kind;
  if (end_) file.reading += fmt::format(", {} behind each", *end_);
  const ChatTemplate chat(encoding.chat_template);
  if (file.has_messages && !chat.is_chatml()) file.reading += fmt::format(", as {}", chat.description());
  file.ids = std::make_unique<TokenIds>(tokenizer_, encoding.num_threads, file.name, end_.value_or(0),
                                        form == RecordForm::Text ? TokenMarks::None : TokenMarks::Some);
  is_learnt_ = form == RecordForm::Text || (end_ && end_is_target_);
}

void RecordIds::add(Record record, i64 number) {
  DS_ASSERT(record.form == form_);
  wait({{}, std::move(record.segments), number});
}

void RecordIds::add_line(std::string_view line, i64 number) { wait({line, {}, number}); }

void RecordIds::wait(Waiting record) {
  waiting_.push_back(std::move(record));
  waiting_bytes_ += waiting_.back().bytes();
  if (waiting_bytes_ >= TokenIds::kStretchBytes * static_cast<size_t>(file_.ids->num_threads())) encode();
}

void RecordIds::finish() {
  encode();
  DS_CHECK(is_learnt_, Errc::Config, "data file '{}': nothing of it is learnt: {}", file_.name,
           form_ == RecordForm::Messages ? "no message has the role \"assistant\"" : "all completions are empty");
  file_.ids->map();
  file_.view_ids();
}

// All that wait, cut into parts of about equal size.
void RecordIds::encode() {
  std::vector<size_t> begins;
  size_t part = 0, bytes = 0;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (bytes >= part * (waiting_bytes_ / static_cast<size_t>(file_.ids->num_threads()) + 1)) {
      begins.push_back(i);
      ++part;
    }
    bytes += waiting_[i].bytes();
  }
  begins.push_back(waiting_.size());
  std::atomic<bool> is_learnt = is_learnt_;
  file_.ids->add_parts(part, [&](size_t i, std::vector<i32>& ids) {
    bool of_part = false;
    for (size_t r = begins[i]; r < begins[i + 1]; ++r) of_part |= encode(waiting_[r], ids);
    if (of_part) is_learnt = true;
  });
  is_learnt_ = is_learnt;
  waiting_.clear();
  waiting_bytes_ = 0;
}

bool RecordIds::encode(const Waiting& record, std::vector<i32>& ids) const {
  Record parsed;
  if (record.line.data() != nullptr) {
    parsed = parse_(record.line, record.number);
    DS_ASSERT(parsed.form == form_);
  }
  bool is_learnt = false;
  for (const Segment& segment : record.line.data() != nullptr ? parsed.segments : record.segments) {
    is_learnt |= segment.is_target && !segment.text.empty();
    const size_t begin = ids.size();
    try {
      tokenizer_.encode(segment.text, ids);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}: {}", place_(record.number), e.what()));
    }
    if (!segment.is_target) std::for_each(ids.begin() + static_cast<i64>(begin), ids.end(), mark);
  }
  if (end_) {
    ids.push_back(*end_);
    if (!end_is_target_) mark(ids.back());
  }
  return is_learnt;
}

}  // namespace ds
