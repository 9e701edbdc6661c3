// SPDX-License-Identifier: Apache-2.0
#pragma once
// How messages of a conversation become text, by role: as ChatML, or as the configuration says.

#include <optional>
#include <string>
#include <string_view>

#include "ds/config.h"

namespace ds {

class Tokenizer;

class ChatTemplate {
 public:
  explicit ChatTemplate(const ChatTemplateConfig& config = {}) : config_(config) {}

  // A message becomes `before`, its content, `end` and `after`. Messages of the assistant are trained on: their content
  // and `end`, which is the text after the content without trailing blanks.
  struct Form {
    std::string before, end, after;
    bool is_learnt = false;
  };
  // Nothing: the template has no such role. ChatML has every role.
  std::optional<Form> form(std::string_view role) const;
  // Before the first message.
  const std::string& begin() const noexcept { return config_.begin; }
  bool is_chatml() const noexcept { return config_ == ChatTemplateConfig{}; }
  // The whole template, unless it is ChatML: part of the identity of a run's data.
  std::string description() const;

 private:
  ChatTemplateConfig config_;
};

// Whether ChatML suits this tokenizer, whose path is as in open_tokenizer(): a warning, or empty. Throws
// Errc::Unavailable if the tokenizer has a chat template of its own, which is not interpreted, in another form.
std::string check_chatml(const Tokenizer& tokenizer, const std::string& path);

}  // namespace ds
