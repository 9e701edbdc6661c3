// SPDX-License-Identifier: Apache-2.0
// Texts as tokens of a model: its tokenizer, its chat template, its end tokens, and the sampling that it comes with.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "data/tokenizer.h"
#include "data/tokenizer_template.h"
#include "ds/infer.h"
#include "run/model_folder.h"

namespace ds {

struct TextCodec::State {
  std::unique_ptr<Tokenizer> tokenizer;
  std::string path;                         // its own
  std::optional<TokenizerTemplate> chat{};  // opened when the first conversation comes
  std::vector<i32> ends;
  std::vector<std::string> warnings;
  TextRequest defaults;
  i64 vocab = 0;
};

namespace {

// The defaults of sampling that a published model comes with. Without do_sample its texts are the most likely ones, as
// in transformers.
void read_generation_config(const std::string& folder, TextRequest& r, std::vector<std::string>& warnings) {
  const std::string path = folder + "/generation_config.json";
  std::error_code ignored;
  if (folder.empty() || !std::filesystem::exists(path, ignored)) return;
  const Json config = parse_json(read_text_file(path, i64{1} << 20), path, {.error = Errc::Corrupt}).root;
  DS_CHECK(config.is_object(), Errc::Corrupt, "{}: is not an object", path);
  const auto number = [&](const char* key, auto& value, double low, double high) {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) return;
    const double given = found->is_number() ? found->get<double>() : std::nan("");
    DS_CHECK(given >= low && given <= high, Errc::Corrupt, "{}: {} is {}, not a number from {} to {}", path, key,
             found->dump(), low, high);
    value = static_cast<std::remove_reference_t<decltype(value)>>(given);
  };
  constexpr std::pair<const char*, double> kNotHonoured[] = {
      {"typical_p", 1}, {"epsilon_cutoff", 0}, {"eta_cutoff", 0}, {"no_repeat_ngram_size", 0}, {"num_beams", 1}};
  for (const auto& [key, without_effect] : kNotHonoured) {
    const auto found = config.find(key);
    if (found != config.end() && !found->is_null() && *found != Json(without_effect))
      warnings.push_back(fmt::format("{}: {} {} is not honoured", path, key, found->dump()));
  }
  number("repetition_penalty", r.repetition_penalty, 1e-6, 1e6);
  number("max_new_tokens", r.max_tokens, 1, 1e9);
  const auto samples = config.find("do_sample");
  DS_CHECK(samples == config.end() || samples->is_null() || samples->is_boolean(), Errc::Corrupt,
           "{}: do_sample must be true or false", path);
  if (samples == config.end() || *samples != Json(true)) {
    r.temperature = 0;
    return;
  }
  number("temperature", r.temperature, 0, 1e6);
  number("top_k", r.top_k, 0, 1e9);
  number("top_p", r.top_p, 0, 1);
  number("min_p", r.min_p, 0, 1);
}

}  // namespace

TextCodec::TextCodec(const Config& config) : state_(std::make_unique<State>()) {
  state_->tokenizer = open_tokenizer(config.data.tokenizer);
  state_->path = config.data.tokenizer;
  state_->ends = end_tokens(*state_->tokenizer, run::model_folder(config), config.model.vocab_size);
  const TokenizerFacts& facts = state_->tokenizer->facts();
  for (const auto* warnings : {&facts.warnings, &facts.when_writing})
    state_->warnings.insert(state_->warnings.end(), warnings->begin(), warnings->end());
  state_->vocab = config.model.vocab_size;
  state_->defaults.max_tokens = 200;
  read_generation_config(run::model_folder(config), state_->defaults, state_->warnings);
}
TextCodec::~TextCodec() = default;
std::optional<i32> TextCodec::begin_or_end() const {
  const auto begin = state_->tokenizer->special(SpecialToken::Bos);
  return begin ? begin : state_->tokenizer->special(SpecialToken::Eos);
}
const TextRequest& TextCodec::defaults() const noexcept { return state_->defaults; }

std::vector<i32> TextCodec::encode(std::string_view text, bool adds_bos) const {
  std::vector<i32> ids;
  const Tokenizer& t = *state_->tokenizer;
  if (const auto bos = t.special(SpecialToken::Bos); adds_bos && t.adds_bos() && bos) ids.push_back(*bos);
  t.encode(text, ids);
  return ids;
}
std::vector<i32> TextCodec::encode_chat(std::string_view conversation) const {
  State& s = *state_;
  if (!s.chat) s.chat = TokenizerTemplate::open(*s.tokenizer, s.path);
  DS_CHECK(s.chat, Errc::Unavailable, "{}: the tokenizer has no chat template for messages", s.path);
  const Json object = parse_json(conversation, "the conversation").root;
  const auto member = [&](const char* name) -> const Json* {
    const auto found = object.find(name);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  };
  const auto flag = [&](const char* name, bool otherwise) {
    const Json* const value = member(name);
    DS_CHECK(value == nullptr || value->is_boolean(), Errc::Config, "{} must be true or false", name);
    return value == nullptr ? otherwise : value->get<bool>();
  };
  ChatOptions o{.tools = member("tools"), .documents = member("documents")};
  o.continue_final_message = flag("continue_final_message", false);
  o.add_generation_prompt = flag("add_generation_prompt", !o.continue_final_message);
  DS_CHECK(!o.add_generation_prompt || !o.continue_final_message, Errc::Config,
           "add_generation_prompt and continue_final_message exclude each other");
  if (const Json* const variables = member("chat_template_kwargs")) {
    DS_CHECK(variables->is_object(), Errc::Config, "chat_template_kwargs must be an object");
    o.variables = *variables;
  }
  const std::string text = s.chat->render(object.at("messages"), o).text;
  for (const auto& [name, value] : {std::pair{"tools", &ChatOptions::tools}, {"documents", &ChatOptions::documents}}) {
    ChatOptions without = o;
    without.*value = nullptr;
    DS_CHECK(o.*value == nullptr || (o.*value)->empty() || s.chat->render(object.at("messages"), without).text != text,
             Errc::Unavailable, "the chat template does not use {}", name);
  }
  std::vector<i32> ids;
  s.tokenizer->encode(text, ids);
  return ids;
}
std::string TextCodec::decode(const std::vector<i32>& tokens) const { return state_->tokenizer->decode(tokens); }
// Tokenizers may drop a blank before the first token of a text.
std::string TextCodec::token_text(i32 id) const {
  const i32 twice[] = {id, id};
  const std::string one = state_->tokenizer->decode(std::span(twice).first(1)), two = state_->tokenizer->decode(twice);
  return two.size() >= one.size() ? two.substr(one.size()) : one;
}
bool TextCodec::ends(i32 id) const { return std::ranges::find(state_->ends, id) != state_->ends.end(); }
i64 TextCodec::model_vocab() const noexcept { return state_->vocab; }
const std::vector<std::string>& TextCodec::warnings() const noexcept { return state_->warnings; }

}  // namespace ds
