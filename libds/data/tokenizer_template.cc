// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "data/jinja/text.h"
#include "data/tokenizer.h"
#include "data/tokenizer/files.h"

namespace ds {
namespace {

constexpr std::string_view kContinueTag = "CONTINUE_FINAL_MESSAGE_TAG ";
constexpr const char* kReasoning[] = {"reasoning_content", "thinking", "reasoning"};

void require_objects(const Json& list, const char* name) {
  DS_CHECK(list.is_array(), Errc::Config, "\"{}\" must be an array", name);
  for (const Json& item : list) DS_CHECK(item.is_object(), Errc::Config, "each of \"{}\" must be an object", name);
}

// As transformers gives a message to a template: without members that are null, and with its reasoning under the names
// that templates read.
Json normal_message(const Json& message) {
  Json normal = Json::object();
  const Json* reasoning = nullptr;
  for (const char* const name : kReasoning)
    if (const auto found = message.find(name); reasoning == nullptr && found != message.end() && !found->is_null())
      reasoning = &*found;
  if (reasoning != nullptr) normal["thinking"] = *reasoning;
  for (const auto& [key, value] : message.items())
    if (!value.is_null()) normal[key] = value;
  if (reasoning != nullptr) normal["reasoning_content"] = *reasoning;
  return normal;
}

// Adds the tag to the content of the last message, or to its last part that has a text. Returns that text.
std::string tag_content(Json& message) {
  const auto content = message.find("content");
  DS_CHECK(content != message.end(), Errc::Config, "the last message has no \"content\" that could be continued");
  Json* text = &*content;
  if (content->is_array()) {
    const auto part = std::find_if(content->rbegin(), content->rend(),
                                   [](const Json& p) { return p.is_object() && p.contains("text"); });
    DS_CHECK(part != content->rend(), Errc::Config,
             "the \"content\" of the last message has no text that could be continued");
    text = &(*part)["text"];
  }
  DS_CHECK(text->is_string(), Errc::Config, "the \"content\" of the last message is no text that could be continued");
  const std::string before = text->get<std::string>();
  *text = before + std::string(kContinueTag);
  return before;
}

// The text up to the tag, which a template may have stripped of its blank together with blanks before it.
std::string cut_at_tag(std::string text, const std::string& content, const std::string& place) {
  const std::string_view bare_tag = jinja::strip_end(kContinueTag);
  const size_t at = text.rfind(bare_tag);
  DS_CHECK(at != text.npos && text.find(jinja::strip_end(jinja::strip_begin(content))) != text.npos, Errc::Config,
           "{}: the last message cannot be continued, since the template does not write its content unchanged", place);
  const bool is_kept = std::string_view(text).substr(at).starts_with(kContinueTag);
  text.resize(at);
  return is_kept ? text : std::string(jinja::strip_end(text));
}

}  // namespace

TokenizerTemplate::TokenizerTemplate(const std::map<std::string, std::string>& sources, Json special_tokens,
                                     const std::string& place)
    : special_tokens_(std::move(special_tokens)), place_(place) {
  for (const char* const name : {"default", "tool_use"}) {
    const auto source = sources.find(name);
    if (source != sources.end())
      templates_.emplace(
          name, jinja::Template(source->second, sources.size() > 1 ? fmt::format("{} ({})", place, name) : place));
  }
  DS_CHECK(!templates_.empty(), Errc::Unavailable, "{}: none of several templates is named \"default\"", place);
}

std::optional<TokenizerTemplate> TokenizerTemplate::open(const Tokenizer& tokenizer, const std::string& path) {
  const tokenizer::ChatTemplates found = tokenizer::read_chat_templates(path);
  if (found.sources.empty()) return std::nullopt;
  Json special = Json::object();
  for (const NamedToken& token : tokenizer.facts().named)
    if (!token.role.empty()) special[token.role] = token.content;
  return TokenizerTemplate(found.sources, std::move(special), found.place);
}

const jinja::Template& TokenizerTemplate::choose(bool has_tools) const {
  if (const auto with_tools = templates_.find("tool_use"); has_tools && with_tools != templates_.end())
    return with_tools->second;
  const auto found = templates_.find("default");
  DS_CHECK(found != templates_.end(), Errc::Unavailable, "{}: the only template is for conversations with tools",
           place_);
  return found->second;
}

ChatText TokenizerTemplate::render(const Json& messages, const ChatOptions& options) const {
  require_objects(messages, "messages");
  DS_CHECK(!messages.empty(), Errc::Config, "a conversation needs a message");
  DS_CHECK(!options.continue_final_message || !options.add_generation_prompt, Errc::Config,
           "a conversation either continues its last message or prompts for another one, not both");
  if (options.tools != nullptr) require_objects(*options.tools, "tools");
  if (options.documents != nullptr) require_objects(*options.documents, "documents");
  Json variables = special_tokens_;
  for (const auto& [name, value] : options.variables.items()) variables[name] = value;
  Json normal = Json::array();
  for (const Json& message : messages) normal.push_back(normal_message(message));
  std::string content;
  if (options.continue_final_message) content = tag_content(normal.back());
  variables["messages"] = std::move(normal);
  variables["tools"] = options.tools != nullptr ? *options.tools : Json();
  variables["documents"] = options.documents != nullptr ? *options.documents : Json();
  variables["add_generation_prompt"] = options.add_generation_prompt;
  ChatText result;
  result.text = choose(options.tools != nullptr).render(variables, options.now.value_or(std::time(nullptr)));
  if (options.continue_final_message) result.text = cut_at_tag(std::move(result.text), content, place_);
  const auto bos = special_tokens_.find("bos_token");
  result.begins_with_bos = bos != special_tokens_.end() && bos->is_string() &&
                           !bos->get_ref<const std::string&>().empty() &&
                           result.text.starts_with(bos->get_ref<const std::string&>());
  return result;
}

}  // namespace ds
