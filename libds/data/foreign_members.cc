// SPDX-License-Identifier: Apache-2.0
#include "data/foreign_members.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "data/records.h"

namespace ds {
namespace {

using nlohmann::json;

bool has_string(const json& record, std::string_view name) {
  const auto it = record.find(name);
  return it != record.end() && it->is_string();
}

// Whether a member asks for something that no filter would keep: a weight, a message of the system, tools.
bool has_more(const json& object, MemberMeaning (*meaning)(std::string_view)) {
  for (const auto& [name, value] : object.items()) {
    const bool is_nothing =
        value.is_null() || value == false || value == "" || ((value.is_array() || value.is_object()) && value.empty());
    if (meaning(name) != MemberMeaning::Other && !is_nothing) return true;
  }
  return false;
}

// The first object of a member that is an array of them; null: it is none.
const json* first_object(const json& record, std::string_view name) {
  const auto it = record.find(name);
  return it != record.end() && it->is_array() && !it->empty() && it->front().is_object() ? &it->front() : nullptr;
}

std::string filter_for_messages(const json& record) {
  for (const std::string_view name : {"messages", "conversations", "conversation", "dialogue", "dialog", "turns"}) {
    const json* const message = first_object(record, name);
    if (message == nullptr || has_more(*message, meaning_in_message)) continue;
    if (has_string(*message, "from") && has_string(*message, "value"))
      return fmt::format(
          "{{messages: [.{}[] | {{role: ({{human: \"user\", gpt: \"assistant\"}}[.from] // .from), content: "
          ".value}}]}}",
          name);
    if (has_string(*message, "role") && has_string(*message, "content") && name != "messages")
      return fmt::format("{{messages: .{}}}", name);
  }
  return {};
}

std::string filter_for_prompt(const json& record) {
  struct Names {
    std::string_view prompt, completion;
  };
  // An instruction may have an input or a context beside it.
  constexpr Names kInstructions[] = {
      {"instruction", "output"}, {"instruction", "response"}, {"instruction", "completion"}};
  for (const auto& [prompt, completion] : kInstructions) {
    if (!has_string(record, prompt) || !has_string(record, completion)) continue;
    return fmt::format(
        "{{prompt: (([.{}, .input // .context // \"\"] | map(select(. != \"\")) | join(\"\\n\\n\")) + \"\\n\\n\"), "
        "completion: .{}}}",
        prompt, completion);
  }
  constexpr Names kPairs[] = {{"prompt", "response"}, {"prompt", "output"},     {"prompt", "answer"},
                              {"prompt", "chosen"},   {"question", "answer"},   {"query", "answer"},
                              {"query", "response"},  {"input", "output"},      {"input", "target"},
                              {"inputs", "targets"},  {"question", "response"}, {"problem", "solution"}};
  for (const auto& [prompt, completion] : kPairs)
    if (has_string(record, prompt) && has_string(record, completion))
      return fmt::format("{{prompt: .{}, completion: .{}}}", prompt, completion);
  return {};
}

}  // namespace

std::string jq_filter_for(const json& record) {
  if (record.is_array()) {
    const bool is_conversation = !record.empty() && record.front().is_object() && has_string(record.front(), "role");
    return is_conversation ? "{messages: .}" : ".[]";
  }
  if (!record.is_object() || has_more(record, meaning_in_record)) return {};
  if (std::string filter = filter_for_messages(record); !filter.empty()) return filter;
  if (std::string filter = filter_for_prompt(record); !filter.empty()) return filter;
  for (const std::string_view name :
       {"content", "raw_content", "body", "document", "article", "sentence", "code", "txt"})
    if (has_string(record, name)) return fmt::format("{{text: .{}}}", name);
  for (const std::string_view name : {"data", "rows", "examples", "instances", "train"})
    if (record.size() == 1 && first_object(record, name) != nullptr) return fmt::format(".{}[]", name);
  return {};
}

}  // namespace ds
