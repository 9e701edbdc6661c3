// SPDX-License-Identifier: Apache-2.0
#include "data/chat_template.h"

#include <fmt/format.h>

#include <cctype>
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

// Whether a template in ChatML's form writes a message of the system itself: letters follow the role.
bool adds_system_message(std::string_view jinja) {
  constexpr std::string_view kSystem = "<|im_start|>system";
  for (size_t at = jinja.find(kSystem); at != jinja.npos; at = jinja.find(kSystem, at + 1)) {
    std::string_view rest = jinja.substr(at + kSystem.size());
    if (rest.starts_with("\\n"))
      rest.remove_prefix(2);
    else if (rest.starts_with('\n'))
      rest.remove_prefix(1);
    if (!rest.empty() && std::isalpha(static_cast<unsigned char>(rest[0])) != 0) return true;
  }
  return false;
}

}  // namespace

std::string check_chatml(const Tokenizer& tokenizer, const std::string& path) {
  const std::optional<std::string> jinja = tokenizer::read_chat_template(path);
  DS_CHECK(
      !jinja || jinja->find(kBegin) != jinja->npos, Errc::Unavailable,
      "messages would become ChatML, and the chat_template of the tokenizer '{}' is another form, which libds does "
      "not interpret: write it out in data.chat_template (assistant, user, system, ..; ds-config(5) has an "
      "example), or convert the messages to \"prompt\" and \"completion\"",
      path);
  if (!is_one_token(tokenizer, kBegin) || !is_one_token(tokenizer, kEnd))
    return fmt::format(
        "messages become ChatML, whose {} and {} are not tokens of the tokenizer '{}' and are cut into "
        "pieces; data.chat_template writes out another form",
        kBegin, kEnd, path);
  if (jinja && adds_system_message(*jinja))
    return fmt::format(
        "the chat_template of the tokenizer '{}' begins conversations that have no system message with "
        "one of its own; libds adds none",
        path);
  return {};
}

}  // namespace ds
