// SPDX-License-Identifier: Apache-2.0
// Texts behind prompts: between text and tokens, around infer/session.

#include <algorithm>
#include <functional>
#include <map>

#include "data/text_stream.h"
#include "data/tokenizer.h"
#include "ds/log.h"
#include "ds/tokenize.h"
#include "infer/prompts.h"
#include "infer/session.h"
#include "run/model_folder.h"
#include "run/run_state.h"

namespace ds {

EncodedPrompts encode_prompts(const Config& config, std::span<const Prompt> prompts, const SamplingOptions& o) {
  return {infer::tokens_of(config.model, *open_tokenizer(config.data.tokenizer), prompts, o.max_tokens,
                           config.sparse_attention.mode == SparseAttentionMode::None ? 0 : config.data.seq_length),
          o};
}

SessionSizes session_sizes(const EncodedPrompts& prompts) {
  constexpr i64 kChunk = 512;
  const SamplingOptions& o = prompts.sampling;
  SessionSizes sizes{.at_once = std::clamp<i64>(o.at_once, 1, std::max<i64>(std::ssize(prompts.ids), 1))};
  std::vector<i64> lengths;
  for (const std::vector<i32>& prompt : prompts.ids) lengths.push_back(std::ssize(prompt) + o.max_tokens);
  std::ranges::sort(lengths, std::greater<>());
  lengths.resize(static_cast<size_t>(sizes.at_once));
  sizes.context = lengths.front();
  sizes.chunk = std::min(kChunk, lengths.front() - o.max_tokens);
  for (const i64 length : lengths) sizes.cached += align_up(length, infer::BlockLives::kBlock);
  return sizes;
}

namespace {

// The texts of a run that continues all of its prompts alike, token by token.
class Texts final : public infer::Session::Listener {
 public:
  Texts(const Tokenizer& tokenizer, const std::vector<i32>& ends, const EncodedPrompts& prompts,
        const GenerateHooks& hooks)
      : tokenizer_(tokenizer), ends_(ends), prompts_(prompts), hooks_(hooks) {}

  bool token(infer::Session::Id id, i32 token, const infer::Row&) override {
    TextStream& stream = under_way_.try_emplace(id, tokenizer_, prompts_.ids[id]).first->second;
    if (std::ranges::find(ends_, token) != ends_.end()) return false;
    hooks_.token(id, token, stream.push(token));
    return true;
  }
  void scored(infer::Session::Id, i64, const infer::Row&) override {}
  void ended(infer::Session::Id id) override {
    hooks_.ended(id, under_way_.at(id).end());
    under_way_.erase(id);
  }

 private:
  const Tokenizer& tokenizer_;
  const std::vector<i32>& ends_;
  const EncodedPrompts& prompts_;
  const GenerateHooks& hooks_;
  std::map<infer::Session::Id, TextStream> under_way_;
};

}  // namespace

void TrainingRun::generate(const EncodedPrompts& prompts, const GenerateHooks& hooks) {
  State& s = *state_;
  s.collective([&] {
    if (prompts.ids.empty()) return;
    const Config& config = s.request.config;
    const auto tokenizer = open_tokenizer(config.data.tokenizer);
    const std::vector<i32> ends = end_tokens(*tokenizer, run::model_folder(config), config.model.vocab_size);
    if (s.request.is_root()) {
      for (const auto* warnings : {&tokenizer->facts().warnings, &tokenizer->facts().when_writing})
        for (const std::string& text : *warnings) log_message(LogLevel::Warning, text);
    }
    const SamplingOptions& o = prompts.sampling;
    infer::Session session(s.engine().stage(), session_sizes(prompts));
    for (const std::vector<i32>& prompt : prompts.ids)
      session.add({.tokens = prompt,
                   .max_tokens = o.max_tokens,
                   .sampling = {.temperature = o.temperature, .top_k = o.top_k, .seed = o.seed}});
    Texts texts(*tokenizer, ends, prompts, hooks);
    while (!session.idle()) session.step(texts);
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
