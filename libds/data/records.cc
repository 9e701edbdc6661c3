// SPDX-License-Identifier: Apache-2.0
#include "data/records.h"

#include <algorithm>
#include <atomic>
#include <span>

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

namespace {

struct Member {
  std::string_view name;
  MemberMeaning meaning;
};

// By the formats of OpenAI, Mistral, axolotl, ms-swift and torchtune.
constexpr Member kWeights[] = {
    {"weight", MemberMeaning::Weight}, {"loss_weight", MemberMeaning::Weight}, {"loss", MemberMeaning::Weight},
    {"train", MemberMeaning::Weight},  {"training", MemberMeaning::Weight},    {"trainable", MemberMeaning::Weight},
    {"mask", MemberMeaning::Mask},     {"masked", MemberMeaning::Mask},
};

// Words of names that concern the loss, or that templates put into the text. A plural counts as the word.
constexpr std::string_view kWords[] = {"weight",    "loss",     "mask",    "masked",   "train",    "trained",
                                       "trainable", "ignore",   "ignored", "tool",     "image",    "audio",
                                       "video",     "function", "thought", "thinking", "reasoning"};
// Whole names: a word of theirs also stands in names that change nothing, such as model_name or finish_reason.
constexpr std::string_view kMessageNames[] = {"name",     "prefix", "channel",   "recipient", "refusal",
                                              "end_turn", "think",  "citations", "documents", "suffix"};
constexpr std::string_view kRecordNames[] = {"system",    "system_prompt", "system_message", "history",
                                             "documents", "suffix",        "chat_template",  "chat_template_kwargs"};

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Whether a word is `known` or its plural, in any case.
bool is_word(std::string_view word, std::string_view known) {
  if (word.size() > known.size() && lower(word.back()) == 's') word.remove_suffix(1);
  return std::ranges::equal(word, known, {}, lower);
}

// Whether one of a name's words satisfies is_known: "tool" and "calls" of "toolCalls" and of "tool_calls".
template <class F>
bool any_word(std::string_view name, F&& is_known) {
  size_t begin = 0;
  for (size_t i = 0; i <= name.size(); ++i) {
    const bool is_letter = i < name.size() && lower(name[i]) >= 'a' && lower(name[i]) <= 'z';
    const bool begins = is_letter && i > begin && lower(name[i]) != name[i] && lower(name[i - 1]) == name[i - 1];
    if (is_letter && !begins) continue;
    if (i > begin && is_known(name.substr(begin, i - begin))) return true;
    begin = is_letter ? i : i + 1;
  }
  return false;
}

MemberMeaning meaning_of(std::string_view name, std::span<const std::string_view> names) {
  if (const auto* const it = std::ranges::find(kWeights, name, &Member::name); it != std::end(kWeights))
    return it->meaning;
  const bool matters =
      std::ranges::find(names, name) != names.end() || any_word(name, [](std::string_view word) {
        return std::ranges::any_of(kWords, [&](std::string_view known) { return is_word(word, known); });
      });
  return matters ? MemberMeaning::Unsupported : MemberMeaning::Other;
}

}  // namespace

MemberMeaning meaning_in_record(std::string_view name) { return meaning_of(name, kRecordNames); }
MemberMeaning meaning_in_message(std::string_view name) { return meaning_of(name, kMessageNames); }

std::optional<bool> is_trained_on(MemberMeaning meaning, double value) {
  if (value != 0 && value != 1) return std::nullopt;
  return (value == 1) == (meaning == MemberMeaning::Weight);
}

