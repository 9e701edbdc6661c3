// SPDX-License-Identifier: Apache-2.0
#include "data/chat_template.h"

#include <fmt/format.h>

#include "base/json.h"

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

}  // namespace ds
