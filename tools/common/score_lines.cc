// SPDX-License-Identifier: Apache-2.0
#include "common/score_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ds/error.h"

namespace ds::tools {
namespace {

const std::string& text_of(const LineJson& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string()) refuse_line(fmt::format("needs the text {}", name));
  return found->get_ref<const std::string&>();
}

}  // namespace

// The token before a text that has nothing before it: the one that begins texts, or else ends them.
i32 ScoreLines::prefix() const {
  const std::optional<i32> id = codec_.begin_or_end();
  if (!id)
    refuse_line(
        "the tokenizer has neither a token that begins texts nor one that ends them, so nothing is before the text");
  return *id;
}

// The end of a text without the blanks that Python's rstrip() removes.
size_t end_without_blanks(std::string_view text) {
  constexpr std::string_view kBlanks[] = {" ",
                                          "\t",
                                          "\n",
                                          "\v",
                                          "\f",
                                          "\r",
                                          "\x1c",
                                          "\x1d",
                                          "\x1e",
                                          "\x1f",
                                          "\xc2\x85",
                                          "\xc2\xa0",
                                          "\xe1\x9a\x80",
                                          "\xe2\x80\x80",
                                          "\xe2\x80\x81",
                                          "\xe2\x80\x82",
                                          "\xe2\x80\x83",
                                          "\xe2\x80\x84",
                                          "\xe2\x80\x85",
                                          "\xe2\x80\x86",
                                          "\xe2\x80\x87",
                                          "\xe2\x80\x88",
                                          "\xe2\x80\x89",
                                          "\xe2\x80\x8a",
                                          "\xe2\x80\xa8",
                                          "\xe2\x80\xa9",
                                          "\xe2\x80\xaf",
                                          "\xe2\x81\x9f",
                                          "\xe3\x80\x80"};
  for (;;) {
    const auto blank = std::ranges::find_if(kBlanks, [&](std::string_view b) { return text.ends_with(b); });
    if (blank == std::end(kBlanks)) return text.size();
    text.remove_suffix(blank->size());
  }
}

// As lm-evaluation-harness does: blanks at the end of the context belong to the continuation; both are encoded
// together, and the tokens after as many as the context alone has are those of the continuation, behind the context's
// own.
TextRequest ScoreLines::continuation(std::string context, std::string text) const {
  if (text.empty()) refuse_line("a continuation is empty");
  const size_t end = end_without_blanks(context);
  text.insert(0, context, end);
  context.resize(end);
  TextRequest r;
  r.max_tokens = r.logprobs = 0;
  if (context.empty()) {
    r.tokens = {prefix()};
    const std::vector<i32> ids = codec_.encode(text, false);
    const bool has_prefix = !ids.empty() && ids.front() == r.tokens.front();
    r.tokens.insert(r.tokens.end(), ids.begin() + (has_prefix ? 1 : 0), ids.end());
    r.scored_from = 1;
  } else {
    const std::vector<i32> whole = codec_.encode(context + text);
    r.tokens = codec_.encode(context);
    r.scored_from = std::ssize(r.tokens);
    if (r.scored_from < std::ssize(whole)) r.tokens.insert(r.tokens.end(), whole.begin() + r.scored_from, whole.end());
  }
  const i64 size = std::ssize(r.tokens), over = size - (context_ + 1);
  if (r.scored_from >= size) refuse_line("the continuation has no tokens of its own");
  if (over <= 0) return r;
  if (!cuts_ || over >= r.scored_from)
    refuse_line(fmt::format("{} tokens exceed the context of {}{}", size - 1, context_,
                            cuts_ ? "" : ": --cut leaves out the beginning of the text"));
  r.tokens.erase(r.tokens.begin(), r.tokens.begin() + over);
  r.scored_from -= over;
  return r;
}

// Each token is scored once, in windows as long as the context: the first begins with the prefix, later ones end where
// tokens have not been scored.
std::vector<TextRequest> ScoreLines::windows(const std::string& text) const {
  std::vector<i32> ids = codec_.encode(text, false);
  if (ids.empty()) refuse_line("the text has no tokens");
  ids.insert(ids.begin(), prefix());
  const i64 size = std::ssize(ids);
  std::vector<TextRequest> all;
  for (i64 from = 1; from < size;) {
    const i64 end = std::min(size, from + context_), begin = std::max<i64>(0, end - context_ - 1);
    all.push_back({.tokens = {ids.begin() + begin, ids.begin() + end},
                   .max_tokens = 0,
                   .logprobs = 0,
                   .scored_from = from - begin});
    from = end;
  }
  return all;
}

void ScoreLines::read(TextLine& line) const {
  const LineJson& object = line.object;
  if (object.contains("text")) {
    if (object.contains("context") || object.contains("continuations")) refuse_line("has a text and a context");
    line.requests = windows(text_of(object, "text"));
    return;
  }
  const std::string& context = text_of(object, "context");
  const auto list = object.find("continuations");
  if (list == object.end() || !list->is_array() || list->empty())
    refuse_line("needs a list of continuations, or a text");
  for (const LineJson& text : *list) {
    if (!text.is_string()) refuse_line("continuations contains something that is not a text");
    line.requests.push_back(continuation(context, text.get<std::string>()));
  }
}

TextLine ScoreLines::parse(std::string_view text, i64 number) const {
  return parse_text_line(text, number, [&](TextLine& line) { read(line); });
}

LineJson ScoreLines::result(const TextLine& line, const std::vector<TextResult>& results) const {
  if (!line.error.empty()) return {{"line", line.number}, {"error", line.error}};
  LineJson all = LineJson::object();
  const auto sum = [](const TextResult& r) {
    double total = 0;
    for (const TokenScore& s : r.prompt_scores) total += static_cast<double>(s.logprob);
    return total;
  };
  if (line.object.contains("text")) {
    double total = 0;
    i64 tokens = 0;
    for (const TextResult& r : results) total += sum(r), tokens += std::ssize(r.prompt_scores);
    all["logprob"] = total, all["tokens"] = tokens;
    all["perplexity"] = std::exp(-total / static_cast<double>(tokens));
    return all;
  }
  for (const TextResult& r : results) {
    LineJson tokens = LineJson::array();
    bool greedy = true;
    for (const TokenScore& s : r.prompt_scores) {
      greedy &= s.most_likely;
      LineJson token = token_json(codec_, s.id, false);
      token["id"] = s.id, token["logprob"] = s.logprob;
      tokens.push_back(std::move(token));
    }
    all["scores"].push_back({{"logprob", sum(r)}, {"is_greedy", greedy}, {"tokens", std::move(tokens)}});
  }
  return all;
}

std::string ScoreLines::members(const TextLine& line, std::string_view text) const {
  constexpr std::string_view kOurs[] = {"schema", "scores", "logprob", "tokens", "perplexity", "error", "line"};
  return line.object.empty() ? "" : members_of(text, kOurs);
}

}  // namespace ds::tools
