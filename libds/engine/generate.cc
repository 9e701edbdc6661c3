// SPDX-License-Identifier: Apache-2.0
// Texts behind prompts: between text and tokens, around infer/writer.

#include <fmt/format.h>

#include "config/model_config.h"
#include "data/text_stream.h"
#include "data/tokenizer.h"
#include "engine/run_state.h"
#include "infer/writer.h"

namespace ds {

void TrainingRun::generate(std::span<const Prompt> prompts, const SamplingOptions& o, const GenerateHooks& hooks) {
  State& s = *state_;
  s.collective([&] {
    DS_CHECK(s.config.model.causal(), Errc::Unavailable,
             "a model of type \"{}\" sees the whole text and fills in masks: it cannot continue a prompt",
             family_name(s.config.model.family));
    const auto tokenizer = open_tokenizer(s.config.data.tokenizer);
    const std::optional<i32> bos = tokenizer->special(SpecialToken::Bos), eos = tokenizer->special(SpecialToken::Eos);
    std::vector<std::vector<i32>> ids;
    std::vector<TextStream> texts;
    for (const Prompt& prompt : prompts) {
      std::vector<i32>& of = ids.emplace_back();
      if (tokenizer->adds_bos() && bos) of.push_back(*bos);
      tokenizer->encode(prompt.text, of);
      for (const i32 id : of)
        DS_CHECK(id<s.config.model.vocab_size, Errc::Mismatch,
                     "{} has the token {} ({}), which is outside the model's vocabulary of {}", prompts.size()> 1
                     ? fmt::format("prompt {}", ids.size())
                     : "the prompt",
                 id, tokenizer->identity(), s.config.model.vocab_size);
      texts.emplace_back(*tokenizer, of);
    }
    std::vector<i64> left(prompts.size(), o.max_tokens);
    infer::write(s.engine->stage(), ids,
                 {.max_tokens = o.max_tokens,
                  .sampling = {.temperature = o.temperature, .top_k = o.top_k, .seed = o.seed},
                  .at_once = o.at_once},
                 [&](size_t p, i32 id) {
                   if (id != eos) {
                     std::string text = texts[p].push(id);
                     if (--left[p] == 0) text += texts[p].end();
                     hooks.token(p, id, text);
                   }
                   const bool goes_on = id != eos && left[p] > 0;
                   if (!goes_on && hooks.ended) hooks.ended(p);
                   return goes_on;
                 });
  });
}

}  // namespace ds
