// SPDX-License-Identifier: Apache-2.0
#include "data/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "data/tokenizer.h"
#include "data/tokenizer/files.h"

namespace ds {

std::optional<ChatTemplate::Form> ChatTemplate::form(std::string_view role) const {
  if (is_chatml()) return Form{fmt::format("<|im_start|>{}\n", role), "<|im_end|>", "\n", role == "assistant"};
  const std::string* const text = role == "system"      ? &config_.system
                                  : role == "user"      ? &config_.user
                                  : role == "assistant" ? &config_.assistant
                                  : role == "tool"      ? &config_.tool
                                                        : nullptr;
  if (text == nullptr || text->empty()) return std::nullopt;
  const size_t at = text->find(kChatContent);
  Form form{.before = text->substr(0, at),
            .end = text->substr(at + kChatContent.size()),
            .after = "",
            .is_learnt = role == "assistant"};
  const size_t last = form.end.find_last_not_of(" \t\r\n") + 1;
  form.after = form.end.substr(last);
  form.end.resize(last);
  return form;
}

std::string ChatTemplate::description() const {
  if (is_chatml()) return {};
  return Json::array({config_.begin, config_.system, config_.user, config_.assistant, config_.tool}).dump();
}

namespace {

constexpr std::string_view kBegin = "<|im_start|>", kEnd = "<|im_end|>";

bool is_one_token(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<i32> ids;
  tokenizer.encode(text, ids);
  return ids.size() == 1;
}

std::string without_comments(std::string_view jinja) {
  std::string text;
  for (size_t at = 0; at < jinja.size();) {
    const size_t begin = std::min(jinja.find("{#", at), jinja.size());
    text += jinja.substr(at, begin - at);
    const size_t end = jinja.find("#}", begin);
    at = end == jinja.npos ? jinja.size() : end + 2;
  }
  return text;
}

// Special tokens of other forms beside ChatML's, as Phi-4's <|im_sep|>.
bool has_other_tokens(std::string_view jinja) {
  for (size_t at = jinja.find("<|"); at != jinja.npos; at = jinja.find("<|", at + 2)) {
    const std::string_view rest = jinja.substr(at);
    if (!rest.starts_with(kBegin) && !rest.starts_with(kEnd) && !rest.starts_with("<|endoftext|>")) return true;
  }
  return false;
}

// The end of a tag that begins at `from`, which is behind its closing brace; strings may hold braces too.
size_t tag_end(std::string_view jinja, size_t from) {
  const std::string_view close = jinja[from + 1] == '%' ? "%}" : "}}";
  char quote = '\0';
  for (size_t i = from + 2; i < jinja.size(); ++i) {
    const char c = jinja[i];
    if (quote != '\0') {
      if (c == '\\') ++i;
      if (c == quote) quote = '\0';
    } else if (c == '\'' || c == '"') {
      quote = c;
    } else if (jinja.substr(i).starts_with(close)) {
      return i + 2;
    }
  }
  return jinja.size();
}

// A tag without white space outside of strings, and with one spelling of strings.
std::string normal_tag(std::string_view tag) {
  std::string text;
  char quote = '\0';
  for (const char c : tag) {
    if (quote == '\0' && (c == ' ' || c == '\t' || c == '\r' || c == '\n')) continue;
    if (quote == '\0' && (c == '\'' || c == '"')) {
      quote = c;
      text += '\'';
    } else if (c == quote) {
      quote = '\0';
      text += '\'';
    } else {
      text += c == '\n' ? "\\n" : std::string(1, c);
    }
  }
  return text;
}

// A template in one spelling: its text between tags as transformers has Jinja write it.
std::string normal(std::string_view jinja) {
  constexpr std::string_view kBlank = " \t\r\n";
  if (jinja.ends_with('\n')) jinja.remove_suffix(1);
  std::string text;
  bool trims = false, was_block = false;
  for (size_t at = 0; at < jinja.size();) {
    size_t begin = at;
    while (begin < jinja.size() && !jinja.substr(begin).starts_with("{{") && !jinja.substr(begin).starts_with("{%"))
      ++begin;
    std::string_view between = jinja.substr(at, begin - at);
    const bool at_line = at == 0 || between.find('\n') != between.npos;
    if (trims) between.remove_prefix(std::min(between.find_first_not_of(kBlank), between.size()));
    if (!trims && was_block && between.starts_with('\n')) between.remove_prefix(1);
    if (begin < jinja.size()) {
      const std::string_view tag = jinja.substr(begin);
      const bool is_block = tag[1] == '%';
      if (tag.substr(2).starts_with('-')) {
        between = between.substr(0, between.find_last_not_of(kBlank) + 1);
      } else if (is_block && at_line) {
        const size_t last = between.find_last_not_of(" \t") + 1;  // blanks before a tag that begins a line
        if (last == 0 || between[last - 1] == '\n') between = between.substr(0, last);
      }
    }
    text += between;
    if (begin == jinja.size()) break;
    const size_t end = tag_end(jinja, begin);
    std::string tag = normal_tag(jinja.substr(begin, end - begin));
    was_block = tag.size() > 1 && tag[1] == '%';
    trims = tag.size() > 5 && tag[tag.size() - 3] == '-';
    if (trims) tag.erase(tag.size() - 3, 1);
    if (tag.size() > 2 && tag[2] == '-') tag.erase(2, 1);
    text += tag;
    at = end;
  }
  const auto replace = [&](std::string_view from, std::string_view to) {
    for (size_t found = text.find(from); found != text.npos; found = text.find(from, found + to.size()))
      text.replace(found, from.size(), to);
  };
  replace("message.role", "message['role']");
  replace("message.content", "message['content']");
  replace("'+'", "");  // two strings that are joined
  return text;
}

// Whether a template is ChatML and nothing else, as far as is known.
bool is_plain_chatml(std::string_view jinja) {
  constexpr std::string_view kLoop =
      "{%formessageinmessages%}{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>\\n'}}{%endfor%}";
  constexpr std::string_view kPrompt = "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}";
  const std::string text = normal(jinja);
  if (!text.starts_with(kLoop)) return false;
  std::string rest = text.substr(kLoop.size());
  std::erase_if(rest, [](char c) { return c == ' ' || c == '\n'; });  // around what no message has
  return rest.empty() || rest == kPrompt;
}

}  // namespace

std::string check_chatml(const Tokenizer& tokenizer, const std::string& path) {
  const std::string jinja = without_comments(tokenizer::read_chat_template(path).value_or(""));
  const bool has_one = jinja.find_first_not_of(" \t\r\n") != jinja.npos;
  DS_CHECK(
      !has_one || (jinja.find(kBegin) != jinja.npos && !has_other_tokens(jinja)), Errc::Unavailable,
      "messages would become ChatML, and the chat_template of the tokenizer '{}' is another form, which libds does "
      "not interpret: write it out in data.chat_template (assistant, user, system, ..; ds-config(5) has an "
      "example), or convert the messages to \"prompt\" and \"completion\"",
      path);
  if (!is_one_token(tokenizer, kBegin) || !is_one_token(tokenizer, kEnd))
    return fmt::format(
        "messages become ChatML, whose {} and {} are not tokens of the tokenizer '{}' and are cut into "
        "pieces; data.chat_template writes out another form",
        kBegin, kEnd, path);
  if (has_one && !is_plain_chatml(jinja))
    return fmt::format(
        "messages become plain ChatML: the chat_template of the tokenizer '{}' is another one and is not interpreted; "
        "where it differs (names of roles, white space, a system message, bos_token, reasoning) it is not followed; "
        "data.chat_template writes a form out",
        path);
  return {};
}

}  // namespace ds
