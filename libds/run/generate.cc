// SPDX-License-Identifier: Apache-2.0
// A prompt and its completion: between text and tokens, around infer/session.

#include <algorithm>

#include "base/check.h"
#include "config/model_config.h"
#include "data/text_stream.h"
#include "data/tokenizer.h"
#include "ds/log.h"
#include "ds/tokenize.h"
#include "infer/block_lives.h"
#include "infer/session.h"
#include "run/model_folder.h"
#include "run/run_state.h"

namespace ds {

EncodedPrompt encode_prompt(const Config& config, std::string_view text, const SamplingOptions& o) {
  const ModelConfig& model = config.model;
  DS_CHECK(model.causal(), Errc::Unavailable,
           "a model of type \"{}\" sees the whole text and fills in masks: it cannot continue a prompt",
           type_name(model));
  const auto tokenizer = open_tokenizer(config.data.tokenizer);
  EncodedPrompt prompt{.sampling = o};
  if (const auto bos = tokenizer->special(SpecialToken::Bos); tokenizer->adds_bos() && bos) prompt.ids.push_back(*bos);
  tokenizer->encode(text, prompt.ids);
  DS_CHECK(!prompt.ids.empty(), Errc::Config, "the prompt is empty");
  for (const i32 id : prompt.ids)
    DS_CHECK(id < model.vocab_size, Errc::Mismatch,
             "the prompt has the token {} ({}), which is outside the model's vocabulary of {}", id,
             tokenizer->identity(), model.vocab_size);
  const auto check_length = [&](i64 most, std::string_view whose) {
    DS_CHECK(std::ssize(prompt.ids) + o.max_tokens <= most, Errc::Config,
             "the prompt ({} tokens by {}) and {} new tokens exceed the {}", prompt.ids.size(), tokenizer->identity(),
             o.max_tokens, whose);
  };
  if (!model.any_length()) check_length(model.max_positions, fmt::format("model's {} positions", model.max_positions));
  if (config.sparse_attention.mode != SparseAttentionMode::None)
    check_length(
        config.data.seq_length,
        fmt::format("{} tokens (data.seq_length) that sparse_attention has a layout of", config.data.seq_length));
  return prompt;
}

SessionSizes session_sizes(const EncodedPrompt& prompt) {
  constexpr i64 kChunk = 512;
  const i64 length = std::ssize(prompt.ids), context = length + prompt.sampling.max_tokens;
  return {.at_once = 1,
          .context = context,
          .chunk = std::min(kChunk, length),
          .cached = align_up(context, infer::BlockLives::kBlock)};
}

namespace {

// The completion of a run's prompt, token by token.
class Completion final : public infer::Session::Listener {
 public:
  Completion(const Tokenizer& tokenizer, const std::vector<i32>& ends, const EncodedPrompt& prompt,
             const GenerateHooks& hooks)
      : ends_(ends), hooks_(hooks), stream_(tokenizer, prompt.ids) {}

  bool token(infer::Session::Id, i32 token, const infer::Row&) override {
    if (std::ranges::find(ends_, token) != ends_.end()) return false;
    hooks_.token(token, stream_.push(token));
    return true;
  }
  void scored(infer::Session::Id, i64, const infer::Row&) override {}
  void ended(infer::Session::Id) override { hooks_.ended(stream_.end()); }

 private:
  const std::vector<i32>& ends_;
  const GenerateHooks& hooks_;
  TextStream stream_;
};

}  // namespace

void TrainingRun::generate(const EncodedPrompt& prompt, const GenerateHooks& hooks) {
  State& s = *state_;
  s.collective([&] {
    const Config& config = s.request.config;
    const auto tokenizer = open_tokenizer(config.data.tokenizer);
    const std::vector<i32> ends = end_tokens(*tokenizer, run::model_folder(config), config.model.vocab_size);
    if (s.request.is_root()) {
      for (const auto* warnings : {&tokenizer->facts().warnings, &tokenizer->facts().when_writing})
        for (const std::string& text : *warnings) log_message(LogLevel::Warning, text);
    }
    const SamplingOptions& o = prompt.sampling;
    infer::Session session(s.engine().stage(), session_sizes(prompt));
    session.add({.tokens = prompt.ids,
                 .max_tokens = o.max_tokens,
                 .sampling = {.temperature = o.temperature, .top_k = o.top_k, .seed = o.seed}});
    Completion completion(*tokenizer, ends, prompt, hooks);
    while (!session.idle()) session.step(completion);
  });
}

TokenizedText tokenize_text(const Config& config, std::string_view text) {
  const auto tokenizer = open_tokenizer(config.data.tokenizer);
  TokenizedText result{.tokenizer = config.data.tokenizer, .identity = tokenizer->identity()};
  std::vector<i32> ids;
  tokenizer->encode(text, ids);
  for (const i32 id : ids) result.tokens.push_back({id, tokenizer->piece(id)});
  for (const NamedToken& token : tokenizer->facts().named)
    result.named.push_back({token.role, token.content, token.id, token.source});
  try {
    result.ends = end_tokens(*tokenizer, run::model_folder(config), config.model.vocab_size);
  } catch (const Error& e) {
    result.bad_ends = e;
  }
  result.adds_bos = tokenizer->adds_bos();
  result.adds_eos = tokenizer->facts().adds_eos;
  result.warnings = tokenizer->facts().warnings;
  for (std::string& warning : tokenizer->warnings_of_texts()) result.warnings.push_back(std::move(warning));
  return result;
}

}  // namespace ds
