// SPDX-License-Identifier: Apache-2.0
#pragma once
// The chat template of a tokenizer: messages become the text that transformers' apply_chat_template gives, byte for
// byte. (ChatTemplate, in chat_template.h, is the form that a configuration writes out for training data.)

#include <ctime>
#include <map>
#include <optional>
#include <string>

#include "base/json.h"
#include "data/jinja/template.h"

namespace ds {

class Tokenizer;

// Beside the messages. Null pointers: not given, and None for the template.
struct ChatOptions {
  const Json* tools = nullptr;      // an array of objects: JSON schemas
  const Json* documents = nullptr;  // an array of objects
  bool add_generation_prompt = false;
  // The text ends with the content of the last message, for a model that continues it.
  bool continue_final_message = false;
  Json variables = Json::object();      // of the template, as enable_thinking
  std::optional<std::time_t> now = {};  // for templates that write the date; nothing: the clock
};

struct ChatText {
  std::string text;
  // Whether the text begins with the tokenizer's bos_token. apply_chat_template encodes a text without special tokens
  // of its own, so only the template decides whether there is one.
  bool begins_with_bos = false;
};

class TokenizerTemplate {
 public:
  // `sources` by name: "default", and perhaps "tool_use" for conversations with tools. `special_tokens`: an object with
  // the members bos_token, eos_token, .. that the tokenizer has. `place` names the templates in errors. Throws as
  // jinja::Template, and Errc::Unavailable if there is neither a default nor a tool_use.
  TokenizerTemplate(const std::map<std::string, std::string>& sources, Json special_tokens, const std::string& place);

  // The templates of the tokenizer's folder; nothing if it has none. `path` as of open_tokenizer(). In this order, as
  // AutoTokenizer reads them: chat_template.jinja and additional_chat_templates/*.jinja, else "chat_template" of
  // tokenizer_config.json. Throws Errc::Io, Errc::Corrupt and Errc::Unavailable.
  static std::optional<TokenizerTemplate> open(const Tokenizer& tokenizer, const std::string& path);

  // `messages`: an array of objects. Reentrant. Throws Errc::Config for messages that are none or that the template
  // refuses, with its message; otherwise as jinja::Template::render().
  ChatText render(const Json& messages, const ChatOptions& options = {}) const;

 private:
  const jinja::Template& choose(bool has_tools) const;

  std::map<std::string, jinja::Template> templates_;
  Json special_tokens_;
  std::string place_;
};

}  // namespace ds
