// SPDX-License-Identifier: Apache-2.0
// Files of prompts: texts, one in each line, or JSON Lines; and their tokens.

#include "infer/prompts.h"

#include "base/file.h"
#include "base/json.h"
#include "config/model_config.h"

namespace ds {
namespace {

constexpr i64 kMostBytes = i64{1} << 30;

Prompt parse_prompt(std::string_view line, const std::string& name, i64 number) {
  const std::string place = fmt::format("{}:{}", name, number);
  const Json root = parse_json(line, place, {.comments = false, .places = false}).root;
  const auto text = root.is_object() ? root.find("prompt") : root.end();
  DS_CHECK(root.is_object() && text != root.end() && text->is_string(), Errc::Config,
           "{}: a prompt is an object with the text \"prompt\"", place);
  return {text->get<std::string>(), std::string(line), place};
}

}  // namespace

std::vector<Prompt> read_prompts(const std::string& path) {
  const bool dash = path == "-";
  const std::string name = dash ? "standard input" : path;
  std::string text;
  try {
    text = dash ? read_standard_input(kMostBytes) : read_named_text(path, kMostBytes);
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{} {}", name, e.what()));
  }
  std::vector<Prompt> prompts;
  std::string_view rest = text;
  if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);  // a byte-order mark
  const size_t first = rest.find_first_not_of(" \t\r\n");
  const bool json = first != std::string_view::npos && rest[first] == '{';
  for (i64 number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (json && line.find_first_not_of(" \t") == std::string_view::npos) continue;
    prompts.push_back(json ? parse_prompt(line, name, number)
                           : Prompt{std::string(line), {}, fmt::format("{}:{}", name, number)});
  }
  DS_CHECK(!prompts.empty(), Errc::Config, "{}: there are no prompts in it", name);
  return prompts;
}

namespace infer {

std::vector<std::vector<i32>> tokens_of(const ModelConfig& model, const Tokenizer& tokenizer,
                                        std::span<const Prompt> prompts, i64 max_tokens) {
  DS_CHECK(model.causal(), Errc::Unavailable,
           "a model of type \"{}\" sees the whole text and fills in masks: it cannot continue a prompt",
           family_name(model.family));
  const std::optional<i32> bos = tokenizer.special(SpecialToken::Bos);
  std::vector<std::vector<i32>> ids;
  constexpr i64 kShown = 20;
  std::string mistakes;
  i64 num_mistakes = 0;
  Errc code = Errc::Config;
  const auto mistake = [&](std::string&& text) {
    if (num_mistakes++ < kShown) mistakes += (mistakes.empty() ? "" : "\n  ") + text;
  };
  for (const Prompt& prompt : prompts) {
    std::vector<i32>& of = ids.emplace_back();
    if (tokenizer.adds_bos() && bos) of.push_back(*bos);
    tokenizer.encode(prompt.text, of);
    const std::string which = !prompt.place.empty() ? prompt.place + ": the prompt"
                              : prompts.size() > 1  ? fmt::format("prompt {}", ids.size())
                                                    : "the prompt";
    const auto outside = std::ranges::find_if(of, [&](i32 id) { return id >= model.vocab_size; });
    if (of.empty()) {
      mistake(which + " is empty");
    } else if (outside != of.end()) {
      mistake(fmt::format("{} has the token {} ({}), which is outside the model's vocabulary of {}", which, *outside,
                          tokenizer.identity(), model.vocab_size));
      code = Errc::Mismatch;
    } else if (std::ssize(of) + max_tokens > model.max_positions && !model.any_length()) {
      mistake(fmt::format("{} ({} tokens by {}) and {} new tokens exceed the model's {} positions", which, of.size(),
                          tokenizer.identity(), max_tokens, model.max_positions));
    }
  }
  if (num_mistakes > kShown) mistakes += fmt::format("\n  and {} more", num_mistakes - kShown);
  if (num_mistakes > 0) throw Error(code, mistakes);
  return ids;
}

}  // namespace infer
}  // namespace ds
