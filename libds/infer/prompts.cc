// SPDX-License-Identifier: Apache-2.0
// Reads and tokenizes files of prompts: one text per line, or JSON Lines.

#include "infer/prompts.h"

#include "base/content_kind.h"
#include "base/file.h"
#include "base/json.h"
#include "config/model_config.h"

namespace ds {
namespace {

constexpr i64 kMostBytes = i64{1} << 30;

// Errors state the file's line, and the column.
Prompt parse_prompt(std::string_view line, const std::string& name, i64 number) {
  const std::string place = fmt::format("{}:{}", name, number);
  Json root;
  try {
    root = parse_json(line, place, {.comments = false, .places = false}).root;
  } catch (const Error& e) {
    const std::string_view message = e.what();
    const std::string first_line = place + ":1:";
    if (!message.starts_with(first_line)) throw;
    throw Error(e.code(), fmt::format("{}:{}", place, message.substr(first_line.size())));
  }
  const auto text = root.is_object() ? root.find("prompt") : root.end();
  DS_CHECK(root.is_object() && text != root.end() && text->is_string(), Errc::Config,
           "{}: a prompt is an object with the text \"prompt\"", place);
  Prompt prompt{text->get<std::string>(), {}, place};
  bool ours = false;
  for (const char* key : {"schema", "text", "tokens"}) ours |= root.erase(key) > 0;
  const std::string rest = ours ? root.dump() : std::string();
  std::string_view object = ours ? rest : line;
  object.remove_prefix(object.find('{') + 1);
  prompt.fields = object.substr(0, object.rfind('}'));
  return prompt;
}

// Reports the first mistakes and counts the others.
class Mistakes {
 public:
  void add(Errc code, std::string_view text) {
    if (num_++ == 0) code_ = code;
    if (num_ <= kShown) texts_ += fmt::format("{}{}", num_ == 1 ? "" : "\n  ", text);
  }
  void throw_if_any() const {
    if (num_ > 0) throw Error(code_, num_ <= kShown ? texts_ : fmt::format("{}\n  and {} more", texts_, num_ - kShown));
  }

 private:
  static constexpr i64 kShown = 20;
  i64 num_ = 0;
  Errc code_ = Errc::Config;
  std::string texts_;
};

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
  Mistakes mistakes;
  if (const std::string_view kind = kind_of_content(text); !kind.empty()) {
    const std::string_view advice = how_to_get_text(kind);
    throw Error(Errc::Mismatch, fmt::format("{}: is {}, not lines of text or JSON{}{}", name, kind,
                                            advice.empty() ? "" : ": ", advice));
  }
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
    try {
      prompts.push_back(json ? parse_prompt(line, name, number)
                             : Prompt{std::string(line), {}, fmt::format("{}:{}", name, number)});
    } catch (const Error& e) {
      mistakes.add(e.code(), e.what());
    }
  }
  mistakes.throw_if_any();
  DS_CHECK(!prompts.empty(), Errc::Config, "{}: contains no prompts", name);
  return prompts;
}

namespace infer {

std::vector<std::vector<i32>> tokens_of(const ModelConfig& model, const Tokenizer& tokenizer,
                                        std::span<const Prompt> prompts, i64 max_tokens, i64 layout_tokens) {
  DS_CHECK(model.causal(), Errc::Unavailable,
           "a model of type \"{}\" sees the whole text and fills in masks: it cannot continue a prompt",
           type_name(model));
  const std::optional<i32> bos = tokenizer.special(SpecialToken::Bos);
  std::vector<std::vector<i32>> ids;
  Mistakes mistakes;
  for (const Prompt& prompt : prompts) {
    std::vector<i32>& of = ids.emplace_back();
    if (tokenizer.adds_bos() && bos) of.push_back(*bos);
    tokenizer.encode(prompt.text, of);
    const auto which = [&] {
      if (!prompt.place.empty()) return prompt.place + ": the prompt";
      return prompts.size() > 1 ? fmt::format("prompt {}", ids.size()) : std::string("the prompt");
    };
    const auto outside = std::ranges::find_if(of, [&](i32 id) { return id >= model.vocab_size; });
    if (of.empty()) {
      mistakes.add(Errc::Config, which() + " is empty");
    } else if (outside != of.end()) {
      mistakes.add(Errc::Mismatch,
                   fmt::format("{} has the token {} ({}), which is outside the model's vocabulary of {}", which(),
                               *outside, tokenizer.identity(), model.vocab_size));
    } else if (std::ssize(of) + max_tokens > model.max_positions && !model.any_length()) {
      mistakes.add(Errc::Config,
                   fmt::format("{} ({} tokens by {}) and {} new tokens exceed the model's {} positions", which(),
                               of.size(), tokenizer.identity(), max_tokens, model.max_positions));
    } else if (layout_tokens > 0 && std::ssize(of) + max_tokens > layout_tokens) {
      mistakes.add(Errc::Config, fmt::format("{} ({} tokens by {}) and {} new tokens exceed the {} tokens "
                                             "(data.seq_length) that sparse_attention has a layout of",
                                             which(), of.size(), tokenizer.identity(), max_tokens, layout_tokens));
    }
  }
  mistakes.throw_if_any();
  return ids;
}

}  // namespace infer
}  // namespace ds