std::string Conversation::add(std::string_view role, std::string_view content, std::optional<bool> is_trained) {
  if (role.empty() || role.find_first_of("\n<>|") != role.npos) return "its member \"role\" is no name of a role";
  constexpr std::string_view kOtherNames[] = {"model", "gpt", "chatgpt", "bot", "bing", "ai", "chatbot"};
  if (std::ranges::find(kOtherNames, role) != std::end(kOtherNames))
    return fmt::format("the role \"{}\" is not trained on; answers of the model have the role \"assistant\"", role);
  const std::optional<ChatTemplate::Form> form = chat_.form(role);
  if (!form) return fmt::format("data.chat_template has no form of the role \"{}\"", role);
  if (is_trained.value_or(false) && !form->is_learnt)
    return fmt::format("its weight asks for training on the role \"{}\"; messages of the assistant are trained on",
                       role);
  const bool is_target = is_trained.value_or(form->is_learnt);
  if (form->is_learnt && !is_target) ++record_.num_left_out;
  if (record_.segments.empty()) record_.append(chat_.begin(), false);
  record_.append(form->before, false);
  record_.append(content, is_target);
  record_.append(form->end, is_target);
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
      is_token_given_(encoding.documents.token >= 0),
      finds_borders_(encoding.documents.matters()) {
  const DocumentRule& rule = encoding.documents;
  // A conversation has an end of its own.
  if (form != RecordForm::Messages && rule.token < 0) end_ = tokenizer_.special(SpecialToken::Eos);
  if (rule.token >= 0) (rule.at == DocumentTokenAt::End ? end_ : begin_) = narrow<i32>(rule.token);
  file.has_document_tokens = rule.token >= 0;
  file.knows_borders = true;
  file.has_messages = form == RecordForm::Messages;
  file.reading = kind;
  if (begin_) file.reading += fmt::format(", {} before each", *begin_);
  if (end_) file.reading += fmt::format(", {} behind each", *end_);
  const ChatTemplate chat(encoding.chat_template);
  if (file.has_messages && chat.is_chatml() && encoding.tokenizer != nullptr) {
    if (const std::string caveat = check_chatml(tokenizer_, encoding.tokenizer_path); !caveat.empty())
      file.warn(fmt::format("data file '{}': {}", file.name, caveat));
  }
  if (file.has_messages && !chat.is_chatml()) file.reading += fmt::format(", as {}", chat.description());
  file.ids = std::make_unique<TokenIds>(tokenizer_, encoding.num_threads, file.name,
                                        std::max<i64>(rule.token, end_.value_or(0)),
                                        form == RecordForm::Text ? TokenMarks::None : TokenMarks::Some);
  is_learnt_ = form == RecordForm::Text;
}

void RecordIds::add(Record record, i64 number) {
  DS_ASSERT(record.form == form_);
  wait({{}, std::move(record.segments), number, record.num_left_out});
}

void RecordIds::add_line(std::string_view line, i64 number) { wait({line, {}, number}); }

void RecordIds::wait(Waiting record) {
  waiting_.push_back(std::move(record));
  waiting_bytes_ += waiting_.back().bytes();
  if (waiting_bytes_ >= TokenIds::kStretchBytes * static_cast<size_t>(file_.ids->num_threads())) encode();
}

void RecordIds::finish() {
  encode();
  DS_CHECK(is_learnt_, Errc::Config, "data file '{}': nothing in it is trained on: {}", file_.name,
           form_ == RecordForm::Messages ? "no message of the role \"assistant\" has a weight"
                                         : "all completions are empty, or have no weight");
  if (counts_.left_out > 0)
    file_.note(fmt::format("data file '{}': {} {} of weight 0 are not trained on", file_.name, counts_.left_out,
                           form_ == RecordForm::Messages ? "messages" : "completions"));
  if (counts_.with_border > 0)
    file_.note(fmt::format("data file '{}': {} of its {} records {} with {} {} already, which is not added again",
                           file_.name, counts_.with_border, num_records_, end_ ? "end" : "begin",
                           is_token_given_ ? "data.document_token" : "the tokenizer's end of text",
                           end_ ? *end_ : *begin_));
  file_.ids->map();
  file_.view_ids();
  file_.borders.finish(file_.view.count, file_.name);
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
  std::atomic<i64> left_out = 0, with_border = 0;
  std::vector<std::vector<i64>> ends(part);  // of the records of a part, in its ids
  i64 first = file_.ids->num_tokens();
  file_.ids->add_parts(part, [&](size_t i, std::vector<i32>& ids) {
    bool of_part = false;
    Counts counts;
    for (size_t r = begins[i]; r < begins[i + 1]; ++r) {
      of_part |= encode(waiting_[r], ids, counts);
      if (finds_borders_) ends[i].push_back(std::ssize(ids));
    }
    if (of_part) is_learnt = true;
    left_out += counts.left_out;
    with_border += counts.with_border;
  });
  for (const std::vector<i64>& of_part : ends) {
    for (const i64 end : of_part) file_.borders.add(first + end, file_.name);
    if (!of_part.empty()) first += of_part.back();
  }
  is_learnt_ = is_learnt;
  counts_.left_out += left_out;
  counts_.with_border += with_border;
  num_records_ += std::ssize(waiting_);
  waiting_.clear();
  waiting_bytes_ = 0;
}

bool RecordIds::encode(const Waiting& record, std::vector<i32>& ids, Counts& counts) const {
  Record parsed;
  const bool is_line = record.line.data() != nullptr;
  if (is_line) {
    parsed = parse_(record.line, record.number);
    DS_ASSERT(parsed.form == form_);
  }
  counts.left_out += is_line ? parsed.num_left_out : record.num_left_out;
  bool is_learnt = false, is_predicted = false;  // something in it; its last part
  const i64 first = std::ssize(ids);
  for (const Segment& segment : is_line ? parsed.segments : record.segments) {
    is_learnt |= segment.is_target && !segment.text.empty();
    is_predicted = segment.is_target;
    const size_t begin = ids.size();
    try {
      tokenizer_.encode(segment.text, ids);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}: {}", place_(record.number), e.what()));
    }
    if (!segment.is_target) std::for_each(ids.begin() + static_cast<i64>(begin), ids.end(), mark);
  }
  const bool has_ids = std::ssize(ids) > first;
  const auto add_border = [&](i32 token, i64 at, i64 neighbour, bool is_target) {
    i32* const there = has_ids ? &ids[static_cast<size_t>(neighbour)] : nullptr;
    if (there != nullptr && (*there & ~TokenIds::kNoTarget) == token) {
      ++counts.with_border;
      if (is_target) *there = token;
      return;
    }
    const auto added = ids.insert(ids.begin() + at, token);
    if (!is_target) mark(*added);
  };
  const i64 last = std::ssize(ids);
  if (begin_) add_border(*begin_, first, first, form_ != RecordForm::Messages);
  if (end_) {
    // The end of a completion is trained on if that is; a conversation has an end of its own.
    is_predicted &= form_ != RecordForm::Messages;
    add_border(*end_, last, last - 1, is_predicted);
    is_learnt |= is_predicted;
  }
  return is_learnt;
}

}  // namespace ds
