// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a message of a conversation becomes, by who says it: ChatML's form, or one that the configuration spells out.

#include <optional>
#include <string>
#include <string_view>

#include "ds/config.h"

namespace ds {

class Tokenizer;

class ChatTemplate {
 public:
  explicit ChatTemplate(const ChatTemplateConfig& config = {}) : config_(config) {}

  // A message is `before`, what is said, `end` and `after`. Of the assistant's what is said and `end` are learnt, which
  // is what the template has behind it but for blanks at the very end.
  struct Form {
    std::string before, end, after;
    bool is_learnt = false;
  };
  // Nothing: nobody of that role may speak. Of ChatML every role may.
  std::optional<Form> form(std::string_view role) const;
  // Before the first message.
  const std::string& begin() const noexcept { return config_.begin; }
  bool is_chatml() const noexcept { return config_ == ChatTemplateConfig{}; }
  // All that it says, where it is not ChatML; what a run was trained with depends on it.
  std::string description() const;

 private:
  ChatTemplateConfig config_;
};

// Whether messages may become ChatML for this tokenizer, whose path is as of open_tokenizer: a warning for somebody to
// print, or empty. Throws Errc::Unavailable where the tokenizer's own chat template (which is not interpreted) is
// another form.
std::string check_chatml(const Tokenizer& tokenizer, const std::string& path);

}  // namespace ds
