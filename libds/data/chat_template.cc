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

// Without what Jinja passes over, and in one spelling.
std::string normal(std::string_view jinja) {
  std::string text;
  for (size_t i = 0; i < jinja.size(); ++i) {
    const char c = jinja[i];
    const bool trims = c == '-' && ((i > 0 && (jinja[i - 1] == '%' || jinja[i - 1] == '{')) ||
                                    (i + 1 < jinja.size() && (jinja[i + 1] == '%' || jinja[i + 1] == '}')));
    if (trims || c == ' ' || c == '\t' || c == '\r') continue;
    text += c == '"' ? "'" : c == '\n' ? "\\n" : std::string(1, c);
  }
  const auto replace = [&](std::string_view from, std::string_view to) {
    for (size_t at = text.find(from); at != text.npos; at = text.find(from, at + to.size()))
      text.replace(at, from.size(), to);
  };
  replace("%}\\n", "%}");  // newlines between tags
  replace("}}\\n", "}}");
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
  return text == kLoop || text == std::string(kLoop).append(kPrompt);
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
        "messages become plain ChatML: the chat_template of the tokenizer '{}' is not interpreted, and what "
        "it adds (such as a system message, bos_token or reasoning) is left out; data.chat_template writes "
        "a form out",
        path);
  return {};
}

}  // namespace ds
